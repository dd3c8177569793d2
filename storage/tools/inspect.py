"""Inspection of a store (segments, layouts, statistics of KV), and finding, pinning and pruning of
prefixes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckv_jax.storage.codec import codec_of, decoded, known
from ckv_jax.storage.errors import PrefixNotFound, StoreError
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix, PrefixRecord
from ckv_jax.storage.segment.manifest import is_id, servable
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.store import ChunkStore

_PIECE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One node of the tree of segments; a prefix is the path from the root to a node.

    Attributes:
      prefix_id: id of the prefix that ends with it.
      parent: id of the segment that it continues; None for a root.
      first_chunk: its first chunk within the prefix.
      usable_chunks: chunks that can be served: those before the first quarantined one, rounded
        down to whole runs where chunks are clusters, and to 0 where tokens are reordered.
      bytes: size on disk.
      pinned: whether it is part of a pinned prefix.
      salted: whether it belongs to a tenant with a salt.
      score: the mean over its packs of attention times uses; evictions take the lowest first. None
        before the first read.
      last_used, created: seconds since the epoch.
      name, source, begins: of the prefix's record, see `PrefixRecord`.
    """

    id: str
    prefix_id: str
    parent: str | None
    first_chunk: int
    chunks: int
    tokens: int
    usable_chunks: int
    bytes: int
    pinned: bool
    salted: bool
    score: float | None
    last_used: float
    created: float
    name: str
    source: str
    begins: str
    layout: dict[str, Any]
    fingerprint: dict[str, str]


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Statistics of one layer's keys and values over a prefix: extremes and mean magnitude of the
    finite values, and how many are NaN or infinite."""

    layer: int
    key_min: float
    key_max: float
    key_mean_abs: float
    value_min: float
    value_max: float
    value_mean_abs: float
    nan: int
    infinite: int


@dataclass(frozen=True, slots=True)
class PrefixInfo:
    """Statistics of one prefix, whose packs were all read.

    Attributes:
      segments: ids of its segments, in order.
      bad_packs: packs that could not be read; they are not in the statistics.
      lost_orders: segments of clustered tokens whose assignment of tokens to packs is damaged.
      layers: statistics of every layer; empty where the codec is unknown.
      importance: [M], the mean attention mass of each chunk over layer groups; None before the
        first request.
    """

    id: str
    num_tokens: int
    num_chunks: int
    segments: list[str]
    bad_packs: int
    lost_orders: int
    layers: list[LayerStats]
    importance: list[float] | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """Description of a store and, on request, of one of its prefixes.

    Attributes:
      bytes: bytes used on disk, including the reservations of running writers.
      max_bytes: the size limit; None without one.
      prefixes: id → tokens of each stored prefix that no other continues.
      segments: all segments that can be served, parents before children.
      unusable: id → fault of each other segment.
      prefix: the requested prefix; None without one.
    """

    bytes: int
    max_bytes: int | None
    prefixes: dict[str, int]
    segments: list[SegmentInfo]
    unusable: dict[str, str]
    prefix: PrefixInfo | None

    def children(self, segment_id: str | None) -> list[SegmentInfo]:
        """Returns the segments that continue one; the roots for None."""
        return [s for s in self.segments if s.parent == segment_id]

    def to_dict(self) -> dict[str, Any]:
        """Returns the inspection as a JSON object."""
        return dataclasses.asdict(self)


def inspect_store(store: ChunkStore, prefix: str | None = None) -> Inspection:
    """Describes a store and, if `prefix` (a name or id) is given, reads that prefix in full.

    Raises the errors of `find_prefix`, and StoreUnavailable where the store cannot be listed.
    """
    store.files.require()
    pinned, said = store.bounds.pinned(), store.records()
    segments = []
    for entry in store.index.catalog.entries():
        loaded = store.index.load(entry.id)
        if loaded is None:
            continue
        manifest = loaded.manifest
        about = said.get(manifest.links[-1].hex(), PrefixRecord())
        info = SegmentInfo(
            id=entry.id,
            prefix_id=manifest.links[-1].hex(),
            parent=manifest.parent,
            first_chunk=manifest.first_chunk,
            chunks=manifest.chunks,
            tokens=len(manifest.tokens),
            usable_chunks=servable(manifest, loaded.usable),
            bytes=entry.bytes,
            pinned=entry.id in pinned,
            salted=bool(manifest.tenant),
            score=entry.score,
            last_used=entry.used,
            created=manifest.created,
            name=about.name,
            source=about.source,
            begins=about.begins,
            layout=manifest.layout.to_dict(),
            fingerprint=dict(manifest.fingerprint.fields),
        )
        segments.append(info)
    besides = store.files.segment_ids() - {s.id for s in segments}
    return Inspection(
        bytes=store.usage(),
        max_bytes=store.config.max_bytes,
        prefixes={p.id: p.num_tokens for p in store.prefixes()},
        segments=sorted(segments, key=lambda s: (s.first_chunk, s.created)),
        unusable={
            id_: str(manifest)
            for id_, manifest, _, _ in store.index.manifests(sorted(besides))
            if isinstance(manifest, StoreError)
        },
        prefix=None if prefix is None else _read_prefix(store, find_prefix(store, prefix)),
    )


def importance_map(store: ChunkStore, prefix: Prefix) -> np.ndarray | None:
    """Returns the attention mass of each chunk, float32 [groups, M]; None if none was saved."""
    found = np.zeros((prefix.layout.groups, prefix.num_chunks), np.float32)
    start, any_saved = 0, False
    for span in prefix.spans:
        scores = store.load_scores(span.segment_id)
        if scores is not None:
            any_saved = True
            part = scores[0][:, span.first_chunk : span.first_chunk + span.num_chunks]
            found[:, start : start + span.num_chunks] = part
        start += span.num_chunks
    return found if any_saved else None


def _read_prefix(store: ChunkStore, prefix: Prefix) -> PrefixInfo:
    layout = prefix.layout
    importance = importance_map(store, prefix)
    bad = 0
    layers = []
    step = layout.parts
    groups = layout.groups if known(layout) else 0
    with store.reader(prefix) as reader:
        for group in range(0, groups, step):
            totals = [_Totals() for _ in layout.group_layers(group)]
            for first in range(group, group + step):
                bad += _read_group(reader, first, totals)
            pairs = zip(layout.group_layers(group), totals, strict=True)
            layers += [t.stats(layer) for layer, t in pairs]
        lost = len(reader.lost_orders()) if layout.alike else 0
    return PrefixInfo(
        id=prefix.id,
        num_tokens=prefix.num_tokens,
        num_chunks=prefix.num_chunks,
        segments=[s.segment_id for s in prefix.spans],
        bad_packs=bad,
        lost_orders=lost,
        layers=layers,
        importance=None if importance is None else importance.mean(0).tolist(),
    )


def _read_group(reader: PrefixReader, group: int, totals: list[_Totals]) -> int:
    """Adds one layer group's packs to `totals`, one per layer; returns the number of bad packs."""
    prefix, layout = reader.prefix, reader.prefix.layout
    kinds = (0, 1) if layout.kv_together else (group % 2,)
    step = max(1, _PIECE_BYTES // layout.pack_bytes)
    out = np.empty((min(step, prefix.num_chunks), *layout.stored_shape), layout.stored_dtype)
    bad, codec = 0, codec_of(layout)
    for first in range(0, prefix.num_chunks, step):
        chunks = np.arange(first, min(first + step, prefix.num_chunks))
        good = reader.read_packs(group, chunks, out[: len(chunks)])
        packs = decoded(codec, out[: len(chunks)], layout)
        bad += int((~good).sum())
        tokens = np.minimum(prefix.num_tokens - chunks * layout.chunk_tokens, layout.chunk_tokens)
        valid = (np.arange(layout.chunk_tokens) < tokens[:, None]) & good[:, None]  # [n, C]
        for i, total in enumerate(totals):
            for j, kind in enumerate(kinds):
                total.add(kind, packs[:, i, j][valid])
    return bad


class _Totals:
    """Running statistics of a layer's keys (0) and values (1)."""

    def __init__(self) -> None:
        self._low = [np.inf, np.inf]
        self._high = [-np.inf, -np.inf]
        self._sum = [0.0, 0.0]
        self._count = [0, 0]
        self._nan = self._infinite = 0

    def add(self, kind: int, values: np.ndarray) -> None:
        numbers = values.astype(np.float32)
        self._nan += int(np.isnan(numbers).sum())
        self._infinite += int(np.isinf(numbers).sum())
        numbers = numbers[np.isfinite(numbers)]
        if numbers.size:
            self._low[kind] = min(self._low[kind], float(numbers.min()))
            self._high[kind] = max(self._high[kind], float(numbers.max()))
            self._sum[kind] += float(np.abs(numbers).sum(dtype=np.float64))
            self._count[kind] += numbers.size

    def stats(self, layer: int) -> LayerStats:
        def of(kind: int) -> tuple[float, float, float]:
            if not self._count[kind]:
                return 0.0, 0.0, 0.0
            mean = self._sum[kind] / self._count[kind]
            return self._low[kind], self._high[kind], mean

        return LayerStats(layer, *of(0), *of(1), self._nan, self._infinite)


def plot_importance(store: ChunkStore, prefix: str, path: Path) -> None:
    """Plots the attention of each chunk of a prefix, by layer group, as a PNG.

    Raises the errors of `find_prefix`, and ValueError where no request has saved scores yet.
    """
    from matplotlib.colors import LogNorm  # an extra: only this function needs it
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    found = find_prefix(store, prefix)
    importance = importance_map(store, found)
    if importance is None:
        raise ValueError(
            f"no scores of prefix {found.id} are saved: ask a question and close the engine"
        )
    drawn = np.ma.masked_less_equal(importance, 0)  # what drew nothing stays white
    # Colours span all but the few chunks that drew far more or less, such as the first.
    high = float(np.percentile(drawn.compressed(), 99)) if drawn.count() else 1.0
    low = max(float(np.percentile(drawn.compressed(), 1)) if drawn.count() else 0.1, high / 1e6)
    figure = Figure(figsize=(10, 2.8 + 0.12 * min(len(drawn), 40)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        drawn, aspect="auto", interpolation="nearest", cmap="viridis", origin="lower",
        norm=LogNorm(vmin=low if low < high else high / 10, vmax=high),
    )  # fmt: skip
    axes.set_xlabel(f"chunk (of {found.layout.chunk_tokens} tokens)")
    axes.set_ylabel(_rows(found.layout))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(
        f"Attention that each chunk drew: prefix {found.id[:12]}, {found.num_tokens:,} tokens",
        loc="left",
    )
    label = "attention drawn (log scale)"
    figure.colorbar(image, ax=axes, label=label, format="%g", extend="both")
    figure.savefig(path, format="png", dpi=120)


def _rows(layout: Layout) -> str:
    if not layout.kv_together:
        return "keys and values of each layer"
    return f"group of {layout.pack_layers} layers" if layout.pack_layers > 1 else "layer"


# -- finding, pinning and pruning ------------------------------------------------------------------


def find_prefix(store: ChunkStore, name: str, *, salt: str | None = None) -> Prefix:
    """Finds the stored prefix with a name, an id, or the start of an id.

    A whole id takes precedence over a name, and a name over the start of an id.

    Args:
      name: a name, an id, or the start of an id.
      salt: the tenant's salt; None, for tools: prefixes of all tenants.

    Raises:
      PrefixNotFound: no prefix matches; the message lists similar ids, else stored prefixes.
      ValueError: several prefixes have this name; the message lists them.
    """
    if is_id(name):
        with contextlib.suppress(PrefixNotFound):
            return store.prefix(name, salt=salt)  # without reading all names
    known = store.records(salt=salt)
    mine = [
        id_
        for id_, record in known.items()
        if name and record.name == name and _belongs_to(store, id_, salt)
    ]
    if len(mine) > 1:
        raise ValueError(
            f"{len(mine)} prefixes have the name {name!r}; give the id of one: "
            f"{listed(mine, known, called=False)}"
        )
    try:
        return store.prefix(mine[0] if mine else name, salt=salt)
    except PrefixNotFound as error:
        stored = [prefix.id for prefix in store.prefixes(salt=salt)]
        if error.several or error.close or not stored:
            raise
        raise PrefixNotFound(name, stored=listed(stored, known)) from error


def _belongs_to(store: ChunkStore, prefix_id: str, salt: str | None) -> bool:
    try:
        store.prefix(prefix_id, salt=salt)
    except PrefixNotFound:
        return False
    return True


_LISTED = 5


def listed(ids: Sequence[str], known: Mapping[str, PrefixRecord], *, called: bool = True) -> str:
    """Lists the first ids, each with its name (if `called`), its first words or its source."""
    lines = []
    for id_ in ids[:_LISTED]:
        record = known.get(id_, PrefixRecord())
        begins = f"“{record.begins}”" if record.begins else record.source
        about = (called and record.name) or begins
        lines.append(f"{id_[:12]}{f' ({about})' if about else ''}")
    return ", ".join(lines) + (f" and {len(ids) - _LISTED} more" if len(ids) > _LISTED else "")


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Result of `prune_store`: bytes of the store before and after, and segments removed."""

    bytes_before: int
    bytes_after: int
    removed: int


def prune_store(
    store: ChunkStore, max_bytes: int | None = None, *, expired: bool = False
) -> PruneReport:
    """Evicts expired prefixes (if `expired`), then whole segments until at most `max_bytes` remain;
    more where segments are pinned or being read. Raises `ValueError` for a negative `max_bytes`,
    and if there is nothing to do."""
    if max_bytes is not None and max_bytes < 0:
        raise ValueError(f"max_bytes: got {max_bytes}, expected at least 0")
    if max_bytes is None and not expired:
        raise ValueError("max_bytes: got None, expected a size in bytes, or expired=True")
    before, evicted = store.usage(), store.stats()["evicted"]
    if expired:
        store.evict_expired()
    if max_bytes is not None:
        store.evict_to(max_bytes)
    return PruneReport(before, store.usage(), store.stats()["evicted"] - evicted)


def pin_prefix(store: ChunkStore, prefix: str, pinned: bool = True) -> str:
    """Pins a prefix, given by its name or id, or unpins it; returns its whole id. Raises the errors
    of `find_prefix`."""
    return update_record(store, prefix, pinned=pinned)


def update_record(
    store: ChunkStore,
    prefix: str,
    *,
    pinned: bool | None = None,
    retain_s: float | None = None,
    priority: int | None = None,
) -> str:
    """Updates the record of a prefix, see `PrefixRecord`; None leaves a field unchanged.

    `prefix`: a name, an id, or the start of an id. Returns the whole id. Raises the errors of
    `find_prefix`.
    """
    found = find_prefix(store, prefix).id
    changes = {"pinned": pinned, "retain_s": retain_s, "priority": priority}
    given = {name: value for name, value in changes.items() if value is not None}
    record = replace(store.records().get(found, PrefixRecord()), **given)  # type: ignore[arg-type]
    return store.set_record(found, record)
