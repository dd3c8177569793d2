from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ckv_jax.kernels_pallas.dispatch import Kernel, dispatch
from ckv_jax.kernels_pallas.gather.api import gather


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="got implementation 'triton', expected one of"):
        gather(jnp.zeros((2, 8)), jnp.zeros((1, 1), jnp.int32), implementation="triton")


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_auto_falls_back_where_a_kernel_says_no(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    class Hopper:
        compute_capability = "9.0"

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [Hopper()])
    pages = jnp.arange(14.0).reshape(2, 7)  # 28 bytes a page: for no kernel
    with caplog.at_level("INFO", "ckv_jax.kernels_pallas.dispatch"):
        out = gather(pages, jnp.asarray([[1, -1]], jnp.int32))
    np.testing.assert_array_equal(out, np.stack([pages[1], np.zeros(7)])[None])
    refused = {"gpu": "mosaic_gpu", "tpu": "tpu"}.get(backend)
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in said] == (
        [f"reference runs gather; {refused} does not"] if refused else []
    )
    assert all("expected" in line for line in said)


def test_a_new_implementation_is_one_function_and_one_line() -> None:
    def odd(x: int) -> str:
        if x % 2 == 0:
            raise NotImplementedError(f"got {x}, expected an odd number")
        return "odd"

    def small(x: int) -> str:
        if x > 9:
            raise NotImplementedError(f"got {x}, expected at most 9")
        return "small"

    kernels = {
        "elsewhere": Kernel(lambda: pytest.fail("imported"), backend="tpu"),
        "odd": Kernel(lambda: odd, backend="cpu"),
        "small": Kernel(lambda: small),
    }
    assert [dispatch("auto", kernels, x) for x in (1, 2, 11)] == ["odd", "small", "odd"]
    with pytest.raises(NotImplementedError, match=r"odd does not: got 12.*small does not: got 12"):
        dispatch("auto", kernels, 12)
    assert dispatch("small", kernels, 1) == "small"  # type: ignore[arg-type]


@pytest.mark.parametrize(("capability", "reason"), [("8.0", "newer"), ("7.5", "newer")])
def test_gpus_without_the_units_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: str, reason: str
) -> None:
    class Older:
        compute_capability = capability

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Older()])
    args = (jnp.zeros((2, 128)), jnp.zeros((1, 1), jnp.int32))
    with pytest.raises(NotImplementedError, match=reason):
        gather(*args, implementation="mosaic_gpu")
    np.testing.assert_array_equal(gather(*args), np.zeros((1, 1, 128)))


def test_a_cpu_loads_no_kernels_of_other_machines() -> None:
    code = (
        "import sys, jax.numpy as jnp\n"
        "from ckv_jax.kernels_pallas.gather.api import gather\n"
        "from ckv_jax.kernels_pallas.score import api\n"
        "from ckv_jax.kernels_pallas.attend import api\n"
        "gather(jnp.zeros((2, 8)), jnp.zeros((1, 1), jnp.int32))\n"
        "print([m for m in sys.modules if 'pallas' in m and 'mosaic_gpu' in m])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
