"""Placement of a model's arrays: whole on one device, or split by KV head over several.

Tensor parallelism as in Megatron-LM (Shoeybi et al., 2019, §3): a device has some KV heads, the
query heads that read them, and a share of the MLP. It computes its part of every layer by itself;
two sums per layer make the parts whole. Pages, probes and decode buffers are split by KV head too,
so attention needs nothing from another device. What is stored knows nothing of all this.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from ckv_jax.model.config import ModelConfig

AXIS = "heads"

_spec: Callable[..., PartitionSpec] = PartitionSpec

WHOLE = _spec()
"""The same on every device: hidden states, token ids, tables, selections."""
HEADS = _spec(None, None, AXIS)
"""Queries [B, S, H, D], keys and values [B, S, K, D] or [B, R, K*D], log-sum-exps [B, S, H]."""
ROWS = _spec(None, AXIS)
"""The head's rows of logits [B, V]."""
PAGES = _spec(None, None, None, None, AXIS)
"""Pools of packs [slots, pl, 2, C, K*D]."""
PROBE = _spec(None, AXIS)
"""What keys are scored by, [T, K, ...]."""
CODEBOOKS = _spec(AXIS)
"""Those of product-quantised keys, [K, ...]."""
BY_NAME = "by name"
"""Parameters, and probes: each array as `Shardings.of_name` says."""

Spec = PartitionSpec | str

_OUT = {"query_kernel", "kv_kernel", "gate_up_kernel"}  # each device has some of the outputs
_IN = {"output_kernel", "down_kernel"}  # each device has some of the inputs, and sums
_BIASES = {"query_bias", "kv_bias", "gate_up_bias"}


@dataclass(frozen=True, slots=True)
class Shardings:
    """The split of one model over devices.

    Attributes:
      mesh: the devices, in one axis; None: one device, nothing is split.
    """

    mesh: Mesh | None = None

    @classmethod
    def over(
        cls, config: ModelConfig, size: int, devices: Sequence[Any] | None = None
    ) -> Shardings:
        """A model of `config` over the first `size` of `devices` (None: those of this process).

        Raises `ValueError` for fewer devices, or a size that does not divide KV heads and MLP.
        """
        devices = jax.local_devices() if devices is None else devices
        if not 1 <= size <= len(devices):
            raise ValueError(
                f"got tensor_parallel={size}, expected 1 to {len(devices)}, the number of devices"
            )
        check_divides(config, size)
        if size == 1:
            return ONE_DEVICE
        return cls(Mesh(np.array(devices[:size]), (AXIS,)))

    @property
    def size(self) -> int:
        """Devices."""
        return 1 if self.mesh is None else self.mesh.size

    def place(self, spec: PartitionSpec) -> NamedSharding | None:
        """Returns the sharding of an array with this spec; None: the default device."""
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def put(self, x: Any, spec: PartitionSpec) -> Any:
        """`x`, an array or a tree of them, on the device or over the devices."""
        return jax.device_put(x, self.place(spec))

    def sum(self, x: Array) -> Array:
        """The sum of what each device computed; inside a call made by `split`."""
        if self.mesh is None:
            return x
        psum: Callable[..., Array] = jax.lax.psum
        return psum(x, AXIS)

    def split(
        self,
        function: Callable[..., Any],
        takes: Sequence[Spec],
        gives: Any,
        *,
        out_first: bool = False,
    ) -> Callable[..., Any]:
        """`function` for each device's part of its arguments, to be jitted; itself for one device.

        `takes`: specs of the first positional arguments, those after them are `WHOLE`; `gives`: of
        what it returns, a tree of specs. Arguments by name are static. `out_first`: the order of
        kernels among the arguments.
        """
        if self.mesh is None:
            return function

        def of(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
            if isinstance(path[-1], DictKey):
                return self.of_name(str(path[-1].key), leaf.shape, out_first)
            return CODEBOOKS if str(path[-1]) == ".codebooks" else PROBE

        def specs_of(spec: Spec, arg: Any) -> Any:
            if isinstance(spec, PartitionSpec):
                return spec
            return jax.tree_util.tree_map_with_path(of, arg)

        @functools.wraps(function)
        def parts(*args: Any, **static: Any) -> Any:
            every = itertools.chain(takes, itertools.repeat(WHOLE))
            specs = tuple(specs_of(spec, arg) for arg, spec in zip(args, every, strict=False))
            return jax.shard_map(
                functools.partial(function, **static), mesh=self.mesh, in_specs=specs,
                out_specs=gives, check_vma=False,
            )(*args)  # fmt: skip

        return parts

    def of_name(self, name: str, shape: Sequence[int], out_first: bool) -> PartitionSpec:
        """Returns the spec of a parameter by its name; `out_first`: kernels are `[out, in]`."""
        if self.mesh is None:
            return WHOLE
        if name in _BIASES or (name == "head" and shape[0] % self.size == 0):
            return _spec(AXIS)
        if name in _OUT | _IN:
            first = (name in _OUT) == out_first
            return _spec(AXIS) if first else _spec(None, AXIS)
        return WHOLE


def check_divides(config: ModelConfig, size: int) -> None:
    """Raises `ValueError` unless every one of `size` devices gets as much of a model."""
    for what, count in (
        ("KV heads", config.num_kv_heads), ("MLP columns", config.intermediate_size),
    ):  # fmt: skip
        if count % size:
            raise ValueError(
                f"got tensor_parallel={size}, expected a divisor of the model's {count} {what}"
            )


ONE_DEVICE = Shardings()
