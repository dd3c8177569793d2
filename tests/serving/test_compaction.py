"""A batch that shrinks: the rows that are left keep what was theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from engine_sharp import Sharp
from engine_support import tokens

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.storage.prefix import Prefix


@pytest.fixture(scope="module")
def engine(sharp: Sharp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with sharp.fresh(tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture(scope="module")
def prefix(engine: Engine) -> Prefix:
    return engine.ingest(tokens(140))


def test_rows_of_different_sampling_go_on_as_they_would_alone(
    engine: Engine, prefix: Prefix
) -> None:
    """The first and the third row end early: from four rows the batch goes to two, then to one,
    and every one of them samples in a way of its own."""
    sampling = [
        SamplingParams(max_tokens=2),
        SamplingParams(max_tokens=14, temperature=1.5, seed=7),
        SamplingParams(max_tokens=4, temperature=0.9, top_p=0.8, seed=3),
        SamplingParams(max_tokens=9, temperature=2.0, top_k=40, seed=11),
    ]
    requests = [
        Request(prefix=prefix, suffix=tokens(3 + 2 * row, row).tolist(), budget=(0.3, 0.6)[row % 2])
        for row in range(4)
    ]
    together = engine.generate(requests, sampling).results()
    for request, params, got in zip(requests, sampling, together, strict=True):
        (alone,) = engine.generate(request, params).results()
        assert got.request is request and got.finish_reason == "length"
        assert len(got.token_ids) == params.max_tokens
        assert got.token_ids.tolist() == alone.token_ids.tolist()
        greedy = dataclasses.replace(params, temperature=0.0)
        (cold,) = engine.generate(request, greedy).results()
        assert params == greedy or got.token_ids.tolist() != cold.token_ids.tolist()
