"""Chunks scored by some heads alone: against Equation 1 in numpy, and through an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from engine_sharp import MODEL, PERIOD, Sharp
from engine_support import TIGHT, scale_error, tokens
from numpy_qwen import softmax
from pipeline_support import UnsteadyStore

from ckv_jax import Blend, Engine, Request, SamplingParams
from ckv_jax.config import SystemConfig
from ckv_jax.fitting import check_split
from ckv_jax.heads import heads_of, read_heads
from ckv_jax.kernels_pallas.score import api, together
from ckv_jax.kernels_pallas.score.probe import (
    BoundKeys,
    Int4Keys,
    Int8Keys,
    Keys,
    Landmarks,
    MeanKeys,
    OneHead,
    PqKeys,
    TokenProbe,
    TurnedKeys,
)
from ckv_jax.kernels_pallas.score.turned import turn
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.reads.digest import Digest
from ckv_jax.selection.coarse import Coarse
from ckv_jax.selection.select import Select
from ckv_jax.storage.prefix import Prefix
from ckv_jax.systems import SYSTEMS, preset

HEADS = ((1, 1), (4, 0), (5, 1))
"""Two of the first period's layers, and the second's only one."""
C, T, K, G, D = 16, 128, 2, 3, 8
CPU = Target(platform="cpu")
score = jax.jit(api.score, static_argnames=("chunk_tokens", "target", "heads"))
score_together = jax.jit(together.score_together, static_argnames="chunk_tokens")


def _probes() -> list[TokenProbe | Landmarks]:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (T, K, D // 2), dtype=np.uint8)
    scale = rng.uniform(0.2, 0.4, (T, K)).astype(np.float32)
    pq = rng.integers(0, 256, (T, K, 1), dtype=np.uint8)
    books = rng.normal(size=(K, 1, 256, D)).astype(np.float32)
    means, high = (rng.normal(size=(T // C, K, D)).astype(np.float32) for _ in range(2))
    int8 = rng.integers(-127, 128, (T, K, D), dtype=np.int8)
    return [
        Int8Keys(int8, scale / 16),
        Keys(rng.normal(size=(T, K, D)).astype(np.float32)),
        Int4Keys(codes, scale),
        PqKeys(pq, books),
        MeanKeys(means, np.zeros((T // C, K), np.float32)),
        BoundKeys(means, means + np.abs(high)),
    ]


def _alone(probe: TokenProbe | Landmarks, head: int) -> OneHead:
    def part(array: np.ndarray, axis: int = 1) -> np.ndarray:
        return np.take(array, [head], axis=axis)

    fields = {
        field.name: part(getattr(probe, field.name), 0 if field.name == "codebooks" else 1)
        for field in dataclasses.fields(probe)
        if getattr(probe, field.name) is not None
    }
    return OneHead(type(probe)(**fields), np.int32(head), K)


@pytest.mark.parametrize("probe", _probes(), ids=lambda probe: type(probe).__name__)
@pytest.mark.parametrize("head", [0, 1])
def test_one_head_gives_its_part_of_what_all_give(probe: TokenProbe | Landmarks, head: int) -> None:
    rng = np.random.default_rng(1)
    q = rng.normal(size=(2, 3, K * G, D)).astype(np.float32)
    how = {
        "num_tokens": np.int32(T - 5), "q_lengths": np.array([3, 2], np.int32),
        "chunk_tokens": C, "target": CPU,
    }  # fmt: skip
    every = score(q, probe, heads="each", **how)  # [B, K, M]
    alone = score(q, _alone(probe, head), **how)
    every, alone = map(np.asarray, (every, alone))
    np.testing.assert_allclose(alone[:, 0], every[:, head], rtol=1e-5, atol=1e-6)
    if not isinstance(probe, Landmarks):
        one = score_together(
            [q[:1]], [_alone(probe, head)], num_tokens=np.array([T - 5], np.int32),
            q_length=np.int32(3), chunk_tokens=C,
        )  # fmt: skip
        np.testing.assert_allclose(one, every[:1, head], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", [0, 1])
def test_turned_keys_of_one_head_are_its_part_of_those_of_all(head: int) -> None:
    probe = next(one for one in _probes() if isinstance(one, Int4Keys))
    alone = _alone(probe, head)
    assert isinstance(alone.probe, Int4Keys)
    q = np.random.default_rng(1).normal(size=(1, 2, K * G, D)).astype(np.float32)
    how = {
        "num_tokens": np.int32(T), "q_lengths": np.array([2], np.int32), "chunk_tokens": C,
        "target": CPU,
    }  # fmt: skip
    every = np.asarray(score(q, turn(probe, dims=5), heads="each", **how))
    digest = Digest({3: alone}, turns=True)
    (rough,) = digest.rough([3])
    assert isinstance(rough, OneHead) and isinstance(rough.probe, TurnedKeys)
    np.testing.assert_allclose(
        np.asarray(score(q, rough, **how))[:, 0], every[:, head], rtol=1e-4, atol=1e-6
    )


@pytest.fixture(scope="module")
def engine(sharp: Sharp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with sharp.fresh(tmp_path_factory.mktemp("store"), system={"heads": HEADS}) as made:
        yield made


@pytest.fixture(scope="module")
def prefix(engine: Engine) -> Prefix:
    return engine.ingest(tokens(250))


def changed(engine: Engine, **system: object) -> Engine:
    assert isinstance(engine.system, SystemConfig)
    values = dataclasses.replace(engine.system, **system)  # type: ignore[arg-type]
    return engine.variant(dataclasses.replace(engine.config, system=values))


def test_the_first_period_chooses_by_its_heads_alone(
    sharp: Sharp, engine: Engine, prefix: Prefix
) -> None:
    assert (prefix.layout.digest_layers, prefix.layout.digest_heads) == ((1, 4, 5), (1, 0, 1))
    assert heads_of(prefix.layout) == HEADS
    with engine.store.reader(prefix) as reader:
        digest = reader.read_digest()
    assert digest is not None
    keys = digest.keys().astype(np.float64)  # [R, T, 1, D]
    suffix = tokens(9, 3)
    hidden, at = sharp.model.embed(suffix)[-4:], prefix.num_tokens + np.arange(5, 9)
    chunks, group = prefix.num_chunks, MODEL.num_heads // MODEL.num_kv_heads
    scores = np.zeros(chunks)
    for row, (layer, head) in enumerate(HEADS[:2]):
        q = sharp.model.query(layer, hidden, at)[:, head * group : (head + 1) * group]
        weights = softmax(np.einsum("shd,td->hst", q, keys[row, :, 0]) * MODEL.head_dim**-0.5)
        by_token = np.pad(weights.sum(axis=(0, 1)), (0, chunks * C - prefix.num_tokens))
        scores += by_token.reshape(chunks, C).sum(axis=1)
    (result,) = engine.reprefill([Request(prefix=prefix, suffix=suffix, budget=0.2)])
    best = np.sort(np.argsort(-scores)[:4])
    assert engine.last_selection(prefix)[0].tolist() == best.tolist()
    mass = result.trace.period_attention_mass[0]
    np.testing.assert_allclose(mass, scores[best].sum() / scores.sum(), rtol=1e-4)


def test_at_a_budget_of_all_nothing_depends_on_them(
    sharp: Sharp, engine: Engine, prefix: Prefix, tmp_path: Path
) -> None:
    request = Request(prefix=prefix, suffix=tokens(9, 3), budget=1.0)
    (few,) = engine.reprefill([request])
    with sharp.fresh(tmp_path) as every:
        same = dataclasses.replace(request, prefix=every.ingest(tokens(250)))
        (all_of_them,) = every.reprefill([same])
    assert scale_error(few.logits, all_of_them.logits) < TIGHT


def test_rows_and_stages_and_texts_choose_by_them(engine: Engine, prefix: Prefix) -> None:
    """In a batch as alone, in two stages, and token by token with reads that fail."""
    requests = [
        Request(prefix=prefix, suffix=tokens(n, 60 + n).tolist(), budget=0.2) for n in (3, 7)
    ]
    together = engine.reprefill(requests)
    for request, row in zip(requests, together, strict=True):
        (alone,) = engine.reprefill([request])
        assert scale_error(alone.logits, row.logits) < TIGHT
    coarse = Coarse(survivors=2, least=1)  # four chunks at 1/8
    two = Select(score_layers=3, queries=4, coarse=coarse)
    sampling = SamplingParams(max_tokens=12)
    small = [dataclasses.replace(request, budget=0.1) for request in requests]
    with changed(engine, choose=two, decode=two) as other:
        plain = [text.token_ids.tolist() for text in other.generate(small, sampling).results()]
    unsteady = UnsteadyStore(engine.store, 0.3)
    assert isinstance(engine.system, SystemConfig)
    system = dataclasses.replace(engine.system, choose=two, decode=two)
    config = dataclasses.replace(engine.config, system=system)
    with engine.variant(config, store=unsteady) as failing:
        again = [text.token_ids.tolist() for text in failing.generate(small, sampling).results()]
    assert again == plain


def test_texts_put_together_choose_by_them(engine: Engine, prefix: Prefix) -> None:
    other = engine.ingest(tokens(100, 5))
    parts = Request(parts=[prefix, other], suffix=tokens(7, 9).tolist(), budget=0.3)
    (few,) = engine.reprefill([parts])
    assert 0.2 < few.trace.attention_mass < 1
    exact = dataclasses.replace(parts, budget=1.0, blend=Blend(recompute=1.0))
    (together,) = engine.reprefill([exact])
    whole = engine.ingest(np.concatenate([tokens(250), tokens(100, 5)]))
    (one,) = engine.reprefill([Request(prefix=whole, suffix=parts.suffix, budget=1.0)])
    assert scale_error(together.logits, one.logits) < TIGHT


def test_a_digest_that_cannot_be_read_is_computed_again(engine: Engine, prefix: Prefix) -> None:
    class Lost(UnsteadyStore):
        def reader(self, prefix: Prefix, *, deadline_s: float) -> object:
            reader = super().reader(prefix, deadline_s=deadline_s)
            reader.read_digest = lambda: None  # type: ignore[attr-defined]
            return reader

    request = Request(prefix=prefix, suffix=tokens(9, 3), budget=0.2)
    with engine.variant(engine.config, store=Lost(engine.store)) as other:
        (result,) = other.reprefill([request])
        assert result.trace.counters["recomputed_probes"] == 2  # one of each period
        assert len(other.last_selection(prefix)) == 2
    (stored,) = engine.reprefill([request])
    # Exact keys in place of rounded ones: about the same attention is on what they choose.
    exact, rounded = (r.trace.period_attention_mass[0] for r in (result, stored))
    assert abs(exact - rounded) < 0.1


@pytest.mark.parametrize(
    ("heads", "why"),
    [
        (((4, 0), (1, 1)), "at most one a layer"),
        (((1, 0), (1, 1)), "at most one a layer"),
        (((1, -1),), "expected .layer, KV head. pairs"),
        ([(1, 0)], "expected .layer, KV head. pairs"),
        (((1, 0, 0),), "expected .layer, KV head. pairs"),
    ],
)
def test_what_names_no_heads_is_refused(heads: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(SYSTEMS["ckv"], heads=heads)  # type: ignore[arg-type]


def test_the_last_token_of_a_question_chooses_by_them() -> None:
    ours = preset("ckv", heads=HEADS)
    assert (ours.choose.queries, ours.choose.coarse) == (1, None)
    assert ours.decode is not None and ours.decode.queries == 1 and preset("ckv") == SYSTEMS["ckv"]


def test_heads_that_a_model_or_a_system_has_not_are_refused(sharp: Sharp, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without a resident digest"):
        preset("contiguous-kv", heads=HEADS)
    for heads in (((1, 0),), ((1, 2), (5, 0)), ((1, 0), (6, 0))):
        expected = f"some of 6 layers with 2 KV heads, in each period of {PERIOD} layers"
        with (
            pytest.raises(ValueError, match=expected),
            sharp.fresh(tmp_path, system={"heads": heads}),
        ):
            pass
    with pytest.raises(ValueError, match="tensor_parallel=2 with system 'ckv', expected 1: heads"):
        check_split(preset("ckv", heads=HEADS), 2)
    check_split(preset("ckv", heads=HEADS), 1)


@pytest.mark.parametrize(
    "text",
    [
        "[]", "{}", '{"heads": 3}', '{"heads": [[1]]}', "no json", "\xff", '{"heads": []}',
        '{"heads": [[1, 0.5]]}', '{"heads": [[Infinity, 0]]}',
    ],
)  # fmt: skip
def test_a_file_of_something_else_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "heads.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"{path}: got no list of heads"):
        read_heads(path)
