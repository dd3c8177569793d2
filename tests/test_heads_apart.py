"""Every KV head selects for itself: exact at a budget of one, and what is always attended to.

`baselines/test_sparse_decode.py` compares what heads select with numpy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_sharp import Sharp
from engine_support import TIGHT, scale_error, tokens
from greedy import greedy_tokens
from heads_oracle import BY_POSITION, KVDRIVE, SHARED
from transformers import AutoModelForCausalLM

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.config import SystemConfig
from ckv_jax.selection.select import Coarse, Select
from ckv_jax.storage.prefix import Prefix
from ckv_jax.systems import SYSTEMS

pytestmark = pytest.mark.slow

BUDGET = 0.2
LENGTH = 20
CHUNK = 16


@pytest.fixture(scope="module", params=["kvdrive", "shared"])
def engine(
    sharp: Sharp, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    system = KVDRIVE if request.param == "kvdrive" else SHARED
    with sharp.fresh(tmp_path_factory.mktemp("store"), system=system) as made:
        yield made


@pytest.fixture(scope="module")
def prefixes(engine: Engine) -> list[Prefix]:
    return [engine.ingest(tokens(250 - 20 * i, i)) for i in range(2)]


def test_greedy_equals_transformers(
    engine: Engine, prefixes: list[Prefix], sharp: Sharp, tmp_path: Path
) -> None:
    sharp.model.save(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    requests = [
        Request(prefix=prefixes[i], suffix=tokens(7, seed).tolist(), budget=1.0)
        for i, seed in ((0, 43), (0, 56), (1, 40))
    ]
    texts = engine.generate(requests, SamplingParams(max_tokens=LENGTH)).results()
    for request, text in zip(requests, texts, strict=True):
        assert isinstance(request.prefix, Prefix) and request.suffix is not None
        prompt = [*request.prefix.tokens.tolist(), *request.suffix]
        assert text.token_ids.tolist() == greedy_tokens(theirs, prompt, LENGTH)


@pytest.mark.parametrize("system", [BY_POSITION, KVDRIVE], ids=["position", "alike"])
def test_what_continues_a_text_stands_on_all_of_it(
    sharp: Sharp, tmp_path: Path, system: SystemConfig
) -> None:
    """Stored by ingest, and as a text that was generated: its last chunk is not whole."""
    with sharp.fresh(tmp_path, system=system) as engine:
        first = engine.ingest(tokens(250))
        longer = engine.ingest(np.concatenate([tokens(250), tokens(150, 7)]))
        assert len(longer.spans) == 2
        request = Request(prefix=first, suffix=tokens(7, 41).tolist(), budget=1.0)
        [text] = engine.generate(request, SamplingParams(max_tokens=9), keep_kv=True).results()
        grown = engine.append(text)
        assert grown.num_tokens == 250 + 7 + 9
        for prefix in (longer, grown):
            again = Request(prefix=prefix, suffix=tokens(7, 42).tolist(), budget=1.0)
            dense = engine.recompute(again)
            [result] = engine.reprefill([again])
            assert scale_error(np.asarray(result.logits), np.asarray(dense.logits)) < TIGHT


def test_steady_tokens_are_attended_to_whatever_share_is_asked_for(
    sharp: Sharp, tmp_path: Path
) -> None:
    with sharp.fresh(tmp_path, system=KVDRIVE) as engine:
        prefix = engine.ingest(tokens(250))
        suffix = tokens(7, 41).tolist()
        engine.reprefill([Request(prefix=prefix, suffix=suffix, budget="mass:0.3")])
        selected = engine.last_selection(prefix)
        steady = {0, *range((250 - 64) // CHUNK, prefix.num_chunks)}
        assert all(steady <= set(ids.tolist()) for ids in selected)
        assert len({len(ids) for ids in selected}) > 1  # and some heads took more
        engine.reprefill([Request(prefix=prefix, suffix=suffix, budget=BUDGET)])
        limit = math.ceil(BUDGET * prefix.num_chunks)
        assert {len(ids) for ids in engine.last_selection(prefix)} == {limit + len(steady)}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"digest": "none", "decode": None}, "got digest='none'"),
        ({"digest": "int4"}, "got digest='int4'"),
        ({"chunk_tokens": 6}, "chunk_tokens=6"),
        ({"codec": "int8"}, "codec: got 'int8"),
        ({"reprefill": Select(coarse=Coarse())}, "got 2 selections per period"),
        ({"reprefill": Select(peaks=True)}, "got 2 selections per period"),
        ({"decode": Select(peaks=True)}, "got 2 selections per period"),
        ({"decode": Select(coarse=Coarse())}, "got 2 selections per period"),
    ],
    ids=str,
)
def test_what_heads_cannot_do_apart_is_refused(
    engine: Engine, wrong: dict[str, object], says: str
) -> None:
    system = dataclasses.replace(SYSTEMS["kvdrive"], **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=says):
        engine.variant(dataclasses.replace(engine.config, system=system))
