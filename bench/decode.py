"""Decode over contexts that fit no device: tokens per second, hits and bytes of every system.

    python -m bench.decode [--quick] [--json OUT] [--plot PNG]

Each sequence stands on a long prefix of its own, whose KV is written straight to the store
(`bench.long_kv`), and goes on with a text that is given, so that all systems see the same queries.
Device memory holds 1/16 of the KV of all sequences, host memory 1/4; both are the engine's own
pools, and reads are direct, so that the page cache holds nothing. With `place="host"` the store
lies in memory (/dev/shm): reads cost a copy. `dense` and `flexgen` attend to everything, the others
to `budget`; `dense` has device memory for it.

The first `warm` tokens are reported apart (`warm_tokens_s`). `device_hits` and `host_hits` are
shares of the packs that tokens chose; `bytes_per_token` is what was read from the store for a token
of one sequence. `exposed_share` is the share of a token's time spent waiting for choices and packs.
`ratio_to_floor` is the time of a token over the larger of two floors: all the rest of that time
(layers and head), and the bytes read over what fio reads at a pack's size. `ahead_share` and
`unused_share`: packs that reads ahead had when they were chosen, and that they brought for nothing,
over all packs read.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from bench.common import SHAPES, Json, budget_share, finish, result_file, table
from bench.disk import Disk
from bench.figures import save
from bench.heads import HEADED, headed
from bench.long_kv import stored, walking_tokens
from bench.structured import structured_model
from ckv_jax import Engine, EngineConfig, Request, SamplingParams
from ckv_jax.config import SystemConfig
from ckv_jax.pipeline.layers import Layers
from ckv_jax.selection.select import Ahead
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.store import ChunkStore
from ckv_jax.systems import DECODE_SYSTEMS, system_named

SYSTEMS_SHOWN = (*DECODE_SYSTEMS, "ckv", *HEADED)
EVERYTHING = ("dense", "flexgen")
"""Systems that attend to the whole prefix."""
COLUMNS = (
    "system", "place", "sequences", "tokens", "budget", "tokens_s", "device_hits", "host_hits",
    "bytes_per_token", "exposed_share", "ratio_to_floor",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured."""

    model: str = "kv7b-thin"
    systems: tuple[str, ...] = SYSTEMS_SHOWN
    places: tuple[str, ...] = ("ssd",)
    prefix_tokens: int = 32_768
    sequences: tuple[int, ...] = (1, 8)
    budget: float = 1 / 64
    tokens: int = 64
    """Measured, after `warm`."""
    warm: int = 16
    stay: float = 0.9
    """Probability that a token keeps to its text's topic."""
    device_share: float = 1 / 16
    host_share: float = 1 / 4
    window: float | None = None
    """Of every system that chooses; None: its own."""
    ahead: Ahead | None = None
    """What every system that chooses reads ahead; None: its own."""
    overfetch: float | None = None
    """Chunks that count as nearly chosen, for each chosen one; None: the system's own."""
    seed: int = 0

    def to_json(self) -> Json:
        """Plain JSON values."""
        return dataclasses.asdict(self)


QUICK = Setting(
    systems=("flexgen", "quest", "shadowkv", "retroinfer", "kvdrive", "ckv"),
    prefix_tokens=4096, sequences=(2,), tokens=16, warm=4,
)  # fmt: skip
FULL = Setting()


class Clock:
    """Time and reads of texts that go on together, token by token, or one after the other: while
    one of them is past its first tokens, and before."""

    def __init__(self, texts: int, warm: int, total: int) -> None:
        """Each of `texts` has `total` tokens, of which `warm` after the first are told apart."""
        self.warm_s = self.late_s = 0.0
        self.late_reads = 0
        self._seen = [0] * texts
        self._warm = warm
        self._total = total
        self._before = (0.0, 0)

    def token(self, text: int, now: float, reads: int) -> None:
        """One more token of a text; `reads`: packs that were read so far."""
        then, known = self._before
        if any(self._warm < seen < self._total for seen in self._seen):
            self.late_s += now - then
            self.late_reads += reads - known
        elif any(0 < seen < self._total for seen in self._seen):
            self.warm_s += now - then
        self._seen[text] += 1
        self._before = (now, reads)


class Bench:
    """One model, and an engine at a time over a store of its own."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        config = dataclasses.replace(SHAPES[setting.model], eos_token_ids=())
        self.setting = setting
        self.model = config
        self._weights = structured_model(config, seed=setting.seed)
        self.layers = Layers(self._weights)
        self.fingerprint = Fingerprint(
            {"weights": f"structured, seed {setting.seed}", "config": setting.model}
            | {"dtype": "bfloat16", "tokenizer": "", "rope": ""}
        )
        self._folder = folder
        rng = np.random.default_rng(setting.seed)
        count = max(setting.sequences)
        self.prefixes = [
            walking_tokens(rng, setting.prefix_tokens, config.vocab_size, stay=0.5)
            for _ in range(count)
        ]
        self.texts = [
            walking_tokens(
                rng, 8 + setting.warm + setting.tokens, config.vocab_size, stay=setting.stay
            )
            for _ in range(count)
        ]

    def rows(self, name: str, place: str, disk: Disk) -> list[Json]:
        """One system's rows, one for each number of sequences."""
        if name in HEADED:
            system = headed(name, self._weights, self.prefixes[:1])
        else:
            system = system_named(name)
        setting = self.setting
        if system.decode is not None:
            said = {"window": setting.window, "overfetch": setting.overfetch}
            if setting.ahead is not None:
                said["decode"] = dataclasses.replace(system.decode, ahead=setting.ahead)
            said = {key: value for key, value in said.items() if value is not None}
            system = dataclasses.replace(system, **said)
        folder = self._folder if place == "ssd" else Path("/dev/shm")
        with tempfile.TemporaryDirectory(prefix="ckv-decode-", dir=folder) as store:
            return [self._row(system, place, Path(store), n, disk) for n in setting.sequences]

    def _engine(self, system: SystemConfig, place: str, folder: Path, sequences: int) -> Engine:
        setting = self.setting
        kv = 2 * 2 * self.model.num_layers * self.model.num_kv_heads * self.model.head_dim
        everything = kv * setting.prefix_tokens * sequences
        share = 1.2 if system.name == "dense" else setting.device_share
        host = 0 if place == "host" or system.name == "dense" else setting.host_share
        config = EngineConfig(
            system=system,
            device_cache_bytes=0,  # what no window keeps leaves the device
            prefetch_device_bytes=round(share * everything),
            host_cache_bytes=round(host * everything),
            digest_bytes=everything,
            admit_bytes=4 * everything,
            compilation_cache=True,
        )
        store = ChunkStore.open(folder, config=StoreConfig(direct_io=place == "ssd"))
        return Engine(self.layers, None, store, self.fingerprint, config)

    def _row(
        self, system: SystemConfig, place: str, folder: Path, sequences: int, disk: Disk
    ) -> Json:
        setting = self.setting
        budget = 1.0 if system.name in EVERYTHING else setting.budget
        with self._engine(system, place, folder, sequences) as engine:
            prefixes = [stored(engine, tokens) for tokens in self.prefixes[:sequences]]
            requests = [
                Request(prefix=prefix, suffix=text[:8].tolist(), budget=budget)
                for prefix, text in zip(prefixes, self.texts, strict=False)
            ]
            engine.generate(requests, self._forced(3)[:sequences]).results()  # compiles
            clock, texts = self._timed(engine, requests)
            pack = engine.layout.pack_bytes
        late = slice(setting.warm, None)
        spent, reads = clock.late_s, clock.late_reads
        told = [text.trace.tokens[late] for text in texts]
        chose = [token for one in told for token in one]
        packs = sum(t.device_hits + t.host_hits + t.ssd_reads for t in chose)
        waited = sum(t.select_ms + t.fetch_ms for t in told[0]) / 1e3
        size = reads * pack
        floor = max(spent - waited, size / disk.bandwidth(pack))
        return {
            "system": system.name,
            "place": place,
            "sequences": sequences,
            "tokens": setting.prefix_tokens,
            "budget": budget,
            "tokens_s": sequences * setting.tokens / spent,
            "warm_tokens_s": sequences * setting.warm / clock.warm_s,
            "step_ms": 1e3 * spent / setting.tokens,
            "device_hits": sum(t.device_hits for t in chose) / packs if packs else None,
            "host_hits": sum(t.host_hits for t in chose) / packs if packs else None,
            "attention_mass": (
                float(np.mean([t.attention_mass for t in chose])) if chose else None
            ),
            "ahead_share": sum(t.ahead for t in told[0]) / max(1, reads),
            "unused_share": sum(t.unused for t in told[0]) / max(1, reads),
            "bytes_per_token": size / (sequences * setting.tokens),
            "select_ms": sum(t.select_ms for t in told[0]) / setting.tokens,
            "fetch_ms": sum(t.fetch_ms for t in told[0]) / setting.tokens,
            "exposed_share": waited / spent if chose else None,
            "ratio_to_floor": spent / floor if chose else None,
        }

    def _forced(self, tokens: int) -> list[SamplingParams]:
        return [
            SamplingParams(max_tokens=tokens, forced_ids=tuple(text[8 : 8 + tokens].tolist()))
            for text in self.texts
        ]

    def _timed(self, engine: Engine, requests: Sequence[Request]) -> tuple[Clock, list[Any]]:
        """What the tokens took, and the texts."""
        total = 1 + self.setting.warm + self.setting.tokens
        clock = Clock(len(requests), self.setting.warm, total)
        forced = self._forced(total)[: len(requests)]
        with engine.generate(list(requests), forced) as stream:
            for event in stream:
                if event.token_id is not None:
                    clock.token(event.index, time.perf_counter(), engine.stats().reads)
            texts = stream.results()
        for text in texts:
            text.raise_for_error()
        return clock, texts


def main() -> None:
    """The command."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--quick", action="store_true", help="two short prefixes, few tokens")
    p.add_argument("--json", type=result_file, help="write the result to this file")
    p.add_argument("--plot", type=result_file, help="draw the figure into this PNG")
    p.add_argument("--folder", type=Path, help="folder for the stores, on the disk to be measured")
    p.add_argument("--model", choices=SHAPES)
    p.add_argument("--systems", nargs="+", choices=SYSTEMS_SHOWN)
    p.add_argument("--places", nargs="+", choices=("ssd", "host"))
    p.add_argument("--sequences", nargs="+", type=int)
    p.add_argument("--budget", type=budget_share)
    p.add_argument("--ahead", choices=get_args(Ahead))
    for option in ("--device-share", "--host-share", "--stay", "--window", "--overfetch"):
        p.add_argument(option, type=float)
    for option in ("--prefix-tokens", "--tokens", "--warm", "--seed"):
        p.add_argument(option, type=int)
    args = p.parse_args()
    said = {name: getattr(args, name) for name in Setting.__slots__}
    said = {k: tuple(v) if isinstance(v, list) else v for k, v in said.items() if v is not None}
    setting = dataclasses.replace(QUICK if args.quick else FULL, **said)
    rows: list[Json] = []
    with tempfile.TemporaryDirectory(prefix="ckv-bench-", dir=args.folder) as folder:
        bench = Bench(setting, Path(folder))
        with Disk(Path(folder), file_bytes=256 << 20) as disk:
            for name in setting.systems:
                for place in setting.places:
                    rows += bench.rows(name, place, disk)
                    print(table([[row[c] for c in COLUMNS] for row in rows[-1:]], COLUMNS))
    print(table([["" if row[c] is None else row[c] for c in COLUMNS] for row in rows], COLUMNS))
    result = finish(args, setting, {"rows": rows})
    save("decode", result, args.plot)


if __name__ == "__main__":
    main()
