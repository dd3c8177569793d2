"""Digests: compressed keys of the layers that select, small enough to stay in memory.

int4 keeps, per token and KV head, a scale and the rounded difference to the head's mean key: keys ~
mean + scale * codes. The mean is not needed for scoring: softmax does not see a shift that is the
same for all keys. "pq" keeps six bits for each half of a key: one of 64 centroids (PQCache). Mean
and codebooks come from a prefix's first segment and are inherited by all that continue it, so that
one softmax may span them.

Those of `LANDMARKS` keep a landmark for each chunk: the mean of its keys, or their bounds (Quest).
With the mean there may be the cosine of the chunk's least alike key, by which the chunks are found
that a mean says least of (ShadowKV, Sun et al. 2025). A landmark depends on its own chunk alone:
there are no parameters to inherit, and segments join as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import tensorstore as ts

from ckv_jax.storage.errors import StoreError
from ckv_jax.storage.layout import LANDMARKS, PQ_CODES, PQ_PARTS, Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.arrays import as_bytes, block_keys
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.reads import Deadline, TokenRun
from ckv_jax.storage.segment.seal import Stream
from ckv_jax.storage.segment.segment import Opened, Segment

_WINDOW_BYTES = 16 << 20  # of pieces of records that are read at once


@dataclass(frozen=True, slots=True, eq=False)
class DigestData:
    """A prefix's digest; the arrays are read-only, their R rows are the layout's `digest_layers`.

    Attributes:
      kind: "int4", "pq", or one of `LANDMARKS`.
      arrays: int4: codes uint8 [R, T, K, D/2] (low nibble dim d, high nibble dim d + D/2, stored
        + 8), scale float32 [R, T, K]. pq: codes uint8 [R, T, K, 2], codebooks float32
        [R, K, 2, 64, D/2]. Landmarks: those of `landmark_arrays`.
      mixed: whether segments that were made around other parameters were brought to the first's.
    """

    kind: str
    arrays: dict[str, np.ndarray]
    mixed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays.values())


def turn(
    layout: Layout, codes: np.ndarray, scale: np.ndarray, old: np.ndarray, new: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One layer's codes uint8 [T, K, Db] and scale [T, K], made around `old`, as if around `new`.
    Loses as much again as the first rounding did. `scale` is empty for "pq"."""
    heads, dim = layout.num_kv_heads, layout.head_dim
    if layout.digest == "pq":
        books = [p.reshape(heads, PQ_PARTS, PQ_CODES, dim // PQ_PARTS) for p in (old, new)]
        index = np.ix_(range(heads), range(PQ_PARTS))
        keys = books[0][index[0][None], index[1][None], codes].reshape(-1, heads, dim)
        return pq_encode(keys, books[1]), scale
    values = np.concatenate([codes & 15, codes >> 4], -1).astype(np.float32) - np.float32(8)
    keys = values * scale[..., None] + (old - new).reshape(heads, dim)
    return quantise(keys)


def quantise(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [..., D/2] and scale float32 [...] of float32 `keys` [..., D] less their mean."""
    levels = np.float32(7)
    scale = np.abs(keys).max(-1) / levels
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint(keys * inverse[..., None])
    np.clip(codes, -levels, levels, out=codes)
    half = keys.shape[-1] // 2
    nibbles = (codes.astype(np.int8) + np.int8(8)).view(np.uint8)
    return nibbles[..., :half] | (nibbles[..., half:] << 4), scale


def as_float32(bits: np.ndarray, layout: Layout) -> np.ndarray:
    """Stored values as float32, without infinities and NaN."""
    if layout.dtype == "bfloat16":
        values = (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        values = bits.view(layout.numpy_dtype).astype(np.float32)
    if not np.isfinite(values).all():
        values = np.nan_to_num(values, nan=0.0, posinf=1e30, neginf=-1e30)
    return values


PQ_SAMPLES = 1024
"""Tokens that the codebooks are trained on."""

# Tokens encoded at once: the distances stay in cache, and the product is too small for the linear
# algebra library to spread it over threads, which costs more than it brings.
_PQ_BLOCK = 128


def pq_train(keys: np.ndarray) -> np.ndarray:
    """Codebooks float32 [K, 2, 64, D/2] from sample keys float32 [n, K, D]."""
    # Here: it takes a fifth of the time that importing the package takes, and few stores need it.
    from scipy.cluster.vq import kmeans

    n, heads, dim = keys.shape
    size = dim // PQ_PARTS
    parts = keys.reshape(n, heads * PQ_PARTS, size).transpose(1, 0, 2)
    books = np.empty((len(parts), PQ_CODES, size), np.float32)
    first = np.random.default_rng(0).permutation(n)[:PQ_CODES]
    for book, part in zip(books, parts, strict=True):
        largest = np.float32(np.abs(part).max()) or np.float32(1)
        unit = np.ascontiguousarray(part) / largest
        found, _ = kmeans(unit, unit[np.sort(first)], thresh=5e-3)
        book[...] = np.resize(found, (PQ_CODES, size)) * largest
    return books.reshape(heads, PQ_PARTS, PQ_CODES, size)


def pq_encode(keys: np.ndarray, books: np.ndarray) -> np.ndarray:
    """Codes uint8 [T, K, 2]: the nearest centroid of keys float32 [T, K, D]."""
    tokens, heads, dim = keys.shape
    flat = books.reshape(-1, PQ_CODES, dim // PQ_PARTS)
    parts = np.ascontiguousarray(keys.reshape(tokens, len(flat), -1).transpose(1, 0, 2))
    codes = np.empty((len(flat), tokens), np.uint8)
    for part, book, code in zip(parts, flat, codes, strict=True):
        turned, norms = np.ascontiguousarray(-2 * book.T), np.square(book).sum(-1)
        for start in range(0, tokens, _PQ_BLOCK):
            distance = part[start : start + _PQ_BLOCK] @ turned
            distance += norms
            code[start : start + _PQ_BLOCK] = distance.argmin(1)
    return np.ascontiguousarray(codes.T).reshape(tokens, heads, PQ_PARTS)


_COSINE = 4  # bytes of one, float32


def landmark_codes(keys: np.ndarray, layout: Layout) -> np.ndarray:
    """Codes uint8 [M, K, digest_codes] of float32 `keys` [T, K, D] that begin with a chunk.

    Means are of the layout's dtype. "means+cosines": after a mean key the least cosine of it and
    one of its keys, float32. "bounds": the least, then the greatest value of each dim, exact.
    """
    starts = np.arange(0, len(keys), layout.chunk_tokens)
    if layout.digest == "bounds":
        parts = [np.minimum.reduceat(keys, starts), np.maximum.reduceat(keys, starts)]
    else:
        parts = [np.add.reduceat(keys, starts) / _sizes(len(keys), layout)[:, None, None]]
    most = float(ml_dtypes.finfo(layout.numpy_dtype).max)
    rounded = np.stack([np.clip(part, -most, most) for part in parts], axis=2)  # [M, K, n, D]
    codes = np.ascontiguousarray(rounded.astype(layout.numpy_dtype)).view(np.uint8)
    codes = codes.reshape(*codes.shape[:2], -1)
    if layout.digest != "means+cosines":
        return codes
    cosines = _least_cosines(keys, parts[0], starts, layout.chunk_tokens)
    return np.concatenate([codes, cosines[:, :, None].view(np.uint8)], axis=2)


def landmark_arrays(codes: np.ndarray, layout: Layout, tokens: int) -> dict[str, np.ndarray]:
    """The arrays of a digest of `tokens` tokens, by name, from codes uint8 [R, M, K, *].

    Means: mean [R, M, K, D] and log_size float32 [R, M, K], the logarithm of how many tokens the
    mean stands for; with cosines, oddity int32 [R, M, K]: a chunk's place among those of its layer
    and head, where 0 has the key that is least like its mean and of equal ones the earlier comes
    first. "bounds": low and high [R, M, K, D].
    """
    bare = codes[..., :-_COSINE] if layout.digest == "means+cosines" else codes
    values = np.ascontiguousarray(bare).view(layout.numpy_dtype)
    values = values.reshape(*codes.shape[:3], -1, layout.head_dim)
    if layout.digest == "bounds":
        return {"low": values[:, :, :, 0], "high": values[:, :, :, 1]}
    log_size = np.log(_sizes(tokens, layout))[None, :, None]
    whole = np.ascontiguousarray(np.broadcast_to(log_size, codes.shape[:3]))
    found = {"mean": values[:, :, :, 0], "log_size": whole}
    if layout.digest == "means+cosines":
        cosines = np.ascontiguousarray(codes[..., -_COSINE:]).view(np.float32)[..., 0]
        order = np.argsort(cosines, axis=1, kind="stable")
        found["oddity"] = np.argsort(order, axis=1).astype(np.int32)
    return found


def _least_cosines(
    keys: np.ndarray, means: np.ndarray, starts: np.ndarray, chunk_tokens: int
) -> np.ndarray:
    """float32 [M, K]: of each chunk the least cosine of one of its keys and its mean; of a key or
    mean of length 0 it is 0."""
    keys, means = keys.astype(np.float64), means.astype(np.float64)  # squares of bad keys are large
    own = np.repeat(means, chunk_tokens, axis=0)[: len(keys)]
    product = np.einsum("tkd,tkd->tk", keys, own)
    lengths = np.linalg.norm(keys, axis=2) * np.linalg.norm(own, axis=2)
    cosines = np.divide(product, lengths, out=np.zeros_like(product), where=lengths > 0)
    least: np.ndarray = np.minimum.reduceat(cosines, starts).astype(np.float32)
    return least


def _sizes(tokens: int, layout: Layout) -> np.ndarray:
    """float32 [M], tokens of each chunk."""
    sizes = np.full(layout.num_chunks(tokens), layout.chunk_tokens, np.float32)
    sizes[-1] = tokens - layout.chunk_tokens * (len(sizes) - 1)
    return sizes


# -- reading ---------------------------------------------------------------------------------------


def read_digest(
    prefix: Prefix,
    runs: list[TokenRun],
    deadline: Deadline,
    prove: Callable[[Opened, int, int], bool],
) -> DigestData | None:
    """Read and check the digests of all runs; None when any of it is bad or missing.

    Segments that were made around other parameters than the first are brought to its own, so that
    one softmax may span all of them. `prove(segment, row, part)` reports what is proven to be bad.
    """
    layout, tokens = prefix.layout, prefix.num_tokens
    rows = len(layout.digest_layers)
    shape, unit = (rows, tokens, layout.num_kv_heads), layout.digest_unit
    codes = np.empty((rows, -(-tokens // unit), shape[2], layout.digest_codes), np.uint8)
    scale = np.empty(shape if layout.digest == "int4" else (rows, 0, 0), np.float32)
    params = np.empty((rows, layout.digest_params), np.float32)
    mixed = False
    for run in runs:
        _, segment, start, end = run
        found = params if not start else np.empty_like(params)
        parts = (found, scale[:, start:end], codes[:, start // unit : -(-end // unit)])
        # Twice before the segment is given up.
        bad = _read_run(run, layout, parts, deadline) and _read_run(run, layout, parts, deadline)
        if bad or isinstance(segment, StoreError):
            all(prove(segment, row, part) for row, part in bad or [(0, 0)])
            return None
        if not np.array_equal(found, params):
            mixed = True
            for row in range(rows):
                turned = turn(layout, parts[2][row], parts[1][row], found[row], params[row])
                parts[2][row], parts[1][row] = turned
    arrays = _arrays(layout, tokens, params, scale, codes)
    for array in arrays.values():
        array.flags.writeable = False
    return DigestData(layout.digest, arrays, mixed)


def _arrays(
    layout: Layout, tokens: int, params: np.ndarray, scale: np.ndarray, codes: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns the arrays of `DigestData` for a layout's kind of digest."""
    if layout.digest in LANDMARKS:
        return landmark_arrays(codes, layout, tokens)
    if layout.digest == "pq":
        books = (layout.num_kv_heads, PQ_PARTS, PQ_CODES, layout.head_dim // PQ_PARTS)
        return {"codes": codes, "codebooks": params.reshape(len(params), *books)}
    return {"codes": codes, "scale": scale}


def _read_run(
    run: TokenRun, layout: Layout, parts: tuple[np.ndarray, ...], deadline: Deadline
) -> list[tuple[int, int]]:
    """Read one run's (params, scale, codes), each [R, ...]; (row, part) of what is not good."""
    span, segment, _, _ = run
    if isinstance(segment, StoreError):
        return []
    sizes = layout.digest_record(len(segment.manifest.tokens))
    starts = (0, sizes[0], sizes[0] + sizes[1])
    # Of each part, the bytes that belong to tokens before the run.
    before = span.first_chunk * layout.chunk_tokens * layout.num_kv_heads
    skips = (0, 4 * before, layout.digest_codes * before // layout.digest_unit)
    streams = _streams(segment.manifest, writing=False)
    for row, at, data in _pieces(segment, layout, sum(sizes), deadline):
        if data is None:
            return [(row, part) for part in range(3)]
        for part, array in enumerate(parts):
            memory = array[row].reshape(-1).view(np.uint8)
            stream = streams[row, part]
            _take(memory, skips[part], starts[part], sizes[part], data, at, stream)
    return [place for place, stream in streams.items() if not stream.end()]


def _take(
    memory: np.ndarray,
    skip: int,
    start: int,
    size: int,
    data: np.ndarray,
    at: int,
    stream: Stream,
) -> None:
    """Copy what `data`, a record from byte `at` on, has of the part of `size` bytes at `start`.

    `memory`: uint8 [n]; takes bytes [skip, skip + n) of the part. `stream`: of the part.
    """
    low = max(start, at)
    sealed = data[low - at : max(low, min(start + size, at + len(data))) - at]
    piece = stream.update(as_bytes(sealed[None])[0])
    first = low - start - skip  # in memory
    begin, end = max(0, first), min(len(memory), first + len(piece))
    if begin < end:
        memory[begin:end] = piece[begin - first : end - first]


def _streams(manifest: Manifest, *, writing: bool) -> dict[tuple[int, int], Stream]:
    """Of all parts of a digest, by (row, part)."""
    rows = range(len(manifest.layout.digest_layers))
    places = ((row, part) for row in rows for part in range(3))
    return {at: manifest.seal.stream("digest", *at, writing=writing) for at in places}


def _pieces(
    segment: Segment, layout: Layout, record: int, deadline: Deadline
) -> Iterator[tuple[int, int, np.ndarray | None]]:
    """(row, offset in its record, bytes) in order; None for bytes that could not be read."""
    step = segment.manifest.arrays["digest"].inner[1]
    places = [(r, at) for r in range(len(layout.digest_layers)) for at in range(0, record, step)]
    ahead = max(1, _WINDOW_BYTES // step)
    for first in range(0, len(places), ahead):
        window = places[first : first + ahead]
        buffers = [np.empty(min(step, record - at), np.uint8) for _, at in window]
        size = sum(len(b) for b in buffers)
        deadline.admit(size, "reading a digest")
        with ts.Batch() as batch:
            reads = [
                segment.begin_part("digest", row, at, buffer, batch)
                for (row, at), buffer in zip(window, buffers, strict=True)
            ]
        deadline.watch(reads, size)
        for (row, at), buffer, read in zip(window, buffers, reads, strict=True):
            yield row, at, buffer if deadline.wait(read, "reading a digest") else None


# -- writing ---------------------------------------------------------------------------------------


class DigestWriter:
    """Fills the digest array of one segment; one thread at a time.

    int4 streams with the blocks, around the mean key of the first block; landmarks
    stream too, and have no parameters. "pq" trains on tokens from all over the segment and encodes
    at the end, reading the packs back.

    Args:
      draft: the segment's manifest; its digest checksums are filled in.
      put: writes data at an entry of the digest's array, from an offset on; see `ArrayWriter`.
      params: float32 [R, digest_params], inherited from the parent; None to make new ones.
    """

    def __init__(
        self,
        draft: Manifest,
        put: Callable[[int, np.ndarray, int], None],
        params: np.ndarray | None,
    ) -> None:
        self._draft = draft
        self._layout = draft.layout
        self._put = put
        self._params = params
        self._sizes = self._layout.digest_record(len(draft.tokens))
        self._pieces = draft.arrays["digest"].entries // len(self._layout.digest_layers)
        self._streams = _streams(draft, writing=True)
        if params is not None:
            self._put_params(params)

    def add(self, first_token: int, packs: np.ndarray, tokens: int) -> None:
        """Take in the block of `tokens` tokens in packs [groups, n, *pack] of bit patterns."""
        layout = self._layout
        if layout.digest == "pq":
            return
        if layout.digest in LANDMARKS:
            start = first_token // layout.chunk_tokens * layout.num_kv_heads * layout.digest_codes
            for row, keys in self._keys(packs, tokens):
                self._append(row, 2, start, landmark_codes(keys, layout))
            return
        heads = layout.num_kv_heads
        fresh = np.empty((len(layout.digest_layers), layout.digest_params), np.float32)
        for row, keys in self._keys(packs, tokens):
            if self._params is None:
                fresh[row] = keys.mean(0, dtype=np.float64).reshape(-1)
            mean = (fresh if self._params is None else self._params)[row]
            keys = keys - mean.reshape(heads, layout.head_dim)
            codes, scale = quantise(keys)
            self._append(row, 1, first_token * 4 * heads, scale)
            self._append(row, 2, first_token * heads * layout.digest_codes, codes)
        if self._params is None:
            self._params = fresh
            self._put_params(fresh)

    def _keys(self, packs: np.ndarray, tokens: int) -> Iterator[tuple[int, np.ndarray]]:
        """(row, keys float32 [tokens, K, D]) of a block."""
        layout = self._layout
        for row, layer in enumerate(layout.digest_layers):
            bits = block_keys(packs, layer, layout)[:tokens]
            yield row, as_float32(bits, layout)

    def finish(self, get: Callable[[int, np.ndarray], None], step: Callable[[], None]) -> None:
        """Encode what could not be encoded before the end, and note what proves the digest.

        `get` reads packs, decoded, from an entry on into an array [n, *pack] of bit patterns;
        `step` is called for each layer group that was read.
        """
        if self._layout.digest == "pq":
            self._finish_pq(get, step)
        for stream in self._streams.values():
            stream.end()

    def _finish_pq(self, get: Callable[[int, np.ndarray], None], step: Callable[[], None]) -> None:
        layout, draft = self._layout, self._draft
        chunks = draft.chunks
        inherited = self._params
        row_of = {layer: row for row, layer in enumerate(layout.digest_layers)}
        fresh = np.empty((len(row_of), layout.digest_params), np.float32)
        shape = (layout.num_kv_heads, PQ_PARTS, PQ_CODES, layout.head_dim // PQ_PARTS)
        parts = layout.parts if layout.heads_apart else 1  # with K and V apart, keys alone
        for group in range(0, layout.groups, layout.parts):
            layers = layout.group_layers(group)
            if row_of.keys().isdisjoint(layers):
                continue
            packs = np.empty((parts, chunks, *layout.pack_shape), layout.disk_dtype)
            for part in range(parts):
                get((group + part) * chunks, packs[part])
                step()
            data = packs[0] if parts == 1 else np.concatenate(packs, axis=4)
            for i, layer in enumerate(layers):
                if layer not in row_of:
                    continue
                row = row_of[layer]
                bits = data[:, i, 0].reshape(-1, *data.shape[4:])[: len(draft.tokens)]
                keys = as_float32(bits, layout)
                if inherited is None:
                    stride = max(1, len(keys) // PQ_SAMPLES)
                    fresh[row] = pq_train(keys[::stride][:PQ_SAMPLES]).reshape(-1)
                books = (fresh if inherited is None else inherited)[row].reshape(shape)
                self._append(row, 2, 0, pq_encode(keys, books))
        if inherited is None:
            self._put_params(fresh)

    def _put_params(self, params: np.ndarray) -> None:
        for row, values in enumerate(params):
            self._append(row, 0, 0, values)

    def _append(self, row: int, part: int, offset: int, data: np.ndarray) -> None:
        """Write bytes of a record, in order within the part."""
        start = sum(self._sizes[:part])
        view = as_bytes(np.ascontiguousarray(data).reshape(1, -1))[0]
        self._put(row * self._pieces, self._streams[row, part].update(view), start + offset)
