"""Several stored documents in any order: each at its place, a share of them computed again."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from engine_support import TIGHT, compiled_layers, scale_error, small_engine, tokens
from engine_tiny import TINY, tiny_engine
from segment_support import hurt, segment_folder

from ckv_jax import (
    Blend,
    Cancelled,
    ContextOverflow,
    DeadlineExceeded,
    Engine,
    FingerprintMismatch,
    Prefix,
    PrefixNotFound,
    Request,
    Result,
    SamplingParams,
    UnsupportedModel,
)
from ckv_jax.documents.loading import check_rotates, rotations
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.rope import Llama3Scaling, YarnScaling, apply_rope
from ckv_jax.pipeline.recovery import Recovered, RecoveryNeeded
from ckv_jax.prefix.open_prefixes import OpenPrefixes

TEXTS = [tokens(n, seed) for n, seed in ((100, 1), (64, 2), (77, 3))]
SUFFIX = tokens(7, 9).tolist()
EXACT = Blend(recompute=1.0)
SCALED = {
    "plain": None,
    "yarn": YarnScaling(factor=4.0, original_max_position_embeddings=64),
    "llama3": Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny_engine(tmp_path_factory.mktemp("documents")) as engine:
        yield engine


@pytest.fixture(scope="module")
def documents(engine: Engine) -> list[Prefix]:
    return [engine.ingest(text) for text in TEXTS]


def ask(engine: Engine, documents: list[Prefix], budget: float = 1.0, **more: Any) -> Result:
    (result,) = engine.reprefill(
        [Request(documents=documents, suffix=SUFFIX, budget=budget, **more)]
    )
    result.raise_for_error()
    return result


def moved(config: ModelConfig, keys: np.ndarray, offset: int) -> np.ndarray:
    """Keys [T, K, D], rotated."""
    cos, sin = rotations(config, [offset])
    one = [np.broadcast_to(table, (1, len(keys), config.head_dim)) for table in (cos, sin)]
    return np.asarray(apply_rope(jnp.asarray(keys)[None], *map(jnp.asarray, one)))[0]


# -- keys and scores at their places --------------------------------------------------------------


@pytest.mark.parametrize("name", SCALED)
def test_moved_keys_are_those_computed_at_the_place(name: str) -> None:
    config = dataclasses.replace(TINY, rope_scaling=SCALED[name])
    check_rotates(config)
    layers, _ = compiled_layers(TINY, "float32", 0)
    hidden = layers.embed(TEXTS[0][None])
    bare = layers.layer_of(layers.state(0)).attention
    bare.config = config
    stored, there = (
        np.asarray(bare.project(hidden, first + jnp.arange(100, dtype=jnp.int32)[None])[1])[0]
        for first in (0, 777)
    )
    assert np.abs(there - stored).max() > 0.1 * np.abs(stored).max()
    np.testing.assert_allclose(moved(config, stored, 777), there, atol=2e-4 * np.abs(there).max())
    np.testing.assert_array_equal(moved(config, stored, 0), stored)


def test_other_positions_are_refused() -> None:
    class Jumping:
        """Positions whose angle depends on the length of the text."""

    config = dataclasses.replace(TINY, rope_scaling=None)
    object.__setattr__(config, "rope_scaling", Jumping())
    with pytest.raises(UnsupportedModel, match="got rope scaling Jumping, expected none, yarn"):
        check_rotates(config)


# -- answers --------------------------------------------------------------------------------------


def test_all_computed_again_is_a_dense_prefill_in_any_order(
    engine: Engine, documents: list[Prefix]
) -> None:
    before = {prefix.id for prefix in engine.store.prefixes()}
    answers = []
    for order in ([0, 1, 2], [2, 0, 1]):
        mine = [documents[i] for i in order]
        dense = engine.recompute(Request(documents=mine, suffix=SUFFIX))
        whole = ask(engine, mine, blend=EXACT)
        assert scale_error(whole.logits, dense.logits) < TIGHT
        rest = sum(document.num_tokens for document in mine[1:])
        assert (whole.trace.recomputed_tokens, whole.trace.blended_tokens) == (rest, 0)
        plain = ask(engine, mine, blend=Blend(recompute=0))
        assert (plain.trace.recomputed_tokens, plain.trace.blended_tokens) == (0, rest)
        some = ask(engine, mine, blend=Blend(recompute=0.5))
        assert f"{some.trace.recomputed_tokens} recomputed" in str(some)
        assert 0.8 < some.trace.recomputed_tokens / (0.5 * sum(map(len, TEXTS))) <= 1
        off = [scale_error(found.logits, dense.logits) for found in (some, plain)]
        assert TIGHT < off[0] < off[1]
        answers.append(whole.logits)
    assert scale_error(*answers) > 100 * TIGHT
    assert {prefix.id for prefix in engine.store.prefixes()} == before


def test_one_document_is_a_prefix(engine: Engine, documents: list[Prefix]) -> None:
    for budget in (0.25, 1.0):
        (alone,) = engine.reprefill([Request(prefix=documents[0], suffix=SUFFIX, budget=budget)])
        np.testing.assert_array_equal(ask(engine, documents[:1], budget).logits, alone.logits)


def test_a_small_budget_and_a_share_of_it(engine: Engine, documents: list[Prefix]) -> None:
    result = ask(
        engine, [documents[1], documents[2], documents[1]], 0.5, blend=Blend(recompute=0.3)
    )
    trace = result.trace
    assert 0 < trace.recomputed_tokens < 0.5 * 205 and trace.blended_tokens > 0
    assert trace.chunks["selected"] == sum(trace.period_chunks)
    assert 0 < trace.attention_mass < 1
    first = ask(engine, documents, blend=Blend(recompute=0.15, select="first"))
    assert first.trace.recomputed_tokens == 32  # the first chunk of each document after the first
    mass = ask(engine, documents, "mass:0.5", blend=Blend(recompute=0))  # type: ignore[arg-type]
    assert mass.trace.chunks["selected"] < mass.trace.chunks["total"]


@pytest.mark.parametrize("share", [0.0, 1e-6, 1.0])
def test_texts_go_on_from_there(engine: Engine, documents: list[Prefix], share: float) -> None:
    request = Request(documents=documents, suffix=SUFFIX, budget=1.0, blend=Blend(recompute=share))
    sampling = SamplingParams(max_tokens=4, logprobs=0)
    (said,) = engine.generate(request, sampling).results()
    assert said.token_ids[0] == ask(engine, documents, blend=request.blend).token_id
    assert said.completion().documents == tuple(documents) and said.codec == "none"
    assert said.trace.recomputed_tokens == {0.0: 0, 1e-6: 16, 1.0: 64 + 77}[share]
    if share == 1:  # what a text over the whole stored as one would say
        whole = engine.ingest(np.concatenate(TEXTS))
        (dense,) = engine.generate(
            Request(prefix=whole, suffix=SUFFIX, budget=1.0), sampling
        ).results()
        chances = [[entry.token for entry in one.completion().logprobs] for one in (said, dense)]
        np.testing.assert_array_equal(said.token_ids, dense.token_ids)
        np.testing.assert_allclose(*chances, atol=1e-3)


def test_a_pool_of_a_few_slots_gives_the_same(engine: Engine, documents: list[Prefix]) -> None:
    few = dataclasses.replace(
        engine.config, device_cache_bytes=0, host_cache_bytes=0,
        prefetch_device_bytes=5 * engine.layout.pack_bytes,
    )  # fmt: skip
    blend = Blend(recompute=0.5)
    expected = ask(engine, documents, blend=blend)
    with engine.variant(few) as small:
        np.testing.assert_array_equal(ask(small, documents, blend=blend).logits, expected.logits)


# -- what goes wrong ------------------------------------------------------------------------------


def test_what_cannot_be_read_is_computed_again(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, device_cache_bytes=0, host_cache_bytes=0) as engine:
        documents = [engine.ingest(text) for text in TEXTS]
        healthy = ask(engine, documents, blend=Blend(recompute=0))
        dense = engine.recompute(Request(documents=documents, suffix=SUFFIX))
        for document in documents[:2]:
            file = sorted(segment_folder(tmp_path, document).glob("packs/c.*"))[0]
            hurt(file, document.layout.stored_bytes + 5)  # of chunk 1
        result = ask(engine, documents, blend=Blend(recompute=0))
        assert result.trace.recomputed_tokens == 32 and result.trace.recomputed_chunks == 2
        assert scale_error(result.logits, dense.logits) < 2 * scale_error(
            healthy.logits, dense.logits
        )
        whole = ask(engine, documents, blend=EXACT)
        assert scale_error(whole.logits, dense.logits) < TIGHT


def test_bad_input_is_said_and_stores_nothing(
    engine: Engine, documents: list[Prefix], tmp_path: Path
) -> None:
    before = {prefix.id for prefix in engine.store.prefixes()}

    def refused(asked: Engine, **values: Any) -> Exception:
        request = Request(**{"documents": documents, "suffix": SUFFIX} | values)
        (result,) = asked.reprefill([request])
        return result.error

    with tiny_engine(tmp_path / "b", seed=1) as stranger:
        other = stranger.ingest(TEXTS[0])
    assert isinstance(refused(engine, documents=[documents[0], other]), FingerprintMismatch)
    hers = engine.ingest(TEXTS[0], salt="hers")
    assert isinstance(refused(engine, documents=[documents[0], hers]), PrefixNotFound)
    assert isinstance(refused(engine, documents=[documents[0], "0" * 64]), PrefixNotFound)
    long = [documents[0]] * (TINY.max_position_embeddings // 100 + 1)
    assert isinstance(refused(engine, documents=long), ContextOverflow)
    chunks = dataclasses.replace(engine.system, chunk_tokens=32)
    with engine.variant(dataclasses.replace(engine.config, system=chunks)) as laid:
        assert "chunk_tokens" in str(refused(laid))
    with small_engine(tmp_path / "c", system="as-lru", model=TINY) as baseline:
        two = [baseline.ingest(text) for text in TEXTS[:2]]
        assert "'as-lru' does not select chunks" in str(refused(baseline, documents=two))
    kept = engine.generate(Request(documents=documents, suffix=SUFFIX), keep_kv=True).results()[0]
    assert "keep_kv with documents" in str(kept.error)
    hers_too = {hers.id}
    assert {prefix.id for prefix in engine.store.prefixes()} <= before | hers_too


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"prefix": "a", "documents": ["b"]}, "got both prefix and documents"),
        ({"documents": []}, "got no documents"),
        ({"documents": "ab"}, "expected a list"),
        ({"documents": [[1, 2]]}, r"got \[1, 2\] among documents"),
        ({"documents": ["a", "b"], "suffix": ""}, "empty suffix"),
        ({"documents": ["a", "b"], "blend": 0.3}, "got blend=0.3"),
        ({}, "got prefix=None"),
    ],
)
def test_requests_that_cannot_be(values: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        Request(**{"suffix": "x"} | values)


def test_no_request_waits_for_ever(engine: Engine, documents: list[Prefix]) -> None:
    late = Request(documents=documents, suffix=SUFFIX, deadline_s=1e-6)
    (result,) = engine.reprefill([late])
    assert isinstance(result.error, DeadlineExceeded)
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> bool:
        begun.set()
        return go_on.wait(60)

    held = threading.Thread(target=lambda: engine._scheduler.call(hold))
    held.start()
    assert begun.wait(60)  # the engine's thread is busy until it may go on
    asked = engine.submit(Request(documents=documents, suffix=SUFFIX))
    asked.cancel()
    go_on.set()
    held.join()
    assert isinstance(asked.settled_result().error, Cancelled)


def test_a_request_is_cancelled_while_lost_kv_is_computed_again(
    engine: Engine, documents: list[Prefix], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, begun = engine.worker.recoveries.begin(documents[0], lambda _: None), threading.Event()

    def probes(*_: object) -> None:
        raise RecoveryNeeded(lost, 1)

    monkeypatch.setattr(OpenPrefixes, "probes", probes)
    monkeypatch.setattr(Recovered, "advance", lambda _: begun.set())  # and computes nothing
    asked = engine.submit(Request(documents=documents, suffix=SUFFIX))
    try:
        assert begun.wait(60)
        asked.cancel()
        assert isinstance(asked.result(60).error, Cancelled)
    finally:
        lost.tokens = 1


def test_blends_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"got recompute=1.5, expected a share in \[0, 1\]"):
        Blend(recompute=1.5)
    with pytest.raises(
        ValueError, match="got select='last', expected one of both, attended, first"
    ):
        Blend(select="last")  # type: ignore[arg-type]
