"""How packs become bytes on disk and packs again: the seam for compression and quantisation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from ckv_jax.storage.layout import PLAIN, Layout


class Codec(Protocol):
    """Turns packs into as many bytes each, and back. Name and version are part of a prefix's
    identity: what one codec wrote, no other is given to read."""

    @property
    def name(self) -> str:
        """a-z, 0-9 and hyphens."""
        ...

    @property
    def version(self) -> int:
        """Another number for bytes of another form."""
        ...

    def num_bytes(self, layout: Layout) -> int:
        """Bytes of one encoded pack; `layout` is that of the packs as they are computed."""
        ...

    def encode(self, packs: np.ndarray, layout: Layout) -> np.ndarray:
        """uint8 [n, num_bytes] from packs [n, *pack_shape] of `layout.numpy_dtype`."""
        ...

    def decode(self, stored: Any, layout: Layout) -> Any:
        """Packs [n, *pack_shape], of `layout.numpy_dtype` or its bit patterns, from uint8
        [n, num_bytes]. JAX operations only: it is traced into one call on the device."""
        ...


CODECS: Mapping[str, Codec | None] = MappingProxyType({PLAIN: None})
"""By what `Layout.codec` says; None: packs lie on disk as they are in memory."""


def codec_id(codec: Codec | None) -> str:
    """What `Layout.codec` says of a codec."""
    return PLAIN if codec is None else f"{codec.name}:{codec.version}"


def check_codec(codec: Codec | None, layout: Layout) -> None:
    """Raises ValueError unless `codec` is that of `layout`."""
    if codec_id(codec) != layout.codec:
        raise ValueError(f"codec: got {codec_id(codec)!r}, expected {layout.codec!r}")


def encoded(codec: Codec | None, packs: np.ndarray, layout: Layout) -> np.ndarray:
    """Packs as they lie on disk [n, *stored_shape], from bit patterns [n, *pack_shape]."""
    if codec is None:
        return packs
    out = np.ascontiguousarray(codec.encode(packs.view(layout.numpy_dtype), layout))
    if out.dtype != np.uint8 or out.shape != (len(packs), *layout.stored_shape):
        want = (len(packs), *layout.stored_shape)
        raise ValueError(f"{layout.codec}: got {out.dtype} {out.shape}, expected uint8 {want}")
    return out


def decoded(codec: Codec | None, stored: np.ndarray, layout: Layout) -> np.ndarray:
    """Packs [n, *pack_shape] of `layout.numpy_dtype`, from [n, *stored_shape], for the host."""
    if codec is None:
        return stored
    return np.asarray(codec.decode(stored, layout)).view(layout.numpy_dtype)
