"""What `bench.decode` measures: a model, stores of long prefixes, and an engine at a time."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
from flax import nnx

from bench.common import SHAPES, Json
from bench.decode_row import (
    QUESTION,
    forced,
    forget_peak,
    measured,
    memory,
    tokens_within,
    warmed,
)
from bench.disk import Disk
from bench.kept import Kept
from bench.lab import forget_scores
from bench.long_kv import stored, walking_tokens
from bench.structured import structured_model
from ckv_jax import Engine, EngineConfig, Request
from ckv_jax.baselines.kvdrive import KVDRIVE, KvDriveSelections, tune
from ckv_jax.config import SystemConfig, layout_of
from ckv_jax.pipeline.layers import Layers
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.store import ChunkStore
from ckv_jax.systems import DECODE_SYSTEMS, system_named

EVERYTHING = ("dense", "flexgen")
"""Systems that attend to the whole prefix."""
RISING = OURS = ("kvdrive", "ckv")
IN_MEMORY = ("quest", "shadowkv", "retroinfer", "kvdrive", "ckv")
TUNED = 40
"""Tokens of each text by which KVDrive's windows and micro-batches are tuned."""
BESIDE = 3 << 30
"""Bytes of memory and of disk that are left to everything else."""
SHM = Path("/dev/shm")


def _without(name: str, overfetch: float = KVDRIVE.overfetch, **fields: Any) -> SystemConfig:
    """KVDrive with parts of it switched off, see `KvDriveSelections`."""
    own = dataclasses.replace(KVDRIVE.own, decoding=partial(KvDriveSelections, **fields))
    return dataclasses.replace(KVDRIVE, name=f"kvdrive, {name}", overfetch=overfetch, own=own)


WHOLE_BATCH = _without("no micro-batches", micro_batches=1)
EVEN = _without("even windows", even=True)
NOTHING_AHEAD = _without("no reads ahead", 1.0)
ONE_BY_ONE = _without("none of these", 1.0, micro_batches=1, even=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured."""

    model: str = "kv7b-thin"
    systems: tuple[str, ...] = (*DECODE_SYSTEMS, "ckv")
    places: tuple[str, ...] | None = None
    """None: SSD, and memory for `IN_MEMORY`."""
    prefix_tokens: int = 32_768
    sequences: tuple[int, ...] = (8,)
    rising: tuple[int, ...] = (1, 2, 4, 16)
    """Numbers of sequences that `RISING` decode from SSD as well."""
    budgets: tuple[float, ...] = (1 / 64,)
    tokens: int = 40
    """Measured, after `warm`; fewer where both would take longer than `row_seconds`. With so many
    a text's question and tokens fit the smallest buffers, which grow for nobody meanwhile."""
    warm: int = 16
    row_seconds: float = 30.0
    stay: float = 0.9
    """Probability that a token keeps to its text's topic."""
    device_share: float = 1 / 16
    host_share: float = 1 / 4
    windows: tuple[float | None, ...] = (None,)
    """Of every system that chooses; None: its own."""
    seed: int = 0

    def to_json(self) -> Json:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    def counts(self, name: str, place: str) -> list[int]:
        """Numbers of sequences that a system decodes from a place."""
        if self.places is None and place == "host" and name not in IN_MEMORY:
            return []
        rising = self.rising if place == "ssd" and name in RISING else ()
        return sorted({*self.sequences, *rising})


@dataclass(frozen=True, slots=True)
class Asked:
    """What a row is of."""

    system: SystemConfig
    budget: float
    sequences: int

    def name(self, place: str) -> str:
        """Of its row."""
        window = f", window {self.system.window:g}" if self.budget < 1 else ""
        return f"{self.system.name}, {place}, {self.sequences}, {self.budget:g}{window}"


class Bench:
    """One model, and an engine at a time over a store of one layout."""

    def __init__(self, setting: Setting, folder: Path, timeline: Path | None = None) -> None:
        """`timeline`: takes a timeline of the last row of `kvdrive`."""
        self._timeline = timeline
        config = dataclasses.replace(SHAPES[setting.model], eos_token_ids=())
        self.setting = setting
        self.model = config
        self.left_out: list[Json] = []
        """What did not fit, and why."""
        weights = structured_model(config, seed=setting.seed)
        self._weight_bytes = sum(x.nbytes for x in jax.tree.leaves(nnx.state(weights)))
        self.layers = Layers(weights)
        self.fingerprint = Fingerprint(
            {"weights": f"structured, seed {setting.seed}", "config": setting.model}
            | {"dtype": "bfloat16", "tokenizer": "", "rope": ""}
        )
        self._folder = folder
        rng = np.random.default_rng(setting.seed)
        count = max((*setting.sequences, *setting.rising))
        self.prefixes = [
            walking_tokens(rng, setting.prefix_tokens, config.vocab_size, stay=0.5)
            for _ in range(count)
        ]
        length = QUESTION + 1 + setting.warm + setting.tokens
        self.texts, self.tuning_texts = (
            [walking_tokens(rng, n, config.vocab_size, stay=setting.stay) for _ in range(count)]
            for n in (length, QUESTION + TUNED)
        )

    def systems(self) -> list[list[SystemConfig]]:
        """What is measured, systems of one layout together."""
        found: dict[str, list[SystemConfig]] = {}
        for name in self.setting.systems:
            system = system_named(name)
            found.setdefault(layout_of(system, self.model, "bfloat16").hex, []).append(system)
        return list(found.values())

    def rows(self, systems: Sequence[SystemConfig], disk: Disk, kept: Kept) -> Iterator[Json]:
        """Rows of systems of one layout: from SSD, then from memory."""
        with tempfile.TemporaryDirectory(prefix="ckv-decode-", dir=self._folder) as name:
            for place in self.setting.places or ("ssd", "host"):
                todo = [
                    one
                    for system in systems
                    for count in self.setting.counts(system.name, place)
                    for one in self._asked(system, count)
                ]
                forget_peak()  # or what earlier systems left counts as taken
                there = {one.name(place): one.name(place) in kept for one in todo}
                new = [one for one in todo if not there[one.name(place)]]
                fits = [one for one in new if self._fits(one, place, Path(name))]
                most = max((one.sequences for one in fits), default=0)
                with self._placed(place, Path(name), most) as store:
                    for one in todo:
                        if one in fits or there[one.name(place)]:
                            yield kept.part(
                                one.name(place), partial(self._row, one, place, store, disk)
                            )

    def _asked(self, system: SystemConfig, sequences: int) -> Iterator[Asked]:
        """Every budget and window."""
        if system.name in EVERYTHING:
            yield Asked(system, 1.0, sequences)
            return
        for budget in self.setting.budgets:
            for window in self.setting.windows if budget < 1 else (None,):
                width = system.window if window is None else window
                yield Asked(dataclasses.replace(system, window=width), budget, sequences)

    @contextmanager
    def _placed(self, place: str, kept: Path, sequences: int) -> Iterator[Path]:
        """The folder of a store: the one on disk, or a new one in memory with what the one on disk
        has of so many prefixes."""
        if place == "ssd" or not sequences:
            yield kept
            return
        with tempfile.TemporaryDirectory(prefix="ckv-decode-", dir=SHM) as name:
            with ChunkStore.open(kept) as store:
                wanted = {tokens.tobytes() for tokens in self.prefixes[:sequences]}
                found = [p for p in store.prefixes() if p.tokens.tobytes() in wanted]
                ids = [span.segment_id for prefix in found for span in prefix.spans]
            ChunkStore.open(Path(name)).close()  # its index is made anew of what is copied
            for one in ids:
                part = Path("segments", one[:2], one)
                shutil.copytree(kept / part, Path(name, part))
            yield Path(name)

    def _fits(self, asked: Asked, place: str, kept: Path) -> bool:
        """Whether pools and KV have room; notes why not."""
        system, sequences = asked.system, asked.sequences
        size = self._kv_bytes * sequences
        device, host = self._shares(system, place)
        # Digests are at most an eighth of the KV; the store has them beside it.
        needs = round((device + host + 1 / 8 + (9 / 8 if place == "host" else 0)) * size)
        free = psutil.virtual_memory().available - BESIDE
        here = sum(file.stat().st_size for file in kept.rglob("*") if file.is_file())
        room = shutil.disk_usage(kept).free + here - BESIDE
        why = ""
        if needs > free:
            why = f"needs {needs / 1e9:.1f} GB of memory, {max(0, free) / 1e9:.1f} are free"
        elif 9 / 8 * size > room:
            why = f"needs {9 / 8 * size / 1e9:.1f} GB of disk, {max(0, room) / 1e9:.1f} are free"
        if why:
            about: Json = {"system": system.name, "place": place, "sequences": sequences}
            self.left_out.append(about | {"why": why})
        return not why

    @property
    def _kv_bytes(self) -> int:
        """Of one prefix, in bfloat16."""
        row = self.model.num_kv_heads * self.model.head_dim
        return 2 * 2 * self.model.num_layers * row * self.setting.prefix_tokens

    def _shares(self, system: SystemConfig, place: str) -> tuple[float, float]:
        """Of all KV, in device and in host memory."""
        if system.name == "dense":
            return 1.2, 0.0
        return self.setting.device_share, 0.0 if place == "host" else self.setting.host_share

    def _engine(self, system: SystemConfig, place: str, folder: Path, sequences: int) -> Engine:
        everything = self._kv_bytes * sequences
        device, host = self._shares(system, place)
        config = EngineConfig(
            system=system,
            device_cache_bytes=0,  # what no window keeps leaves the device
            prefetch_device_bytes=round(device * everything),
            host_cache_bytes=round(host * everything),
            digest_bytes=everything,
            admit_bytes=4 * everything,
            warm_batch=0,
        )
        store = ChunkStore.open(folder, config=StoreConfig(direct_io=place == "ssd"))
        return Engine(self.layers, None, store, self.fingerprint, config)

    def _row(self, asked: Asked, place: str, folder: Path, disk: Disk) -> Json:
        system, setting = asked.system, self.setting
        found = self._decoded(asked, place, folder, disk)
        floor: float | None = None
        if system.name in OURS and place == "ssd" and asked.sequences in setting.sequences:
            still = dataclasses.replace(asked, system=standing_still(system))
            alone = self._decoded(still, place, folder, disk)
            assert alone["device_hits"] is None, "nothing was to be chosen"
            floor = alone["step_ms"]
        larger = None if floor is None else max(floor, found["read_ms"])
        return {
            "system": system.name,
            "place": place,
            "sequences": asked.sequences,
            "tokens": setting.prefix_tokens,
            "budget": asked.budget,
            "window": None if system.name in EVERYTHING else system.window,
            **found,
            "still_ms": floor,
            "ratio_to_floor": None if larger is None else found["step_ms"] / larger,
        }

    def _decoded(self, asked: Asked, place: str, folder: Path, disk: Disk) -> Json:
        """What a system takes over the texts, in an engine of its own."""
        system, budget, sequences = asked.system, asked.budget, asked.sequences
        setting, texts = self.setting, self.texts[:sequences]
        with self._engine(system, place, folder, sequences) as engine:
            prefixes = [stored(engine, tokens) for tokens in self.prefixes[:sequences]]
            forget_scores(engine.store, prefixes)
            forget_peak()
            requests = [
                Request(prefix=prefix, suffix=text[:QUESTION].tolist(), budget=budget)
                for prefix, text in zip(prefixes, texts, strict=True)
            ]
            step_s = warmed(engine, requests, texts)
            tuned = self._tuned(engine, requests, asked) if budget < 1 else {}
            warm, tokens = tokens_within(setting.row_seconds, step_s, setting.warm, setting.tokens)
            bandwidth = disk.bandwidth(engine.layout.pack_bytes) if place == "ssd" else None
            timeline = self._timeline if system.name == KVDRIVE.name else None
            found = measured(
                engine, requests, texts, warm=warm, tokens=tokens, bandwidth=bandwidth,
                timeline=timeline,
            )  # fmt: skip
            return found | tuned | memory(engine, self._weight_bytes)

    def _tuned(self, engine: Engine, requests: Sequence[Request], asked: Asked) -> Json:
        """What KVDrive's calibration finds, by other texts over the same prefixes."""
        if not isinstance(engine.worker.decode_selections, KvDriveSelections):
            return {}
        texts = self.tuning_texts[: asked.sequences]
        again = [
            dataclasses.replace(request, suffix=text[:QUESTION].tolist())
            for request, text in zip(requests, texts, strict=True)
        ]
        window = None if self.setting.windows == (None,) else asked.system.window
        found = tune(engine, again, forced(texts, TUNED), window=window)
        engine.settle()  # host memory is filled
        return {
            "window": found.window, "micro_batches": found.micro_batches,
            "tuning": dataclasses.asdict(found),
        }  # fmt: skip


def standing_still(system: SystemConfig) -> SystemConfig:
    """A system whose texts go on by what their questions chose: it attends to as much, and neither
    chooses nor reads between tokens."""
    return dataclasses.replace(system, decode=None)
