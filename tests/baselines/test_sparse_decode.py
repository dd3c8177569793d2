"""Systems of long decode against numpy: what they score and what they attend to, and that nothing
else decides about it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from engine_sharp import COLD, MODEL, Sharp
from engine_support import (
    SMALL,
    TIGHT,
    check_alone,
    check_kv,
    kept_kv,
    scale_error,
    small_engine,
    tokens,
)  # fmt: skip
from engine_tiny import TINY
from heads_oracle import BY_POSITION, HEADS, KVDRIVE, SHARED, Decode, Oracle
from numpy_qwen import LayerKv, NumpyQwen, softmax
from segment_support import hurt, segment_folder

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.baselines import decoding as shared
from ckv_jax.baselines.decoding import decoding, heads_apart, lru
from ckv_jax.baselines.infinigen import PARTIAL
from ckv_jax.baselines.kvswap import RANK
from ckv_jax.baselines.magicpig import sampling
from ckv_jax.baselines.quest import DENSE_LAYERS, DenseFirst
from ckv_jax.baselines.retroinfer import next_best
from ckv_jax.baselines.shadowkv import Outliers, Rebuilt, by_rebuilt
from ckv_jax.config import OwnParts, SystemConfig, layout_of
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.pipeline.layers import Seen, over_pages_and_rows
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.storage.layout import PLAIN
from ckv_jax.storage.prefix import Prefix
from ckv_jax.systems import SYSTEMS

LENGTH, BUDGET = 12, 0.2
WIDTH = MODEL.num_kv_heads * MODEL.head_dim


class AllHeads(Decode):
    """All heads of a layer select chunks together."""

    before = 0
    """Layers between what a layer's scores go by and the layer."""

    def __init__(self, model: NumpyQwen, engine: Engine, prefix: Prefix, budget: float) -> None:
        super().__init__(model, prefix.tokens, prefix.layout.chunk_tokens, budget)
        self.ends = [0, *range((self.start - 64) // self.chunk, len(self.edges))]
        """Chunks outside of the budget."""
        self.local: list[int] = []
        """Chunks within it that are attended to in any case."""

    def by_means(self, layer: int, q: np.ndarray) -> np.ndarray:
        """The attention mass [M] of chunks by their mean keys, for queries [S, H, D]."""
        sums = np.add.reduceat(self.kv[layer][0], self.edges)
        means = np.repeat(sums / self.count[:, None, None], q.shape[1] // sums.shape[1], axis=1)
        logits = np.einsum("shd,mhd->shm", q, means) * MODEL.head_dim**-0.5
        return np.asarray(softmax(logits + np.log(self.count)).sum(axis=(0, 1)))

    def scores(self, layer: int, q: np.ndarray) -> np.ndarray:
        """What ranks the chunks [M] for a token of a generation."""
        return self.by_means(layer, q)

    def seen(self, layer: int, at: np.ndarray, done: int) -> tuple[np.ndarray, Sequence[LayerKv]]:
        """What is kept in any case, and the best of the others."""
        by = self.entered[max(0, layer - self.before) if done else layer]
        scores = (self.scores if done else self.by_means)(layer, self.model.query(layer, by, at))
        left = [c for c in range(len(scores)) if c not in (*self.ends, *self.local)]
        count = self.limit - len(self.local)
        ranked = sorted(left, key=lambda chunk: -scores[chunk])
        gap = scores[ranked[count - 1]] - scores[ranked[count]]
        assert gap > 1e-5 * np.abs(scores).max(), "a tie: float32 may select otherwise"
        seen = self.text(at, done)
        for chunk in (*self.ends, *self.local, *ranked[:count]):
            seen[:, self.tokens(chunk)] = True
        return seen, ()


class KvSwap(AllHeads):
    """Groups by the best key of low rank, a layer before."""

    before = 1

    def scores(self, layer: int, q: np.ndarray) -> np.ndarray:
        rows = self.kv[layer][0].reshape(self.start, WIDTH)
        basis = np.linalg.svd(rows.T, full_matrices=False)[0][:, : round(RANK * WIDTH)]
        mean = q[0].reshape(HEADS, -1, MODEL.head_dim).mean(axis=1).reshape(-1)
        products = (rows @ basis) @ (basis.T @ mean)
        return np.asarray(np.maximum.reduceat(products, self.edges))


class Infini(AllHeads):
    """Chunks by their attention mass over a fifth of each head's skewed columns, a layer before."""

    before = 1

    def scores(self, layer: int, q: np.ndarray) -> np.ndarray:
        keys, count = self.kv[layer][0], round(PARTIAL * MODEL.head_dim)
        by_head, mass = q[0].reshape(HEADS, -1, MODEL.head_dim), 0
        for head in range(HEADS):
            basis = np.linalg.svd(keys[:, head].T, full_matrices=False)[0][:, :count]
            logits = (by_head[head] @ basis) @ (keys[:, head] @ basis).T * MODEL.head_dim**-0.5
            mass = mass + softmax(logits).sum(axis=0)
        return np.add.reduceat(np.asarray(mass), self.edges)


class Solid(AllHeads):
    """Blocks by their mean keys; half of the budget is the latest ones before the ends."""

    def __init__(self, model: NumpyQwen, engine: Engine, prefix: Prefix, budget: float) -> None:
        super().__init__(model, engine, prefix, budget)
        self.local = [*range(self.ends[1] - self.limit // 2, self.ends[1])]


# Dense layers are no matter of the index: here that of the oracle.
DENSE = dataclasses.replace(
    SYSTEMS["quest"], digest="means+cosines", always=Outliers(0.125),
    own=OwnParts(layout=heads_apart, decoding=decoding(DenseFirst, keep=lru)),
)  # fmt: skip
LOW = dataclasses.replace(SYSTEMS["shadowkv"], always=Outliers(0.125))
SYSTEMS_OF = {
    "dense": DENSE,
    "estimated": SYSTEMS["retroinfer"],
    "low rank": LOW,
    "alike": KVDRIVE,
    "position": BY_POSITION,
    "shared": SHARED,
    "sampled": dataclasses.replace(
        SYSTEMS["magicpig"], own=OwnParts(decoding=sampling(bits=4, tables=20, dense=(0,)))
    ),
    **{
        name: dataclasses.replace(SYSTEMS[name], digest="means")
        for name in ("kvswap", "infinigen", "solidattention")
    },
}
ORACLES: dict[str, tuple[Callable[..., Decode], int]] = {
    "dense": (partial(Oracle, outliers=4, dense=DENSE_LAYERS), 250),
    "estimated": (partial(Oracle, estimated=4), 250),  # of 16 chunks
    "low rank": (partial(Oracle, outliers=4, rank=WIDTH * 160 // 1024), 250),
    "alike": (Oracle, 250),
    "position": (Oracle, 250),
    "kvswap": (KvSwap, 250), "infinigen": (Infini, 600), "solidattention": (Solid, 600),
}  # fmt: skip
"""And the tokens of the prefix; 250: its last chunk is not whole."""
OWN_ATTENTION = ("dense", "estimated", "low rank")
QUICK = ("estimated", "infinigen")
"""One whose heads select apart and one whose heads select together: the others are slow."""


def asked(prefix: Any, seed: int = 41, budget: float = BUDGET) -> Request:
    return Request(prefix=prefix, suffix=tokens(7, seed).tolist(), budget=budget)


@pytest.fixture
def system(request: pytest.FixtureRequest) -> SystemConfig:
    return SYSTEMS_OF[request.param]


def each(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("system", [case(name) for name in names], indirect=True)


def case(name: str, *more: object) -> Any:
    """A case of a test."""
    return pytest.param(name, *more, marks=[] if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "length"),
    [*[case(name, length) for name, (_, length) in ORACLES.items()], ("estimated", 256)],
)
def test_a_generation_is_that_of_numpy(
    sharp: Sharp, tmp_path: Path, name: str, length: int
) -> None:
    with sharp.fresh(tmp_path, system=SYSTEMS_OF[name], **COLD) as engine:
        prefix = engine.ingest(tokens(length, 5))
        [text] = engine.generate(
            asked(prefix), SamplingParams(max_tokens=LENGTH), keep_kv=True
        ).results()
        selected = engine.last_selection(prefix)
        oracle = ORACLES[name][0](sharp.model, engine, prefix, budget=BUDGET)
    oracle.step(tokens(7, 41))
    for token in text.token_ids:
        oracle.step(np.array([token]))
    check_kv(text, oracle.own)
    if name in ("alike", "position"):
        assert len({tuple(ids) for ids in oracle.ids}) > MODEL.num_layers  # heads differ
        for mine, theirs in zip(selected, oracle.ids, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@each(*OWN_ATTENTION, "sampled", "infinigen")
def test_a_batch_says_what_each_says_alone(
    sharp: Sharp, tmp_path: Path, system: SystemConfig
) -> None:
    """Three of one prefix make a bucket of four, whose padding is the row of the other; and one at
    a budget of 1."""
    with sharp.fresh(tmp_path, system=system) as engine:
        prefixes = [engine.ingest(tokens(250 - 60 * i, i)) for i in range(2)]
        requests = [asked(prefixes[i > 0], 41 + i) for i in range(4)]
        check_alone(engine, [*requests, asked(prefixes[1], 45, 1.0)], max_tokens=LENGTH // 2)


@each(*OWN_ATTENTION, "alike", "shared")
def test_caches_and_failing_reads_change_no_bit(
    sharp: Sharp, tmp_path: Path, system: SystemConfig
) -> None:
    with sharp.fresh(tmp_path, system=system) as engine:
        prefix = engine.ingest(tokens(250, 5))
        [plain] = kept_kv(engine, [asked(prefix)], max_tokens=LENGTH)
        cold = dataclasses.replace(engine.config, **COLD)
        with engine.variant(cold) as other:
            for _ in range(2):
                [found] = kept_kv(other, [asked(prefix)], max_tokens=LENGTH)
                assert (found == plain).all()
            assert other.stats().pinned_packs == 0
        shard = sorted(segment_folder(tmp_path, prefix).glob("packs/c.0.*"))[0]
        hurt(shard, 3 * engine.layout.pack_bytes + 9)  # of the first layer's first head
        with engine.variant(cold) as other:
            [found] = kept_kv(other, [asked(prefix)], max_tokens=LENGTH)
        assert scale_error(found, plain) < TIGHT


def test_a_text_goes_on_over_its_own_segments(sharp: Sharp, tmp_path: Path) -> None:
    """What was generated is selected, estimated and attended to like the prefix."""
    with sharp.fresh(tmp_path, system=SYSTEMS["retroinfer"], segment_tokens=32) as engine:
        prefix = engine.ingest(tokens(150))
        [text] = engine.generate(asked(prefix), SamplingParams(max_tokens=150)).results()
        text.raise_for_error()
    assert text.trace.segments == 2


@each("dense", "estimated", "low rank", "infinigen")
def test_a_warm_engine_compiles_nothing(tmp_path: Path, system: SystemConfig) -> None:
    """In 16 bits: a CPU has no product of such numbers that is wider than they are."""
    model = dataclasses.replace(TINY, num_heads=4, num_kv_heads=2)
    with small_engine(
        tmp_path, system=system, model=model, nothing_compiled=True, dtype="bfloat16"
    ) as engine:
        prefix = engine.ingest(tokens(250))
        engine.warmup(prefix, max_batch=2, max_suffix=8, budgets=[BUDGET], max_tokens=LENGTH)
        warm = compilations()
        kept_kv(engine, [asked(prefix), asked(prefix, 42)], max_tokens=LENGTH)
        assert compilations() == warm


def test_most_blocks_are_read_before_they_are_selected(sharp: Sharp, tmp_path: Path) -> None:
    """Those of the token before, while another layer computes; the first layer's are not."""
    with sharp.fresh(tmp_path, system=SYSTEMS_OF["solidattention"], **COLD) as engine:
        prefix = engine.ingest(tokens(600, 5))
        [text] = engine.generate(asked(prefix), SamplingParams(max_tokens=LENGTH)).results()
    later = text.trace.tokens[1:]
    assert sum(token.ahead for token in later) > 0.5 * sum(token.ssd_reads for token in later)
    assert text.trace.tokens[0].ahead == 0


def test_a_token_says_what_dense_layers_attend_to(sharp: Sharp, tmp_path: Path) -> None:
    with sharp.fresh(tmp_path, system=DENSE, **COLD) as engine:
        prefix = engine.ingest(tokens(250, 5))
        [text] = engine.generate(asked(prefix), SamplingParams(max_tokens=4)).results()
        selected = engine.last_selection(prefix)
    packs = sum(len(ids) for ids in selected[DENSE_LAYERS * HEADS :])
    everything = DENSE_LAYERS * HEADS * prefix.num_chunks
    for token in text.trace.tokens:
        assert token.device_hits + token.host_hits + token.ssd_reads == packs + everything
        assert token.ssd_reads >= everything  # nothing is cached
    assert len(selected) == MODEL.num_layers * HEADS


def test_a_pool_without_room_for_a_dense_layer_is_refused(sharp: Sharp, tmp_path: Path) -> None:
    with sharp.fresh(tmp_path, system=DENSE) as engine:
        prefix = engine.ingest(tokens(960, 5))
        room = 200 * engine.layout.pack_bytes  # of 240 packs, where a selection takes 28
        small = dataclasses.replace(engine.config, device_cache_bytes=0, prefetch_device_bytes=room)
        with engine.variant(small) as other:
            [text] = other.generate(
                asked(prefix, budget=0.01), SamplingParams(max_tokens=4)
            ).results()
            with pytest.raises(PoolExhausted, match="packs of dense layer 0"):
                text.raise_for_error()


@each("estimated", "low rank")
def test_a_window_that_is_not_held_says_the_same(
    sharp: Sharp, tmp_path: Path, system: SystemConfig
) -> None:
    """A layer's selection after the other; where not even that fits, it is refused."""
    with sharp.fresh(tmp_path, system=system) as engine:
        prefix = engine.ingest(tokens(250))
        [expected] = kept_kv(engine, [asked(prefix)], max_tokens=LENGTH)
        selected = max(map(len, engine.last_selection(prefix)))
        size = HEADS * engine.layout.pack_bytes
        for slots in (2 * selected, selected - 1):
            room = dataclasses.replace(
                engine.config, device_cache_bytes=0, host_cache_bytes=0,
                prefetch_device_bytes=slots * size,
            )  # fmt: skip
            with engine.variant(room) as small:
                if slots > selected:
                    [found] = kept_kv(small, [asked(prefix)], max_tokens=LENGTH)
                    assert scale_error(found, expected) < TIGHT
                    continue
                [text] = small.generate(asked(prefix), SamplingParams(max_tokens=4)).results()
                with pytest.raises(PoolExhausted, match="raise device_cache_bytes"):
                    text.raise_for_error()


def test_a_device_has_the_products_of_rebuilt_keys() -> None:
    """In 16 bits, of a 7B model's shape; exact keys would weigh the second token of each chunk."""
    dtype, shape = jnp.bfloat16, (4, 4, 40)
    ones = jnp.ones((*shape, 8, 128), dtype)
    packs = jnp.stack([ones.at[..., 1, :].set(9), ones.at[..., 1, :].set(3)], axis=3)
    slots = jnp.arange(640, dtype=jnp.int32).reshape(shape)
    none, q = jnp.zeros((4, 0, 512), dtype), jnp.ones((4, 1, 28, 128), dtype)

    @jax.jit
    def attend(pages: jax.Array, exact: jax.Array) -> jax.Array:
        seen = by_rebuilt(
            Seen(pages, slots, jnp.full(shape, 8, jnp.int32)), Rebuilt(ones, exact), dtype
        )
        return over_pages_and_rows(
            q, seen.pages, seen.slots, seen.lengths, 0, none, none, jnp.zeros(4, jnp.int32),
            target=Target.here(),
        )  # fmt: skip

    pages = packs.reshape(640, 1, 2, 8, 128)
    for own, expected in ((False, 1.25), (True, 3.0)):
        out = attend(pages, jnp.full(shape, own))
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=1e-2)


def test_the_zone_is_what_comes_after_a_selection() -> None:
    rng = np.random.default_rng(0)
    scores = rng.random((2, 3, 40)).astype(np.float32)
    ids = np.argsort(-scores, axis=2)[:, :, :5].astype(np.int32)
    ids[0, 0, 3:] = -1
    count = 33
    seen = np.asarray(next_best(jnp.asarray(scores), jnp.asarray(ids), jnp.int32(count)))
    assert (seen.sum(axis=2) == 8).all()  # 23.2% of 33
    for row, head in np.ndindex(2, 3):
        left = [c for c in range(count) if c not in ids[row, head]]
        best = sorted(left, key=lambda c: -scores[row, head, c])[:8]
        assert sorted(best) == np.flatnonzero(seen[row, head]).tolist()
    few = next_best(jnp.asarray(scores), jnp.asarray(ids), jnp.int32(0))
    assert not np.asarray(few).any()


def test_an_index_is_made_once(
    sharp: Sharp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever batch a generation is in; of each layer."""
    made = []
    read = shared._read

    def counted(opened: OpenPrefix, layer: int) -> Any:
        made.append(layer)
        return read(opened, layer)

    monkeypatch.setattr(shared, "_read", counted)
    with sharp.fresh(tmp_path, system=LOW) as engine:
        prefix = engine.ingest(tokens(250, 5))
        for _ in range(2):
            kept_kv(engine, [asked(prefix)], max_tokens=4)
    assert made == [*range(MODEL.num_layers)]


def test_indices_take_no_more_bytes_than_digests_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those in use; what was used last stays longest."""
    made = []

    def make(config: Any, opened: Any, *_: Any) -> np.ndarray:
        made.append(opened.prefix.id)
        return np.zeros(100, np.uint8)

    monkeypatch.setattr(shared, "_read", lambda opened, layer: (None, None))
    layout = SimpleNamespace(pack_layers=1, kv_together=True, codec=PLAIN, num_layers=2)
    layers, prefixes = SimpleNamespace(config=None), SimpleNamespace(digest_budget=600)
    runtime = SimpleNamespace(
        layout=layout, layers=layers, prefixes=prefixes, system=SYSTEMS["kvswap"]
    )
    index = shared.SideIndex(make, cast("Any", SimpleNamespace(runtime=runtime)))
    opened = [
        cast("Any", SimpleNamespace(probe_chunks=4, prefix=SimpleNamespace(
            id=name, spans=[], layout=layout
        )))
        for name in "abcd"
    ]  # fmt: skip
    for one in (*opened[:3], opened[0], opened[3]):
        index.of([one])
    assert made == [*"aabbccdd"]
    index.of(opened[:1])
    assert len(made) == 8, "a was used after b"
    index.of(opened)
    assert made[8:] == ["b", "b"]
    index.of(opened)
    assert len(made) == 10, "all are in use"


@pytest.mark.parametrize(
    ("name", "model", "wrong", "says"),
    [
        ("solidattention", {"head_dim": 1 << 21}, {}, "head_dim: got 2097152"),
        ("kvdrive", {}, {"chunk_tokens": 6}, "got digest='means' and chunk_tokens=6"),
        ("retroinfer", {}, {"codec": "int8"}, "codec: got 'int8:1'"),
        ("magicpig", {}, {"codec": "int8"}, "got packs of 1 layers with codec 'int8:1'"),
    ],
    ids=["head size", "chunk", "codec", "codec of an index"],
)
def test_what_a_system_cannot_serve_is_refused_by_its_name(
    tmp_path: Path, name: str, model: dict[str, Any], wrong: dict[str, Any], says: str
) -> None:
    """In one line, before an engine is made, or where its index is."""
    system = dataclasses.replace(SYSTEMS[name], **wrong)
    config = dataclasses.replace(SMALL, **model)
    with pytest.raises(ValueError, match=f"^{name}: {re.escape(says)}.*, expected .*$"):
        if name == "magicpig":
            small_engine(tmp_path, system=system)
        else:
            layout_of(system, config, "float32")


@pytest.mark.slow
def test_a_lost_digest_is_made_again(sharp: Sharp, tmp_path: Path) -> None:
    """And at a budget of 1 there is nothing beside a selection."""
    with sharp.fresh(tmp_path, system=LOW, **COLD) as engine:
        prefix = engine.ingest(tokens(250, 5))
        [expected] = kept_kv(engine, [asked(prefix)], max_tokens=LENGTH)
        [whole] = engine.reprefill([asked(prefix, budget=1.0)])
        dense = engine.recompute(asked(prefix, budget=1.0))
        assert scale_error(whole.logits, dense.logits) < TIGHT
        with engine.variant(engine.config) as other:
            (path,) = segment_folder(tmp_path, prefix).glob("digest/c.*")
            hurt(path, 9)
            sampling = SamplingParams(max_tokens=LENGTH)
            [text] = other.generate(asked(prefix), sampling, keep_kv=True).results()
        assert text.trace.counters["recomputed_probes"] == MODEL.num_layers
        assert scale_error(np.asarray(text.completion().kv), expected) < TIGHT
