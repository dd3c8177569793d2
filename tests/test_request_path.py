"""What a request and a token pass through in Python, counted: calls, classes and files.

All threads count, from the call of the engine to its return, and so do values and private classes.
Nothing is timed. `python tests/test_request_path.py` prints the counts and the names.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import pytest
from segment_support import packs_memory

import ckv_jax
from ckv_jax import Engine, EngineConfig, Request, SamplingParams, kernels_pallas, storage
from ckv_jax.prefix.landing import Room
from ckv_jax.prefix.prefetcher import Prefetcher, ReadJob
from ckv_jax.trace import Trace

ROOTS = tuple(f"{Path(part.__path__[0])}/" for part in (ckv_jax, storage, kernels_pallas))
REFERENCE = Path(ckv_jax.__path__[0]) / "data" / "reference"
COLD = {"device_cache_bytes": 0, "host_cache_bytes": 0}
SELECTIONS = 8
T = TypeVar("T")


class Passed:
    """Calls by (file, qualified name)."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.on = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(ROOTS):
            self.calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    @property
    def classes(self) -> list[str]:
        """Those of which a method ran."""
        methods = [(f, name.split(".<locals>")[0]) for f, name in self.calls if name[0] != "<"]
        return sorted({name.split(".")[0] for _, name in methods if "." in name})

    @property
    def files(self) -> list[str]:
        """Those in which a function ran."""
        return sorted({file for file, _ in self.calls})


@contextmanager
def engine_of(folder: Path, found: Passed, **config: int) -> Iterator[tuple[Engine, Request]]:
    """An engine over the reference checkpoint, whose threads all count, and a request at 25%."""
    engine_config = EngineConfig(budget=0.25, **config)
    threading.setprofile(found)
    try:
        with Engine.from_pretrained(REFERENCE, store=folder, config=engine_config) as engine:
            tokens = np.random.default_rng(0).integers(5, 200, 1024).tolist()
            yield engine, Request(prefix=engine.ingest(tokens), suffix=[7, 8, 9, 10])
    finally:
        threading.setprofile(None)


def counted(found: Passed, call: Callable[[], T]) -> T:
    """What a call returns; `found` has what it passed."""
    found.calls.clear()
    found.on = True
    sys.setprofile(found)
    try:
        return call()
    finally:
        sys.setprofile(None)
        found.on = False


def passed(folder: Path, **config: int) -> Passed:
    """By a request that was asked before: everything is compiled. The least of five: times of use
    are brought to the store now and then, and what is read on a busy disk comes in parts."""
    found, every = Passed(), list[Counter[tuple[str, str]]]()
    with engine_of(folder, found, **config) as (engine, request):
        for _ in range(3):
            engine.reprefill([request])
        for _ in range(5):
            [result] = counted(found, lambda: engine.reprefill([request]))
            result.raise_for_error()
            assert len(result.trace.period_attention_mass) == SELECTIONS
            every.append(found.calls.copy())
    found.calls = min(every, key=Counter.total)
    return found


@contextmanager
def host_waits() -> Iterator[list[int]]:
    """Counts how often any thread waits for arrays of the device; several at once count as one."""
    count, thread = [0], threading.local()

    def counting(function: Callable[..., T]) -> Callable[..., T]:
        def call(*args: Any, **named: Any) -> T:
            outermost = not getattr(thread, "waits", False)
            if outermost and any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(args)):
                count[0] += 1
            thread.waits = True
            try:
                return function(*args, **named)
            finally:
                thread.waits = not outermost

        return call

    array = type(jax.numpy.zeros(()))
    reads = {
        np: ("asarray", "array", "stack", "concatenate"),
        jax: ("device_get", "block_until_ready"),
        array: (
            "block_until_ready", "item", "tolist", "__array__", "__int__", "__float__", "__bool__",
            "__index__", "__iter__",
        ),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in reads.items():
            for name in names:
                patch.setattr(owner, name, counting(getattr(owner, name)))
        yield count


class OfOneToken(NamedTuple):
    """Of a generation that was made before, the mean of 16 tokens."""

    python: float
    """Calls of Python functions."""
    jitted: float
    """Calls of jitted functions."""
    waits: float
    """See `host_waits`."""


def token_calls(folder: Path) -> OfOneToken:
    """What one token passes through."""
    found, calls, jitted, first, waits = Passed(), [], [0], [], []
    with engine_of(folder, found) as (engine, request):

        def generate(tokens: int) -> None:
            [made] = engine.generate(request, SamplingParams(max_tokens=tokens)).results()
            assert len(made.token_ids) == tokens
            engine.settle()  # the calls of a token are compiled beside the first ones

        for tokens in (40, 24, 8):
            generate(tokens)
        for tokens in (8, 24):
            counted(found, lambda: generate(tokens))  # noqa: B023
            calls.append(found.calls.total())

        def count(name: str, call: Callable[..., T], args: tuple[T, ...], named: dict[str, T]) -> T:
            jitted[0] += 1
            return call(*args, **named)

        with engine._worker.layers.programs.watch(count):
            for tokens in (8, 24):
                generate(tokens)
                first.append(jitted[0])
        for tokens in (8, 24):
            with host_waits() as waited:
                generate(tokens)
            waits.append(waited[0])
    return OfOneToken(
        python=(calls[1] - calls[0]) / 16,
        jitted=(first[1] - 2 * first[0]) / 16,
        waits=(waits[1] - waits[0]) / 16,
    )


def read_job_calls(folder: Path) -> int | None:
    """Python's and C's calls in the thread that reads, from one demanded job of packs that lie
    together to the next; None where the disk is not read directly. The least of three: JAX has a
    call whenever Python collects garbage."""
    calls, trace = list[int](), Trace()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is Prefetcher._next.__code__:
            calls.append(0)
        if event in ("call", "c_call") and calls:
            calls[-1] += 1

    with engine_of(folder, Passed()) as (engine, request):
        prefix = request.prefix
        if engine.store._place.queues is None:
            return None
        chunks = np.arange(8)
        room = Room(packs_memory(prefix.layout, len(chunks)), np.arange(len(chunks)))
        threading.setprofile(count)
        with engine.store.reader(prefix) as reader, closing(Prefetcher(1)) as prefetcher:
            for _ in range(5):  # the first opens things, the last is followed by none
                job = ReadJob(
                    reader=reader, group=1, first_group=1, chunks=chunks, room=room, demanded=True,
                    trace=trace, prefix=prefix.id, span="pack_read", codes=chunks,
                    num_bytes=room.array.nbytes,
                )  # fmt: skip
                prefetcher.submit(job)
                prefetcher.wait(job)
                assert job.ok.all()
    return min(calls[1:-1])


@pytest.mark.parametrize(
    ("config", "fixed", "each", "classes", "files"),
    [({}, 200, 25, 25, 25), (COLD, 200, 200, 50, 40)],
    ids=["all in memory", "nothing cached"],
)
def test_a_request_passes_few_calls_classes_and_files(
    tmp_path: Path, config: dict[str, int], fixed: int, each: int, classes: int, files: int
) -> None:
    found = passed(tmp_path / "store", **config)
    assert found.calls.total() <= fixed + each * SELECTIONS, found.calls.most_common(40)
    assert len(found.classes) <= classes, found.classes
    assert len(found.files) <= files, found.files


def test_a_token_passes_few_calls(tmp_path: Path) -> None:
    """Whose packs are in its window, of whatever many selections."""
    one = token_calls(tmp_path / "store")
    assert one.python <= 210
    assert one.jitted <= 3
    assert one.waits == 1


def test_a_read_job_passes_few_calls(tmp_path: Path) -> None:
    """However long the disk takes: the packs are one request of the kernel's."""
    calls = read_job_calls(tmp_path / "store")
    if calls is None:
        pytest.skip("no direct reads here")
    assert calls <= 80, calls


if __name__ == "__main__":
    for title, caches in (("all in memory", {}), ("nothing cached", COLD)):
        with tempfile.TemporaryDirectory() as temporary:
            it = passed(Path(temporary) / "store", **caches)
        print(
            f"{title}: {it.calls.total()} calls, {len(it.classes)} classes, {len(it.files)} files"
        )
        print("  " + " ".join(it.classes))
    with tempfile.TemporaryDirectory() as temporary:
        one = token_calls(Path(temporary) / "store")
        print(f"one read job: {read_job_calls(Path(temporary) / 'read')} calls, C's too")
    print(f"one token: {one.python:.0f} calls, {one.jitted:.0f} of jitted functions")
