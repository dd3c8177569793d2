"""KV that the store could not give, computed again from the tokens. Made once a request, lazily."""

from __future__ import annotations

import numpy as np

from ckv_jax.pipeline.prefill import DensePrefill
from ckv_jax.storage.prefix import Prefix


class Recovery:
    """The dense KV of one prefix. Every fault of the store ends here, never in a wrong answer.

    Args:
        order: int [T], the position of each token as stored, of a reordered prefix.
    """

    def __init__(
        self, prefix: Prefix, prefill: DensePrefill, order: np.ndarray | None = None
    ) -> None:
        self._prefix = prefix
        self._prefill = prefill
        self._order = order
        self._kv: np.ndarray | None = None

    def packs(self, group: int, chunks: np.ndarray) -> np.ndarray:
        """Packs [n, *pack_shape] of a layer group, zero past the prefix's last token."""
        layout = self._prefix.layout
        size = layout.chunk_tokens
        kv = self._dense()
        out = np.zeros((len(chunks), *layout.pack_shape), layout.numpy_dtype)
        layers = layout.group_layers(group)
        for row, chunk in enumerate(chunks.tolist()):
            part = kv[layers.start : layers.stop, :, chunk * size : (chunk + 1) * size]
            if layout.kv_together:
                out[row, : len(layers), :, : part.shape[2]] = part
            else:
                out[row, :, :, : part.shape[2]] = part[:, group % 2, None]
        return out

    def keys(self, layer: int) -> np.ndarray:
        """Keys [T, K, D] of one layer."""
        keys: np.ndarray = self._dense()[layer, 0]
        return keys

    def _dense(self) -> np.ndarray:
        if self._kv is None:
            dtype = self._prefix.layout.numpy_dtype
            blocks = [
                np.asarray(block.kv)[:, :, : block.length].view(dtype)
                for block in self._prefill.run(self._prefix.tokens)
            ]
            kv = np.concatenate(blocks, axis=2)
            self._kv = kv if self._order is None else np.take(kv, self._order, axis=2)
        return self._kv
