"""One request's sizes on one model, and its arrays as shapes: weights, pool, tables, probes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bench.common import PUBLISHED
from ckv_jax.buckets import chunk_bucket, probe_bucket
from ckv_jax.config import EngineConfig
from ckv_jax.kernels_pallas.score.probe import BoundKeys, Int4Keys, Keys, MeanKeys, PqKeys, Probe
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.shardings import CODEBOOKS, HEADS, ONE_DEVICE, PAGES, PROBE, WHOLE, Shardings
from ckv_jax.pipeline.layers import Layers
from ckv_jax.pipeline.prefill import context_bucket, window_within
from ckv_jax.storage.layout import PQ_PARTS

MODELS: Mapping[str, ModelConfig] = MappingProxyType(
    {name: PUBLISHED[name] for name in ("0.5B", "7B", "14B", "32B", "72B")}
    | {
        "llama-8B": ModelConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope_theta=5e5,
            max_position_embeddings=131072,
        )
    }
)
"""Qwen2.5, and the shape of Llama 3.1 8B (with Qwen's biases, which it does not have)."""

DTYPE = "bfloat16"
PREFIX, SUFFIX, BUDGET = 5008, 32, 0.05
CHUNK, PACK = 8, 2
BASELINE_CHUNK, BASELINE_TOKENS = 64, 256  # the tokens that 5% buys a baseline, rounded up
BLOCK = 512
"""Tokens of one block of a dense prefill."""
WINDOW_ROWS = 64
"""Rows of a decode buffer when it begins."""
CALLS: Any = SimpleNamespace(compile=lambda call, *args, **named: call(*args, **named))
"""In place of `Background`: calls what it is to compile."""
CALL_LAYERS = 4
"""Layers of one call of `run` or `extend`."""


def abstract(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An array that is only a shape."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def ints(*shape: int) -> Any:
    """int32 numbers: positions, tables, lengths."""
    return abstract(shape, jnp.int32)


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, without any padding."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@dataclass(frozen=True)
class Sizes:
    """A request of 32 tokens over 5,008, of which 5% are attended, with an engine's own defaults
    for its pool."""

    config: ModelConfig
    target: Target
    memory_bytes: int | None = None
    """Of each device; None: as much as it takes."""
    shardings: Shardings = ONE_DEVICE
    """Over several devices, arrays are shapes that know where they lie."""

    def split(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> Any:
        """An array that lies as `spec` says."""
        place = self.shardings.place(spec)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place)

    @property
    def row(self) -> int:
        """K * D: numbers in a token's keys (or values) of one layer."""
        return self.config.num_kv_heads * self.config.head_dim

    @property
    def pool_bytes(self) -> int:
        """What an engine gives its pool by default."""
        config = EngineConfig()
        return config.device_cache_bytes + config.prefetch_device_bytes

    @property
    def prefill_window(self) -> int:
        """Tokens of a dense prefill that stay on the device, as an engine there has it."""
        parts, room = self.shardings.size, self.memory_bytes
        if room is not None:
            room -= self.weight_bytes + self.pool_bytes // parts
        return window_within(
            room, EngineConfig().prefill_window, self.config, block=BLOCK,
            itemsize=jnp.dtype(DTYPE).itemsize, devices=parts,
        )  # fmt: skip

    @property
    def prefill_rows(self) -> int:
        """Rows of its buffers."""
        return min(context_bucket(PREFIX, BLOCK), self.prefill_window + BLOCK)

    @property
    def chosen(self) -> int:
        """N: chunks that 5% buys, as the engine rounds them."""
        chunks = -(-PREFIX // CHUNK)
        return chunk_bucket(math.ceil(BUDGET * chunks), chunks)

    @property
    def chunks(self) -> int:
        """M: chunks of a probe, as the engine rounds them."""
        return probe_bucket(-(-PREFIX // CHUNK))

    def pack(self, *, layers: int = PACK, kinds: int = 2, chunk: int = CHUNK) -> tuple[int, ...]:
        """The shape of one slot of the pool."""
        return layers, kinds, chunk, self.row

    def pool(self, *, layers: int = PACK, kinds: int = 2, chunk: int = CHUNK) -> Any:
        """The pool of such slots."""
        shape = self.pack(layers=layers, kinds=kinds, chunk=chunk)
        slots = self.pool_bytes // (math.prod(shape) * jnp.dtype(DTYPE).itemsize)
        return self.split((slots, *shape), DTYPE, PAGES)

    def hidden(self, batch: int, length: int) -> Any:
        """[B, S, E]."""
        return abstract((batch, length, self.config.hidden_size), DTYPE)

    def queries(self, batch: int, length: int) -> Any:
        """[B, S, H, D]."""
        shape = (batch, length, self.config.num_heads, self.config.head_dim)
        return self.split(shape, DTYPE, HEADS)

    def rows(self, batch: int, length: int) -> Any:
        """Keys or values [B, R, K*D]."""
        return self.split((batch, length, self.row), DTYPE, HEADS)

    def scores(self, kind: str, layers: int) -> int:
        """The number of kernel calls that score so many layers. Landmarks and product-quantised
        keys have no kernel. A GPU scores all int4 digests in one call."""
        if kind in LANDMARKS or kind == "pq":
            return 0
        return 1 if kind == "int4" and self.target.platform == "gpu" else layers

    def probe(self, kind: str, tokens: int) -> Probe:
        """A probe of so many keys, or of the chunks that they make."""
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        split = self.split
        if kind in LANDMARKS:
            marks = split((tokens // CHUNK, heads, dim), DTYPE, PROBE)
            if kind == "bounds":
                return BoundKeys(marks, marks)
            return MeanKeys(marks, split((tokens // CHUNK, heads), jnp.float32, PROBE))
        scale = split((tokens, heads), jnp.float32, PROBE)
        if kind == "keys":
            return Keys(split((tokens, heads, dim), DTYPE, PROBE))
        if kind == "int4":
            return Int4Keys(split((tokens, heads, dim // 2), jnp.uint8, PROBE), scale)
        codes = split((tokens, heads, PQ_PARTS), jnp.uint8, PROBE)
        books = (heads, PQ_PARTS, 256, dim // PQ_PARTS)
        return PqKeys(codes, split(books, jnp.float32, CODEBOOKS))

    @cached_property
    def layers(self) -> Layers:
        """The jitted calls over four layers, whose weights are shapes."""
        short = dataclasses.replace(self.config, num_layers=CALL_LAYERS)
        model = Transformer.abstract(
            short, dtype=DTYPE, out_first=True, target=self.target, shardings=self.shardings
        )
        return Layers(model)

    @property
    def weight_bytes(self) -> int:
        """Of the whole model, on one of its devices."""
        layers, rest = self.layers.weights
        return self._held(layers[0]) * self.config.num_layers + self._held(rest)

    def _held(self, weights: Any) -> int:
        """Bytes of weights that one device has."""
        total = 0
        for path, x in jax.tree_util.tree_leaves_with_path(weights):
            spec = self.shardings.of_name(str(path[-1].key), x.shape, out_first=True)
            total += nbytes(x) // (1 if spec == WHOLE else self.shardings.size)
        return total


PROBES = ("keys", "int4", "pq")
"""Those with a key for each token: kernels score all but the last."""
LANDMARKS = ("means", "bounds")
"""Those with one for each chunk, which are XLA's alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One function and the shapes it is compiled for."""

    jitted: Callable[..., Any]
    args: tuple[Any, ...]
    named: dict[str, Any] = field(default_factory=dict)
    kernels: int = 0
    """How many kernels it calls: what a device should run by a kernel of ours."""
    tokens: int
    """New tokens that it computes, all rows together."""
    room: int = 0
    """Bytes of temporary arrays that its own arithmetic needs beside those of a layer."""
    big: tuple[tuple[int, ...], ...] = ()
    """Shapes of arrays that must never be copied: the pool, and what is donated."""
    must_read: int | None = None
    """Of one kernel by itself: bytes that it has to read and write."""
    moves_more: str | None = None
    """Why no kernel could move about that little."""
    spills_more: str | None = None
    """Why no version is better that spills less."""
    whole_model: float = 1.0
    """Donated buffers of the whole model over those of this call."""
    example: Callable[[], tuple[Any, ...]] | None = None
    """Arrays to count its traffic with."""
    sums: int = 0
    """All-reduces of a model that is split: what devices send each other, and nothing else."""
    gathers: str | None = None
    """What they send each other besides, and why."""
    pinned: bool = False
    """The arguments lie in pinned host memory."""


class _Caught(Exception):
    """Carries what was about to run."""


def caught(sizes: Sizes, call: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The jitted function that `call` would run, with its arguments."""

    def watcher(_: str, jitted: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        raise _Caught(jitted, args, named)

    with sizes.layers.programs.watch(watcher):
        try:
            call()
        except _Caught as found:
            jitted, args, named = found.args
            return jitted, args, named
    raise AssertionError("the caller ran nothing")


def of(sizes: Sizes, call: Callable[[], Any], **facts: Any) -> Program:
    jitted, args, named = caught(sizes, call)
    return Program(jitted=jitted, args=args, named=named, **facts)
