"""Which implementation runs where, and the gather of pages by each."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_targets import CPU, H100, V5E

from ckv_jax.kernels_pallas.gather import gather
from ckv_jax.kernels_pallas.target import Kernel, Target, dispatch, dispatches


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
