"""One parameter, from its HF tensors to its device or devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ckv_jax.model.decoder import Transformer
from ckv_jax.model.tensor_map import Slot

__all__ = ["check_whole_model", "placed"]


def placed(
    model: Transformer, slot: Slot, parts: Sequence[np.ndarray], dtype: str | None = None
) -> jax.Array:
    """The parameter of `slot`, of the HF tensors `parts` (see `Slot`), in `dtype` or the model's.

    Where the model is split, a device gets its rows or columns of every part end to end: of a
    kernel for keys and values its own keys, then its own values.
    """
    dtype, shardings = dtype or model.dtype.name, model.shardings
    transpose = slot.kernel and not model.out_first
    rows, columns = sum(len(part) for part in parts), parts[0].shape[1:]
    if transpose:
        shape: tuple[int, ...] = (*columns, rows)
    else:
        shape = (rows, *columns)
    spec = shardings.of_name(str(slot.path[-1]), shape, model.out_first)
    place = shardings.place(spec)
    whole: jax.Array
    if place is None:
        whole = _join([jax.device_put(part) for part in parts], transpose, dtype)
        return whole
    axes = [axis for axis, name in enumerate(spec) if name is not None]
    if not axes:
        whole = _join([jax.device_put(part) for part in parts], transpose, dtype)
        everywhere: jax.Array = shardings.put(whole, spec)
        return everywhere
    axis = 1 - axes[0] if transpose else axes[0]  # of the HF tensors
    return _shares(parts, axis, transpose, dtype, shape, place)


def check_whole_model(model: Transformer) -> None:
    """Raises `ValueError` for a model that is split, whose fused kernels are in another order, or
    of int8, which no format here has."""
    if model.int8:
        raise ValueError("got a model of int8 weights, expected one that was loaded without them")
    if model.shardings.size > 1:
        raise ValueError(
            f"got a model split over {model.shardings.size} devices, expected one on one device: "
            "load it without tensor_parallel to save it"
        )


def _shares(
    parts: Sequence[np.ndarray], axis: int, transpose: bool, dtype: str, shape: tuple[int, ...],
    place: NamedSharding,
) -> jax.Array:  # fmt: skip
    """An array of each device's share of every part, along `axis` of the parts."""
    size = place.mesh.size
    shares = []
    for index, device in enumerate(place.mesh.devices.flat):
        mine = [np.split(part, size, axis=axis)[index] for part in parts]
        shares.append(_join([jax.device_put(part, device) for part in mine], transpose, dtype))
    return jax.make_array_from_single_device_arrays(shape, place, shares)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _join(parts: list[jax.Array], transpose: bool, dtype: str) -> jax.Array:
    """The tensors end to end, transposed if need be; their element types may differ."""
    parts = [part.astype(dtype) for part in parts]
    whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)
    return whole.T if transpose else whole
