"""Two stores on one folder against a dictionary of what they promised, under everything at once."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ckv_jax.storage import (
    ChunkStore,
    CkvError,
    Prefix,
    StoreConfig,
    StoreFull,
    pin_prefix,
    prune_store,
    verify_store,
)
from tests.faults import farm
from tests.faults.calls import CODES, Calls, Plan
from tests.faults.scene import LAYOUT, index_rows, open_files
from tests.faults.tally import MEMORY, Tally, read_prefix
from tests.support.truth import FINGERPRINT, ingest, some_tokens

SEGMENT = LAYOUT.segment_bytes(48) + 8192
"""Bytes of a segment of the longest text, and more than its small files need."""
CONFIG = StoreConfig(deadline_s=1.0, wait_s=1.0, direct_io=False)
WAIT_S = 8.0
"""What an operation may take while somebody else stands still with the folder's lock."""


TEXTS = 4
"""How many there are."""
_LENGTHS = (16, 24, 32, 48)

Name = tuple[int, int]
"""A text and how many of its tokens."""
TEXT = st.tuples(st.integers(0, TEXTS - 1), st.sampled_from(_LENGTHS))


def text(name: Name) -> np.ndarray:
    """Its tokens."""
    return some_tokens(max(name[1], 1024), 100 + name[0])[: name[1]]


WHICH = st.integers(0, 1)


def die_while_storing(folder: str, name: Name, at: int) -> None:
    """Store a text in a process that dies at a call."""
    with Calls() as calls, ChunkStore.open(folder, config=CONFIG) as store:
        calls.arm(Plan(at))
        ingest(store, text(name), layout=LAYOUT)


class TwoStores(RuleBasedStateMachine):
    """The machine. What was promised and is not kept goes to `broken`, which may raise."""

    tally = Tally()
    strict = True
    """Whether a broken promise is an AssertionError, so that Hypothesis finds the shortest way."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="ckv-model-", dir=MEMORY))
        self.folder = self.home / "store"
        self.bound: int | None = None
        self.stores: list[ChunkStore] = []
        self.promised: dict[Name, Prefix] = {}
        """Stored, and nothing that may have been done since can have removed it."""
        self.pinned: dict[Name, Prefix] = {}
        self.readers: list[tuple[Name, Prefix, Any]] = []
        self.bad: set[str] = set()  # segments that somebody damaged
        self.calls = Calls().__enter__()
        self.plan: Plan | None = None  # what happens to the calls of the next operation
        self.real_time = time.time

    @initialize(segments=st.sampled_from((None, None, 3, 5)))
    def open_both(self, segments: int | None) -> None:
        self.bound = None if segments is None else segments * SEGMENT
        self.stores = [self._open(), self._open()]

    def _open(self) -> ChunkStore:
        config = dataclasses.replace(CONFIG, max_bytes=self.bound)
        return ChunkStore.open(self.folder, config=config)

    # -- keeping count -----------------------------------------------------------------------------

    def broken(self, kind: str, what: str, number: int = 1) -> None:
        """A promise was not kept."""
        setattr(self.tally, kind, getattr(self.tally, kind) + number)
        self.tally.notes.append(f"model: {what}")
        if self.strict:
            raise AssertionError(what)

    def act(self, what: str, work: Callable[[], Any]) -> Any:
        """Do something to a store; its result, or the typed error that it raised."""
        self.tally.states += 1
        bad = self.tally.bad
        plan, self.plan = self.plan, None
        try:
            if plan is not None:
                self.calls.arm(plan)
            found = work()
        except CkvError as e:
            found = e
        except AssertionError:
            raise
        except Exception as e:
            self.broken("crashes", f"{what}: {type(e).__name__}: {e}"[:300])
            found = e
        finally:
            self.calls.disarm()
        if self.tally.bad == bad:
            self.tally.caught += isinstance(found, Exception)
            self.tally.harmless += not isinstance(found, Exception)
        return found

    def segments(self) -> set[str]:
        """Ids of what lies in the folder."""
        return {p.name for p in self.folder.glob("segments/*/*")}

    def safe(self) -> set[str]:
        """Segments that nothing may remove: pinned, or being read."""
        prefixes = [*self.pinned.values(), *(p for _, p, _ in self.readers)]
        return {s.segment_id for p in prefixes for s in p.spans}

    def may_evict(self) -> None:
        """Anything that is not safe may be gone from here on."""
        safe = self.safe()
        for name, prefix in list(self.promised.items()):
            if not {s.segment_id for s in prefix.spans} <= safe:
                del self.promised[name]

    # -- what users do -----------------------------------------------------------------------------

    def store_text(self, which: int, name: Name, how: str) -> Any:
        """Store a text, and see to it that a refusal for want of room changes nothing."""
        before = self.segments()
        found = self.act(
            f"{how} of {name}", lambda: ingest(self.stores[which], text(name), layout=LAYOUT)
        )
        if isinstance(found, StoreFull) and (gone := before - self.segments()):
            self.broken("lost_healthy", f"{how} was refused and evicted {len(gone)}", len(gone))
        if self.bound is not None or isinstance(found, Exception):
            self.may_evict()
        if isinstance(found, Prefix):
            if found.num_tokens != name[1]:
                self.broken("lost_healthy", f"{how} of {name} gave {found.num_tokens} tokens")
            self.promised[name] = found
        return found

    @rule(which=WHICH, name=TEXT)
    def ingest(self, which: int, name: Name) -> None:
        self.store_text(which, name, "ingest")

    @rule(which=WHICH, data=st.data())
    def append(self, which: int, data: Any) -> None:
        if self.promised:
            number, length = data.draw(st.sampled_from(sorted(self.promised)))
            self.store_text(which, (number, length + data.draw(st.sampled_from((8, 16)))), "append")

    @precondition(lambda self: self.bound is not None)
    @rule(which=WHICH)
    def oversized(self, which: int) -> None:
        length = 16
        while LAYOUT.segment_bytes(length) <= self.bound:
            length += 16
        found = self.store_text(which, (TEXTS, length), "an oversized ingest")
        if not isinstance(found, StoreFull):
            self.broken("crashes", f"an oversized ingest gave {type(found).__name__}")

    @rule(which=WHICH, share=st.sampled_from((0, 1, 3)))
    def evict(self, which: int, share: int) -> None:
        self.act("prune", lambda: prune_store(self.stores[which], share * SEGMENT))
        self.may_evict()

    @rule(which=WHICH, data=st.data(), wanted=st.booleans())
    def pin(self, which: int, data: Any, wanted: bool) -> None:
        names = self.promised if wanted else self.pinned
        if names and len(self.pinned) < 2 + (not wanted):
            name = data.draw(st.sampled_from(sorted(names)))
            prefix = names[name]
            self.pinned.pop(name, None)
            found = self.act(
                f"pin {name}", lambda: pin_prefix(self.stores[which], prefix.id, wanted)
            )
            if wanted and not isinstance(found, Exception):
                self.pinned[name] = prefix

    @rule(which=WHICH, name=TEXT)
    def read(self, which: int, name: Name) -> None:
        self.act(f"read {name}", lambda: self._read(self.stores[which], name, sure=True))

    def _read(self, store: ChunkStore, name: Name, *, sure: bool) -> None:
        found = store.longest_prefix(text(name), fingerprint=FINGERPRINT, layout=LAYOUT)
        served = read_prefix(store, found)
        if served.wrong or not np.array_equal(found.tokens, text(name)[: found.num_tokens]):
            self.broken("wrong_tokens", f"{name} was served wrong", max(1, served.wrong))
        less = found.num_tokens < name[1] or not served.whole
        if less and sure and name in self.promised and not self._hurt(self.promised[name]):
            kind = "evicted_pins" if name in self.pinned else "lost_healthy"
            del self.promised[name]
            self.broken(kind, f"{name}: {found.num_tokens} tokens, all of them: {served.whole}")

    def _hurt(self, prefix: Prefix) -> bool:
        return any(s.segment_id in self.bad for s in prefix.spans)

    @precondition(lambda self: len(self.readers) < 2)
    @rule(which=WHICH, data=st.data())
    def hold(self, which: int, data: Any) -> None:
        if self.promised:
            name = data.draw(st.sampled_from(sorted(self.promised)))
            prefix = self.promised[name]
            found = self.act(f"hold {name}", lambda: self.stores[which].reader(prefix))
            if not isinstance(found, Exception):
                self.readers.append((name, prefix, found))

    @precondition(lambda self: self.readers)
    @rule()
    def let_go(self) -> None:
        name, prefix, reader = self.readers.pop()
        out = np.empty((prefix.num_chunks, *LAYOUT.pack_shape), LAYOUT.numpy_dtype)
        good = self.act(
            f"read held {name}", lambda: reader.read_packs(0, np.arange(len(out)), out).all()
        )
        reader.close()
        if not (good is True or good == np.True_) and not self._hurt(prefix):
            self.broken("lost_healthy", f"{name} was evicted while it was read")

    @rule(which=WHICH, repair=st.booleans())
    def verify(self, which: int, repair: bool) -> None:
        self.act("verify", lambda: verify_store(self.stores[which], repair=repair))

    @rule(which=WHICH)
    def reopen(self, which: int) -> None:
        def again() -> ChunkStore:
            self.stores[which].close()
            return self._open()

        found = self.act("reopen", again)
        self.stores[which] = found if isinstance(found, ChunkStore) else self._open()

    # -- what befalls them -------------------------------------------------------------------------

    @rule(data=st.data())
    def corrupt(self, data: Any) -> None:
        files = sorted(self.folder.glob("segments/*/*/*/c.*"))
        if files and len(self.bad) < 2:
            path = data.draw(st.sampled_from(files))
            self.bad.add(path.parents[1].name)
            with path.open("r+b") as file:
                place = data.draw(st.integers(0, path.stat().st_size - 1))
                file.seek(place)
                byte = file.read(1)[0] ^ 16
                file.seek(place)
                file.write(bytes([byte]))

    @rule(which=WHICH, at=st.integers(1, 150), code=st.sampled_from(CODES), name=TEXT,
          what=st.sampled_from(("ingest", "read", "evict", "reopen")))  # fmt: skip
    def fault(self, which: int, at: int, code: str, name: Name, what: str) -> None:
        self.plan = Plan(at, code)
        if what == "ingest":
            self.store_text(which, name, f"ingest, {code} at call {at}")
        elif what == "read":
            reading = f"read {name}, {code} at call {at}"
            self.act(reading, lambda: self._read(self.stores[which], name, sure=False))
        elif what == "evict":
            self.act(f"prune, {code} at call {at}", lambda: prune_store(self.stores[which], 0))
            self.may_evict()
        else:
            self.reopen(which)

    @rule(name=TEXT, at=st.integers(1, 150))
    def crash(self, name: Name, at: int) -> None:
        process = farm.context().Process(
            target=die_while_storing, args=(str(self.folder), name, at), daemon=True
        )
        process.start()
        process.join(20)

    @rule(which=WHICH, name=TEXT)
    def paused_lock_holder(self, which: int, name: Name) -> None:
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(self.store_text, which, name, "ingest, lock held")
            hung = not wait([found], WAIT_S).done
            os.close(fd)
            found.result()
        if hung:
            self.broken("hangs", f"ingest waited over {WAIT_S:g} s for a stopped process")

    @rule(days=st.sampled_from((-1000, -1, 1, 1000)))
    def clock_jump(self, days: int) -> None:
        real = self.real_time
        time.time = lambda: real() + days * 86400.0

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def what_is_safe_is_there(self) -> None:
        there = self.segments() if self.stores else set()
        for names, kind in ((self.pinned, "evicted_pins"), (self.promised, "lost_healthy")):
            for name, prefix in list(names.items()):
                gone = {s.segment_id for s in prefix.spans} - there
                if gone and not self._hurt(prefix):
                    self.pinned.pop(name, None)
                    self.promised.pop(name, None)
                    self.broken(kind, f"{name} is gone")

    @invariant()
    def within_bounds(self) -> None:
        if self.stores and self.bound is not None:
            used = sum(p.stat().st_size for p in self.folder.glob("segments/**/*") if p.is_file())
            if used > self.bound:
                self.bound = None if not self.strict else self.bound
                self.broken("leaks", f"{used} bytes on the disk are over the bound")

    def teardown(self) -> None:
        time.time = self.real_time
        try:
            self._end()
        finally:
            self.calls.__exit__()
            with contextlib.suppress(Exception):
                for store in self.stores:
                    store.close()
            shutil.rmtree(self.home, ignore_errors=True)

    def _end(self) -> None:
        """Close everything; nothing is left over, and the next one gets full service."""
        for _, _, reader in self.readers:
            reader.close()
        for store in self.stores:
            store.close()
        if not self.stores:
            return
        left = open_files(self.folder)
        self.stores = [ChunkStore.open(self.folder, config=CONFIG)]
        self.stores[0].usage()  # as in `scene.judge`
        left += [f"tmp/{p.name[:4]}" for p in (self.folder / "tmp").iterdir()]
        left += index_rows(self.folder / "catalog.sqlite")
        if left:
            self.broken("leaks", f"left over: {left}")
        for number in range(TEXTS):
            for _ in range(2):  # damage that nobody saw before is seen by the first
                prefix = ingest(self.stores[0], text((number, 48)), layout=LAYOUT)
                served = read_prefix(self.stores[0], prefix)
            if served.wrong:
                self.broken("wrong_tokens", f"text {number} is read wrong", served.wrong)
            elif not served.whole:
                self.broken("lost_healthy", f"text {number} was stored again and is not served")


def run_machine(machine: type[TwoStores], examples: int, steps: int) -> Tally:
    """Run a machine so many times, each of so many rules at most; what it counted."""
    kind: type[TwoStores] = type(machine.__name__, (machine,), {"tally": Tally()})
    run_state_machine_as_test(
        kind,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            report_multiple_bugs=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return kind.tally


class Counting(TwoStores):
    """The machine that does not stop at what it finds."""

    strict = False
