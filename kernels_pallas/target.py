"""What a program is compiled for: said once, as an argument, and never asked while tracing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax

_PLATFORMS = ("cpu", "gpu", "tpu")
_ALSO_GPU = ("cuda", "rocm")
_BFLOAT16 = ("amx_bf16", "avx512_bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One kind of device. Two programs of equal targets are compiled alike.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: the device's name as JAX gives it, such as "TPU v5 lite" or "NVIDIA H200".
      capability: a GPU's compute capability; None: not known, or no GPU.
      cores: what a grid has to fill: a GPU's multiprocessors, the tensor cores that one TPU device
        runs a kernel on.
      widens: a CPU that has no instructions for products of bfloat16: those of many rows are faster
        in float32, to which their 16-bit factors are widened first. The sums are float32's anyway.
    """

    platform: str
    kind: str = ""
    capability: tuple[int, int] | None = None
    cores: int = 1
    widens: bool = False

    def __post_init__(self) -> None:
        if self.platform not in _PLATFORMS:
            raise ValueError(f"got platform {self.platform!r}, expected one of {_PLATFORMS}")
        if self.cores < 1:
            raise ValueError(f"got {self.cores} cores, expected at least 1")

    @classmethod
    def of(cls, device: Any) -> Target:
        """The target of a `jax.Device`, or of a device of a compile-only topology."""
        platform = "gpu" if device.platform in _ALSO_GPU else device.platform
        found = str(getattr(device, "compute_capability", "")).split(".")
        known = len(found) == 2 and all(part.isdigit() for part in found)
        return cls(
            platform=platform,
            kind=device.device_kind,
            capability=(int(found[0]), int(found[1])) if known and platform == "gpu" else None,
            cores=max(1, _cores(device, platform)),
            widens=platform == "cpu" and not _multiplies_bfloat16(),
        )

    @classmethod
    def here(cls) -> Target:
        """The target of this process's default device."""
        return cls.of(jax.devices()[0])

    @property
    def in_host_memory(self) -> bool:
        """Whether the device computes in host memory."""
        return self.platform == "cpu"


@cache
def _multiplies_bfloat16() -> bool:
    """Whether this machine's cores have instructions for products of bfloat16, a matrix unit's or
    AVX-512's; where Linux does not say, they are taken to have some."""
    try:
        known = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True
    return any(found in known for found in _BFLOAT16) or "flags" not in known


def _cores(device: Any, platform: str) -> int:
    names = {"gpu": "core_count", "tpu": "num_cores"}
    return int(getattr(device, names[platform], 1)) if platform in names else 1


def require_tma(target: Target) -> None:
    """Raises NotImplementedError for a GPU older than Hopper, which has no tensor memory unit."""
    if target.capability is None or target.capability[0] < 9:
        raise NotImplementedError(
            f"got compute capability {target.capability}, expected (9, 0) or newer"
        )


def require_wgmma(target: Target) -> None:
    """Raises NotImplementedError for a GPU that is not of the Hopper family (sm_90a)."""
    if target.capability is None or target.capability[0] != 9:
        raise NotImplementedError(f"got compute capability {target.capability}, expected (9, 0)")
