"""One way to call every implementation of a kernel, where this machine has no accelerator."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from kernel_targets import NATIVE, OF, WIDENING_CPU, native_at

# JAX 0.10's GPU interpreter cannot follow a transposed reference, which every WGMMA here takes.
_INTERPRETS_WGMMA = jax.__version_info__ >= (0, 11)


def _interpreter(implementation: str) -> Any:
    """Buffers start as NaN (or the largest integers), so that what is not written shows, and two
    accesses that nothing orders are an error.
    """
    if implementation == "tpu":
        return pltpu.InterpretParams(detect_races=True)
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams(detect_races=True)
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(detect_races=True)


@pytest.fixture(params=["reference", "widened", "tpu", "mosaic_gpu"])
def implementation(request: pytest.FixtureRequest) -> str:
    """The name of an implementation, or "widened": the reference that multiplies in float32."""
    return str(request.param)


@pytest.fixture
def kernel(implementation: str) -> Callable[..., Any]:
    """kernel("attend", *args) runs the implementation, interpreted if it must be."""

    def call(name: str, *args: Any) -> Any:
        api = importlib.import_module(f"ckv_jax.kernels_pallas.{name}")
        if implementation in ("reference", "widened"):
            one = api.IMPLEMENTATIONS["reference"]
            run = jax.jit(
                partial(
                    one.run, OF["reference"] if implementation == "reference" else WIDENING_CPU
                ),
                static_argnums=(4, 5) if name == "score" else None,
            )
            return run(*args)
        if implementation in NATIVE:
            function = api.IMPLEMENTATIONS["cpu"].load()
            run = partial(function, target=OF["reference"])
            with native_at(implementation):
                return jax.jit(run, static_argnums=(4, 5))(*args)
        function = api.IMPLEMENTATIONS[implementation].load()
        if implementation == "mosaic_gpu" and name != "gather" and not _INTERPRETS_WGMMA:
            pytest.skip("this JAX's GPU interpreter has no transposed references")
        return function(*args, target=OF[implementation], interpret=_interpreter(implementation))

    return call
