"""Traffic is clustered and stable as asked, in tokens and in the weights' own attention."""

from __future__ import annotations

import argparse
import itertools

import numpy as np
import pytest

from bench import ttft
from bench.common import SHAPES, Setting
from bench.kept import Kept
from bench.structured import GROUPS, STABLE_AT, TOPICS, Structure, alike_for, structured_model
from bench.workload import Synthetic, touched_chunks
from ckv_jax.model.decoder import Transformer

TINY = SHAPES["tiny"]


def work(clustering: float = 1.0, *, stable: bool = False, tokens: int = 40_000) -> Synthetic:
    return Synthetic(
        vocab_size=50_000, prefix_tokens=tokens, suffix_tokens=8, clustering=clustering,
        stable=stable,
    )  # fmt: skip


@pytest.mark.parametrize("clustering", [1.0, 2.0, 5.0])
def test_runs_are_as_long_as_asked(clustering: float) -> None:
    prefix = work(clustering).prefix(0)
    runs = [len(list(same)) for _, same in itertools.groupby(prefix.tolist())]
    assert np.mean(runs) == pytest.approx(clustering, rel=0.03)
    assert clustering == 1 or np.std(runs) > clustering / 2  # drawn, not all of one length
    assert (work().prefix(0)[0] == prefix[0]) and len(prefix) == 40_000


@pytest.mark.parametrize(("share", "clustering"), [(0.05, 1.0), (0.05, 2.0), (0.25, 8.0)])
def test_important_tokens_touch_as_many_chunks_as_the_formula_has(
    share: float, clustering: float
) -> None:
    importance = np.random.default_rng(3).random(50_000)  # of a token, wherever it stands
    prefix = work(clustering, tokens=64 * 4000).prefix(1)
    chunks = (importance[prefix] < share).reshape(-1, 64)
    touched = chunks.any(axis=1).mean()
    assert touched == pytest.approx(touched_chunks(share, clustering, 64), abs=0.02)
    assert touched_chunks(share, 1.0, 64) == pytest.approx(1 - (1 - share) ** 64)


def test_questions_of_stable_traffic_ask_within_their_prefix_s_group() -> None:
    stable, free = work(stable=True), work()
    for prefix in range(GROUPS + 2):
        topics = {int(stable.suffix(i, prefix)[0]) % TOPICS for i in range(40)}
        assert {topic // (TOPICS // GROUPS) for topic in topics} == {prefix % GROUPS}
        assert len(topics) > 4
    assert len({int(free.suffix(i, 1)[0]) % TOPICS for i in range(200)}) > 40


def shared(model: Transformer, traffic: Synthetic) -> float:
    """Share of the important tokens of a question that others over its prefix find as well."""
    layer, found = model.layers[0], []
    for prefix in range(4):
        tokens = traffic.prefix(prefix)
        _, keys, _ = layer.project(model.embedding[...][tokens][None], np.arange(len(tokens))[None])
        chosen = []
        for question in range(4):
            suffix = traffic.suffix(question, prefix)
            places = len(tokens) + np.arange(len(suffix))
            queries, _, _ = layer.project(model.embedding[...][suffix][None], places[None])
            chosen.append(important(*(np.asarray(x, np.float64)[0] for x in (queries, keys))))
        pairs = itertools.combinations(chosen, 2)
        found += [len(np.intersect1d(a, b)) / len(a) for a, b in pairs if (a != b).any()]
    return float(np.mean(found))


def important(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Tokens, a share `STABLE_AT`, that get most of the attention of queries [S, H, D] to keys."""
    keys = np.repeat(keys, queries.shape[1] // keys.shape[1], axis=1)
    logits = np.einsum("shd,thd->hst", queries, keys) * queries.shape[2] ** -0.5
    mass = np.exp(logits - logits.max(axis=2, keepdims=True))
    mass = (mass / mass.sum(axis=2, keepdims=True)).sum(axis=(0, 1))
    return np.sort(np.argsort(-mass)[: round(STABLE_AT * len(mass))])


def test_questions_share_as_many_important_tokens_as_asked() -> None:
    assert alike_for(0.0) == 0 and alike_for(1.0) == 1
    found = {}
    for stability in (0.0, 0.7):
        structure = Structure(alike=alike_for(stability))
        model = structured_model(TINY, dtype="float32", seed=1, structure=structure)
        traffic = Synthetic(
            vocab_size=TINY.vocab_size, prefix_tokens=1024, suffix_tokens=8, stable=stability > 0
        )
        found[stability] = shared(model, traffic)
    assert found[0.0] < 0.5
    assert found[0.7] == pytest.approx(0.7, abs=0.08)


def test_a_sweep_measures_the_smallest_budget_at_every_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Setting] = []

    def measured(setting: Setting, _: object, *, ablate: bool) -> dict[str, object]:
        asked.append(setting)
        return {"rows": [], "ablated": ablate}

    monkeypatch.setattr(ttft, "measured_with", measured)
    points = ttft.swept(Setting(budgets=(0.05, 0.25), seed=7), argparse.Namespace(), Kept(None, {}))
    assert [(s.clustering, s.stability) for s in asked] == list(ttft.TRAFFIC)
    assert all(s.budgets == (0.05,) and s.seed == 7 for s in asked)
    assert [(p["clustering"], p["stability"]) for p in points] == list(ttft.TRAFFIC)
    assert (1.0, 0.0) in ttft.TRAFFIC and not any(p["ablated"] for p in points)


@pytest.mark.parametrize("wrong", [{"clustering": 0.5}, {"stability": 1.5}, {"stability": -0.1}])
def test_traffic_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="clustering"):
        Setting(**wrong)  # type: ignore[arg-type]
