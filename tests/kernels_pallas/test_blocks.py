from __future__ import annotations

import dataclasses

import pytest
from kernel_targets import H100, V5E

from ckv_jax.kernels_pallas import blocks


def test_every_target_has_block_sizes() -> None:
    assert blocks.tpu_blocks(V5E).attend.keys % 128 == 0
    for capability in ((9, 0), (10, 0), None):
        target = dataclasses.replace(H100, capability=capability)
        assert blocks.gpu_blocks(target) == blocks.gpu_blocks(H100)


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (blocks.TpuAttend, {"rows": 24}, "got rows 24, expected a multiple of 16"),
        (blocks.TpuDense, {"keys": 64}, "got keys 64, expected a multiple of 128"),
        (blocks.TpuScore, {"keys": 0}, "got keys 0"),
        (blocks.TpuGather, {"entries": 0}, "got entries 0"),
        (blocks.GpuAttend, {"keys": 96}, "got keys 96, expected a multiple of 64"),
        (blocks.GpuScore, {"steps": 0}, "got steps 0"),
        (blocks.GpuGather, {"bytes": 2**20}, "got bytes 1048576"),
    ],
)
def test_sizes_that_no_kernel_can_take(kind: type, wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**wrong)
