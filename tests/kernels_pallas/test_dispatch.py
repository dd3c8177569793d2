"""Which implementation runs where, and the gather of pages by each."""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from ctypes import CDLL as LoadLibrary
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_targets import BEST, CPU, H100, V5E

from ckv_jax.kernels_pallas.gather import gather
from ckv_jax.kernels_pallas.native import build, library
from ckv_jax.kernels_pallas.score.probe import Int4Keys
from ckv_jax.kernels_pallas.target import Kernel, Target, dispatch, dispatches

needs_library = pytest.mark.skipif(BEST.path is None, reason=BEST.refused)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="got implementation 'triton', expected one of"):
        gather(jnp.zeros((2, 8)), jnp.zeros((1, 1), jnp.int32), target=CPU, implementation="triton")


@pytest.mark.parametrize("target", [CPU, H100, V5E])
def test_auto_falls_back_where_a_kernel_says_no(
    caplog: pytest.LogCaptureFixture, target: Target
) -> None:
    pages = jnp.arange(14.0).reshape(2, 7)  # 28 bytes per page: for no kernel
    with caplog.at_level("INFO", "ckv_jax.kernels_pallas.target"), dispatches() as made:
        out = gather(pages, jnp.asarray([[1, -1]], jnp.int32), target=target)
    np.testing.assert_array_equal(out, np.stack([pages[1], np.zeros(7)])[None])
    refused = {"gpu": "mosaic_gpu", "tpu": "tpu"}.get(target.platform)
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in said] == (
        [f"reference runs gather; {refused} does not"] if refused else []
    )
    assert all("expected" in line for line in said)
    [one] = made
    assert one[:2] == ("gather", "reference")
    assert [why.split(":")[0] for why in one.refused] == (
        [f"{refused} does not"] if refused else []
    )


def test_a_new_implementation_is_one_function_and_one_line() -> None:
    def odd(x: int, *, target: Target) -> str:
        if x % 2 == 0:
            raise NotImplementedError(f"got {x}, expected an odd number")
        return f"odd on {target.platform}"

    def small(x: int) -> str:
        if x > 9:
            raise NotImplementedError(f"got {x}, expected at most 9")
        return "small"

    kernels = {
        "elsewhere": Kernel(lambda: pytest.fail("imported"), platform="tpu"),
        "odd": Kernel(lambda: odd, platform="cpu"),
        "small": Kernel(lambda: small),
    }

    def run(x: int) -> str:
        return dispatch("parity", "auto", kernels, CPU, x)  # type: ignore[no-any-return]

    with dispatches() as outer:
        with dispatches() as made:
            assert [run(x) for x in (1, 2, 11)] == ["odd on cpu", "small", "odd on cpu"]
        assert run(3) == "odd on cpu"
    assert [one.implementation for one in made] == ["odd", "small", "odd"]
    assert made[1].refused == ("odd does not: got 2, expected an odd number",)
    assert [one.implementation for one in outer] == ["odd", "small", "odd", "odd"]
    with pytest.raises(NotImplementedError, match=r"odd does not: got 12.*small does not: got 12"):
        run(12)
    assert dispatch("parity", "small", kernels, CPU, 1) == "small"  # type: ignore[arg-type]


@pytest.mark.parametrize("capability", [(8, 0), (7, 5), None])
def test_gpus_without_the_units_are_refused(capability: tuple[int, int] | None) -> None:
    older = dataclasses.replace(H100, capability=capability)
    args = (jnp.zeros((2, 128)), jnp.zeros((1, 1), jnp.int32))
    with pytest.raises(NotImplementedError, match="newer"):
        gather(*args, target=older, implementation="mosaic_gpu")
    np.testing.assert_array_equal(gather(*args, target=older), np.zeros((1, 1, 128)))


class OldLibrary:
    """The library as a processor without AVX2 loads it."""

    def __init__(self, path: str) -> None:
        self._library = LoadLibrary(path)

    def __getattr__(self, name: str) -> Any:
        return (lambda: 0) if name == "ckv_level" else getattr(self._library, name)


@needs_library
def test_a_processor_without_avx2_runs_the_portable_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert BEST.path is not None
    monkeypatch.setattr("ctypes.CDLL", OldLibrary)
    found = library.find([BEST.path.parent])
    assert found == (BEST.path, 0, "") and library.LEVELS[found.level] == "portable"
    monkeypatch.setattr(library, "native", lambda: found)
    assert library.required_level() == 0


@needs_library
def test_a_library_of_another_xla_is_tried_and_one_of_other_sources_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "g+++")  # a name of no compiler
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    assert BEST.path is not None
    mine, interface = build.library_name().removesuffix(".so").rsplit("-", 1)
    (tmp_path / f"ckv-{'0' * 16}-{interface}.so").symlink_to(BEST.path)
    no_compiler = "got no C++ compiler, expected $CXX, c++, g++ or clang++"
    assert library.find([tmp_path / "none"]) == (None, 0, no_compiler)
    other = tmp_path / f"{mine}-{'0' * 8}.so"
    other.symlink_to(BEST.path)
    assert library.find([tmp_path / "none"]) == (other, BEST.level, "")
    said = "INVALID_ARGUMENT: got XLA FFI 0.1, expected 0.2"
    refuse = Mock(side_effect=RuntimeError(f"{said}\nand a trace"))
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    why = f"{other.name} does not load: {said}"
    assert library.find([tmp_path / "none"]) == (None, 0, why)


def test_a_misspelt_compiler_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usual = tmp_path / "c++"
    usual.write_text("")
    usual.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "g+++")
    assert build.compiler() == str(usual)
    usual.unlink()
    assert build.compiler() is None
    with pytest.raises(OSError, match=r"^got no C\+\+ compiler, expected \$CXX, c\+\+, g\+\+ or"):
        build.compile_library(tmp_path)


def attended(dim: int, dtype: str, queries: int = 1) -> tuple[jax.Array, ...]:
    """Arguments of `attend`, over one page of 8 tokens and the query's own."""
    rng = np.random.default_rng(0)
    page, new = (jnp.asarray(rng.standard_normal((1, n, 2 * dim)), dtype) for n in (8, queries))
    q = jnp.asarray(rng.standard_normal((1, queries, 4, dim)), "bfloat16")
    table = jnp.zeros((1, 1), jnp.int32)
    return q, page, table, table, table + 8, new, new, jnp.zeros(1, jnp.int32)


def scored(dim: int, chunk: int, queries: int = 1) -> tuple[Any, ...]:
    """Arguments of `score`, over two chunks of int4 keys."""
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.integers(0, 256, (2 * chunk, 2, dim // 2)), jnp.uint8)
    probe = Int4Keys(codes, jnp.asarray(rng.uniform(0.1, 0.2, (2 * chunk, 2)), jnp.float32))
    q = jnp.asarray(rng.standard_normal((1, queries, 4, dim)), jnp.bfloat16)
    return q, probe, jnp.int32(2 * chunk - 3), jnp.asarray([queries], jnp.int32), chunk


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("attend", attended(6, "bfloat16"), "6 dims over bfloat16, expected bfloat16 and a"),
        ("attend", attended(8, "float32"), "1 queries of bfloat16 and 8 dims over float32"),
        ("score", scored(12, 8), "got 12 dims and chunks of 8 tokens, expected a multiple of 8"),
        ("score", scored(264, 8), "got 264 dims and chunks of 8 tokens, expected .* at most 256"),
        ("score", scored(8, 264), "got 8 dims and chunks of 264 tokens, expected .* at most 256"),
        ("score", scored(8, 8, 0), r"got q bfloat16\(1, 0, 4, 8\), expected bfloat16 or float32"),
    ],
)
def test_what_a_native_kernel_does_not_take_runs_by_the_reference(
    name: str, args: tuple[Any, ...], said: str
) -> None:
    api = importlib.import_module(f"ckv_jax.kernels_pallas.{name}")
    public, named = getattr(api, name), {"target": CPU}
    if name == "score":
        named |= dict(zip(("num_tokens", "q_lengths", "chunk_tokens"), args[2:], strict=True))
        args = args[:2]
    with pytest.raises(NotImplementedError, match=said):
        public(*args, **named, implementation="cpu")
    with dispatches() as made:
        found = public(*args, **named)
    assert [one[:2] for one in made] == [(name, "reference")]
    assert re.search(f"^cpu does not: .*{said}", made[0].refused[0])
    jax.tree.map(
        np.testing.assert_array_equal, found, public(*args, **named, implementation="reference")
    )


class Device:
    """What `Target.of` looks at."""

    def __init__(self, **facts: object) -> None:
        self.__dict__ |= facts


def test_targets_of_devices() -> None:
    cuda = Device(
        platform="cuda", device_kind="NVIDIA H200", compute_capability="9.0", core_count=132
    )
    assert Target.of(cuda) == Target(
        platform="gpu", kind="NVIDIA H200", capability=(9, 0), cores=132
    )
    rocm = Device(platform="gpu", device_kind="MI300X", compute_capability="gfx942")
    assert Target.of(rocm) == Target(platform="gpu", kind="MI300X")
    tpu = Device(platform="tpu", device_kind="TPU v4", num_cores=2)
    assert Target.of(tpu) == Target(platform="tpu", kind="TPU v4", cores=2)
    here = Target.here()
    assert here.in_host_memory == (jax.default_backend() == "cpu")
    facts = Path("/proc/cpuinfo").read_text()
    multiplies = "flags" not in facts or "amx_bf16" in facts or "avx512_bf16" in facts
    assert here.widens == (here.in_host_memory and not multiplies)
    with pytest.raises(ValueError, match="got platform 'npu'"):
        Target(platform="npu")


def test_a_cpu_loads_no_kernels_of_other_machines() -> None:
    code = (
        "import sys, jax.numpy as jnp\n"
        "from ckv_jax.kernels_pallas.gather import gather\n"
        "from ckv_jax.kernels_pallas.score import score\n"
        "from ckv_jax.kernels_pallas.attend import attend\n"
        "from ckv_jax.kernels_pallas.target import Target\n"
        "gather(jnp.zeros((2, 8)), jnp.zeros((1, 1), jnp.int32), target=Target.here())\n"
        "print([m for m in sys.modules if 'pallas' in m and 'mosaic_gpu' in m])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- gather ----------------------------------------------------------------------------------------


def bits(array: jax.Array) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


def random_pages(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Every bit pattern but NaNs, which some processors make quiet."""
    raw = rng.integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), dtype=np.uint8)
    values = raw.view(jnp.dtype(dtype))[..., 0]
    with np.errstate(invalid="ignore"):
        return jnp.asarray(np.where(values == values, values, np.zeros_like(values)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "uint16"])
def test_copies_bit_for_bit(kernel: Callable[..., Any], dtype: str) -> None:
    rng = np.random.default_rng(0)
    pages = random_pages(rng, (7, 2, 16, 2, 32), dtype)
    table = np.asarray([[3, 3, -1, 0, 6], [7, 2, 5, 2**31 - 1, -(2**31)]], np.int32)
    out = kernel("gather", pages, jnp.asarray(table))
    assert out.shape == (2, 5, 2, 16, 2, 32)
    assert out.dtype == pages.dtype
    inside = (table >= 0) & (table < 7)
    expected = np.where(
        inside[..., None, None, None, None], bits(pages)[np.clip(table, 0, 6)], np.uint8(0)
    )
    np.testing.assert_array_equal(bits(out), expected)


def test_pages_larger_than_a_block(
    kernel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckv_jax.kernels_pallas.gather.mosaic_gpu.GPU_GATHER_BYTES", 2048)
    monkeypatch.setattr("ckv_jax.kernels_pallas.gather.tpu.TPU_GATHERS", 2)
    rng = np.random.default_rng(0)
    pages = random_pages(rng, (3, 6, 16, 2, 64), "bfloat16")  # 24 KiB, in blocks of 2 KiB
    table = np.asarray([[2, 0, 2]], np.int32)
    out = kernel("gather", pages, jnp.asarray(table))
    np.testing.assert_array_equal(bits(out), bits(pages)[table])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_single_rows(kernel: Callable[..., Any], dtype: str) -> None:
    rng = np.random.default_rng()
    rows = random_pages(rng, (48, 256), dtype)
    table = rng.integers(0, 48, (2, 13)).astype(np.int32)
    table[1, 3:] = -1
    table[0, 2] = 48
    out = kernel("gather", rows, jnp.asarray(table))
    inside = (table >= 0) & (table < 48)
    expected = np.where(inside[..., None], bits(rows)[np.clip(table, 0, 47)], np.uint8(0))
    np.testing.assert_array_equal(bits(out), expected)


def test_says_what_it_got() -> None:
    pages = jnp.zeros((3, 16, 8))
    with pytest.raises(ValueError, match=r"got table int32\[3\]|got table int32\(3,\)"):
        gather(pages, jnp.zeros(3, jnp.int32), target=CPU)
    with pytest.raises(ValueError, match="float32"):
        gather(pages, jnp.zeros((1, 3)), target=CPU)
    with pytest.raises(ValueError, match="P > 0"):
        gather(pages[:0], jnp.zeros((1, 3), jnp.int32), target=CPU)
