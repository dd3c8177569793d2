"""Measurements of `bench.decode`: a model, stores of long prefixes, and one engine at a time."""

from __future__ import annotations

import dataclasses
import gc
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
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
from bench.disk import Disk
from bench.kept import Kept
from bench.lab import forget_scores
from bench.long_kv import stored, walking_tokens
from bench.measure import Compilations
from bench.memory import release_heap, status_mb
from bench.structured import structured_model
from ckv_jax import Engine, EngineConfig, Request, SamplingParams
from ckv_jax.baselines.kvdrive import KVDRIVE, KvDriveSelections, tune
from ckv_jax.config import SystemConfig, layout_of
from ckv_jax.decode.decoder import rows_bucket
from ckv_jax.pipeline.layers import Layers
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.store import ChunkStore
from ckv_jax.systems import system_named
from ckv_jax.trace import Trace, TraceSpan, write_perfetto

QUESTION = 8
"""Tokens of a text that are re-prefilled; those after them are decoded."""
LEAST = 2
"""Tokens that are measured at least, however slow they are."""
EVERYTHING = ("dense", "flexgen")
"""Systems that attend to the whole prefix."""
DECODE_SYSTEMS = (
    *EVERYTHING, "quest", "shadowkv", "retroinfer", "infinigen", "pqcache", "kvdrive", "kvswap",
    "solidattention", "magicpig",
)  # fmt: skip
"""Published systems of long decode."""
OURS = ("kvdrive", "ckv")
RISING = ("ckv",)
IN_MEMORY = ("quest", "shadowkv", "retroinfer", "kvdrive", "ckv")
TUNED = 24
"""Tokens of each text by which KVDrive's windows and micro-batches are tuned."""
BESIDE = 3 << 30
"""Bytes of memory and of disk that are left to everything else."""
SHM = Path("/dev/shm")


def _without(name: str, **fields: Any) -> SystemConfig:
    """KVDrive with parts of it switched off, see `KvDriveSelections`."""
    own = dataclasses.replace(KVDRIVE.own, decoding=partial(KvDriveSelections, **fields))
    return dataclasses.replace(KVDRIVE, name=f"kvdrive, {name}", own=own)


WHOLE_BATCH = _without("no micro-batches", micro_batches=1)
EVEN = _without("even windows", even=True)
NOTHING_AHEAD = _without("no reads ahead", near=1.0)
ONE_BY_ONE = _without("none of these", near=1.0, micro_batches=1, even=True)


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
    a text's question and tokens fit the smallest buffers, which do not grow meanwhile."""
    warm: int = 16
    row_seconds: float = 30.0
    stay: float = 0.9
    """Probability that a token keeps to its text's topic."""
    device_share: float = 1 / 16
    host_share: float = 1 / 4
    windows: tuple[float | None, ...] = (None,)
    """Of every system that selects; None: its own."""
    seed: int = 0

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
            ChunkStore.open(Path(name)).close()  # its index is made of what is copied
            for one in ids:
                part = Path("segments", one[:2], one)
                shutil.copytree(kept / part, Path(name, part))
            yield Path(name)

    def _fits(self, asked: Asked, place: str, kept: Path) -> bool:
        """Whether pools and KV have room; notes why not."""
        system, sequences = asked.system, asked.sequences
        size = self._kv_bytes * sequences
        device, host = self._shares(system, place)
        # A digest is at most an eighth of the KV, and a store in memory holds both. MagicPIG keeps
        # all KV in memory (512 bytes of a token and head), and its hashes (300).
        index = 1.6 if system.name == "magicpig" else 1 / 8
        needs = round((device + host + index + (9 / 8 if place == "host" else 0)) * size)
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
            # It goes on by what the questions selected: as much is attended to, nothing is read.
            still = dataclasses.replace(system, decode=None)
            alone = self._decoded(dataclasses.replace(asked, system=still), place, folder, disk)
            assert alone["device_hits"] is None, "nothing was to be selected"
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
            if tuned:  # its windows are others now, and a token takes another time
                step_s = timed(engine, requests, texts, warm=1, tokens=1)[0].late_s
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
        if not isinstance(engine.worker.decoding.selections, KvDriveSelections):
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


class Clock:
    """Time and reads of texts that go on together, token by token, or one after the other: while
    one of them is past its first tokens, and before."""

    def __init__(self, texts: int, warm: int, total: int) -> None:
        """Each of `texts` has `total` tokens, of which `warm` after the first are timed apart."""
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


def tokens_within(seconds: float, step_s: float, warm: int, tokens: int) -> tuple[int, int]:
    """How many tokens are to be warm and measured so that all take about `seconds`: those asked
    for, or fewer. Warm ones, which fill windows, have up to half the time; `LEAST` are measured."""
    warm = min(warm, int(seconds / 2 / step_s))
    return warm, max(min(tokens, LEAST), min(tokens, int(seconds / step_s) - warm))


def forced(texts: Sequence[np.ndarray], tokens: int) -> list[SamplingParams]:
    """Ways to say so many tokens of given texts int32 [n], after their questions."""
    return [
        SamplingParams(
            max_tokens=tokens, forced_ids=tuple(text[QUESTION : QUESTION + tokens].tolist())
        )
        for text in texts
    ]


def timed(
    engine: Engine, requests: Sequence[Request], texts: Sequence[np.ndarray], warm: int, tokens: int
) -> tuple[Clock, list[Any]]:
    """What `warm` tokens and `tokens` more took after the first one, and the generations."""
    total = 1 + warm + tokens
    clock = Clock(len(requests), warm, total)
    with engine.generate(list(requests), forced(texts, total)) as stream:
        for event in stream:
            if event.token_id is not None:
                clock.token(event.index, time.perf_counter(), engine.stats().reads)
        found = stream.results()
    for text in found:
        text.raise_for_error()
    return clock, found


def warmed(engine: Engine, requests: Sequence[Request], texts: Sequence[np.ndarray]) -> float:
    """Compiles and loads what a few tokens need; seconds that one of all texts takes then."""
    asked = requests[0]
    engine.warmup(asked.prefix, max_suffix=QUESTION, budgets=[asked.budget])  # reads of every size
    timed(engine, requests, texts, warm=1, tokens=1)  # compiles; else a slow token allows few
    return timed(engine, requests, texts, warm=1, tokens=1)[0].late_s


def warmed_up_to(
    engine: Engine, requests: Sequence[Request], texts: Sequence[np.ndarray], total: int
) -> None:
    """Compiles what so many tokens need: at each size that buffers grow to meanwhile, questions
    that fill the size before but for one token."""
    size = rows_bucket(QUESTION + 1)
    while size < QUESTION + total:
        longer = [
            dataclasses.replace(request, suffix=text[: size - 1].tolist())
            for request, text in zip(requests, texts, strict=True)
        ]
        timed(engine, longer, [text[size - 1 - QUESTION :] for text in texts], warm=1, tokens=1)
        size *= 2


def measured(
    engine: Engine,
    requests: Sequence[Request],
    texts: Sequence[np.ndarray],
    *,
    warm: int,
    tokens: int,
    bandwidth: float | None,
    timeline: Path | None = None,
) -> Json:
    """The measured part of a row; `bandwidth`: bytes a second that reads can have at best, None
    where the store lies in memory; `timeline`: takes the last two tokens of `kvdrive`."""
    warmed_up_to(engine, requests, texts, 1 + warm + tokens)
    selections, traces = engine.worker.decoding.selections, list[Trace]()
    if isinstance(selections, KvDriveSelections):
        selections.timeline = traces
    with Compilations() as compilations:
        clock, found = timed(engine, requests, texts, warm, tokens)
    if timeline is not None and traces:
        _write_timeline(timeline, traces[-2:])
    late = slice(warm, None)
    spent, reads = clock.late_s, clock.late_reads
    traced = [text.trace.tokens[late] for text in found]
    selected = [token for one in traced for token in one]
    packs = sum(t.device_hits + t.host_hits + t.ssd_reads for t in selected)
    waited = sum(t.select_ms + t.fetch_ms for t in traced[0]) / 1e3
    size = reads * engine.layout.pack_bytes
    read_s = size / bandwidth if bandwidth else 0.0
    busy = max(spent - waited, read_s)
    count = len(requests)
    return {
        "warm_tokens": warm,
        "measured_tokens": tokens,
        "tokens_s": count * tokens / spent,
        "warm_tokens_s": count * warm / clock.warm_s if warm else None,
        "step_ms": 1e3 * spent / tokens,
        "device_hits": sum(t.device_hits for t in selected) / packs if packs else None,
        "host_hits": sum(t.host_hits for t in selected) / packs if packs else None,
        "attention_mass": float(np.mean([t.attention_mass for t in selected]))
        if selected
        else None,
        "ahead_share": sum(t.ahead for t in traced[0]) / max(1, reads),
        "unused_share": sum(t.unused for t in traced[0]) / max(1, reads),
        "bytes_per_token": size / (count * tokens),
        "read_ms": 1e3 * read_s / tokens,
        "select_ms": sum(t.select_ms for t in traced[0]) / tokens,
        "fetch_ms": sum(t.fetch_ms for t in traced[0]) / tokens,
        "exposed_share": waited / spent if selected else None,
        "ratio_to_busy": spent / busy if selected else None,
        "compiled": compilations.count,
        "overlap": overlap([span for trace in traces[1 + warm :] for span in trace.spans]),
    }


def _write_timeline(path: Path, traces: Sequence[Trace]) -> None:
    """Tokens that follow one another, as one Perfetto trace."""
    whole = Trace()
    spans = [span for trace in traces for span in trace.spans]
    whole.extend((*span[:4], dict(span.args)) for span in spans)
    whole.start_ns = min(span.start_ns for span in spans)
    whole.end_ns = max(span.end_ns for span in spans)
    write_perfetto(path, [whole])


def overlap(spans: Sequence[TraceSpan]) -> float | None:
    """Of the time in which packs were looked up, read or copied, the share in which a selection or
    a layer was in progress; None without such spans."""
    device, moved = (
        covered((span.start_ns, span.end_ns) for span in spans if span.lane in lanes)
        for lanes in (("select", "compute"), ("look-up", "host memory", "ssd"))
    )
    total = sum(end - start for start, end in moved)
    both = sum(
        max(0, min(end, other) - max(start, begin))
        for start, end in moved
        for begin, other in device
        if begin < end and start < other
    )
    return both / total if total else None


def covered(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The stretches that spans (start, end) cover together, none overlapping."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def forget_peak() -> None:
    """The process's highest memory (VmHWM) is counted from here on, without what earlier systems
    left: engines that nothing refers to any more, and what C's heap keeps for later."""
    gc.collect()
    release_heap()
    Path("/proc/self/clear_refs").write_text("5")


def memory(engine: Engine, weights: int) -> Json:
    """MB that the process held at most since `forget_peak`, and those that it may: bytes of
    `weights`, device and host budgets, and the digests that are resident."""
    config = engine.config
    budgets = config.device_cache_bytes + config.host_cache_bytes
    budgets += config.prefetch_device_bytes + config.prefetch_host_bytes
    may = weights + budgets + engine.stats().digest_bytes
    return {"peak_mb": status_mb("VmHWM"), "budget_mb": may / 1e6}
