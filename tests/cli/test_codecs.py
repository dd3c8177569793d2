"""Codecs on the command line: one that is named, and a store whose codec is gone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from command_line import Here
from small_checkpoint import small_checkpoint

from ckv_jax import Engine, EngineConfig
from ckv_jax.storage.codec import Quantised
from ckv_jax.systems import system_named

WORDS = "the lamp was lit at two and the keeper wrote of rain, fog and a broken fuse. "


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("codecs")
    small_checkpoint(home / "model")
    (home / "text.txt").write_text(WORDS * 10)
    return home


def test_ask_finds_the_codec_that_ingest_was_given(home: Path, tmp_path: Path, here: Here) -> None:
    store = tmp_path / "kv"
    ingest = ("ingest", home / "model", home / "text.txt", "--store", store, "--json")
    code, said, err = here(*ingest, "--codec", "k8v4")
    assert code == 0, err
    stored = json.loads(said)
    assert stored["codec"] == "k8v4"
    assert "codec k8v4:1" in here("inspect", store)[1]
    ask = ("ask", home / "model", "lamp", "--store", store, "--max-tokens", 1, "--json")
    code, said, err = here(*ask)
    assert code == 0 and json.loads(said)["codec"] == "k8v4:1", err
    code, out, err = here(*ingest, "--codec", "int4-rotated")
    assert (code, out) == (1, "") and len(err.splitlines()) == 1
    assert "got codec='int4-rotated', expected one of none, int8, k8v4" in err


def test_a_store_whose_codec_is_gone_says_to_ingest_again(
    home: Path, tmp_path: Path, here: Here
) -> None:
    store = tmp_path / "kv"
    codec = Quantised(name="int4-rotated", bits=(4, 4))
    config = EngineConfig(system=dataclasses.replace(system_named("ckv"), codec=codec))
    with Engine.from_pretrained(home / "model", store=store, config=config) as engine:
        prefix = engine.ingest((home / "text.txt").read_text())
    says = "stored with codec 'int4-rotated:1', expected one of none, int8:1, k8v4:1: ingest the"
    for prefix_id in ((), ("--prefix", prefix.id[:8])):
        code, out, err = here("ask", home / "model", "lamp", "--store", store, *prefix_id)
        assert (code, out) == (1, "") and says in err and len(err.splitlines()) == 1
    (tmp_path / "jobs.jsonl").write_text(json.dumps({"prefix": prefix.id, "question": "lamp"}))
    batch = ("batch", home / "model", tmp_path / "jobs.jsonl", "--store", store)
    code, out, err = here(*batch, "--out", tmp_path / "out.jsonl")
    assert says in (tmp_path / "out.jsonl").read_text() and "Traceback" not in out + err
    code, out, _ = here("inspect", store, prefix.id)
    assert code == 0 and "codec int4-rotated:1" in out
    assert here("verify", store)[0] == 0
    ingest = ("ingest", home / "model", home / "text.txt", "--store", store, "--json")
    code, said, _ = here(*ingest)  # beside it, as another prefix
    assert code == 0 and json.loads(said)["prefix"] != prefix.id
    code, said, err = here(
        "ask", home / "model", "lamp", "--store", store, "--max-tokens", 1, "--json", "--prefix",
        json.loads(said)["prefix"],
    )  # fmt: skip
    assert code == 0 and json.loads(said)["codec"] == "none", err
    assert here("prune", store, "--max-bytes", "0")[0] == 0
