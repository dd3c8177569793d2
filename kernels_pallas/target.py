"""The target that a program is compiled for, and the choice of a kernel's implementation on it:
one by name, or the first that supports the target.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

_PLATFORMS = ("cpu", "gpu", "tpu")
_CORES = {"gpu": "core_count", "tpu": "num_cores"}
_MATRIX_UNIT = "amx_bf16"
_BFLOAT16 = (_MATRIX_UNIT, "avx512_bf16")


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

    @classmethod
    def of(cls, device: Any) -> Target:
        """The target of a `jax.Device`, or of a device of a compile-only topology."""
        platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
        found = str(getattr(device, "compute_capability", "")).split(".")
        known = len(found) == 2 and all(part.isdigit() for part in found)
        return cls(
            platform=platform,
            kind=device.device_kind,
            capability=(int(found[0]), int(found[1])) if known and platform == "gpu" else None,
            cores=max(1, int(getattr(device, _CORES.get(platform, ""), 1))),
            widens=platform == "cpu" and not _features(),
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
def _features() -> frozenset[str]:
    """Which of `_BFLOAT16` this machine's cores have; all where Linux does not say."""
    known = ""
    with suppress(OSError):
        known = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return frozenset(name for name in _BFLOAT16 if name in known or "flags" not in known)


def has_matrix_unit() -> bool:
    """Whether this machine's cores have a matrix unit for bfloat16, or may have one."""
    return _MATRIX_UNIT in _features()


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


Implementation = Literal["auto", "reference", "mosaic_gpu", "tpu", "cpu"]

_log = logging.getLogger(__name__)


def imported(module: str, name: str) -> Callable[[], Callable[..., Any]]:
    """Returns a function that imports one of these modules at first use."""
    return lambda: getattr(import_module(f"ckv_jax.kernels_pallas.{module}"), name)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation: how to import it, and the only platform where "auto" may take it.

    One that has a platform is called with `target=` beside its arguments, a jnp reference that
    multiplies with `widen=`, see `Target.widens`.
    """

    load: Callable[[], Callable[..., Any]]
    """Imports it: called when it is first needed, so that no machine loads another's kernels."""
    platform: str | None = None
    multiplies: bool = False
    """A reference with products in it."""

    def run(self, target: Target, *args: Any) -> Any:
        """Its outcome on a target."""
        if self.platform is not None:
            return self.load()(*args, target=target)
        return self.load()(*args, **({"widen": target.widens} if self.multiplies else {}))


class Dispatched(NamedTuple):
    """The implementation that ran, and why the ones before it in the order did not."""

    kernel: str
    implementation: str
    refused: tuple[str, ...]
    """Why others did not, each "NAME does not: …"; empty where the first that may run did."""


_made: ContextVar[list[Dispatched] | None] = ContextVar("dispatches", default=None)


@contextmanager
def dispatches() -> Iterator[list[Dispatched]]:
    """Lists what `dispatch` runs in this context, in order: wrap the tracing of a program."""
    outer, made = _made.get(), list[Dispatched]()
    token = _made.set(made)
    try:
        yield made
    finally:
        _made.reset(token)
        if outer is not None:
            outer.extend(made)


def dispatch(
    name: str,
    implementation: Implementation,
    kernels: Mapping[str, Kernel],
    target: Target,
    *args: Any,
) -> Any:
    """Calls one of the implementations of kernel `name`, in the order in which "auto" tries them.

    "auto" passes over an implementation that raises NotImplementedError for these shapes on this
    target: what runs in its place, and why, is logged as a warning once in a process, and noted
    for `dispatches`.

    Raises:
      ValueError: no such implementation.
      NotImplementedError: the one asked for by name, or every one, refuses; it says why.
    """
    if implementation != "auto":
        if implementation not in kernels:
            expected = ("auto", *kernels)
            raise ValueError(f"got implementation {implementation!r}, expected one of {expected}")
        kernels = {implementation: kernels[implementation]}
    refused: list[str] = []
    for key, kernel in kernels.items():
        if implementation == "auto" and kernel.platform not in (None, target.platform):
            continue
        try:
            out = kernel.run(target, *args)
        except NotImplementedError as error:
            if implementation != "auto":
                raise
            refused.append(f"{key} does not: {error}")
            continue
        if refused:
            _warn_once(f"{key} runs {name}; {'; '.join(refused)}")
        if (made := _made.get()) is not None:
            made.append(Dispatched(name, key, tuple(refused)))
        return out
    raise NotImplementedError("; ".join(refused))


_warn_once = cache(partial(_log.warning, "%s"))
