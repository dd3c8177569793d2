"""Gather, score and attend alone: time, bandwidth and memory against this machine's ceilings.

    python -m bench.kernels --json bench/results/kernels.json     # 7B, 14B, 32B; 5k and 32k tokens
    python -m bench.kernels --quick

One layer's calls of one request with 32 suffix tokens; scores of two layers' int4 digests by the
last 4 and 16 of them too, as the preset `ckv` selects. The ceilings are measured right before the
calls of each model and prefix: a copy of a large array (bytes read and written) and a large matmul
that accumulates in float32. `share` is the time these would need for the bytes that a call must
move, or for its multiplications where those take longer, over the time it took: 1 is the ceiling,
and more says that the data stayed in a CPU's caches. `speedup` is against the jnp reference;
`temporary_mb` is what the compiled call holds in device memory beside its operands and results, and
`peak_mb` all of it. A run that was cut short goes on where it was (`bench.kept`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.common import SHAPES, Json, Setting, budget_share, command, finish, positive, table
from bench.kept import Kept
from ckv_jax.kernels_pallas.attend import attend
from ckv_jax.kernels_pallas.attend import implementations as attend_implementations
from ckv_jax.kernels_pallas.gather import IMPLEMENTATIONS as GATHER
from ckv_jax.kernels_pallas.gather import gather
from ckv_jax.kernels_pallas.score import implementations, score
from ckv_jax.kernels_pallas.score.probe import Int4Keys, Keys, PqKeys, Probe
from ckv_jax.kernels_pallas.target import Implementation, Target
from ckv_jax.model.config import ModelConfig
from ckv_jax.selection.base import select_units
from ckv_jax.storage.layout import PQ_CODES, PQ_PARTS

CHUNK = 8
"""Tokens of a chunk of the preset `ckv`."""
BUDGETS = (0.05, 0.10, 0.25, 0.50, 1.0)
KERNELS: dict[str, Implementation] = {"gpu": "mosaic_gpu", "tpu": "tpu", "cpu": "cpu"}
DIGESTS, FEW = 2, (4, 16)
"""Layers whose digests are scored together, and the last queries that do so: a token's in decode,
and a suffix's (`ckv`)."""
COLUMNS = (
    "models", "prefix_tokens", "kernel", "budget", "implementation", "ms", "gb_per_s",
    "gflop_per_s", "share", "speedup", "temporary_mb", "peak_mb", "note",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """What the device does at best: bytes per second copied (read and write), FLOP per second."""

    bytes_per_s: float
    flop_per_s: float

    def seconds(self, size: float, flop: float) -> float:
        """The least time for so many bytes and operations."""
        return max(size / self.bytes_per_s, flop / self.flop_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One kernel at one shape; `run` takes the operands and an implementation."""

    kernel: str
    budget: float | None
    has: Container[str]
    """Implementations."""
    run: Callable[..., Any]
    operands: tuple[Any, ...]
    size: float
    flop: float


def ceilings(dtype: Any, repeats: int) -> Ceiling:
    """A copy of 64 MiB (1 GiB on an accelerator) and a matmul of 2048 (8192) squared."""
    large = jax.default_backend() != "cpu"
    words = jnp.arange(2**28 if large else 2**24, dtype=jnp.uint32)
    width = 8192 if large else 2048
    square = jnp.ones((width, width), dtype)
    copy = _best(jax.jit(lambda x: x ^ jnp.uint32(1)), (words,), repeats)
    dot = partial(jnp.dot, preferred_element_type=jnp.float32)
    matmul = _best(jax.jit(dot), (square, square), repeats)
    return Ceiling(bytes_per_s=2 * words.nbytes / copy, flop_per_s=2 * width**3 / matmul)


def kernel_rows(setting: Setting) -> list[Json]:
    """Every kernel at the setting's model, prefix and budgets, by every implementation that this
    backend has, with the ceilings of the moment; `note` says why one does not run.
    """
    shape = SHAPES[setting.model]
    ceiling = ceilings(jnp.dtype(setting.dtype), setting.repeats)
    names: list[Implementation] = ["reference"]
    if (backend := jax.default_backend()) in KERNELS:
        names.append(KERNELS[backend])
    rows = []
    for call in calls(shape, setting):
        seconds: float | None = None
        for name in (name for name in names if name in call.has):
            row: Json = {
                "models": setting.model,
                "prefix_tokens": setting.prefix_tokens,
                "kernel": call.kernel,
                "budget": call.budget,
                "implementation": name,
                "copy_gb_per_s": ceiling.bytes_per_s / 1e9,
                "matmul_gflop_per_s": ceiling.flop_per_s / 1e9,
            }
            try:
                compiled = jax.jit(partial(call.run, name)).lower(*call.operands).compile()
                taken = _best(compiled, call.operands, setting.repeats)
            except (NotImplementedError, RuntimeError) as error:
                rows.append(row | {"note": f"{type(error).__name__}: {str(error)[:80]}"})
                continue
            seconds = seconds or taken
            memory = compiled.memory_analysis()
            rows.append(
                row
                | {
                    "ms": taken * 1e3,
                    "gb_per_s": call.size / taken / 1e9,
                    "gflop_per_s": call.flop / taken / 1e9,
                    "share": ceiling.seconds(call.size, call.flop) / taken,
                    "speedup": seconds / taken,
                    "temporary_mb": memory.temp_size_in_bytes / 1e6 if memory else None,
                    "peak_mb": _peak(memory) / 1e6 if memory else None,
                }
            )
    return rows


def calls(shape: ModelConfig, setting: Setting) -> Iterator[Call]:
    """gather and attend at each budget, score with each probe, and the choice of the best."""
    rng, target = np.random.default_rng(setting.seed), Target.here()
    dtype, queries = jnp.dtype(setting.dtype), setting.suffix_tokens
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    chunks = -(-setting.prefix_tokens // CHUNK)
    tokens = chunks * CHUNK

    def random(*size: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(size, np.float32), dtype)

    q = random(1, queries, heads, dim)
    new = random(1, queries, kv_heads * dim)
    pool = random(chunks, 2, CHUNK, kv_heads * dim)
    pages = pool.reshape(2 * chunks, CHUNK, kv_heads * dim)
    zero = jnp.zeros(1, jnp.int32)
    for budget in setting.budgets:
        chosen = max(1, round(budget * chunks))
        ids = jnp.asarray(np.sort(rng.choice(chunks, chosen, replace=False))[None], jnp.int32)
        page_bytes = chosen * pool[0].nbytes
        yield Call(
            kernel="gather",
            budget=budget,
            has=GATHER,
            run=lambda name, *a: gather(*a, target=target, implementation=name),
            operands=(pool, ids),
            size=2 * page_bytes,
            flop=0,
        )
        full = jnp.full(ids.shape, CHUNK, jnp.int32)
        for kernel, some in (("attend", q), ("attend one query", q[:, -1:])):
            rows = new[:, : some.shape[1]]
            yield Call(
                kernel=kernel,
                budget=budget,
                has=attend_implementations(some, target),
                run=lambda name, *a: attend(*a, target=target, implementation=name),
                operands=(some, pages, 2 * ids, 2 * ids + 1, full, rows, rows, zero),
                size=page_bytes + 2 * some.nbytes + 2 * rows.nbytes,
                flop=4 * some.shape[1] * heads * dim * (chosen * CHUNK + some.shape[1]),
            )
    count, lengths = jnp.int32(setting.prefix_tokens), jnp.full(1, queries, jnp.int32)
    for kind, probe in _probes(rng, random(tokens, kv_heads, dim)):
        yield Call(
            kernel=f"score {kind}",
            budget=None,
            has=implementations(probe),
            run=_score,
            operands=(q, probe, count, lengths),
            size=q.nbytes + sum(leaf.nbytes for leaf in jax.tree.leaves(probe)),
            flop=2 * queries * heads * dim * tokens,
        )
    digests = [dict(_probes(rng, random(tokens, kv_heads, dim)))["int4"] for _ in range(DIGESTS)]
    for few in FEW:
        last, of_few = q[:, -few:], jnp.full(1, min(few, queries), jnp.int32)
        yield Call(
            kernel=f"score {DIGESTS} int4 peaks by {few}",
            budget=None,
            has=implementations(digests[0]),
            run=lambda name, q, probes, *a: sum(
                _score(name, q, probe, *a, peaks=True) for probe in probes
            ),
            operands=(last, digests, count, of_few),
            size=last.nbytes + sum(leaf.nbytes for leaf in jax.tree.leaves(digests)),
            flop=2 * DIGESTS * last.shape[1] * heads * dim * tokens,
        )
    scores, best = jnp.asarray(rng.random((1, chunks)), jnp.float32), max(1, chunks // 4)
    yield Call(
        kernel="select",
        budget=0.25,
        has=("reference",),
        run=lambda name, s, n: select_units(s, best, jnp.full((1,), best, jnp.int32), count=n).ids,
        operands=(scores, jnp.int32(chunks)),
        size=scores.nbytes,
        flop=0,
    )


def _score(
    name: Implementation,
    q: jax.Array,
    probe: Probe,
    count: jax.Array,
    lengths: jax.Array,
    *,
    peaks: bool = False,
) -> jax.Array:
    return score(
        q,
        probe,
        num_tokens=count,
        q_lengths=lengths,
        chunk_tokens=CHUNK,
        peaks=peaks,
        target=Target.here(),
        implementation=name,
    )


def _probes(rng: np.random.Generator, keys: jax.Array) -> Iterator[tuple[str, Probe]]:
    tokens, kv_heads, dim = keys.shape
    scale = jnp.full((tokens, kv_heads), 0.01, jnp.float32)
    yield "keys", Keys(keys)
    codes = rng.integers(0, 256, (tokens, kv_heads, dim // 2))
    yield "int4", Int4Keys(jnp.asarray(codes, jnp.uint8), scale)
    codes = rng.integers(0, PQ_CODES, (tokens, kv_heads, PQ_PARTS))
    books = rng.standard_normal((kv_heads, PQ_PARTS, 256, dim // PQ_PARTS))
    yield "pq", PqKeys(jnp.asarray(codes, jnp.uint8), jnp.asarray(books, jnp.float32))


def _peak(memory: Any) -> int:
    """Bytes of a compiled call's operands, results and temporary arrays together."""
    apart = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(apart + memory.temp_size_in_bytes)


def _best(function: Callable[..., Any], operands: tuple[Any, ...], repeats: int) -> float:
    """Seconds of the fastest of some calls, after one that is not counted."""
    jax.block_until_ready(function(*operands))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*operands))
        best = min(best, time.perf_counter() - start)
    return best


def _distinct(models: Sequence[str]) -> dict[str, list[str]]:
    """Models by their attention's shape: 14B and 32B share theirs, and need one measurement."""
    found: dict[tuple[int, int, int], list[str]] = {}
    for name in models:
        shape = SHAPES[name]
        found.setdefault((shape.num_heads, shape.num_kv_heads, shape.head_dim), []).append(name)
    return {names[0]: names for names in found.values()}


def main(argv: Sequence[str] | None = None) -> Json:
    """The command."""
    p = command(__doc__)
    p.add_argument("--quick", action="store_true", help="7B, 5,008 tokens, 5%% and 25%%")
    p.add_argument("--models", nargs="+", choices=sorted(SHAPES), help="published shapes")
    p.add_argument("--prefix-tokens", type=positive, nargs="+", help="tokens of a prefix")
    p.add_argument("--budgets", type=budget_share, nargs="+", help="shares of the prefix in (0, 1]")
    p.add_argument("--repeats", type=positive, help="measured calls of each kernel")
    args = p.parse_args(argv)
    models = args.models or (["7B"] if args.quick else ["7B", "14B", "32B"])
    prefixes = args.prefix_tokens or ([5008] if args.quick else [5008, 32768])
    budgets = tuple(args.budgets or ((0.05, 0.25) if args.quick else BUDGETS))
    repeats = args.repeats or (5 if args.quick else 10)
    parts = [(names, prefix) for names in _distinct(models).values() for prefix in prefixes]
    setting = Setting(model=models[0], prefix_tokens=prefixes[0], budgets=budgets, repeats=repeats)
    kept = Kept(args.json, setting.to_json() | {"models": models, "prefixes": prefixes})
    rows: list[Json] = []
    for names, prefix in parts:
        label = " ".join(names)
        one = dataclasses.replace(setting, model=names[0], prefix_tokens=prefix)
        found = kept.part(f"{label}, {prefix}", lambda one=one: {"rows": kernel_rows(one)})["rows"]
        rows += [row | {"models": label} for row in found]
        copy, matmul = found[0]["copy_gb_per_s"], found[0]["matmul_gflop_per_s"]
        print(f"copy {copy:.1f} GB/s, matmul {matmul:.0f} GFLOP/s")
        print(table([[row.get(c, "") for c in COLUMNS] for row in rows[-len(found) :]], COLUMNS))
    result = finish(args, {"setting": setting.to_json(), **kept.said(), "rows": rows})
    kept.forget()
    return result


if __name__ == "__main__":
    main()
