"""An engine over a model of sharp attention, whose answers depend on every chunk they attend to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine_support import MIB, SMALL, random_fingerprint, small_engine
from numpy_qwen import NumpyQwen

from ckv_jax import Engine
from ckv_jax.config import SystemConfig
from ckv_jax.model.weights import load_pretrained
from ckv_jax.storage.store import ChunkStore

MODEL = dataclasses.replace(
    SMALL, hidden_size=32, intermediate_size=32, num_layers=6, tie_word_embeddings=False
)
PERIOD = 5
SHAPE = {"period": PERIOD, "subperiod": 1, "pack_layers": 1}
"""Two periods, of five layers and of one; one layer a call and a pack."""

POOL_BYTES = 9 * MIB
"""Device slots in all, cached and others: engines of one such sum share their programs."""
COLD = {"device_cache_bytes": 0, "host_cache_bytes": 0, "prefetch_device_bytes": POOL_BYTES}
"""An engine without caches."""


class Sharp:
    """One model and all that is compiled for it. `fresh` engines have stores of their own."""

    def __init__(self, folder: Path) -> None:
        self.model = NumpyQwen(MODEL, seed=3)
        self.model.save(folder / "model")
        with small_engine(folder / "unused", system="ckv", model=MODEL, overrides=SHAPE) as unused:
            config = dataclasses.replace(unused.config, prefill_block=256)  # few programs
        weights = load_pretrained(folder / "model", dtype="float32")
        store = ChunkStore.open(folder / "store")
        self._engine = Engine(weights, None, store, random_fingerprint(weights), config)
        self.config = config
        self.layout = self._engine.layout

    @contextmanager
    def fresh(
        self, folder: Path, *, system: SystemConfig | dict[str, object] | None = None,
        **config: object,
    ) -> Iterator[Engine]:  # fmt: skip
        """An engine over the store in `folder`, opened for it; changes of `ckv` in `system`, or
        another one."""
        if not isinstance(system, SystemConfig):
            system = dataclasses.replace(self.config.system, **(system or {}))  # type: ignore[type-var]
        values = dataclasses.replace(self.config, system=system, **config)  # type: ignore[arg-type]
        with ChunkStore.open(folder) as store, self._engine.variant(values, store=store) as engine:
            yield engine

    def close(self) -> None:
        """Ends the engine that holds what is compiled."""
        self._engine.close()
