"""Every family through the whole engine: stored, opened again, asked by every system."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import MIB, TIGHT, scale_error

from ckv_jax import Engine, EngineConfig, Request, SamplingParams
from ckv_jax.config import SystemConfig
from ckv_jax.errors import UnsupportedModel
from ckv_jax.model.families import FAMILIES
from ckv_jax.systems import SYSTEMS
from tests.model.hf_checkpoints import their_logits, write_checkpoint
from tests.model.small import write_tokenizer

ODD = {"qwen2": "qwen2", "qwen3": "qwen3-odd", "llama": "llama-odd", "mistral": "mistral-odd"}
DECODE = {"dense", "flexgen", *(name for name in SYSTEMS if SYSTEMS[name].own.decoding is not None)}
"""Published systems of long decode."""
TEXT, QUESTION = 114, 6  # past the trained length of those whose RoPE is scaled


def tokens(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 300, n).astype(np.int32)


def settings(system: str | SystemConfig) -> EngineConfig:
    return EngineConfig(
        system=system, dtype="float32", device_cache_bytes=MIB, host_cache_bytes=MIB,
        prefetch_device_bytes=2 * MIB, prefetch_host_bytes=2 * MIB, prefill_block=64, io_threads=2,
    )  # fmt: skip


def make(folder: Path, case: str, **changes: Any) -> Any:
    theirs = write_checkpoint(folder, case, vocab_size=300, **changes)
    write_tokenizer(folder)
    return theirs


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, transformers' logits after text and question, and a store."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = make(folder / "model", ODD[request.param])
    whole = np.concatenate([tokens(TEXT, 1), tokens(QUESTION, 2)])[None]
    np.save(folder / "expected.npy", their_logits(theirs, whole)[0, -1])
    return folder


@pytest.fixture(scope="module")
def engine(family: Path) -> Iterator[Engine]:
    """Over what another engine of the same checkpoint ingested."""
    opened = {"store": family / "kv", "config": settings("ckv")}
    with Engine.from_pretrained(family / "model", **opened) as first:
        (family / "prefix").write_text(first.ingest(tokens(TEXT, 1)).id)
    with Engine.from_pretrained(family / "model", **opened) as again:
        yield again


def test_a_stored_text_is_answered_after_a_restart_as_by_transformers(
    family: Path, engine: Engine
) -> None:
    prefix = (family / "prefix").read_text()
    expected = np.load(family / "expected.npy")
    request = Request(prefix=prefix, suffix=tokens(QUESTION, 2), budget=1.0)
    (result,) = engine.reprefill([request])
    result.raise_for_error()
    assert result.trace.bytes["ssd"] > 0
    assert scale_error(result.logits, expected) < TIGHT
    assert scale_error(engine.recompute(request).logits, expected) < TIGHT


@pytest.mark.parametrize(
    ("family", "system"),
    [
        *[("qwen3", system) for system in sorted(SYSTEMS.keys() - DECODE)],
        ("llama", "impress"),
        ("mistral", "as-lru"),
    ],
    indirect=["family"],
)
def test_every_system_runs(system: str, family: Path, engine: Engine) -> None:
    """Qwen2.5 is what all other tests of systems run on."""
    expected = np.load(family / "expected.npy")
    with engine.variant(settings(system)) as asked:
        prefix = asked.ingest(tokens(TEXT, 1))
        request = Request(prefix=prefix, suffix=tokens(QUESTION, 2), budget=1.0)
        (result,) = asked.reprefill([request])
        result.raise_for_error()
        assert scale_error(result.logits, expected) < TIGHT
        if SYSTEMS[system].own.selects == "chunk" and not SYSTEMS[system].computes_all:
            (less,) = asked.reprefill([dataclasses.replace(request, budget=0.1)])
            assert scale_error(less.logits, expected) > 10 * TIGHT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "system"),
    [
        *[("qwen3", s) for s in sorted({"ckv", *DECODE})],
        *[(family, "ckv") for family in ("llama", "mistral")],
    ],
    indirect=["family"],
)
def test_every_system_of_decode_goes_on(system: str, family: Path, engine: Engine) -> None:
    """With some of the prefix; where nothing is selected, as if nothing were stored."""
    way = SamplingParams(max_tokens=3)
    config = SYSTEMS[system]
    text, question = tokens(TEXT, 1), tokens(QUESTION, 2)
    with engine.variant(settings(system)) as asked:
        prefix = asked.ingest(text)
        wide = config.always.most(prefix.layout, TEXT) == prefix.num_chunks  # the ends are all
        chooses = config.decode is not None and not wide
        budget = 1.0 if config.decode is None else 0.1
        request = Request(prefix=prefix, suffix=question, budget=budget)
        (found,) = asked.generate(request, way).results()
    assert found.error is None and len(found.token_ids) == 3
    assert bool(found.trace.tokens) == chooses
    if not chooses:
        whole = Request(prefix=[], suffix=np.concatenate([text, question]))
        (dense,) = engine.generate(whole, way).results()
        assert found.token_ids.tolist() == dense.token_ids.tolist()


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_text_begins_and_ends_as_its_checkpoint_says(family: Path, tmp_path: Path) -> None:
    """Begin-of-text, chat template, end-of-text ids and sampling of a Llama."""
    folder = tmp_path / "model"
    shutil.copytree(family / "model", folder)
    write_tokenizer(folder, begin="<s>")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.8, "max_new_tokens": 12}))
    config, store = settings("ckv"), tmp_path / "kv"
    with Engine.from_pretrained(folder, store=store, config=config) as engine:
        begin = engine.encode("<s>", begins=True)[0]
        prefix = engine.ingest("the cat sat on the mat, the dog sat", raw=True)
        assert [begin] == [token for token in prefix.tokens if token == begin] == [prefix.tokens[0]]
        assert engine.ingest("<s>the cat sat on the mat, the dog sat", raw=True) == prefix
        question = engine.chat("where?")
        assert question[0] == begin
        question = question[1:]
        (answer,) = engine.generate(Request(prefix=prefix, suffix=question)).results()
        way = SamplingParams(temperature=0.8, top_k=50, max_tokens=12)
        (same,) = engine.generate(Request(prefix=prefix, suffix=question), way).results()
        (greedy,) = engine.generate(
            Request(prefix=prefix, suffix=question), SamplingParams(max_tokens=12)
        ).results()
        (alone,) = engine.reprefill([Request(prefix=[], suffix="the cat")])
        (ids,) = engine.reprefill([Request(prefix=[], suffix=[begin, *engine.encode("the cat")])])
    assert answer.token_ids.tolist() == same.token_ids.tolist() != greedy.token_ids.tolist()
    assert len(answer.token_ids) == 12
    np.testing.assert_array_equal(alone.logits, ids.logits)
    ends = [int(answer.token_ids[5]), 299]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
    with Engine.from_pretrained(folder, store=store, config=config) as engine:
        (ended,) = engine.generate(Request(prefix=prefix, suffix=question)).results()
    stop = answer.token_ids.tolist().index(ends[0]) + 1
    assert ended.token_ids.tolist() == answer.token_ids.tolist()[:stop]
    assert ended.finish_reason == "stop"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mixtral"}, "mixture of experts"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding window"),
    ],
)
def test_what_is_not_supported_is_refused_before_anything_is_made(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))  # and no weights at all
    with pytest.raises(UnsupportedModel, match=reason):
        Engine.from_pretrained(tmp_path, store=tmp_path / "kv", config=settings("ckv"))
    assert not (tmp_path / "kv").exists()
