"""What a model answers on one device and split over two and four: for a process of its own, whose
CPU is seen as eight devices. Prints one line of JSON.

    python several_devices.py FOLDER
"""

from __future__ import annotations

import json
import os
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from checkpoint import LARGEST, config

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
from nudge import nudge_products

from ckv_jax import Engine, Prefix, Request, SamplingParams
from ckv_jax.decode import selection
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.shardings import Shardings
from ckv_jax.model.weights import load_pretrained, model_fingerprint
from ckv_jax.pipeline.layers import Layers
from ckv_jax.storage import ChunkStore

nudge_products()

SIZES = {"ckv": (1, 2, 4), "contiguous-kv": (1, 2), "as-h2o-lru": (1, 2)}


class Models:
    """The checkpoint over one, two and four devices; engines over one of them share programs."""

    def __init__(self, folder: Path) -> None:
        config = ModelConfig.from_hf(folder)
        self.fingerprint = model_fingerprint(folder, config, dtype="float32")
        self._layers = {
            size: Layers(
                load_pretrained(folder, dtype="float32", shardings=Shardings.over(config, size))
            )
            for size in (1, 2, 4)
        }

    def engine(self, store: Path, name: str, size: int) -> Engine:
        """Over so many devices."""
        opened = ChunkStore.open(store)
        return Engine(self._layers[size], None, opened, self.fingerprint, config(name, size))


def texts() -> tuple[np.ndarray, np.ndarray]:
    """A prefix and a suffix."""
    rng = np.random.default_rng(0)
    text, suffix = (rng.integers(0, 512, n).astype(np.int32) for n in (250, 12))
    return text, suffix


def answers(engine: Engine, prefix: Prefix, suffix: np.ndarray) -> dict[str, Any]:
    """Logits and choices at a small budget; of `ckv` also with everything, and a text."""
    found: dict[str, Any] = {}
    ours = engine.system.name == "ckv"
    for budget in (0.2, 1.0) if ours else (0.2,):
        request = Request(prefix=prefix, suffix=suffix, budget=budget)
        cold, found_all, warm = (engine.reprefill([request])[0] for _ in range(3))
        for result in (cold, found_all, warm):
            if result.error is not None:
                raise result.error
        found[str(budget)] = {
            "logits": cold.logits.tolist(),
            "warm": bool(np.array_equal(cold.logits, warm.logits)),
            "selected": [ids.tolist() for ids in engine.last_selection(prefix)],
        }
        if ours and budget < 1:
            with patch.object(selection, "_TOKENS_BEFORE_COMPILING", 1):  # tokens of few calls each
                for _ in range(2):
                    text = engine.generate(request, SamplingParams(max_tokens=4)).results()[0]
                    text.raise_for_error()
                    engine.settle()
            found[str(budget)]["tokens"] = text.token_ids.tolist()
    return found


def collectives(engine: Engine, ask: Callable[[], Any]) -> dict[str, float]:
    """All-reduces in a layer of each program that a request runs, and anything else it sends."""
    found: dict[str, float] = {}

    def watch(name: str, jitted: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        text = jitted.lower(*args, **named).compile().as_text()
        sums = len(re.findall(r"= [^=]*\ball-reduce(?:-start)?\(", text))
        kinds = "collective-permute|all-gather|all-to-all|reduce-scatter"
        other = len(re.findall(rf"= [^=]*\b(?:{kinds})(?:-start)?\(", text))
        if name == "run":
            sums /= len(args[0])
        found[name] = max(found.get(name, 0), sums)
        found["other"] = found.get("other", 0) + (other if name in {"run", "select"} else 0)
        return jitted(*args, **named)

    with engine.layers.programs.watch(watch):
        ask()
    return found


def in_one_call(engine: Engine, request: Request) -> list[Any]:
    """The logits of a request whose periods are calls of their parts, and one call each; and how
    many calls of whole periods that took."""
    resident, looked = engine.worker.runtime.resident, list[bool]()
    period = resident.period

    def counted(*args: Any, **named: Any) -> Any:
        found = period(*args, **named)
        looked.append(found is not None)
        return found

    apart = engine.reprefill([request])[0]
    with patch.object(resident, "fuses", True), patch.object(resident, "period", counted):
        for _ in range(2):
            [together] = engine.reprefill([request])
            engine.settle()
    return [apart.logits.tolist(), together.logits.tolist(), sum(looked)]


def main(folder: Path) -> None:
    """Everything, in one process: programs are compiled once for each size."""
    model = folder / "model"
    models = Models(model)
    text, suffix = texts()
    found: dict[str, Any] = {"answers": {}}
    prefixes: dict[str, Any] = {}
    for name, sizes in SIZES.items():
        for size in sizes:
            with models.engine(folder / "store", name, size) as engine:
                if name not in prefixes:  # stored by one device, read on all
                    prefixes[name] = engine.ingest(text)
                found["answers"][f"{name} {size}"] = answers(engine, prefixes[name], suffix)
                if name == "ckv" and size == 2:
                    request = Request(prefix=prefixes[name], suffix=suffix, budget=0.2)
                    found["collectives"] = collectives(
                        engine, lambda engine=engine, r=request: engine.reprefill([r])
                    )
                    found["one call"] = in_one_call(engine, request)
    with models.engine(folder / "written", "ckv", 4) as engine:
        prefix = engine.ingest(text)
    with models.engine(folder / "written", "ckv", 1) as engine:
        found["written"] = answers(engine, prefix, suffix)
        found["same id"] = prefix.id == prefixes["ckv"].id
    shardings = Shardings.over(ModelConfig.from_hf(model), 4)
    tracemalloc.start()  # of numpy's arrays; those of devices are not Python's
    load_pretrained(model, dtype="float32", shardings=shardings)
    found["host bytes"] = tracemalloc.get_traced_memory()[1]
    found["largest"] = LARGEST
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
