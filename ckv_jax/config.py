"""Configuration: `SystemConfig` (the method), `EngineConfig` (sizes of one engine), `Budget`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from threading import TIMEOUT_MAX
from typing import Any, Literal, Self

from ckv_jax.errors import WrongType, check_number, check_one_of, check_text, check_whole
from ckv_jax.model.config import ModelConfig, check_weights
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The chunks that a request may select in every period, as shares of the prefix.

    Attributes:
      most: the largest share of the prefix's chunks to select, in (0, 1].
      mass: the share of the selecting queries' attention, in (0, 1], that the selected chunks must
        hold, of what is not always kept (`SystemConfig.always`); selection stops there. None:
        select as many chunks as `most` allows.
      least: the smallest share of chunks to select; at least one chunk always is.
    """

    most: float = 1.0
    mass: float | None = None
    least: float = 0.0

    @classmethod
    def of(cls, budget: float | str) -> Self:
        """Parses a number in (0, 1], "mass:SHARE" or "mass:SHARE:LEAST-MOST".

        Raises `ValueError` for anything else.
        """
        if isinstance(budget, str):
            return cls._by_mass(budget)
        if type(budget) is not float:  # as almost every budget is, once a request
            check_number("budget", budget)
        if not 0.0 < budget <= 1.0:
            raise ValueError(
                f"got budget={budget}, expected a share of the prefix in (0, 1], such as 0.25"
            )
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
        """Whether all chunks are selected, so that the answer is exact."""
        return self.most == 1.0 and (self.mass in (None, 1.0) or self.least == 1.0)

    def chunks(self, num_chunks: int) -> int:
        """Returns the most chunks (or tokens) to select of `num_chunks`: the share, rounded up, and
        at least one."""
        return _share(self.most, num_chunks)

    def floor(self, num_chunks: int) -> int:
        """Returns the fewest chunks to select of `num_chunks`."""
        return min(_share(self.least, num_chunks), self.chunks(num_chunks))


def _share(share: float, count: int) -> int:
    return max(1, math.ceil(round(share * count, 9)))


def check_budget(budget: float | str) -> float | str:
    """Returns `budget` unchanged; raises `ValueError` unless it is one, see `Budget.of`."""
    Budget.of(budget)
    return budget


def scoring_layers(period: range, score_layers: int) -> list[int]:
    """Returns the layers of one period that score for it: at most `score_layers`, the first one
    included."""
    count = min(score_layers, len(period))
    return [period[i * len(period) // count] for i in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnParts:
    """Parts of a system that replace parts of the core (`ckv_jax.baselines` has examples)."""

    layout: Callable[[Layout, int], Layout] | None = None
    """Layout of packs on disk: maps (the core's layout, number of query heads) to a layout."""
    executor: Callable[[Any], Any] | None = None
    """Executor of re-prefills: maps a `serving.worker.Worker` to a
    `pipeline.executor.ReprefillExecutor`."""
    decoding: Callable[[Any], Any] | None = None
    """Selections of generated tokens: maps a `decode.token.DecodeContext` to a
    `decode.selection.DecodeSelections`."""
    selects: Literal["chunk", "token", "all"] = "chunk"
    """Unit of a budget: chunks or tokens. "all": the executor ignores the budget and attends to
    everything."""
    generates: bool = True
    """Whether the system generates tokens after the first. False: the executor computes first
    tokens only, in batches over one prefix."""

    def __post_init__(self) -> None:
        check_one_of("selects", self.selects, Literal["chunk", "token", "all"])
        for name in ("layout", "executor", "decoding"):
            part = getattr(self, name)
            if part is not None and not callable(part):
                raise ValueError(f"got {name}={part!r}, expected a function or a class")
        if self.executor is None and (self.selects != "chunk" or not self.generates):
            raise ValueError(
                f"got selects={self.selects!r}, generates={self.generates} without an executor, "
                "expected one that implements them"
            )


@dataclass(frozen=True, kw_only=True)
class SystemConfig:
    """One method of re-prefill: chunks, digest, selection, prefetch and cache policy.

    Raises `ValueError` for fields that are out of range or do not fit together.
    """

    name: str
    """Name of the system in reports and messages."""
    chunk_tokens: int = 16
    """Tokens in a chunk (C)."""
    pack_layers: int = 4
    """Layers in a pack, which is one read: K and V of one chunk. 1, 2 or 4; divides `subperiod`."""
    period: int = 4
    """Layers that share one selection."""
    subperiod: int = 4
    """Layers in one jitted call, which starts when their packs have been read. Divides `period`."""
    digest: DigestName = "int4"
    """The compressed copy of the keys that is scored and stays in memory: quantised keys, or one
    landmark per chunk (`LANDMARKS`). "none": a system without an executor computes everything."""
    prefetch: Prefetch = "intra"
    """When packs are read: "none", when a subperiod needs them; "intra", for all of a period once
    it has selected; "previous", also for the next period, by the chunks that this one selected, if
    those had to be read."""
    policy: PolicyName | Policy = "attention"
    """Cache policy: a name from `prefix.policy.POLICIES`, or a `Policy` of your own."""
    always: Always = NOTHING
    """Chunks that every selection includes outside its budget, such as `selection.select.Ends`."""
    reprefill: Select = WHOLE_QUESTION
    """Selection of a question."""
    decode: Select | None = None
    """Selection of each generated token; None: generated tokens keep the question's selection."""
    window: float = 2.0
    """Device slots that the decode of a sequence keeps between tokens, per chunk of one selection.
    At least 1; the engine uses fewer slots where memory is short."""
    codec: str | Codec = "none"
    """Encoding of packs on disk: a name from `storage.codec.CODECS`, or a `Codec` of your own. With
    a lossy codec, budget 1.0 is exact up to the codec."""
    own: OwnParts = OwnParts()
    """Parts that replace those of the core."""

    def __post_init__(self) -> None:
        if not isinstance(self.own, OwnParts):
            raise ValueError(f"got own={self.own!r}, expected OwnParts")
        check_one_of("digest", self.digest, DigestName)
        check_one_of("prefetch", self.prefetch, Prefetch)
        if isinstance(self.policy, str):
            check_one_of("policy", self.policy, PolicyName)
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
        if self.reprefill.every > 1:
            raise ValueError(
                f"got reprefill=Select(every={self.reprefill.every}), expected every=1: a question "
                "selects once for each period"
            )
        if self.decode is not None:
            self.decode.check_text()
            if self.decode.every > 1 and self.own.decoding is not None:
                raise ValueError(
                    f"got decode=Select(every={self.decode.every}) with own.decoding, expected "
                    "every=1: such a system selects for every token"
                )
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
                    raise ValueError(f"got {name} without a digest, expected one such as 'int4'")
        check_number("window", self.window)
        if not self.window >= 1:
            raise ValueError(f"got window={self.window}, expected at least 1, a whole selection")

    @cached_property
    def computes_all(self) -> bool:
        """Whether every request computes its whole text and attends to no stored KV."""
        return self.digest == "none" and self.own.executor is None

    @cached_property
    def chunked(self) -> bool:
        """Whether a budget counts chunks, the unit of reads, and not tokens."""
        return self.own.selects == "chunk"

    @property
    def coder(self) -> Codec | None:
        """Returns the codec; None where packs on disk equal those in memory."""
        return codec_named(self.codec) if isinstance(self.codec, str) else self.codec

    def layout(
        self, *, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> Layout:
        """Returns the layout on disk of a model's KV under this system.

        `num_heads`: query heads. Raises `ValueError` for a model that does not suit the system.
        """
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
    """Budgets and sizes of one engine. Sizes are bytes of KV; the model's weights come on top.

    Raises `ValueError` for a value out of range, `WrongType` for a value of another type.
    """

    system: str | SystemConfig = "ckv"
    """A name from `ckv_jax.systems.SYSTEMS`, "package.module:NAME", or a config of your own."""
    budget: float | str = 0.25
    """Default budget of requests: the share of the prefix's tokens to attend to, in (0, 1]; or
    "mass:0.95", see `Request.budget`."""
    dtype: str = "bfloat16"
    """Element type of weights, keys and values: bfloat16, float16 or float32."""
    weights: str | None = None
    """Quantisation of the weights. "int8": symmetric, one scale per row (its largest magnitude /
    127), in half the memory; needs one device and `dtype` bfloat16. None: not quantised."""
    device_cache_bytes: int = 512 * MIB
    """Device memory for packs cached between requests."""
    host_cache_bytes: int = 1024 * MIB
    """Host memory for packs evicted from the device."""
    prefetch_device_bytes: int = GB // 5
    """Device memory for packs being read (the paper's 0.2 of 10 GB, §4.5)."""
    prefetch_host_bytes: int = 2 * GB // 5
    """Host memory for packs being read (the paper's 0.4 of 10 GB, §4.5)."""
    digest_bytes: int = 1024 * MIB
    """Memory for resident digests; the least recently used prefix's is evicted first."""
    io_threads: int = 4
    """Threads that read from the store."""
    read_deadline_s: float = 10.0
    """Seconds after which a read is abandoned and its chunks are recomputed."""
    prefill_block: int = 512
    """Tokens in one block of the dense prefill; other requests wait for at most one block."""
    prefill_window: int = 8192
    """Tokens of an ingest whose keys and values stay on the device, or fewer where memory is short.
    Earlier ones are read back from the store, so the memory does not grow with the text."""
    segment_tokens: int = 1024
    """Generated tokens, besides the latest 64, after which they move from device memory to the
    store, to be selected, read and evicted like the prefix; 0: never. For systems with
    `SystemConfig.decode`."""
    max_batch: int = 32
    """Maximum number of requests computed together, over any prefixes."""
    warm_batch: int = 1
    """Largest batch whose programs an idle engine compiles for questions over a newly stored
    prefix. 0: programs are compiled at first use. See `Engine.settle`."""
    admit_bytes: int = 1024 * MIB
    """Device memory for the packs, suffixes, generations and prefills of running requests, or less
    where weights and pool leave less; further requests wait."""
    tensor_parallel: int = 1
    """Devices to split the model over, by KV head; the stored KV does not depend on it."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, so that a second start compiles little."""
    salt: str = ""
    """The tenant's salt: prefixes of one salt are invisible under every other."""

    def __post_init__(self) -> None:
        from ckv_jax.systems import system_of  # which builds its presets of this module

        system_of(self.system)
        check_budget(self.budget)
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"got dtype={self.dtype!r}, expected bfloat16, float16 or float32")
        check_weights(self.weights, self.dtype, self.tensor_parallel)
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
    """Returns the layout of `model`'s KV under `system`; where they do not fit, `ValueError` with
    the system's name first."""
    try:
        return system.layout(
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
        )
    except ValueError as error:
        raise ValueError(f"{system.name}: {error}") from error


def check_split(system: SystemConfig, layout: Layout, devices: int) -> None:
    """Checks that a system can be split over several `devices`; else raises `ValueError`.

    It cannot where its packs or its probe belong to single heads, or its score needs all heads.
    """
    if devices > 1 and (layout.pack_heads < layout.num_kv_heads or layout.probe == "heads"):
        raise ValueError(
            f"got tensor_parallel={devices} with system {system.name!r}, expected 1: its heads "
            "select separately, and each head is on one device"
        )
    if devices > 1 and any(one and one.score for one in (system.reprefill, system.decode)):
        raise ValueError(
            f"got tensor_parallel={devices} with system {system.name!r}, expected 1: its score "
            "needs all heads, and each device has only some"
        )
