"""Layout of a segment's KV on disk: shapes, packing, and the sizes that follow."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

VERSION = 2
"""Version of the on-disk format; part of every fingerprint of a layout."""
VERSIONS = tuple(range(VERSION, 14))
"""Those that can be read; see `_STEPS`."""
DIGEST_HEADS = "digest_heads"
"""A field of digests with one head of each layer, which are read no more. It is empty in all that
is written and read, so that the ids of what is stored stay."""
ORDERS = "layer_orders"
"""A field that equals `reordered` in all that is written and read: segments with one order for all
layers are read no more."""
PLAIN = "none"
"""The codec of packs that lie on disk as they are in memory."""
LANDMARKS = ("means", "bounds", "means+cosines")
"""Digests that keep a landmark for each chunk, not for each token."""
TOGETHER = 4
"""Tokens side by side that stay together where tokens are grouped by their keys."""
RUN = 8192
"""Tokens that are grouped with each other."""
FIRST, LAST = 16, 64
"""Tokens at a text's beginning and end that stay where they are, also where others are grouped."""

_DTYPES: dict[str, tuple[Any, str]] = {
    "bfloat16": (ml_dtypes.bfloat16, "uint16"),
    "float16": (np.float16, "uint16"),
    "float32": (np.float32, "float32"),
}
DIGESTS = ("none", "int4", "pq", *LANDMARKS)
_KNOWN: dict[str, Sequence[str]] = {
    "dtype": list(_DTYPES),
    "probe": ("keys", "heads", "none"),
    "digest": DIGESTS,
    "grouping": ("position", "alike"),
}
_CODEC = re.compile(r"[a-z0-9-]{1,1024}:[0-9]{1,9}")
_PROBE_BLOCK = 1024  # tokens of one probe read
_PROBE_WIDTH = 3  # of layouts before version 5
_MAX_PACK = 1 << 30
PQ_PARTS = 2  # sub-vectors of a key, and centroids of each, as PQCache's script has them
PQ_CODES = 64


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Shapes and packing of a segment's KV. A store may have several layouts of one model.

    A pack, the unit of a read, is one chunk over `pack_layers` layers, keys and values together.
    With `kv_together=False` (baselines) a pack has the keys or the values of one layer, with
    `heads_apart=True` the keys and values of one KV head. Raises `ValueError` for fields that are
    out of range or do not fit together.

    Attributes:
      num_layers: number of layers (L).
      num_kv_heads: number of KV heads (K).
      head_dim: dimension of a head (D).
      dtype: element type of keys and values: "bfloat16", "float16" or "float32".
      chunk_tokens: tokens of one chunk (C).
      pack_layers: layers in one pack: 1, 2 or 4.
      kv_together: whether keys and values of a chunk share a pack.
      probe: stored keys that are scored: "keys", the full keys of the first layer of every layer
        group; "heads", the keys of the first `probe_width` KV heads of every layer; or "none".
      probe_width: KV heads of a "heads" probe; a number above `num_kv_heads` means all.
      digest: compressed keys: "int4"; "pq" (6 bits for each half of a key); of every chunk the mean
        key ("means"), the mean key and the cosine of the least similar key ("means+cosines"), or
        the smallest and largest values of its keys ("bounds"); or "none".
      digest_layers: layers with a digest, ascending; empty: all layers, if there is a digest.
      reordered: whether a segment's tokens are stored in an order set by the writer, with a mapping
        list per layer (IMPRESS §4.2, §5). Such a segment is only used whole.
      codec: "none", or name and version of the codec of packs (`codec.py`).
      codec_bytes: bytes of one encoded pack; 0 without a codec.
      heads_apart: whether every KV head has separate packs, which can be read separately.
      grouping: the tokens of a chunk: neighbouring positions ("position"), or, per layer and KV
        head, a cluster of tokens with "alike" keys (`segment/alike.py`), whose assignment is stored
        with the packs. The first and last tokens of a text are not clustered. Such a segment is
        used whole, or up to the end of a run.
      short_last: whether packs of the last layer group are shorter where `pack_layers` does not
        divide `num_layers`; else they are padded with zeros.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    chunk_tokens: int = 16
    pack_layers: int = 4
    kv_together: bool = True
    probe: str = "none"
    probe_width: int = _PROBE_WIDTH
    digest: str = "none"
    digest_layers: tuple[int, ...] = ()
    reordered: bool = False
    codec: str = PLAIN
    codec_bytes: int = 0
    heads_apart: bool = False
    grouping: str = "position"
    short_last: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "chunk_tokens", "probe_width"):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= 1 << 20:
                raise ValueError(f"{name}: got {value!r}, expected an int in [1, 2**20]")
        for name in ("kv_together", "reordered", "heads_apart", "short_last"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected a bool")
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected one of {known}")
        if type(self.pack_layers) is not int or self.pack_layers not in (1, 2, 4):
            raise ValueError(f"pack_layers: got {self.pack_layers!r}, expected 1, 2 or 4")
        if not self.kv_together and self.pack_layers != 1:
            raise ValueError(f"pack_layers: got {self.pack_layers}, expected 1 without kv_together")
        if self.digest != "none" and self.digest_layers == ():
            object.__setattr__(self, "digest_layers", tuple(range(self.num_layers)))
        self._check_digest_layers()
        self._check_codec()
        self._check_apart()
        if self.short_last and not self.uneven:
            raise ValueError(
                "short_last: got True, expected a num_layers that pack_layers does not divide, in "
                "packs of all heads without a codec"
            )
        if self.pack_bytes > _MAX_PACK:
            raise ValueError(f"pack: got {self.pack_bytes} bytes, expected at most {_MAX_PACK}")
        if self.digest in ("int4", "pq") and self.head_dim % 2:
            raise ValueError(
                f"head_dim: got {self.head_dim}, expected an even one for {self.digest}"
            )

    def _check_digest_layers(self) -> None:
        layers = self.digest_layers
        whole = type(layers) is tuple and all(type(layer) is int for layer in layers)
        if not whole or list(layers) != sorted(set(layers) & set(range(self.num_layers))):
            raise ValueError(
                f"digest_layers: got {layers!r}, expected a tuple of ascending layers "
                f"in [0, {self.num_layers})"
            )
        if layers and self.digest == "none":
            raise ValueError(f"digest_layers: got {layers!r}, expected none without a digest")

    def _check_codec(self) -> None:
        name, size = self.codec, self.codec_bytes
        if type(name) is not str or not (name == PLAIN or _CODEC.fullmatch(name)):
            raise ValueError(f"codec: got {name!r}, expected {PLAIN!r} or a name and version")
        least, most = (0, 0) if name == PLAIN else (1, _MAX_PACK)
        if type(size) is not int or not least <= size <= most:
            raise ValueError(f"codec_bytes: got {size!r}, expected one in [{least}, {most}]")

    def _check_apart(self) -> None:
        """Packs of one head are only made of keys and values together, as they are."""
        for name, expected in (("kv_together", True), ("reordered", False), ("codec", PLAIN)):
            if self.heads_apart and getattr(self, name) != expected:
                raise ValueError(
                    f"{name}: got {getattr(self, name)!r}, expected {expected!r} with heads apart"
                )
        fits = self.heads_apart and self.pack_layers == 1 and self.probe == "none"
        if self.alike and not (fits and self.chunk_tokens % TOGETHER == 0):
            raise ValueError(
                "grouping: got 'alike', expected heads apart in packs of one layer, no probe, and "
                f"chunk_tokens a multiple of {TOGETHER}"
            )

    # -- packs -----------------------------------------------------------------------------------

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Element type of keys and values in memory."""
        dtype: np.dtype[Any] = np.dtype(_DTYPES[self.dtype][0])
        return dtype

    @cached_property
    def disk_dtype(self) -> np.dtype[Any]:
        """Element type on disk: 16-bit types are stored as bit patterns."""
        return np.dtype(_DTYPES[self.dtype][1])

    @cached_property
    def groups(self) -> int:
        """Layer groups; with K and V apart, `2 * layer` holds keys and `2 * layer + 1` values; with
        heads apart, K of them in a row hold one KV head each of the same layers."""
        return -(-self.num_layers // self.pack_layers) * self.parts

    @cached_property
    def parts(self) -> int:
        """Groups that have the same layers: K with heads apart, 2 with K and V apart, else 1."""
        return self.num_kv_heads if self.heads_apart else 1 if self.kv_together else 2

    @property
    def pack_heads(self) -> int:
        """KV heads in one pack."""
        return 1 if self.heads_apart else self.num_kv_heads

    @cached_property
    def pack_shape(self) -> tuple[int, int, int, int, int]:
        """`(pack_layers, 2, C, K, D)`; `(1, 1, C, K, D)` with K and V apart, `(pack_layers, 2, C,
        1, D)` with heads apart."""
        kv = 2 if self.kv_together else 1
        return (self.pack_layers, kv, self.chunk_tokens, self.pack_heads, self.head_dim)

    @cached_property
    def pack_bytes(self) -> int:
        """Bytes of one pack in memory."""
        return math.prod(self.pack_shape) * self.disk_dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in memory, all layers."""
        row = self.num_kv_heads * self.head_dim * self.numpy_dtype.itemsize
        return 2 * row * self.num_layers

    @cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one pack on disk: `pack_shape`, or `(codec_bytes,)`."""
        return self.pack_shape if self.codec == PLAIN else (self.codec_bytes,)

    @cached_property
    def stored_dtype(self) -> np.dtype[Any]:
        """Element type of a pack as on disk, in memory: uint8 with a codec."""
        return self.numpy_dtype if self.codec == PLAIN else np.dtype(np.uint8)

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of one pack on disk; `group_bytes` of those of the last layer group."""
        return self.codec_bytes or self.pack_bytes

    @property
    def uneven(self) -> bool:
        """Whether packs of the last layer group could be shorter than others, see `short_last`."""
        return self.num_layers % self.pack_layers > 0 and self.parts == 1 and self.codec == PLAIN

    def disk_layers(self, group: int) -> int:
        """Layers that a pack of a layer group has on disk."""
        last = self.short_last and group == self.groups - 1
        return self.num_layers % self.pack_layers if last else self.pack_layers

    def group_bytes(self, group: int) -> int:
        """Bytes on disk of one pack of a layer group."""
        if not self.short_last:
            return self.stored_bytes
        return self.pack_bytes // self.pack_layers * self.disk_layers(group)

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes on disk of all packs of a chunk."""
        return sum(map(self.group_bytes, range(self.groups)))

    def group_layers(self, group: int) -> range:
        """The layers in `group`; the last group may hold fewer than `pack_layers`."""
        if not 0 <= group < self.groups:
            raise ValueError(f"group: got {group}, expected one in [0, {self.groups})")
        first = group // self.parts * self.pack_layers
        return range(first, min(first + self.pack_layers, self.num_layers))

    def group_heads(self, group: int) -> slice:
        """The KV heads in `group`."""
        head = group % self.parts
        return slice(head, head + 1) if self.heads_apart else slice(None)

    @property
    def alike(self) -> bool:
        """Whether chunks are of alike tokens, and have an assignment beside them."""
        return self.grouping == "alike"

    def cut(self, wanted: int, tokens: int) -> int:
        """The most tokens of a segment of `tokens` that can be used where its first `wanted` are:
        all, or so many chunks that hold the first tokens and no others."""
        whole = wanted // self.chunk_tokens * self.chunk_tokens
        if wanted == tokens or not (self.reordered or self.alike):
            return wanted if wanted == tokens else whole
        if self.reordered:
            return 0
        tail = (tokens - LAST) // self.chunk_tokens * self.chunk_tokens
        run = run_chunks(self.chunk_tokens) * self.chunk_tokens
        return whole if whole >= tail else whole // run * run

    def num_chunks(self, tokens: int) -> int:
        """Chunks that hold `tokens` tokens; the last one may be partial."""
        return -(-tokens // self.chunk_tokens)

    # -- shard files: a shard spans at least two layers, so that files stay few -------------------

    @cached_property
    def shard_groups(self) -> int:
        """Layer groups in one shard file."""
        return (max(self.pack_layers, 2) // self.pack_layers) * self.parts

    # -- probe -----------------------------------------------------------------------------------

    @cached_property
    def probe_layers(self) -> tuple[int, ...]:
        """Layers that have a probe, ascending."""
        if self.probe == "none":
            return ()
        return tuple(range(0, self.num_layers, 1 if self.probe == "heads" else self.pack_layers))

    @property
    def probe_heads(self) -> int:
        """KV heads in the probe."""
        return (
            self.num_kv_heads if self.probe == "keys" else min(self.probe_width, self.num_kv_heads)
        )

    @cached_property
    def probe_page_chunks(self) -> int:
        """Chunks whose keys of one probe layer fill the memory of a pack: what a cache's slot holds
        of a probe (`ProbePages`)."""
        _, _, chunk, _, dim = self.pack_shape
        return math.prod(self.pack_shape) // (chunk * self.probe_heads * dim)

    def probe_block(self, chunks: int) -> int:
        """Chunks of one probe block of a segment of `chunks` chunks."""
        return min(max(1, _PROBE_BLOCK // self.chunk_tokens), chunks)

    # -- digest: one record of bytes per layer of `digest_layers`: params | scale | codes ----------

    @property
    def digest_params(self) -> int:
        """float32 values at the head of a layer's record: mean key, or the pq codebooks."""
        values = self.num_kv_heads * self.head_dim
        return {"int4": values, "pq": values * PQ_CODES}.get(self.digest, 0)

    @property
    def digest_unit(self) -> int:
        """Tokens that share one entry of codes."""
        return self.chunk_tokens if self.digest in LANDMARKS else 1

    @property
    def digest_codes(self) -> int:
        """Bytes of codes of one entry and KV head."""
        if self.digest in LANDMARKS:
            rows = 2 if self.digest == "bounds" else 1
            cosine = 4 if self.digest == "means+cosines" else 0
            return rows * self.head_dim * self.disk_dtype.itemsize + cosine
        return {"int4": self.head_dim // 2, "pq": PQ_PARTS}.get(self.digest, 0)

    def digest_record(self, tokens: int) -> tuple[int, int, int]:
        """Bytes of (params, scale, codes) in one layer's record."""
        scale = 4 * self.num_kv_heads * tokens if self.digest == "int4" else 0
        entries = -(-tokens // self.digest_unit)
        return 4 * self.digest_params, scale, self.digest_codes * self.num_kv_heads * entries

    # -- identity and size -----------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with the format version."""
        return _versioned(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, value: Any) -> Layout:
        """Inverse of `to_dict`; raises ValueError for anything else."""
        fields = _fields_of(value, {f.name for f in dataclasses.fields(cls)})
        if isinstance(fields.get("digest_layers"), list):  # JSON has no tuples
            fields["digest_layers"] = tuple(fields["digest_layers"])
        try:
            return cls(**fields)
        except TypeError as error:  # a list or an object where a number or a name belongs
            raise ValueError(f"layout: got {str(value)[:80]}: {error}") from error

    @cached_property
    def hex(self) -> str:
        """SHA-256 of the layout and the format version."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def segment_bytes(self, tokens: int) -> int:
        """Upper estimate of a segment's bytes on disk, its metadata included."""
        chunks = self.num_chunks(tokens)
        block = self.probe_block(chunks)
        probe = -(-chunks // block) * block * self.chunk_tokens * len(self.probe_layers)
        probe *= self.probe_heads * self.head_dim * self.disk_dtype.itemsize
        digest = sum(self.digest_record(tokens)) * len(self.digest_layers)
        tables = (self.groups + len(self.probe_layers)) * chunks * 24
        tables += 2 * tokens * (6 + 3 * self.num_layers * self.reordered + self.groups * self.alike)
        return chunks * self.chunk_bytes + probe + digest + tables + (1 << 14)


_SHORT_CODEC = 64  # letters of a codec's name in older versions

_Needs = Callable[[Mapping[str, Any]], bool]
PQ_VERSION = 12
"""Of product-quantised keys of two halves; those of eight values each are read no more."""
_STEPS: tuple[tuple[int, tuple[str, ...], _Needs], ...] = (
    (13, ("short_last",), lambda layout: layout["short_last"]),
    (PQ_VERSION, (), lambda layout: layout["digest"] == "pq"),
    (11, (), lambda layout: layout["digest"] == "means+cosines"),
    (10, ("grouping",), lambda layout: layout["grouping"] != "position"),
    (9, ("heads_apart",), lambda layout: layout["heads_apart"]),
    (8, (DIGEST_HEADS,), lambda _: False),
    (7, (ORDERS,), lambda layout: layout["reordered"]),
    (6, (), lambda layout: len(layout["codec"].partition(":")[0]) > _SHORT_CODEC),
    (5, ("probe_width",), lambda layout: layout["probe_width"] != _PROBE_WIDTH),
    (4, (), lambda layout: layout["digest"] in LANDMARKS),
    (3, ("codec", "codec_bytes"), lambda layout: layout["codec"] != PLAIN),
)
"""Newest first: a version, the fields that those before it do not have, and what needs it.

A layout is written as the oldest version that can say what it is: its id, and that of every prefix
stored in it, does not change when the format grows. What knows no such version leaves it alone.
"""


def _versioned(layout: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of a layout, as the oldest version that has what it needs writes them."""
    values: dict[str, Any] = {**layout, DIGEST_HEADS: [], ORDERS: layout["reordered"]}
    for version, since, needs in _STEPS:
        if needs(layout):
            return {"version": version, **values}
        for name in since:
            del values[name]
    return {"version": VERSION, **values}


def _fields_of(value: Any, names: set[str]) -> dict[str, Any]:
    """What `_versioned` was given, of fields `names`; those that the version lacks are left out.

    Raises ValueError for anything else.
    """
    if not isinstance(value, dict) or value.get("version") not in VERSIONS:
        raise ValueError(f"layout: got {str(value)[:80]}, expected version {VERSION}")
    if why := unsupported(value):
        raise ValueError(f"layout: {why}")
    later = [name for version, since, _ in _STEPS if value["version"] < version for name in since]
    names = {*names, DIGEST_HEADS, ORDERS} - set(later)
    if set(value) - {"version"} != names:
        raise ValueError(f"layout: got fields {sorted(value)[:20]}, expected {sorted(names)}")
    return {name: value[name] for name in names - {DIGEST_HEADS, ORDERS}}


def unsupported(layout: Mapping[str, Any]) -> str:
    """Returns what a layout in JSON has that is read no more; "" if there is nothing."""
    version, kind = layout.get("version"), layout.get("digest")
    if type(version) is int and version not in VERSIONS:
        return f"of version {version}, expected {VERSION}"
    if isinstance(kind, str) and kind not in DIGESTS:
        return f"got digest={kind[:40]!r}, expected one of {', '.join(DIGESTS)}"
    if layout.get(DIGEST_HEADS, []) != []:
        return "got a digest of single heads, expected one of all"
    if kind == "pq" and type(version) is int and version < PQ_VERSION:
        return f"got a pq digest of version {version}, expected at least {PQ_VERSION}"
    if layout.get(ORDERS, False) is not layout.get("reordered", False):
        return "got one order for all layers, expected one for each"
    return ""


# -- which tokens are grouped, and in which chunk each is ------------------------------------------


def run_chunks(chunk_tokens: int) -> int:
    """The chunks of a run."""
    return max(1, RUN // chunk_tokens)


def runs(first: int, stop: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """The chunks [first, stop) in runs of `RUN` tokens, which end where multiples of it do."""
    size = run_chunks(chunk_tokens)
    while first < stop:
        end = min(stop, (first // size + 1) * size)
        yield first, end
        first = end


def steady(first_token: int, tokens: int, chunk_tokens: int) -> tuple[int, int]:
    """[first, stop): the chunks of a segment whose tokens are grouped; the others stay as they are.

    `first_token`: the segment's first one, counted in its prefix; `tokens`: of the segment.
    """
    first = -(-max(0, FIRST - first_token) // chunk_tokens)
    return first, max(first, (tokens - LAST) // chunk_tokens)


def by_position(tokens: int, chunk_tokens: int) -> np.ndarray:
    """uint16 [T]: the chunk of each token, counted in its run, where none is grouped."""
    chunk_of: np.ndarray = np.arange(tokens) // chunk_tokens % run_chunks(chunk_tokens)
    return chunk_of.astype("<u2")


def order_of(assignment: np.ndarray, chunk_tokens: int) -> np.ndarray:
    """int32 [R, T]: the position of each token as stored, of what each token is assigned to.

    `assignment` uint16 [R, T]: the chunk of each token, counted in its run.
    """
    tokens = assignment.shape[1]
    size = run_chunks(chunk_tokens) * chunk_tokens
    order = np.empty(assignment.shape, np.int32)
    for start in range(0, tokens, size):
        part = assignment[:, start : start + size]
        order[:, start : start + size] = start + np.argsort(part, axis=1, kind="stable")
    return order
