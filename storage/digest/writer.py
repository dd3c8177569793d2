"""Making a segment's digest while its KV is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import google_crc32c
import numpy as np

from ckv_jax.storage.digest.data import (
    PQ_SAMPLES,
    as_float32,
    landmark_codes,
    pq_encode,
    pq_train,
    quantise,
)
from ckv_jax.storage.layout import LANDMARKS, PQ_CODES, PQ_PARTS
from ckv_jax.storage.segment import crc
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.packing import block_keys


class DigestWriter:
    """Fills the digest array of one segment; one thread at a time.

    int8 and int4 stream with the blocks, around the mean key of the first block; landmarks
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
        seed = crc.seed(draft.segment_id, "digest")
        empty = np.zeros(0, np.uint8)
        empty.flags.writeable = False
        for row in range(len(self._layout.digest_layers)):
            for part in range(3):
                draft.digest_crc[row, part] = crc.checksum(seed, row, part, empty)
        if params is not None:
            self._put_params(params)

    def add(self, first_token: int, packs: np.ndarray, tokens: int) -> None:
        """Take in the block of `tokens` tokens in packs [groups, n, *pack] of bit patterns."""
        layout = self._layout
        if layout.digest == "pq":
            return
        if layout.digest in LANDMARKS:
            self._add_landmarks(first_token, packs, tokens)
            return
        heads = layout.num_kv_heads
        fresh = np.empty((len(layout.digest_layers), layout.digest_params), np.float32)
        for row, keys in self._keys(packs, tokens):
            if self._params is None:
                fresh[row] = keys.mean(0, dtype=np.float64).reshape(-1)
            mean = (fresh if self._params is None else self._params)[row]
            keys = keys - mean.reshape(heads, layout.head_dim)
            codes, scale = quantise(keys, layout.digest)
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

    def _add_landmarks(self, first_token: int, packs: np.ndarray, tokens: int) -> None:
        layout = self._layout
        first = first_token // layout.chunk_tokens * layout.num_kv_heads * layout.digest_codes
        for row, keys in self._keys(packs, tokens):
            self._append(row, 2, first, landmark_codes(keys, layout))

    def finish(self, get: Callable[[int, np.ndarray], None], step: Callable[[], None]) -> None:
        """Encode what could not be encoded before the end.

        Args:
          get: reads packs, decoded, from an entry on into an array [n, *pack] of bit patterns.
          step: told of each layer group that was read.
        """
        layout, draft = self._layout, self._draft
        if layout.digest != "pq":
            return
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
        """Write bytes of a record, in order within the part, and extend its checksum."""
        start = sum(self._sizes[:part])
        self._put(row * self._pieces, data, start + offset)
        table = self._draft.digest_crc
        view = crc.as_bytes(np.ascontiguousarray(data).reshape(1, -1))[0]
        table[row, part] = google_crc32c.extend(int(table[row, part]), view)
