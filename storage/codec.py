"""How packs become bytes on disk and packs again: the seam for compression and quantisation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from ckv_jax.storage.layout import Layout
from ckv_jax.storage.layout_versions import PLAIN
from ckv_jax.storage.quantised import Quantised


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
        [n, num_bytes]: an array of numpy's on the host, or one that JAX traces into a call on the
        device."""
        ...


CODECS: Mapping[str, Codec | None] = MappingProxyType(
    {
        PLAIN: None,
        "int8": Quantised(name="int8", bits=(8, 8)),
        "k8v4": Quantised(name="k8v4", bits=(8, 4)),
    }
)
"""By name; None: packs lie on disk as they are in memory."""


def codec_named(name: str) -> Codec | None:
    """The codec of a name in `CODECS`. Raises ValueError for another one."""
    if name not in CODECS:
        raise ValueError(f"got codec={name!r}, expected one of {', '.join(CODECS)}")
    return CODECS[name]


def codec_of(layout: Layout) -> Codec | None:
    """The codec that `layout` names. Raises ValueError where it is not known here."""
    codec = CODECS.get(layout.codec.partition(":")[0])
    if codec_id(codec) != layout.codec:
        raise ValueError(
            f"stored with codec {layout.codec!r}, expected one of "
            f"{', '.join(map(codec_id, CODECS.values()))}: ingest the text again"
        )
    if codec is not None and codec.num_bytes(layout) != layout.codec_bytes:
        raise ValueError(
            f"{layout.codec}: got packs of {layout.codec_bytes} bytes, "
            f"expected {codec.num_bytes(layout)}"
        )
    return codec


def known(layout: Layout) -> bool:
    """Whether the codec that `layout` names is known here."""
    try:
        codec_of(layout)
    except ValueError:
        return False
    return True


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
