"""Making a segment's digest while its KV is written."""

from __future__ import annotations

import google_crc32c
import numpy as np

from ckv_jax.storage import checks, pq
from ckv_jax.storage.array_writer import ArrayWriter
from ckv_jax.storage.digest import as_float32, quantise
from ckv_jax.storage.manifest import Manifest
from ckv_jax.storage.packing import block_keys


class DigestWriter:
    """Fills the digest array of one segment; one thread at a time.

    int8 and int4 stream with the blocks, around the mean key of the first block. "pq" trains on
    tokens from all over the segment and encodes at the end, reading the packs back.

    Args:
      draft: the segment's manifest; its digest checksums are filled in.
      array: the digest's array.
      params: float32 [L, digest_params], inherited from the parent; None to make new ones.
    """

    def __init__(self, draft: Manifest, array: ArrayWriter, params: np.ndarray | None) -> None:
        self._draft = draft
        self._layout = draft.layout
        self._array = array
        self._params = params
        self._sizes = self._layout.digest_record(len(draft.tokens))
        self._pieces = draft.arrays["digest"].entries // self._layout.num_layers
        seed = checks.seed(draft.segment_id, "digest")
        empty = np.zeros(0, np.uint8)
        empty.flags.writeable = False
        for layer in range(self._layout.num_layers):
            for part in range(3):
                draft.digest_crc[layer, part] = checks.checksum(seed, layer, part, empty)
        if params is not None:
            self._put_params(params)

    def add(self, first_token: int, packs: np.ndarray, tokens: int) -> None:
        """Take in the block of `tokens` tokens in packs [groups, n, *pack] of bit patterns."""
        layout = self._layout
        if layout.digest == "pq":
            return
        heads = layout.num_kv_heads
        fresh = np.empty((layout.num_layers, layout.digest_params), np.float32)
        for layer in range(layout.num_layers):
            keys = as_float32(block_keys(packs, layer, layout)[:tokens], layout)
            if self._params is None:
                fresh[layer] = keys.mean(0, dtype=np.float64).reshape(-1)
            mean = (fresh if self._params is None else self._params)[layer]
            keys = keys - mean.reshape(heads, layout.head_dim)
            codes, scale = quantise(keys, layout.digest)
            self._append(layer, 1, first_token * 4 * heads, scale)
            self._append(layer, 2, first_token * heads * layout.digest_codes, codes)
        if self._params is None:
            self._params = fresh
            self._put_params(fresh)

    def finish(self, packs: ArrayWriter) -> None:
        """Encode what could not be encoded before the end."""
        layout, draft = self._layout, self._draft
        if layout.digest != "pq":
            return
        chunks = draft.chunks
        inherited = self._params
        fresh = np.empty((layout.num_layers, layout.digest_params), np.float32)
        shape = (layout.num_kv_heads, layout.head_dim // 8, 256, 8)
        groups = range(0, layout.groups, 1 if layout.kv_together else 2)
        for group in groups:
            data = np.empty((chunks, *layout.pack_shape), layout.disk_dtype)
            packs.get(group * chunks, data)
            for i, layer in enumerate(layout.group_layers(group)):
                bits = data[:, i, 0].reshape(-1, *data.shape[4:])[: len(draft.tokens)]
                keys = as_float32(bits, layout)
                if inherited is None:
                    step = max(1, len(keys) // pq.SAMPLES)
                    fresh[layer] = pq.train(keys[::step][: pq.SAMPLES]).reshape(-1)
                books = (fresh if inherited is None else inherited)[layer].reshape(shape)
                self._append(layer, 2, 0, pq.encode(keys, books))
        if inherited is None:
            self._put_params(fresh)

    def _put_params(self, params: np.ndarray) -> None:
        for layer, values in enumerate(params):
            self._append(layer, 0, 0, values)

    def _append(self, layer: int, part: int, offset: int, data: np.ndarray) -> None:
        """Write bytes of a layer's record, in order within the part, and extend its checksum."""
        start = sum(self._sizes[:part])
        self._array.put(layer * self._pieces, data, start + offset)
        table = self._draft.digest_crc
        view = checks.as_bytes(np.ascontiguousarray(data).reshape(1, -1))[0]
        table[layer, part] = google_crc32c.extend(int(table[layer, part]), view)
