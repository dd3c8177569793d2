"""Configuration: `SystemConfig` (which algorithm), `EngineConfig` (how much), `Budget`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from threading import TIMEOUT_MAX
from typing import Any, Literal, Self, get_args

from ckv_jax.errors import WrongType, check_number, check_text, check_whole
from ckv_jax.model.config import ModelConfig
from ckv_jax.prefix.policy import Policy
from ckv_jax.selection.select import NOTHING, WHOLE_QUESTION, Always, Select
from ckv_jax.storage.codec import Codec, codec_id, codec_named
from ckv_jax.storage.layout import Layout

Prefetch = Literal["none", "intra", "previous"]
PolicyName = Literal["attention", "frequency-attention", "lru", "lfu"]
DigestName = Literal["none", "int4", "pq", "means", "bounds", "means+cosines"]

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
        """How many of `num_chunks` chunks (or tokens) may be selected: the smallest integer not
        below the share, at least one."""
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
class OwnParts:
    """What a system brings in place of parts of the core (`ckv_jax.baselines` has examples)."""

    layout: Callable[[Layout, int], Layout] | None = None
    """How its packs lie on disk: from the core's layout and a model's query heads to its own."""
    executor: Callable[[Any], Any] | None = None
    """What answers re-prefills: from a `serving.worker.Worker` to a
    `pipeline.executor.ReprefillExecutor`."""
    decoding: Callable[[Any], Any] | None = None
    """What selects for each token of a generation: from a `decode.selection.DecodeContext` to a
    `decode.selection.DecodeSelections`."""
    selects: Literal["chunk", "token", "all"] = "chunk"
    """What a budget counts; "all": the executor attends to everything, whatever the budget."""
    generates: bool = True
    """False: the executor serves first tokens only, in batches over one prefix."""

    def __post_init__(self) -> None:
        _one_of("selects", self.selects, Literal["chunk", "token", "all"])
        for name in ("layout", "executor", "decoding"):
            part = getattr(self, name)
            if part is not None and not callable(part):
                raise ValueError(f"got {name}={part!r}, expected a function or a class")
        if self.executor is None and (self.selects != "chunk" or not self.generates):
            raise ValueError(
                f"got selects={self.selects!r}, generates={self.generates} without an executor, "
                "expected one that attends to that"
            )


CORE = OwnParts()
"""The core's own parts."""


@dataclass(frozen=True, kw_only=True)
class SystemConfig:
    """One method: chunks, digest, selection, prefetch and cache policy."""

    name: str
    """What reports call it."""
    chunk_tokens: int = 16
    """C: tokens in a chunk."""
    pack_layers: int = 4
    """Layers whose K and V of one chunk are one read."""
    period: int = 4
    """Layers that share one selection."""
    subperiod: int = 4
    """Layers in one jitted call: how much KV must be there before compute starts."""
    digest: DigestName = "int4"
    """The compressed copy of keys that is scored and stays in memory: quantised, or one landmark
    for each chunk (`LANDMARKS`). "none": a system without an executor computes everything."""
    prefetch: Prefetch = "intra"
    """Packs that are read before they are needed: none; those of a period once it has selected
    ("intra"); those of the next period too, by what this one selected, if that had to be read
    ("previous")."""
    policy: PolicyName | Policy = "attention"
    """A name from `prefix.policy.POLICIES`, or a policy of one's own."""
    always: Always = NOTHING
    """Chunks that every selection holds outside of its budget, such as `selection.select.Ends`."""
    reprefill: Select = WHOLE_QUESTION
    """How a question selects chunks."""
    decode: Select | None = None
    """How each generated token selects what it attends to; None: the selection of the re-prefill
    stays to the end."""
    window: float = 2.0
    """Slots that a sequence's decode keeps on the device between tokens, for each chunk of one
    selection, at least 1; fewer where memory is short."""
    codec: str | Codec = "none"
    """A name from `storage.codec.CODECS`, or a codec of one's own: how packs lie on disk. With one
    that rounds, budget 1.0 is exact up to the codec."""
    own: OwnParts = CORE
    """Parts of its own."""

    def __post_init__(self) -> None:
        if not isinstance(self.own, OwnParts):
            raise ValueError(f"got own={self.own!r}, expected OwnParts")
        _one_of("digest", self.digest, DigestName)
        _one_of("prefetch", self.prefetch, Prefetch)
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
        if self.decode is not None:
            self.decode.check_text()
        if self.always != NOTHING and not self.chunked:
            raise ValueError(
                f"got always={self.always!r} with selects={self.own.selects!r}, expected a system "
                "that selects chunks"
            )
        if self.digest == "none":
            for name, needs in (
                ("score_layers above 1", self.reprefill.score_layers > 1),
                ("decode=Select(...)", self.decode is not None),
            ):
                if needs:
                    raise ValueError(f"got {name} without a digest, expected one")
        check_number("window", self.window)
        if not self.window >= 1:
            raise ValueError(f"got window={self.window}, expected at least 1: a whole selection")

    @cached_property
    def computes_all(self) -> bool:
        """Whether it attends to nothing stored: every request computes its whole text."""
        return self.digest == "none" and self.own.executor is None

    @cached_property
    def chunked(self) -> bool:
        """Whether a budget counts chunks, which are what is read, and not tokens."""
        return self.own.selects == "chunk"

    @property
    def coder(self) -> Codec | None:
        """What `codec` names; None where packs lie on disk as they are in memory."""
        return codec_named(self.codec) if isinstance(self.codec, str) else self.codec

    def layout(
        self, *, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> Layout:
        """How a prefix of such a model lies on disk for this system."""
        periods = [
            range(first, min(first + self.period, num_layers))
            for first in range(0, num_layers, self.period)
        ]
        counts = {select.score_layers for select in (self.reprefill, self.decode) if select}
        scored = sorted({i for p in periods for n in counts for i in scoring_layers(p, n)})
        layout = Layout(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            chunk_tokens=self.chunk_tokens,
            pack_layers=self.pack_layers,
            probe="none",
            digest=self.digest,
            digest_layers=() if self.digest == "none" else tuple(scored),
        )
        if self.own.layout is not None:
            layout = self.own.layout(layout, num_heads)
        if self.coder is None:
            return replace(layout, short_last=layout.uneven)
        size = self.coder.num_bytes(layout)
        return replace(layout, codec=codec_id(self.coder), codec_bytes=size)


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
    """While the engine is idle, the engine compiles the programs that questions over a newly stored
    prefix need, in batches of up to this size. 0: it compiles them at first use. See
    `Engine.settle`."""
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


def check_split(system: SystemConfig, layout: Layout, devices: int) -> None:
    """Raises `ValueError` for a model over several `devices` under a system that cannot be split:
    its packs or its probe are of some heads alone, or its own score needs all of them."""
    if devices > 1 and (layout.pack_heads < layout.num_kv_heads or layout.probe == "heads"):
        raise ValueError(
            f"got tensor_parallel={devices} with system {system.name!r}, expected 1: some of its "
            "heads decide by themselves what is read, and each is on one device"
        )
    if devices > 1 and any(one and one.score for one in (system.reprefill, system.decode)):
        raise ValueError(
            f"got tensor_parallel={devices} with system {system.name!r}, expected 1: its own score "
            "needs all heads, and each device has some"
        )
