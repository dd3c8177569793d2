"""Programs under a cap: by their number, and by the memory mappings they take."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations

from ckv_jax.pipeline.programs import (
    Background,
    Program,
    Programs,
    mappings_allowed,
    mappings_held,
    specs,
)


def many_kernels(x: jax.Array) -> jax.Array:
    """What XLA cannot fuse into one kernel."""
    for _ in range(4):
        x = jnp.sort(jnp.tanh(x @ x.T) @ x, axis=-1)
    return x


def test_the_least_recently_used_function_goes_first() -> None:
    programs = Programs(most=3)
    double, triple = programs.jit(lambda x: 2 * x), programs.jit(lambda x: 3 * x)
    calls = [(double, 1), (double, 2), (triple, 1), (double, 1), (double, 3)]
    for call, size in calls:
        assert call(np.full(size, 1.0, np.float32)).shape == (size,)
    assert [len(call.dispatched) for call in (double, triple)] == [3, 0]
    before = compilations()
    double(np.full(2, 1.0, np.float32))
    assert compilations() == before
    triple(np.full(1, 1.0, np.float32))  # let go, and compiled again
    assert compilations() == before + 1
    assert [len(call.dispatched) for call in (double, triple)] == [0, 1]
    assert len(programs) == 1 and programs.made == 5


def test_nobody_waits_for_what_close_has_cancelled() -> None:
    begins, goes_on = threading.Event(), threading.Event()

    def slow(x: jax.Array) -> jax.Array:
        begins.set()
        assert goes_on.wait(30)
        return x

    background, programs = Background(), Programs()
    for function in (slow, many_kernels):
        assert not background.compile(programs.jit(function), np.ones((2, 2), np.float32))
    assert begins.wait(30)
    background.close()
    background.close()
    goes_on.set()
    assert background.settle(30.0)
    assert not programs.jit(many_kernels).compiled(np.ones((2, 2), np.float32))


@pytest.mark.parametrize("committed", [False, True])
def test_a_call_finds_what_was_compiled_on_another_thread(committed: bool) -> None:
    programs = Programs()
    scaled = programs.jit(
        lambda x, by, *, power: x["of"] * by.astype(jnp.float32) ** power,
        static=("power",),
        donate=("x",),
    )
    device = jax.devices()[0] if committed else None
    like = specs(({"of": jax.device_put(np.ones((3, 5), np.float32), device)}, np.int64(2)))
    assert not scaled.compiled(*like, power=3)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(scaled.compile, *like, power=3).result()
    assert scaled.compiled(*like, power=3)
    x, by = jax.device_put(np.full((3, 5), 2.0, np.float32), device), np.int64(3)
    before = compilations()
    result = scaled({"of": x}, by, power=3)
    assert compilations() == before and x.is_deleted()
    np.testing.assert_array_equal(result, np.full((3, 5), 54.0, np.float32))


def test_compilations_on_several_threads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread that looks at the number gives the others time to do the same."""
    meeting, counts = threading.Barrier(2), list[int]()

    def look(self: Program) -> int:
        count = counts[-1]
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.2)
        return count

    seen = property(look, lambda self, count: counts.append(count))
    monkeypatch.setattr(Program, "compiling", seen, raising=False)
    program = Programs().jit(lambda x: 2 * x)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(program.compile, [np.ones(size, np.float32) for size in (2, 3)]))
    assert np.abs(np.diff(counts)).tolist() == [1] * 4 and counts[-1] == 0


@pytest.mark.slow
def test_mappings_of_endless_shapes_stay_bounded() -> None:
    if not mappings_held():
        pytest.skip("this system does not tell its mappings")
    gc.collect()
    room = 150
    before = mappings_held()
    programs = Programs(mapped=(before + room) / mappings_allowed())
    call = programs.jit(many_kernels)
    took = 0
    for rows in range(1, 41):
        start = mappings_held()
        call(np.ones((rows, 8), np.float32)).block_until_ready()
        took = max(took, mappings_held() - start)
    assert took * 40 > 2 * room  # without a cap they would not fit
    assert mappings_held() - before <= room + 2 * took
    again = call(np.ones((1, 8), np.float32))  # let go, and compiled again
    np.testing.assert_allclose(again, many_kernels(jnp.ones((1, 8))), rtol=1e-6)
    assert len(programs) < programs.made == 41
