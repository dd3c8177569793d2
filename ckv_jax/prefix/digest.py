"""A prefix's digest on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ckv_jax.buckets import pad_rows
from ckv_jax.kernels_pallas.score.probe import (
    BoundKeys,
    Int4Keys,
    Landmarks,
    MeanKeys,
    PqKeys,
    Probe,
    TokenProbe,
)
from ckv_jax.model.shardings import CODEBOOKS, ONE_DEVICE, PROBE, Shardings
from ckv_jax.storage.digest import DigestData
from ckv_jax.storage.layout import LANDMARKS


@dataclass(slots=True)
class Digest:
    """The probes of the layers that have one. Engine thread only, but `nbytes`."""

    probes: dict[int, Probe]
    """Layer -> its probe, of one length."""
    nbytes: int = field(init=False)
    """Device bytes of all of it; kept, as every token and every look at the engine's state asks for
    it, and JAX takes microseconds for each array's."""
    scorers: dict[int, Any] = field(default_factory=dict)
    """The `Scorer` of a period, made once."""

    def __post_init__(self) -> None:
        self.nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.probes))

    def get(self, layers: Sequence[int], period: int) -> list[Probe]:
        """The probes of these layers of `period`."""
        return [self.probes[layer] for layer in layers]

    def bring(self, period: int) -> None:
        """Has the probes of `period` in memory, where these are in any case."""


def device_digest(
    data: DigestData, chunks: int, chunk_tokens: int, shardings: Shardings = ONE_DEVICE
) -> list[TokenProbe | Landmarks]:
    """A stored digest as one device probe a row, padded to so many chunks."""
    arrays = data.arrays
    entries = chunks * (1 if data.kind in LANDMARKS else chunk_tokens)

    def codes(row: int, name: str = "codes") -> jax.Array:
        padded: jax.Array = shardings.put(pad_rows(arrays[name][row], entries), PROBE)
        return padded

    rows = range(len(next(iter(arrays.values()))))
    match data.kind:
        case "int4":
            return [Int4Keys(codes(row), codes(row, "scale")) for row in rows]
        case "pq":
            whole = ((0, 0), (0, 0), (0, 256 - arrays["codebooks"].shape[3]), (0, 0))
            books = [  # kernels take as many as a byte tells apart
                shardings.put(np.pad(book, whole), CODEBOOKS) for book in arrays["codebooks"]
            ]
            return [PqKeys(codes(row), books[row]) for row in rows]
        case "means" | "means+cosines":
            return [
                MeanKeys(
                    codes(row, "mean"),
                    codes(row, "log_size"),
                    oddity=codes(row, "oddity") if "oddity" in arrays else None,
                )
                for row in rows
            ]
        case "bounds":
            return [BoundKeys(codes(row, "low"), codes(row, "high")) for row in rows]
    raise ValueError(f"got a digest of unknown kind {data.kind!r}")
