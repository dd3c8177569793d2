"""Compressed keys of every layer, small enough to stay in memory and rank all chunks with.

int8 and int4 keep, per token and KV head, a scale and the rounded difference to the head's mean
key: keys ~ mean + scale * codes. The mean is not needed for scoring: softmax does not see a shift
that is the same for all keys. "pq" keeps one byte for eight values (`pq.py`). Mean and codebooks
come from a prefix's first segment and are inherited by all that continue it, so that one softmax
may span them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorstore as ts

from ckv_jax.storage.layout import PQ_CODES, PQ_DIM, Layout
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment import Deadline, Segment

_PIECE_BYTES = 32 << 20  # of records that are read before they are unpacked


@dataclass(frozen=True, slots=True, eq=False)
class DigestData:
    """A prefix's digest; the arrays are read-only.

    Attributes:
      kind: "int8", "int4" or "pq".
      arrays: int8: codes int8 [L, T, K, D], scale float32 [L, T, K]. int4: codes uint8
        [L, T, K, D/2] (low nibble dim d, high nibble dim d + D/2, stored + 8), scale. pq: codes
        uint8 [L, T, K, D/8], codebooks float32 [L, K, D/8, 256, 8].
    """

    kind: str
    arrays: dict[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays.values())

    def keys(self) -> np.ndarray:
        """float32 [L, T, K, D]: the keys as the digest knows them, less the mean for int8, int4."""
        codes = self.arrays["codes"]
        if self.kind == "pq":
            books = self.arrays["codebooks"]
            layers, _, heads, parts = codes.shape
            index = np.ix_(range(layers), range(heads), range(parts))
            picked = books[index[0][:, None], index[1][:, None], index[2][:, None], codes]
            found: np.ndarray = picked.reshape(*codes.shape[:3], -1)
            return found
        if self.kind == "int4":
            codes = np.concatenate([codes & 15, codes >> 4], -1).astype(np.int8) - np.int8(8)
        values: np.ndarray = codes * self.arrays["scale"][..., None]
        return values


def quantise(keys: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [..., Db] and scale float32 [...] of float32 `keys` [..., D], less their mean."""
    levels = np.float32(127 if kind == "int8" else 7)
    scale = np.abs(keys).max(-1) / levels
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint(keys * inverse[..., None])
    np.clip(codes, -levels, levels, out=codes)
    signed = codes.astype(np.int8)
    if kind == "int8":
        return signed.view(np.uint8), scale
    half = keys.shape[-1] // 2
    nibbles = (signed + np.int8(8)).view(np.uint8)
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


def read_digest(
    prefix: Prefix,
    runs: list[tuple[Span, Segment | None, int, int]],
    deadline: Deadline,
    report: Callable[[Segment | None, int, str], None],
) -> DigestData | None:
    """Read and check the digests of `runs` (span, segment, first token, end token); None if bad."""
    layout, tokens = prefix.layout, prefix.num_tokens
    shape = (layout.num_layers, tokens, layout.num_kv_heads)
    codes = np.empty((*shape, layout.digest_codes), np.uint8)
    scale = np.empty(shape if layout.digest != "pq" else (layout.num_layers, 0, 0), np.float32)
    params = np.empty((layout.num_layers, layout.digest_params), np.float32)
    for span, segment, start, end in runs:
        if segment is None:
            report(None, 0, "digest")
            return None
        sizes = layout.digest_record(len(segment.manifest.tokens))
        skip = span.first_chunk * layout.chunk_tokens
        step = max(1, _PIECE_BYTES // sum(sizes))
        for first in range(0, layout.num_layers, step):
            layers = range(first, min(first + step, layout.num_layers))
            records = np.empty((len(layers), sum(sizes)), np.uint8)
            if not _read_records(segment, layers, records, deadline):
                report(segment, 0, f"digest of layers {layers.start} to {layers.stop - 1}")
                return None
            for layer, record in zip(layers, records, strict=True):
                head, middle, tail = np.split(record, np.cumsum(sizes)[:2])
                if start and not np.array_equal(params[layer], head.view(np.float32)):
                    return None  # not made to be scored together
                params[layer] = head.view(np.float32)
                if len(middle):
                    values = middle.view(np.float32).reshape(-1, shape[2])
                    scale[layer, start:end] = values[skip : skip + end - start]
                part = tail.reshape(-1, shape[2], layout.digest_codes)
                codes[layer, start:end] = part[skip : skip + end - start]
    arrays: dict[str, np.ndarray] = {"codes": codes}
    if layout.digest == "int8":
        arrays["codes"] = codes.view(np.int8)
    if layout.digest == "pq":
        books = (shape[2], layout.digest_codes, PQ_CODES, PQ_DIM)
        arrays["codebooks"] = params.reshape(shape[0], *books)
    else:
        arrays["scale"] = scale
    for array in arrays.values():
        array.flags.writeable = False
    return DigestData(layout.digest, arrays)


def _read_records(segment: Segment, layers: range, records: np.ndarray, deadline: Deadline) -> bool:
    for _ in range(2):  # once more before the segment is given up
        with ts.Batch() as batch:
            reads = [
                deadline.watch(segment.begin_digest(layer, record, batch))
                for layer, record in zip(layers, records, strict=True)
            ]
        arrived = [deadline.wait(read, "reading a digest") for read in reads]
        if all(arrived) and all(map(segment.digest_good, layers, records)):
            return True
    return False
