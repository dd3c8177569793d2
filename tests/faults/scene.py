"""A small store with everything there is to lose, what may be done to it, and the judge of it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ckv_jax.storage import ChunkStore, CkvError, StoreConfig, pin_prefix, prune_store, verify_store
from tests.faults.tally import CONFIG, read_prefix
from tests.support.truth import FINGERPRINT, SMALL, ingest, some_tokens

LAYOUT = dataclasses.replace(SMALL, num_layers=2, head_dim=16, digest="int4")
"""One layer group whose packs are a page: few files, and yet read directly."""
DOCS = {
    "pinned": some_tokens(48, 1),  # two segments
    "held": some_tokens(32, 2),
    "loose": some_tokens(32, 3),
    "spare": some_tokens(40, 4),  # ends with a partial chunk
    "new": some_tokens(40, 5),
}
DOCS["more"] = np.append(DOCS["loose"], some_tokens(24, 7))
DOCS["hurt"] = some_tokens(48, 8)
STORED = ("pinned", "held", "loose", "spare")
_SETTLE_S = 0.3  # for the kernel to finish reads that nobody waits for

Act = Callable[[ChunkStore, "Done"], object]


@dataclass(frozen=True, slots=True)
class Operation:
    """What is done to the store.

    Attributes:
      act: does it; None: nothing besides opening and closing.
      may_go: documents that it may evict or replace.
      hurt: whether the store has a damaged segment beside the healthy ones.
      beside: whether another store reads "held" meanwhile.
      room: bytes above what is used; None: no bound.
      direct: whether reads and writes go past the page cache.
      fresh: whether the folder does not exist yet.
      stores: documents that are stored afterwards: those that it was to store.
    """

    act: Act | None
    may_go: tuple[str, ...] = ()
    hurt: bool = False
    beside: bool = False
    room: int | None = None
    direct: bool = False
    fresh: bool = False
    stores: tuple[str, ...] = ("new",)


@dataclass(slots=True)
class Done:
    """What an operation did, as far as it knows.

    Attributes:
      acked: documents that it said are stored.
      pins: documents that it said are pinned (True) or not (False).
      refused: the typed error that it raised.
      crash: any other error.
      wrong: tokens that it served wrong.
      less: whether it served less than there is.
      leaks: what it left open.
    """

    acked: list[str] = field(default_factory=list)
    pins: dict[str, bool] = field(default_factory=dict)
    refused: str = ""
    crash: str = ""
    wrong: int = 0
    less: bool = False
    leaks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """What the judge found: segments lost, pins evicted, tokens wrong, leaks and crashes, named."""

    wrong: int = 0
    lost: list[str] = field(default_factory=list)
    pins: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)


# -- what is done ------------------------------------------------------------------------------


def _store(name: str) -> Act:
    def act(store: ChunkStore, done: Done) -> None:
        ingest(store, DOCS[name], layout=LAYOUT)
        done.acked.append(name)

    return act


def _lookup(store: ChunkStore, done: Done) -> None:
    for name in STORED:
        found = store.longest_prefix(DOCS[name], fingerprint=FINGERPRINT, layout=LAYOUT)
        if not np.array_equal(found.tokens, DOCS[name][: found.num_tokens]):
            done.wrong += found.num_tokens
        done.less |= found.num_tokens < len(DOCS[name])
    done.less |= len(store.prefixes()) < len(STORED)
    store.prefix(found.id)


def _read(store: ChunkStore, done: Done) -> None:
    for name in ("pinned", "spare"):
        found = store.longest_prefix(DOCS[name], fingerprint=FINGERPRINT, layout=LAYOUT)
        done.less |= found.num_tokens < len(DOCS[name])
        served = read_prefix(store, found)
        done.wrong += served.wrong
        done.less |= not served.whole


def _pin(store: ChunkStore, done: Done) -> None:
    for name, pinned in (("loose", True), ("spare", True), ("spare", False)):
        found = store.longest_prefix(DOCS[name], fingerprint=FINGERPRINT, layout=LAYOUT)
        if found.num_tokens < len(DOCS[name]):
            done.less = True
            continue
        done.pins.pop(name, None)  # while it is changed, it may be either
        pin_prefix(store, found.id, pinned)
        done.pins[name] = pinned


OPERATIONS: dict[str, Operation] = {
    "open": Operation(None),
    "create": Operation(_store("new"), fresh=True),
    "write": Operation(_store("new")),
    "append": Operation(_store("more"), stores=("more",)),
    "evict": Operation(_store("new"), may_go=("loose", "spare"), beside=True, room=0),
    "read": Operation(_read),
    "read directly": Operation(_read, direct=True),
    "pin": Operation(_pin),
    "verify": Operation(lambda store, _: verify_store(store), hurt=True),
    "repair": Operation(
        lambda store, _: verify_store(store, repair=True), hurt=True, beside=True, stores=("hurt",)
    ),
    # Not acked: with the index, the mark is lost, and then nothing need be replaced yet.
    "replace": Operation(
        lambda store, _: ingest(store, DOCS["hurt"], layout=LAYOUT), hurt=True, stores=("hurt",)
    ),
    "prune": Operation(
        lambda store, _: prune_store(store, 0), may_go=("loose", "spare"), beside=True
    ),
    "lookup": Operation(_lookup),
}


def prepare(folder: Path) -> None:
    """Make the stores that operations start from, below `folder`: "whole" and "hurt"."""
    with ChunkStore.open(folder / "whole", config=CONFIG) as store:
        ingest(store, DOCS["pinned"][:32], layout=LAYOUT)
        for name in STORED:
            found = ingest(store, DOCS[name], layout=LAYOUT)
            if name == "pinned":
                pin_prefix(store, found.id)
            scores = np.full((LAYOUT.groups, found.spans[-1].segment_chunks), 0.5, np.float32)
            store.save_scores(found.spans[-1].segment_id, scores, scores.astype(np.uint32))
    shutil.copytree(folder / "whole", folder / "hurt")
    with ChunkStore.open(folder / "hurt", config=CONFIG) as store:
        id_ = ingest(store, DOCS["hurt"], layout=LAYOUT).spans[0].segment_id
    shard = next((folder / "hurt" / "segments" / id_[:2] / id_ / "packs").glob("c.*"))
    data = bytearray(shard.read_bytes())
    data[100] ^= 8  # of its first chunk: nothing of it can be served
    shard.write_bytes(data)
    with ChunkStore.open(folder / "hurt", config=CONFIG) as store:  # so that it is marked as bad
        read_prefix(
            store, store.longest_prefix(DOCS["hurt"], fingerprint=FINGERPRINT, layout=LAYOUT)
        )


def lay_out(pristine: Path, operation: Operation, folder: Path) -> None:
    """A store for `operation` to work on; segments, which nobody writes to, are shared by links."""
    if operation.fresh:
        return
    source = pristine / ("hurt" if operation.hurt else "whole")

    def copy(path: str, to: str) -> None:
        if f"{source}/segments" in path:
            os.link(path, to)
        else:
            shutil.copy(path, to)

    shutil.copytree(source, folder, copy_function=copy)


def perform(name: str, folder: Path, arm: Callable[[], None], disarm: Callable[[], None]) -> Done:
    """Do an operation to the store in `folder`; faults happen between `arm` and `disarm`."""
    operation, done = OPERATIONS[name], Done()
    store: ChunkStore | None = None
    config = dataclasses.replace(CONFIG, direct_io=operation.direct)
    with contextlib.ExitStack() as stack:
        reader: Any = None
        if operation.beside:
            other = stack.enter_context(ChunkStore.open(folder, config=config))
            held = ingest(other, DOCS["held"], layout=LAYOUT)
            reader = stack.enter_context(other.reader(held))
        if operation.act is not None and not operation.fresh:
            store = _open(folder, config, operation.room)
        try:
            arm()
            if store is None:
                store = _open(folder, config, operation.room)
            if operation.act is not None:
                operation.act(store, done)
            store.close()
        except CkvError as e:
            done.refused = f"{type(e).__name__}: {e}"[:200]
        except Exception as e:
            done.crash = f"{type(e).__name__}: {e}"[:200]
        finally:
            disarm()
        if store is not None:
            store.close()
        if reader is not None:
            out = np.empty((2, *LAYOUT.pack_shape), LAYOUT.numpy_dtype)
            if not reader.read_packs(0, np.arange(2), out).all():
                done.leaks.append("held: a segment that is being read is gone")
    return done


def _open(folder: Path, config: StoreConfig, room: int | None) -> ChunkStore:
    store = ChunkStore.open(folder, config=config)
    if room is None:
        return store
    bound = store.usage() + room
    store.close()
    return ChunkStore.open(folder, config=dataclasses.replace(config, max_bytes=bound))


# -- the judge ---------------------------------------------------------------------------------


def judge(pristine: Path, folder: Path, name: str, done: Done) -> Verdict:
    """Open the store anew, without faults, and see what is left, and whether all of it works."""
    verdict = Verdict()
    try:
        _judge(pristine, folder, OPERATIONS[name], done, verdict)
    except Exception as e:
        verdict.crashes.append(f"afterwards: {type(e).__name__}: {e}"[:200])
    return verdict


def _judge(
    pristine: Path, folder: Path, operation: Operation, done: Done, verdict: Verdict
) -> None:
    due = set() if operation.fresh else set(STORED) - set(operation.may_go)
    due |= set(done.acked)
    config = dataclasses.replace(CONFIG, direct_io=False)
    with ChunkStore.open(folder, config=config) as store:
        verdict.leaks += [f"tmp/{p.name[:4]}" for p in (folder / "tmp").iterdir()]
        store.usage()  # whoever asks for it no longer counts what the dead had reserved
        verdict.leaks += index_rows(folder / "catalog.sqlite")
        pins = store.files.pins()
        for doc in sorted(set(STORED) | due):
            tokens = DOCS[doc]
            found = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=LAYOUT)
            same = np.array_equal(found.tokens, tokens[: found.num_tokens])
            verdict.wrong += 0 if same else found.num_tokens
            served = read_prefix(store, found)
            verdict.wrong += served.wrong
            if doc in due and (found.num_tokens < len(tokens) or not served.whole):
                there = verdict.pins if doc == "pinned" else verdict.lost
                there.append(f"{doc}: {found.num_tokens} of {len(tokens)} tokens")
            wanted = True if doc == "pinned" and not operation.fresh else done.pins.get(doc)
            known = wanted is not None and found.num_tokens == len(tokens)
            if known and (found.id in pins) != wanted:
                verdict.pins.append(f"{doc}: pinned is {not wanted}, expected {wanted}")
        for doc in operation.stores:  # full service
            again = ingest(store, DOCS[doc], layout=LAYOUT)
            served = read_prefix(store, again)
            if not served.whole:  # damage that nobody had seen: it is seen now
                again = ingest(store, DOCS[doc], layout=LAYOUT)
                served = read_prefix(store, again)
            verdict.wrong += served.wrong
            if not served.whole or again.num_tokens < len(DOCS[doc]):
                verdict.lost.append(f"{doc}: stored again, and not read in full")
    verdict.leaks += [f"a stray {p}" for p in _strays(pristine, folder)]
    verdict.leaks += open_files(folder)


def index_rows(path: Path) -> list[str]:
    """Reservations, and scores and marks of segments that are gone, in an idle store's index."""
    queries = {
        "reservations": "SELECT count(*) FROM reservations",
        "scores": "SELECT count(*) FROM scores WHERE id NOT IN (SELECT id FROM segments)",
        "quarantine": "SELECT count(*) FROM quarantine WHERE id NOT IN (SELECT id FROM segments)",
    }
    with contextlib.closing(sqlite3.connect(path)) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_schema")}
        counts = {n: db.execute(q).fetchone()[0] for n, q in queries.items() if n in tables}
    return [f"{count} rows of {name}" for name, count in counts.items() if count]


def _strays(pristine: Path, folder: Path) -> Iterator[str]:
    """Names that no store has when it is closed."""
    known = {p.name for p in (pristine / "whole").iterdir()}
    known |= {"catalog.sqlite-wal", "catalog.sqlite-shm"}
    yield from sorted(p.name.split(".sqlite.")[0] for p in folder.iterdir() if p.name not in known)


def open_files(folder: Path) -> list[str]:
    """Descriptors of this process that lie below `folder`, after those in flight have landed."""
    end = time.monotonic() + _SETTLE_S
    while True:
        found = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if target.startswith(f"{folder}/") or target in (
                    str(folder),
                    f"{folder} (deleted)",
                ):
                    found.append(f"an open {'/'.join(Path(target).relative_to(folder).parts[:1])}")
        if not found or time.monotonic() > end:
            return found
        gc.collect()
        time.sleep(0.02)
