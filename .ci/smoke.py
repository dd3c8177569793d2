"""A plain install works from any directory: import the three rooms, store a prefix, ask from it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

import ckv_jax
import ckv_jax.kernels_pallas
import ckv_jax.storage
from ckv_jax import Engine, EngineConfig, Request
from ckv_jax.data.reference import random_checkpoint


def main() -> None:
    for room in (ckv_jax, ckv_jax.storage, ckv_jax.kernels_pallas):
        assert Path(sys.prefix) in Path(str(room.__file__)).parents, room.__file__
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = random_checkpoint(Path(folder) / "checkpoint", num_layers=4, hidden_size=64)
        config = EngineConfig(budget=1.0, dtype="float32")
        with Engine.from_pretrained(checkpoint, store=f"{folder}/kv", config=config) as engine:
            prefix = engine.ingest(np.arange(5, 105).tolist())
            request = Request(prefix=prefix, suffix=[7, 8, 9])
            (result,) = engine.reprefill([request])
            dense = engine.recompute(request).logits
    error = float(np.abs(result.logits - dense).max() / np.abs(dense).max())
    assert error < 1e-4, error
    version = ".".join(str(part) for part in sys.version_info[:3])
    print(
        f"Python {version}, JAX {jax.__version__}: budget 1.0 equals recompute within {error:.1e}"
    )


if __name__ == "__main__":
    main()
