"""The native kernels of a CPU: how the library comes about, and that sums have one order."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_targets import BEST, CPU, NATIVE, V5E, native_at

from ckv_jax.kernels_pallas.native import build, library
from ckv_jax.kernels_pallas.native.library import decode_packs, multiply_rows
from ckv_jax.kernels_pallas.score import best, best_by_xla, score
from ckv_jax.kernels_pallas.score.probe import Int4Keys, of_chunks
from ckv_jax.kernels_pallas.target import Implementation, dispatches
from ckv_jax.model.decoder import matmul
from ckv_jax.storage.codec import CODECS, Quantised
from ckv_jax.storage.layout import Layout

REFUSED = "no native library: got no C++ compiler, expected $CXX, c++, g++ or clang++"
needs_library = pytest.mark.skipif(BEST.path is None, reason=BEST.refused)


def test_the_library_builds_where_there_is_a_compiler() -> None:
    """Every other test here is left out without it, so that nothing else would notice."""
    if build.compiler() is None or build.lacking():
        pytest.skip(build.lacking() or "no C++ compiler")
    assert BEST.path is not None, BEST.refused


HASH = """
import hashlib, os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from test_native import scores
print(hashlib.sha256(scores([9, 4, 0]).tobytes()).hexdigest())
"""
LOAD = """
import sys
from functools import partial
from pathlib import Path
from ckv_jax.kernels_pallas.native import library
library.SOURCES = Path("/no/such/folder")
print(library.find([Path("/proc/no-such-place"), Path(sys.argv[1])]))
"""


def scores(
    lengths: list[int], implementation: Implementation = "auto", dim: int = 64, far: float = 1
) -> np.ndarray:
    """[2, B, 1, M] of 9 queries over 499 of 512 tokens; `far` multiplies one dim of the queries."""
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.integers(0, 256, (512, 2, dim // 2)), jnp.uint8)
    scale = jnp.asarray(rng.uniform(0.1, 0.2, (512, 2)), jnp.float32)
    q = jnp.asarray(rng.standard_normal((3, 9, 6, dim)), jnp.bfloat16)[: len(lengths)]
    q = q.at[..., 5].multiply(far)
    one = partial(
        score, num_tokens=jnp.int32(499), chunk_tokens=8, target=CPU, peaks=True,
        implementation=implementation,
    )  # fmt: skip
    found = jax.jit(one)(q, Int4Keys(codes, scale), q_lengths=jnp.asarray(lengths, jnp.int32))
    return np.asarray(found)


def process(code: str, *args: object, **environment: str) -> str:
    words = [sys.executable, "-c", code, *map(str, args)]
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), **environment}
    here["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent.parent)
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=here)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_library
def test_a_sequence_scores_alone_as_in_a_batch_bit_for_bit() -> None:
    with dispatches() as made:
        together = scores([9, 4, 0], "cpu")
    assert [one.implementation for one in made] == ["cpu"]
    alone = scores([9], "cpu")
    np.testing.assert_array_equal(together[:, :1], alone)
    assert not together[:, 2].any()


@needs_library
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("far", [1.0, 60.0], ids=["one byte", "two bytes"])
def test_a_query_scores_alone_as_among_many_bit_for_bit(dim: int, far: float) -> None:
    """Few rows are multiplied with keys in place, many with transposed keys."""
    many = scores([1, 9], "cpu", dim, far)[:, :1]
    np.testing.assert_array_equal(many, scores([1], "cpu", dim, far))


@needs_library
@pytest.mark.parametrize(("rows", "units", "n"), [(1, 9, 9), (3, 700, 40), (5, 64, 1)])
def test_the_best_of_each_row_are_those_of_xla(rows: int, units: int, n: int) -> None:
    """With equals, and units that are always or never selected."""
    rng = np.random.default_rng(0)
    found = rng.integers(-3, 20, (rows, units)).astype(np.float32)
    found[:, ::7], found[:, 1], found[:, 2] = -np.inf, np.inf, -0.0
    ages = rng.integers(-2, 3, (rows, units)).astype(np.int32)
    for given in [(), (jnp.asarray(ages),)]:
        mine = best(jnp.asarray(found), n, *given, target=CPU, implementation="cpu")
        for here, wanted in zip(mine, best_by_xla(jnp.asarray(found), n, *given), strict=True):
            np.testing.assert_array_equal(here, wanted)


def test_what_has_no_best_is_refused() -> None:
    scores, ages = jnp.zeros((2, 4)), jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="got n=5, expected at most 4"):
        best(scores, 5, target=CPU)
    with pytest.raises(ValueError, match="got ages int32"):
        best(scores, 2, ages, target=CPU)
    with pytest.raises(NotImplementedError, match="got no target"):
        best(scores, 2, target=None, implementation="cpu")
    narrow = scores.astype(jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="got scores bfloat16, expected float32"):
        best(narrow, 2, target=CPU, implementation="cpu")
    assert best(narrow, 2, target=CPU)[1].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("implementation", [*NATIVE, "reference"])
@pytest.mark.parametrize("queries", [1, 9])
def test_chunks_score_where_they_are_as_copied_together(implementation: str, queries: int) -> None:
    """The last chunk has 3 tokens; behind it are chunks that are none."""
    rng = np.random.default_rng(1)
    codes = jnp.asarray(rng.integers(0, 256, (504, 2, 32)), jnp.uint8)
    probe = Int4Keys(codes, jnp.asarray(rng.uniform(0.1, 0.2, (504, 2)), jnp.float32))
    kept = [0, 3, 4, *range(9, 40), 62]
    ids = jnp.asarray(kept + [-1] * 9, jnp.int32)
    one = partial(
        score, jnp.asarray(rng.standard_normal((2, queries, 6, 64)), jnp.bfloat16),
        num_tokens=jnp.int32(8 * len(kept) - 5), chunk_tokens=8, target=CPU, peaks=True,
        q_lengths=jnp.asarray([queries, 1], jnp.int32),
        implementation="reference" if implementation == "reference" else "cpu",
    )  # fmt: skip
    with nullcontext() if implementation == "reference" else native_at(implementation):
        in_place = one(probe, chunk_ids=ids)
        copied = one(of_chunks(probe, ids, 8))
    assert in_place.shape == (2, 2, 2, len(ids)) and in_place[..., len(kept) - 1].all()
    np.testing.assert_array_equal(in_place, copied)
    assert not in_place[..., len(kept) :].any()


@needs_library
@pytest.mark.slow
def test_threads_change_no_bit() -> None:
    one = process(HASH)
    code = HASH.replace("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", "")
    assert one == process(code)


@needs_library
@pytest.mark.slow
def test_a_library_is_compiled_where_it_can_be_written_and_found_again(tmp_path: Path) -> None:
    broken = tmp_path / build.library_name()
    broken.write_bytes(b"not a library")
    made = process(LOAD, tmp_path)
    assert str(broken) in made and "refused=''" in made
    assert [path.name for path in tmp_path.iterdir()] == [broken.name]  # and nothing else
    assert process(LOAD, tmp_path, PATH="", CXX="") == made
    broken.write_bytes(b"not a library")
    made = process(LOAD, tmp_path, PATH="", CXX="")
    assert "path=None" in made and "does not load" in made


def test_without_a_compiler_the_reference_runs_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    none = library.find([tmp_path])
    assert none == (None, 0, REFUSED.split(": ", 1)[1])
    monkeypatch.setattr(library, "native", lambda: none)
    with caplog.at_level(logging.WARNING), dispatches() as made:
        scores([9])
        scores([9, 4])
    assert [one.implementation for one in made] == ["reference"] * 2
    assert {one.refused for one in made} == {(f"cpu does not: {REFUSED}",)}
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"reference runs score; cpu does not: {REFUSED}"]
    with pytest.raises(NotImplementedError, match="no native library"):
        scores([9], "cpu")


def test_what_fails_to_compile_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cxx = tmp_path / "cxx"
    cxx.write_text("#!/bin/sh\necho 'x.cc:1: error: no such thing' >&2\nexit 1\n")
    cxx.chmod(0o755)
    monkeypatch.setenv("CXX", str(cxx))
    with pytest.raises(OSError, match=r"cxx failed: x.cc:1: error: no such thing$"):
        build.compile_library(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_big_endian_processor_has_no_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    refused = "got a big-endian processor, expected a little-endian one"
    with pytest.raises(OSError, match=refused):
        build.compile_library(tmp_path)
    assert library.find([tmp_path]) == (None, 0, refused)


@pytest.mark.parametrize("implementation", NATIVE)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 576, 192), (2, 96, 37), (16, 96, 67), (70, 96, 67), (100, 64, 16)],
)
def test_rows_times_weights_agree_with_float64(
    implementation: str, int8: bool, rows: int, inputs: int, outputs: int
) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, 1, inputs)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((outputs, inputs)), jnp.bfloat16)
    exact, scale = np.asarray(weight, np.float64), None
    if int8:
        weight = jnp.asarray(rng.integers(-127, 128, (outputs, inputs)), jnp.int8)
        scale = jnp.asarray(rng.uniform(0.01, 0.02, outputs), jnp.float32)
        exact = np.asarray(weight, np.float64) * np.asarray(scale, np.float64)[:, None]
    with native_at(implementation):
        found = multiply_rows(x, weight, scale, target=CPU)
        # Each row's sums are the same, alone and beside any others.
        fewest = 1 if rows <= 16 else 65  # fewer take another order
        counts = range(fewest, rows)
        alone = [multiply_rows(x[-count:], weight, scale, target=CPU) for count in counts]
    wanted = np.asarray(x, np.float64) @ exact.T
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    for count, last in zip(counts, alone, strict=True):
        np.testing.assert_array_equal(found[-count:], last)


@pytest.mark.parametrize("implementation", NATIVE)
@pytest.mark.parametrize("codec", ["int8", "k8v4"])
def test_packs_are_decoded_to_the_bits_of_numpy(implementation: str, codec: str) -> None:
    layout, coder = Layout(num_layers=4, num_kv_heads=3, head_dim=64), CODECS[codec]
    assert isinstance(coder, Quantised)
    rng = np.random.default_rng(0)
    sizes = 10 ** rng.uniform(-20, 20, (5, 1, 1, 1, 1, 1))
    packs = sizes * rng.standard_normal((5, *layout.pack_shape))
    stored = coder.encode(packs.astype(layout.numpy_dtype), layout)
    slots = np.array([6, -1, 0, 3, 2], np.int32)
    found = np.ones((7, *layout.pack_shape), layout.numpy_dtype)
    with native_at(implementation):
        decode_packs(stored, slots, found, bits=coder.bits)
    wanted = np.ones_like(found)
    wanted[slots[slots >= 0]] = coder.decode(stored, layout)[slots >= 0]
    np.testing.assert_array_equal(found.view(np.uint16), wanted.view(np.uint16))


@needs_library
def test_one_row_of_a_model_is_the_native_kernels_and_what_it_does_not_take_is_xlas() -> None:
    x, weight = jnp.ones((1, 1, 64), jnp.bfloat16), jnp.ones((36, 64), jnp.bfloat16)
    with dispatches() as made:
        for rows in (x, jnp.repeat(x, 257, axis=1), x.astype(jnp.float32), x[..., :40]):
            whole = weight[:, : rows.shape[2]].astype(rows.dtype)
            out = matmul(rows, whole, True, CPU)
            np.testing.assert_array_equal(out, np.full(out.shape, rows.shape[2], np.float32))
        matmul(x, weight.T, False, CPU)
        matmul(x, weight, True, V5E)
    assert [one[:2] for one in made] == [("multiply_rows", "cpu"), ("multiply_rows", "reference")]
    assert "a multiple of 32 inputs" in made[1].refused[0]
