"""Configuration: `SystemConfig` (which algorithm), `EngineConfig` (how much), `Budget`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import TIMEOUT_MAX
from typing import Any, Literal, Self, get_args

from ckv_jax.errors import WrongType, check_number, check_text, check_whole
from ckv_jax.model.config import ModelConfig
from ckv_jax.prefix.policy import Policy
from ckv_jax.selection.select import WHOLE_QUESTION, Select
from ckv_jax.selection.zones import Zones
from ckv_jax.storage.codec import Codec, codec_id, codec_named
from ckv_jax.storage.grouping import TOGETHER
from ckv_jax.storage.layout import LANDMARKS, PROBE_HEADS, Layout

Selector = Literal["none", "all", "chunk", "token"]
"""What takes part in attention: nothing stored (recompute), everything, chunks, or tokens."""
Prefetch = Literal["none", "intra", "inter"]
Speculate = Literal["previous", "lookahead"]
PolicyName = Literal["attention", "frequency-attention", "lru", "lfu"]
KeepName = Literal["lru", "lfu", "lookahead"]
WidthsName = Literal["even", "profiled"]
DigestName = Literal["none", "int8", "int4", "pq", "means", "bounds", "means+cosines"]

MIB = 2**20
GB = 10**9

_NUMBER = r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_MASS = re.compile(rf"mass:{_NUMBER}(?::{_NUMBER}-{_NUMBER})?")


def _one_of(name: str, value: object, kind: object) -> None:
    if value not in get_args(kind):
        raise ValueError(f"got {name}={value!r}, expected one of {', '.join(get_args(kind))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a request may select in every period.

    Attributes:
      most: the share of the prefix's chunks, in (0, 1], that may be selected.
      mass: the share, in (0, 1], of the selecting queries' attention that the selected chunks must
        hold: no more of them are taken. None: as many as `most` allows.
      least: the share of chunks that is selected in any case; one chunk always is.
    """

    most: float = 1.0
    mass: float | None = None
    least: float = 0.0

    @classmethod
    def of(cls, budget: float | str) -> Self:
        """From a number in (0, 1], "mass:SHARE" or "mass:SHARE:LEAST-MOST".

        Raises `ValueError` for anything else.
        """
        if isinstance(budget, str):
            return cls._by_mass(budget)
        if type(budget) is not float:  # as almost every budget is, once a request
            check_number("budget", budget)
        if not 0.0 < budget <= 1.0:
            raise ValueError(f"got budget={budget}, expected a share of the prefix in (0, 1]")
        return cls(most=float(budget))

    @classmethod
    def _by_mass(cls, budget: str) -> Self:
        match = _MASS.fullmatch(budget)
        shares = (match[1], match[2] or "0", match[3] or "1") if match else ("0", "0", "1")
        mass, least, most = map(float, shares)
        if not 0.0 < mass <= 1.0 or not 0.0 <= least <= most <= 1.0 or not most:
            raise ValueError(
                f"got budget={budget!r}, expected a share of the prefix, mass:SHARE or "
                "mass:SHARE:LEAST-MOST, with shares in (0, 1] and LEAST at most MOST"
            )
        return cls(most=most, mass=mass, least=least)

    @property
    def exact(self) -> bool:
        """Whether everything takes part."""
        return self.most == 1.0 and (self.mass in (None, 1.0) or self.least == 1.0)

    def chunks(self, num_chunks: int) -> int:
        """How many of so many chunks (or tokens) may be selected: the smallest integer not below
        the share, at least one."""
        return _share(self.most, num_chunks)

    def floor(self, num_chunks: int) -> int:
        """How many are in any case."""
        return min(_share(self.least, num_chunks), self.chunks(num_chunks))


def _share(share: float, count: int) -> int:
    return max(1, math.ceil(round(share * count, 9)))


def check_budget(budget: float | str) -> float | str:
    """`budget` itself, or `ValueError` unless it is one, see `Budget.of`."""
    Budget.of(budget)
    return budget


def scoring_layers(period: range, score_layers: int) -> list[int]:
    """The layers of one period that select for it: at most so many, the first among them."""
    count = min(score_layers, len(period))
    return [period[i * len(period) // count] for i in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig:
    """One algorithm: layout x probe x selector x prefetcher x cache policy (see `systems.py`)."""

    name: str
    """What reports call it."""
    selector: Selector = "chunk"
    """What takes part in attention, and what a budget counts: chunks, tokens, all of the prefix, or
    nothing of it. The engine's own executor selects chunks."""
    executor: Callable[[Any], Any] | None = None
    """What answers re-prefills: from a `serving.worker.Worker` to a
    `pipeline.executor.ReprefillExecutor`; None: the engine's own. With one of its own a system
    serves first tokens only, in batches over one prefix."""
    chunk_tokens: int = 16
    """C: tokens in a chunk."""
    pack_layers: int = 4
    """Layers whose K and V of one chunk are one read."""
    kv_together: bool = True
    """K and V of a chunk are one read; False: a read each."""
    heads_apart: bool = False
    """Each KV head of a period selects chunks for itself, by its own queries, and has packs of its
    own: it attends to what it asked for and to nothing that others did, in smaller reads."""
    grouping: Literal["position", "alike"] = "position"
    """What a chunk is: tokens at neighbouring positions, or with heads apart those that are alike
    to a layer's KV head (KVDrive §4). A text's first 16 and last 64 tokens are then in chunks of
    their own, which are attended to whatever the budget, beside it."""
    keep_ends: bool = False
    """A prefix's first 16 and last 64 tokens take part whatever is selected, outside of the budget:
    the first chunk holds a third of all attention in a trained model (StreamingLLM's sink)."""
    outliers: float = 0.0
    """Share of a prefix's chunks that each KV head of every layer attends to whatever it chooses,
    beside its budget: those with a key that is least like the chunk's mean (ShadowKV, which has 48
    of the 16,384 chunks of 128k tokens). Needs the digest "means+cosines". 0: none."""
    period: int = 8
    """Layers that share one selection."""
    subperiod: int = 4
    """Layers in one jitted call: how much KV must be there before compute starts."""
    probe: Literal["keys", "heads", "digest", "none"] = "keys"
    """What is scored to select: all keys, those of some heads, or a digest that stays in memory."""
    probe_heads: int = PROBE_HEADS
    """Query heads whose keys are scored with probe="heads", the first of every layer (IMPRESS
    §4.3); where query heads share a key head, so many need fewer keys."""
    digest: DigestName = "none"
    """How that digest holds keys: quantised, or as one landmark per chunk (`LANDMARKS`)."""
    prefetch: Prefetch = "inter"
    """Packs are read before they are needed: never, within a period, or across periods too."""
    speculate: Speculate = "previous"
    """What is read across periods: what the period before chose, or what the next period's queries
    on this one's hidden state choose."""
    overfetch: float = 1.0
    """Chunks that lookahead speculates for each one that will be selected: a near miss that was
    read costs its bytes, one that was not costs a read's latency. Rows of a batch share the
    excess. In decode, what a token nearly chose is read ahead for the next one."""
    speculate_always: bool = True
    """False: only after periods whose packs took longer to read than to choose
    (`executor.Pace`)."""
    policy: PolicyName | Policy = "attention"
    """A name from `cache.policy.POLICIES`, or a policy of one's own."""
    choose: Select = WHOLE_QUESTION
    """How a question selects chunks."""
    decode: Select | None = None
    """How generated tokens select what they attend to; None: what the re-prefill selected stays to
    the end. Needs a resident digest."""
    window: float = 2.0
    """Slots that a sequence's decode keeps on the device between tokens, for each chunk of one
    selection; fewer where memory is short (KVDrive §5). 1: the latest one alone; 0: nothing."""
    widths: WidthsName = "even"
    """How the periods' windows share that: all alike, or "profiled", as `Engine.profile_windows`
    found for this model and system; alike, too, where it has not been asked."""
    keep: KeepName = "lookahead"
    """What leaves a full window first, see `cache.window.KEEP`."""
    sequential: bool = False
    """Decode chooses for all sequences before it reads for any; False: packs of the first are read
    while the next ones choose (KVDrive §6.1)."""
    codec: str | Codec = "none"
    """A name from `storage.codec.CODECS`, or a codec of one's own: how packs lie on disk. With one
    that rounds, budget 1.0 is exact up to the codec."""

    def __post_init__(self) -> None:
        _one_of("selector", self.selector, Selector)
        if self.executor is None and self.selector in ("all", "token"):
            raise ValueError(
                f"got selector={self.selector!r} without an executor, expected one that attends to "
                "that"
            )
        if self.executor is not None and (self.selector == "none" or not callable(self.executor)):
            raise ValueError(
                f"got executor={self.executor!r} with selector={self.selector!r}, expected what "
                "makes an executor, of a system that attends to something stored"
            )
        _one_of("prefetch", self.prefetch, Prefetch)
        _one_of("speculate", self.speculate, Speculate)
        if isinstance(self.policy, str):
            _one_of("policy", self.policy, PolicyName)
        if isinstance(self.codec, str):
            codec_named(self.codec)
        if self.chunk_tokens < 1:
            raise ValueError(f"got chunk_tokens={self.chunk_tokens}, expected at least 1")
        if self.pack_layers not in (1, 2, 4):
            raise ValueError(f"got pack_layers={self.pack_layers}, expected 1, 2 or 4")
        if self.subperiod % self.pack_layers or self.period % self.subperiod:
            raise ValueError(
                f"got pack_layers={self.pack_layers}, subperiod={self.subperiod}, "
                f"period={self.period}, expected each to divide the next"
            )
        self._check_apart()
        each = self.heads_apart and self.period == 1
        self.zones.check(digest=self.digest, each=each)
        if self.probe_heads < 1:
            raise ValueError(f"got probe_heads={self.probe_heads}, expected at least 1")
        if (self.probe == "digest") != (self.digest != "none"):
            raise ValueError(f"got probe={self.probe!r} with digest={self.digest!r}")
        if self.speculate == "lookahead" and self.probe != "digest":
            raise ValueError("got speculate='lookahead' without a resident digest")
        self.choose.check_question()
        if self.choose.score_layers > 1 and self.probe != "digest":
            raise ValueError(
                f"got score_layers={self.choose.score_layers} without a resident digest, expected 1"
            )
        if self.decode is not None:
            self.decode.check_text()
            if self.probe != "digest":
                raise ValueError("got decode=Select(...) without a resident digest")
        check_number("window", self.window)
        if self.window != 0 and not self.window >= 1:
            raise ValueError(f"got window={self.window}, expected 0, or at least 1: a whole choice")
        _one_of("keep", self.keep, KeepName)
        _one_of("widths", self.widths, WidthsName)
        if self.overfetch < 1:
            raise ValueError(f"got overfetch={self.overfetch}, expected at least 1")

    def _check_apart(self) -> None:
        _one_of("grouping", self.grouping, Literal["position", "alike"])
        if self.grouping == "alike":
            whole = self.chunk_tokens % TOGETHER == 0 and self.digest in LANDMARKS
            if not (self.heads_apart and self.pack_layers == 1 and whole):
                raise ValueError(
                    "got grouping='alike', expected heads apart in packs of one layer, a digest of "
                    f"landmarks and chunk_tokens a multiple of {TOGETHER}"
                )
        if not self.heads_apart:
            return
        own = self.executor is not None
        if own or self.probe != "digest" or not self.kv_together:
            raise ValueError(
                "got heads_apart=True, expected a system that chooses chunks, by a digest, with "
                "keys and values together"
            )
        if self.coder is not None:
            raise ValueError(f"got heads_apart=True with codec={self.codec!r}, expected none")
        if self.prefetch == "inter":
            raise ValueError(
                "got heads_apart=True with prefetch='inter', expected 'intra': what one head "
                "chose says little of another's choice"
            )
        for select in (self.choose, self.decode):
            if select is not None and (select.coarse or select.score or select.peaks):
                raise ValueError(
                    "got heads_apart=True with a coarse pass, peaks or a score of one's own, whose "
                    "scores are of all heads together"
                )

    @property
    def zones(self) -> Zones:
        """What its choices have beside their budget."""
        return Zones(self.keep_ends or self.grouping == "alike", self.outliers)

    @property
    def chunked(self) -> bool:
        """Whether a budget counts chunks, which are what is read, and not tokens."""
        return self.selector == "chunk"

    @property
    def coder(self) -> Codec | None:
        """What `codec` names; None where packs lie on disk as they are in memory."""
        return codec_named(self.codec) if isinstance(self.codec, str) else self.codec

    def probe_width(self, num_heads: int, num_kv_heads: int) -> int:
        """KV heads that hold the keys of `probe_heads`, in a model of so many heads."""
        shared = num_heads // num_kv_heads
        return min(-(-self.probe_heads // shared), num_kv_heads)

    def layout(
        self, *, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> Layout:
        """How a prefix of such a model lies on disk for this system."""
        width = self.probe_width(num_heads, num_kv_heads) if self.probe == "heads" else PROBE_HEADS
        periods = [
            range(first, min(first + self.period, num_layers))
            for first in range(0, num_layers, self.period)
        ]
        counts = {select.score_layers for select in (self.choose, self.decode) if select}
        scored = sorted({i for p in periods for n in counts for i in scoring_layers(p, n)})
        plain = Layout(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            chunk_tokens=self.chunk_tokens,
            pack_layers=self.pack_layers,
            kv_together=self.kv_together,
            heads_apart=self.heads_apart,
            grouping=self.grouping,
            probe="none" if self.probe == "digest" else self.probe,
            probe_width=width,
            digest=self.digest,
            digest_layers=() if self.digest == "none" else tuple(scored),
        )
        if self.coder is None:
            return plain
        size = self.coder.num_bytes(plain)
        return replace(plain, codec=codec_id(self.coder), codec_bytes=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Budgets and sizes of one engine. Bytes are bytes of KV, apart from the model's weights."""

    system: str | SystemConfig = "ckv"
    """A name from `ckv_jax.systems.SYSTEMS`, "package.module:NAME", or a config of one's own."""
    budget: float | str = 0.25
    """Share of the prefix's tokens that take part in attention, where a request names none; or
    "mass:0.95", see `Request.budget`."""
    dtype: str = "bfloat16"
    """Element type of weights, keys and values: bfloat16, float16 or float32."""
    weights: str | None = None
    """None: of `dtype`. "int8": every row of a weight is rounded to 127ths of its largest number,
    in half the memory; on one device, with bfloat16 for all else."""
    device_cache_bytes: int = 512 * MIB
    """Packs kept on the device between requests."""
    host_cache_bytes: int = 1024 * MIB
    """Packs kept in the host's memory when they leave the device."""
    prefetch_device_bytes: int = GB // 5
    """Device room for packs on their way (the paper's 0.2 of 10 GB, §4.5)."""
    prefetch_host_bytes: int = 2 * GB // 5
    """Host room for packs on their way (the paper's 0.4 of 10 GB, §4.5)."""
    digest_bytes: int = 1024 * MIB
    """Room for resident digests; the least recently used prefix's goes first."""
    io_threads: int = 4
    """Threads that read from the store."""
    read_deadline_s: float = 10.0
    """A read that takes longer is given up and its chunks are recomputed."""
    prefill_block: int = 512
    """Tokens in one block of the dense prefill: what others wait for at most."""
    prefill_window: int = 8192
    """Tokens of an ingest whose keys and values stay on the device, fewer where it has room for
    fewer; the others come back from the store, so that a text of any length needs no more
    memory."""
    segment_tokens: int = 1024
    """Generated tokens that leave device memory for the store, to be selected, read and
    evicted like its prefix, whenever there are so many beside the latest 64; 0: they stay. In
    systems whose tokens select (`SystemConfig.decode`)."""
    max_batch: int = 32
    """Requests computed together at most, whatever prefixes they stand on."""
    warm_batch: int = 1
    """While the engine is idle, what questions over a newly stored prefix need is compiled, for up
    to so many at once; 0: programs are compiled when they are first needed. See `Engine.settle`."""
    admit_bytes: int = 1024 * MIB
    """Device room for the packs, suffixes, generations and prefills that run at once, less where
    weights and pool leave less; others wait."""
    tensor_parallel: int = 1
    """Devices that the model is split over, by KV head; the store knows nothing of it."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, so that a second start compiles little."""
    salt: str = ""
    """Tenant: prefixes of one salt are invisible to every other."""

    def __post_init__(self) -> None:
        from ckv_jax.systems import system_of  # which builds its presets of this module

        system_of(self.system)
        check_budget(self.budget)
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"got dtype={self.dtype!r}, expected bfloat16, float16 or float32")
        if self.weights not in (None, "int8"):
            raise ValueError(f"got weights={self.weights!r}, expected 'int8' or None")
        if self.weights and (self.dtype != "bfloat16" or self.tensor_parallel != 1):
            raise ValueError(
                f"got weights={self.weights!r} with dtype={self.dtype!r} and "
                f"tensor_parallel={self.tensor_parallel}, expected bfloat16 on one device"
            )
        for name in (
            "device_cache_bytes", "host_cache_bytes", "digest_bytes", "segment_tokens",
            "warm_batch",
        ):  # fmt: skip
            check_whole(name, getattr(self, name), least=0)
        for name in (
            "prefetch_device_bytes", "prefetch_host_bytes", "io_threads", "prefill_block",
            "prefill_window", "max_batch", "admit_bytes", "tensor_parallel",
        ):  # fmt: skip
            check_whole(name, getattr(self, name), least=1)
        if system_of(self.system).heads_apart and self.tensor_parallel > 1:
            raise ValueError(
                f"got tensor_parallel={self.tensor_parallel} for a system whose heads have packs "
                "of their own, expected 1"
            )
        check_number("read_deadline_s", self.read_deadline_s)
        if not 0 < self.read_deadline_s <= TIMEOUT_MAX:
            raise ValueError(
                f"got read_deadline_s={self.read_deadline_s}, expected more than 0 seconds, "
                f"at most {TIMEOUT_MAX:.0f}"
            )
        if not isinstance(self.salt, str):
            raise WrongType(f"got salt={self.salt!r}, expected a text")
        check_text(self.salt)


def layout_of(system: SystemConfig, model: ModelConfig, dtype: str) -> Layout:
    """How `system` stores KV of `model`; `ValueError` for one that does not suit the model."""
    return system.layout(
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )


def check_split(system: SystemConfig, devices: int) -> None:
    """`ValueError` for a model over several `devices` under a system in which its first heads
    choose for all."""
    if devices > 1 and system.probe == "heads":
        raise ValueError(
            f"got tensor_parallel={devices} with system {system.name!r}, expected 1: its first "
            "heads decide what is read, and they are on one device"
        )
