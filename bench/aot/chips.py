"""The devices that are compiled for: what their compiler asks about them, and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

GIB = 2**30
_OF_MEMORY = ("device_memory_size", "memory_bandwidth", "device_description_str")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One device as JAX shows it: a chip, of TPU v4 and 7x one of a chip's two halves."""

    name: str
    kind: Literal["tpu", "gpu"]
    memory_bytes: int
    """What programs may use: of a TPU by its compiler's own message, of a GPU its whole memory."""
    topology: str = ""
    """Of a TPU: the smallest that its compiler knows, of four devices."""
    eight: str = ""
    """Of a TPU: one of eight devices."""
    config: str = ""
    """Of a GPU: a `GpuTargetConfigProto` in text form."""

    @property
    def compiled_as(self) -> str:
        """What its compiler is told of it, apart from how much memory it has and how fast that is:
        an H200 is an H100 with more and faster memory."""
        lines = self.config.splitlines() or [self.topology, self.eight]
        return "\n".join(line for line in lines if not any(word in line for word in _OF_MEMORY))


def _tpu(name: str, topology: str, eight: str, *, gib: float) -> Chip:
    return Chip(name=name, kind="tpu", topology=topology, eight=eight, memory_bytes=int(gib * GIB))


def _gpu(
    name: str, device: str, *, capability: int, cores: int, fpus: int, ghz: float, memory: int,
    l2: int, shared: int, bandwidth: float,
) -> Chip:  # fmt: skip
    """`shared`: bytes of shared memory of a multiprocessor, 1 KiB of which is the system's."""
    facts = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_core": shared,
        "shared_memory_per_block_optin": shared - 1024,
        "threads_per_core_limit": 2048,
        "core_count": cores,
        "fpus_per_core": fpus,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "memory_bandwidth": int(bandwidth),
        "device_memory_size": memory,
        "l2_cache_size": l2,
        "clock_rate_ghz": ghz,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    lines = "".join(f"  {key}: {value}\n" for key, value in facts.items())
    own = "ACCELERATED_FEATURES" if capability >= 9 else "NONE"
    config = (
        "gpu_device_info {\n"
        f"{lines}  cuda_compute_capability {{ major: {capability} feature_extension: {own} }}\n"
        "}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 }\n"
        f'device_description_str: "{device}"\n'
    )
    return Chip(name=name, kind="gpu", config=config, memory_bytes=memory)


_HOPPER = {"capability": 9, "cores": 132, "fpus": 128, "ghz": 1.98, "shared": 228 << 10}

CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            _tpu("v4", "v4:2x2x1", "v4:2x2x1", gib=15.25),
            _tpu("v5e", "v5e:2x2", "v5e:2x4", gib=15.75),
            _tpu("v5p", "v5p:2x2x1", "v5p:2x2x2", gib=95.74),
            _tpu("v6e", "v6e:2x2", "v6e:2x4", gib=31.25),
            _tpu("7x", "tpu7x:2x2x1", "tpu7x:2x2x1", gib=94.75),
            _gpu(
                "A100", "NVIDIA A100-SXM4-80GB", capability=8, cores=108, fpus=64, ghz=1.41,
                memory=85_100_068_864, l2=40 << 20, shared=164 << 10, bandwidth=2.039e12,
            ),
            _gpu(
                "H100", "NVIDIA H100 80GB HBM3", memory=84_942_979_072, l2=50 << 20,
                bandwidth=3.352e12, **_HOPPER,
            ),
            _gpu(
                "H200", "NVIDIA H200", memory=151_397_597_184, l2=50 << 20, bandwidth=4.8e12,
                **_HOPPER,
            ),
            _gpu(
                "B200", "NVIDIA B200", capability=10, cores=148, fpus=128, ghz=1.965,
                memory=191_514_411_008, l2=126 << 20, shared=228 << 10, bandwidth=7.67e12,
            ),
        )
    }
)  # fmt: skip
"""By the name that the command line takes; bandwidths are the published peaks."""


def parted(target: str) -> tuple[Chip, int]:
    """The chip of a target, and how many of them a model is split over: `v5e`, or `v5e:4`.

    Raises `ValueError` for a target that is none.
    """
    name, _, count = target.partition(":")
    if name not in CHIPS:
        raise ValueError(f"unknown target, expected one of {', '.join(CHIPS)}")
    chip = CHIPS[name]
    if not count:
        return chip, 1
    if chip.kind != "tpu" or count not in ("2", "4", "8"):
        raise ValueError(f"got {target!r}, expected 2, 4 or 8 devices of a TPU, such as v5e:4")
    return chip, int(count)
