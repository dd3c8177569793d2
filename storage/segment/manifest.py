"""The manifest of a segment: all its metadata, validated before use."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckv_jax.storage import chain
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.errors import SegmentDamaged, SegmentForeign, StoreError
from ckv_jax.storage.layout import Layout, unsupported
from ckv_jax.storage.place.files import Files
from ckv_jax.storage.prefix import Span
from ckv_jax.storage.segment.arrays import ArraySpec, array_specs
from ckv_jax.storage.segment.seal import ENTRY_BYTES, SEALED, Seal

if TYPE_CHECKING:
    from ckv_jax.storage.encryption import SegmentKey, StoreKey

FILE = "manifest.json"
ZARR_GROUP = b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'
"""The segment's own zarr.json."""
MAX_BYTES = 64 << 20
"""No manifest is read beyond this size; that of a million tokens takes a third of it. With heads
apart, which have checksums of their own, half a million tokens of 48 layers of 8 KV heads fill it.
"""

_CACHE_BYTES = 32 << 20
_HEAD = b'{"sha256":"'
_BODY = b'","body":'
_FORMAT = "ckv-segment-1"
_FIELDS = {"packs": "pack_crc", "probe": "probe_crc", "digest": "digest_crc",
           "assignment": "assignment_crc"}  # fmt: skip
"""The field of the file that has the table of a kind of pieces."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """Metadata of one segment.

    Attributes:
      layout, fingerprint: whose KV, and how it is stored.
      tenant: the mark of the tenant's salt (`chain.py`); "" without one.
      provenance: "exact", or how the KV was made.
      tokens: int32 [T], the segment's own tokens.
      start: chain link before the first chunk.
      parent: id of the segment that holds the chunk before, None for a root.
      first_chunk: chunks of the prefix before this segment.
      order: int32 [L, T] of a reordered layout, else None; token i of layer l on disk is token
        `order[l, i]` of the segment.
      tables: what proves pieces, by their kind: "packs" uint32 [groups, M]; "probe" [P, M], P = 0
        without one; "digest" [R, 3] for (params, scale, codes), a row per layer that has one;
        "assignment" [groups, 1] of a layout of alike tokens, else [0, 1]. Of an encrypted segment
        uint8 [..., `ENTRY_BYTES`], nonces and tags in the place of checksums.
      created: seconds since the epoch.
      key: of an encrypted segment.
    """

    layout: Layout
    fingerprint: Fingerprint
    tenant: str = field(repr=False)
    tokens: np.ndarray = field(repr=False)
    start: bytes
    parent: str | None
    first_chunk: int
    order: np.ndarray | None = field(repr=False)
    tables: dict[str, np.ndarray] = field(repr=False)
    created: float
    provenance: str = chain.EXACT
    key: SegmentKey | None = field(default=None, repr=False)

    @property
    def chunks(self) -> int:
        """M."""
        return self.layout.num_chunks(len(self.tokens))

    @cached_property
    def links(self) -> list[bytes]:
        """The chain link after each chunk."""
        return list(chain.links(self.start, self.tokens, self.layout.chunk_tokens))

    @cached_property
    def segment_id(self) -> str:
        """Hex id, a hash of what the segment covers."""
        return segment_id(self.start, self.links[-1], self.order)

    def span(self, checksum: str, first: int = 0, chunks: int | None = None) -> Span:
        """A run of its chunks; all from `first` on by default. `checksum`: this manifest's."""
        return Span(
            segment_id=self.segment_id,
            first_chunk=first,
            num_chunks=self.chunks - first if chunks is None else chunks,
            segment_chunks=self.chunks,
            checksum=checksum,
        )

    @cached_property
    def arrays(self) -> dict[str, ArraySpec]:
        """The zarr arrays of the segment."""
        return array_specs(self.layout, len(self.tokens))

    @cached_property
    def seal(self) -> Seal:
        """What notes in the tables what proves pieces, and checks them."""
        return self.key.seal_of(self.tables) if self.key else Seal(self.segment_id, self.tables)

    @cached_property
    def files(self) -> dict[str, int]:
        """Exact size of every shard file, by path within the segment."""
        arrays = self.arrays.values()
        return {f: a.file_bytes(s) for a in arrays for s, f in enumerate(a.files)}

    def size(self, encoded: int) -> int:
        """Bytes of all files of the segment, its manifest being `encoded` bytes long."""
        described = sum(len(a.encoded()) for a in self.arrays.values())
        return sum(self.files.values()) + described + encoded + len(ZARR_GROUP)

    @property
    def encryption_bytes(self) -> int:
        """Upper estimate of the bytes that encryption adds to the segment: of its tables."""
        return 2 * sum(table.nbytes for table in self.tables.values()) if self.key else 0

    def encode(self) -> tuple[bytes, str]:
        """The file's bytes, and the hex SHA-256 that they carry in clear."""
        body = {
            "format": _FORMAT,
            "segment": self.segment_id,
            "start": self.start.hex(),
            "parent": self.parent,
            "first_chunk": self.first_chunk,
            "created": self.created,
            **({"tenant": self.tenant} if self.tenant else {"salt": ""}),
            **({} if self.provenance == chain.EXACT else {"provenance": self.provenance}),
            "fingerprint": dict(self.fingerprint.fields),
            "layout": self.layout.to_dict(),
            "tokens": _pack(self.tokens),
            "order": None if self.order is None else _pack(self.order),
            **{
                name: _pack(self.tables[kind])
                for kind, name in _FIELDS.items()
                if kind != "assignment" or self.layout.alike
            },
            **({"encrypted": self.key.salt.hex()} if self.key else {}),
        }
        data = json.dumps(body, separators=(",", ":")).encode()
        digest = hashlib.sha256(data).hexdigest()
        file = b"".join((_HEAD, digest.encode(), _BODY, data, b"}\n"))
        return self.key.store.seal(self.segment_id, file) if self.key else file, digest

    @classmethod
    def decode(
        cls, data: bytes, expected_id: str, key: StoreKey | None = None
    ) -> tuple[Manifest, str]:
        """The manifest in `data` and its checksum. `key`: the store's, where it is encrypted.

        Raises:
          SegmentForeign: for a whole manifest of another version, or of a digest of unknown kind,
            of single heads, or of an older product quantisation; with one order for all layers; or
            one that is encrypted where the store is not, in clear where it is, or encrypted with
            another key.
          SegmentDamaged: for anything but a manifest of `expected_id` exactly as it was written.
        """
        try:
            return _decode(opened(data, expected_id, key), expected_id, key)
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError, MemoryError) as e:
            raise SegmentDamaged(f"segment {expected_id}: bad manifest: {str(e)[:200]}") from e


def servable(manifest: Manifest, chunk: int) -> int:
    """The chunks of a segment that can be served where those from `chunk` on cannot."""
    layout, tokens = manifest.layout, len(manifest.tokens)
    return layout.num_chunks(layout.cut(min(chunk * layout.chunk_tokens, tokens), tokens))


def segment_id(start: bytes, end: bytes, order: np.ndarray | None) -> str:
    """Hex id of the segment from link `start` to link `end`, its tokens in `order`."""
    mapping = b"" if order is None else order.astype("<i4").tobytes()
    return hashlib.sha256(b"ckv-segment\0" + start + end + mapping).digest()[: chain.BYTES].hex()


def _table_shapes(layout: Layout, tokens: int) -> dict[str, tuple[int, int]]:
    """(rows, columns) of a manifest's tables, by kind."""
    chunks = layout.num_chunks(tokens)
    return {
        "packs": (layout.groups, chunks),
        "probe": (len(layout.probe_layers), chunks),
        "digest": (len(layout.digest_layers), 3),
        "assignment": (layout.groups * layout.alike, 1),
    }


def _check_size(layout: Layout, tokens: int, entry_bytes: int) -> None:
    """Raises ValueError if the manifest of this many tokens may be too large to be read."""
    entries = sum(rows * columns for rows, columns in _table_shapes(layout, tokens).values())
    orders = layout.num_layers * layout.reordered
    size = 4 * tokens * (1 + orders) + entries * entry_bytes
    most = -(-size * 4 // 3) + 16 * len(layout.digest_layers) + (1 << 14)  # in base64
    if most > MAX_BYTES:
        raise ValueError(
            f"tokens: got {tokens}, more than the manifest of one segment has room for with "
            f"{layout.groups} packs for each chunk"
            + (f" and {orders} mapping lists" if orders else "")
        )


def check_order(order: Any, tokens: int, layout: Layout) -> np.ndarray:
    """`order` as int32 [L, T]; raises ValueError unless every row is a permutation of
    range(tokens)."""
    array, want = np.asarray(order), (layout.num_layers, tokens)
    if array.shape != want or array.dtype.kind not in "iu":
        raise ValueError(f"order: got {array.dtype} {array.shape}, expected integers {want}")
    if not np.array_equal(np.sort(array, axis=1), np.tile(np.arange(tokens), (len(array), 1))):
        raise ValueError(f"order: expected a permutation of range({tokens})")
    return array.astype(np.int32)


def opened(data: bytes, expected_id: str, key: StoreKey | None) -> bytes:
    """A manifest in clear; raises SegmentForeign for another key, ValueError for damage."""
    if key is not None and not data.startswith(_HEAD):
        return key.open(expected_id, data)
    if key is None and not data.startswith(SEALED):
        return data
    raise SegmentForeign(
        f"segment {expected_id} is {'not encrypted' if key else 'encrypted'}, but its store is "
        f"{'encrypted' if key else 'not'}: it is not changed"
    )


def _decode(data: bytes, expected_id: str, key: StoreKey | None) -> tuple[Manifest, str]:
    at = len(_HEAD)
    digest, body = data[at : at + 64], data[at + 64 + len(_BODY) : -2]
    if len(data) > MAX_BYTES or data != b"".join((_HEAD, digest, _BODY, body, b"}\n")):
        raise ValueError("not a manifest")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError("checksum does not match")
    value = json.loads(body)
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise ValueError(f"expected format {_FORMAT}")
    described = value["layout"]
    if isinstance(described, dict) and (why := unsupported(described)):
        raise SegmentForeign(
            f"segment {expected_id}: {why}: it is not changed; to store its text again, run "
            "`ckv ingest`"
        )
    layout = Layout.from_dict(described)
    tokens = chain.as_tokens(_unpack(value["tokens"]))
    if not tokens.size:
        raise ValueError("no tokens")
    whose, salt = _tenant(value)
    provenance = chain.check_provenance(value.get("provenance", chain.EXACT))
    first = value["first_chunk"]
    if type(first) is not int or not 0 <= first <= 1 << 40:
        raise ValueError(f"first_chunk: got {first!r}")
    parent = value["parent"]
    if (parent is None) != (first == 0) or (parent is not None and not is_id(parent)):
        raise ValueError(f"parent: got {parent!r} before chunk {first}")
    order = None
    if layout.reordered:
        rows = _unpack(value["order"]).reshape(layout.num_layers, -1)
        order = check_order(rows, len(tokens), layout)
    elif value["order"] is not None:
        raise ValueError("order: expected none")
    created = float(value["created"])
    if not math.isfinite(created):
        raise ValueError("created: expected a finite time")
    width = 4 if key is None else ENTRY_BYTES
    stored = {"assignment_crc": "", **value}
    tables = {
        kind: _table(stored[_FIELDS[kind]], *shape, width)
        for kind, shape in _table_shapes(layout, len(tokens)).items()
    }
    manifest = Manifest(
        layout=layout,
        fingerprint=Fingerprint(value["fingerprint"]),
        tenant=whose,
        provenance=provenance,
        tokens=tokens,
        start=bytes.fromhex(value["start"]),
        parent=parent,
        first_chunk=first,
        order=order,
        tables=tables,
        created=created,
        key=None if key is None else key.segment(bytes.fromhex(value["encrypted"])),
    )
    if salt is not None and not starts(manifest, salt):
        raise ValueError("start: does not belong to this fingerprint, layout and salt")
    if len(manifest.start) != chain.BYTES or manifest.segment_id != expected_id:
        raise ValueError("id: does not belong to these tokens")
    return manifest, digest.decode()


def _tenant(value: dict[str, Any]) -> tuple[str, str | None]:
    """A manifest's tenant, and its salt where that is known: none, or written by older code."""
    if "salt" in value:
        if type(value["salt"]) is not str:
            raise ValueError("salt: expected text")
        return chain.tenant_mark(value["salt"]), value["salt"]
    if not is_id(value["tenant"]):
        raise ValueError("tenant: expected 32 hex digits")
    return value["tenant"], None


def starts(manifest: Manifest, salt: str) -> bool:
    """Whether a segment starts as one of this salt's may; one that continues another always."""
    if manifest.first_chunk:
        return True
    first = chain.seed(manifest.fingerprint, manifest.layout, salt)
    return manifest.start == chain.branch(first, manifest.provenance)


def is_id(value: Any) -> bool:
    """Whether `value` is a hex id, the only kind of name that ever becomes a path."""
    return type(value) is str and len(value) == 2 * chain.BYTES and not set(value) - HEX


def segment_folder(root: Path, segment_id: str) -> Path:
    """Returns the folder of a published segment; two hex digits of fan-out keep folders short."""
    if not is_id(segment_id):
        raise StoreError(f"segment id: got {segment_id!r}, expected hex")
    return root / "segments" / segment_id[:2] / segment_id


HEX = frozenset("0123456789abcdef")
"""Digits of names."""


def _pack(array: np.ndarray) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def _unpack(text: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), "<i4")


def _table(text: Any, rows: int, columns: int, width: int) -> np.ndarray:
    """Entries of `width` bytes each; see `Manifest`."""
    data = base64.b64decode(text, validate=True)
    if len(data) != rows * columns * width:
        raise ValueError(f"checksums: got {len(data) / width:g}, expected {rows} x {columns}")
    if width == ENTRY_BYTES:
        return np.frombuffer(data, np.uint8).reshape(rows, columns, width)
    return np.frombuffer(data, "<u4").reshape(rows, columns)


def draft_manifest(
    *,
    layout: Layout,
    fingerprint: Fingerprint,
    tenant: str,
    provenance: str,
    tokens: np.ndarray,
    start: bytes,
    parent: str | None,
    first_chunk: int,
    order: np.ndarray | None,
    key: StoreKey | None = None,
) -> Manifest:
    """A manifest whose checksums are still to be filled in; `key`: of an encrypted store.

    Raises ValueError where it would be too large to be read, and for an `order` that is none.
    """
    _check_size(layout, len(tokens), 4 if key is None else ENTRY_BYTES)
    tables = {
        kind: np.zeros(shape, np.uint32) if key is None else np.zeros((*shape, ENTRY_BYTES), "u1")
        for kind, shape in _table_shapes(layout, len(tokens)).items()
    }
    return Manifest(
        layout=layout,
        fingerprint=fingerprint,
        tenant=tenant,
        provenance=provenance,
        tokens=tokens,
        start=start,
        parent=parent,
        first_chunk=first_chunk,
        order=None if order is None else check_order(order, len(tokens), layout),
        tables=tables,
        created=time.time(),
        key=None if key is None else key.segment(),
    )


class ManifestCache:
    """A bounded cache of checked manifests; thread-safe."""

    def __init__(self, files: Files, key: StoreKey | None) -> None:
        self._files = files
        self._key = key
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[object, Manifest, str, int]] = OrderedDict()
        self._bytes = 0

    def load(self, segment_id: str) -> tuple[Manifest, str]:
        """The manifest and its checksum; raises SegmentDamaged when it is gone or not whole."""
        stamp = self._files.stamp(segment_id)
        with self._lock:
            kept = self._kept.get(segment_id)
            if kept is not None and kept[0] == stamp:
                self._kept.move_to_end(segment_id)
                return kept[1], kept[2]
        if stamp is None:
            self.forget(segment_id)
            raise SegmentDamaged(f"segment {segment_id}: gone")
        data = self._files.manifest(segment_id)
        manifest, checksum = Manifest.decode(data, segment_id, self._key)
        self.forget(segment_id)
        with self._lock:
            if segment_id not in self._kept:
                self._kept[segment_id] = (stamp, manifest, checksum, len(data))
                self._bytes += len(data)
            while self._bytes > _CACHE_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1][3]
        return manifest, checksum

    def forget(self, segment_id: str) -> None:
        """Drop a manifest from memory."""
        with self._lock:
            kept = self._kept.pop(segment_id, None)
            self._bytes -= kept[3] if kept else 0
