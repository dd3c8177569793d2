"""Storing texts: again, over bounds and quotas, on a full disk."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import TEXT, Here
from small_checkpoint import small_checkpoint

from ckv_jax import Engine, EngineConfig
from ckv_jax.cli.options import store_config
from ckv_jax.storage import ChunkStore, PrefixRecord
from ckv_jax.storage.codec import Quantised
from ckv_jax.storage.config import StoreConfig
from ckv_jax.systems import system_named
from ckv_jax.user_cache import count_compiled


def test_ingesting_again_stores_nothing_new(
    home: Path, prefix: dict, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXT))
    code, out, _ = here("ingest", home / "checkpoint", "-", "--store", home / "kv", "--json")
    assert code == 0
    again = json.loads(out)
    assert again["prefix"] == prefix["prefix"]
    assert again["store_bytes"] == prefix["store_bytes"]


def test_ingesting_again_keeps_what_was_wished(home: Path, tmp_path: Path, here: Here) -> None:
    ingest = ("ingest", home / "checkpoint", home / "text.txt", "--store", tmp_path / "kv")

    def wish() -> PrefixRecord:
        with ChunkStore.open(tmp_path / "kv", readonly=True) as store:
            (found,) = store.records().values()
        return found

    assert here(*ingest, "--retain", "7d", "--priority", 3, "--name", "lamps")[0] == 0
    first = wish()
    assert (first.retain_s, first.priority, first.name) == (7 * 86400, 3, "lamps")
    assert here(*ingest)[0] == 0
    assert wish() == first
    assert here(*ingest, "--retain", "1h", "--priority", 0)[0] == 0
    assert wish() == replace(first, retain_s=3600, priority=0)


def test_the_stores_settings_are_those_of_the_command_line() -> None:
    settings = store_config("1.5MiB", "lru", False, 4, None)
    assert settings == StoreConfig(
        max_bytes=3 * 2**19, eviction="lru", direct_io=False, io_concurrency=4
    )
    default = store_config(None, "attention", None, 32, None)
    assert default == StoreConfig()


def test_a_tenant_over_its_quota_makes_room_of_its_own(
    home: Path, here: Here, tmp_path: Path
) -> None:
    (tmp_path / "more.txt").write_text(TEXT.replace("lamp", "desk"))
    model, kv = home / "checkpoint", ("--store", tmp_path / "kv")
    mine = ("--salt", "correct horse")

    def ingested(text: Path, *options: object) -> dict:
        code, out, err = here("ingest", model, text, *kv, *options, "--raw", "--json")
        assert code == 0, err
        return json.loads(out)

    other = ingested(home / "text.txt", "--salt", "other")
    quota = ("--tenant-bytes", other["store_bytes"] * 3 // 2)
    first = ingested(home / "text.txt", *mine, *quota)
    second = ingested(tmp_path / "more.txt", *mine, *quota)
    with ChunkStore.open(tmp_path / "kv", readonly=True) as store:
        assert {p.id for p in store.prefixes()} == {other["prefix"], second["prefix"]}
        why = store.why_evicted(first["prefix"])
        assert why is not None and "tenant_bytes" in why.reason
    code, _, err = here(
        "ingest", model, home / "text.txt", *kv, *mine, "--tenant-bytes", "10kB", "--raw"
    )
    assert code == 1 and len(err.strip().splitlines()) == 1 and "--tenant-bytes allows" in err
    with ChunkStore.open(tmp_path / "kv", readonly=True) as store:
        assert {p.id for p in store.prefixes()} == {other["prefix"], second["prefix"]}


@pytest.mark.slow
def test_the_first_question_compiles_nothing(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the default budget and at 1.0, for texts of one length, after the first of them."""
    model = small_checkpoint(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["rms_norm_eps"] *= 1 + random.SystemRandom().random()  # programs that no test has made
    (model / "config.json").write_text(json.dumps(config))
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "more.txt").write_text(TEXT.replace("lamp", "desk"))
    monkeypatch.setitem(EngineConfig.__init__.__kwdefaults__, "warm_batch", 1)

    store = ("--store", tmp_path / "kv")
    code, out, err = here("ingest", model, tmp_path / "text.txt", *store, "--name", "lamps")
    assert code == 0 and "more to compile for questions" in out, err
    ask = ("ask", model, "What does the document say about room 7?", *store, "--prefix", "lamps")
    for budget, tokens in ((0.25, 2), (0.1, 2), (1.0, 1)):
        with count_compiled() as compiled:
            code, _, err = here(*ask, "--budget", budget, "--max-tokens", tokens)
        assert code == 0 and not compiled, (budget, err)
    code, out, _ = here("ingest", model, tmp_path / "more.txt", *store, "--json")
    assert code == 0 and json.loads(out)["compile_seconds"] == 0.0
    more = ("ingest", model, tmp_path / "more.txt", *store, "--warm-batch", 2, "--json")
    assert json.loads(here(*more)[1])["compile_seconds"] > 0
    question = {"question": "What does the document say about room 7?", "max_tokens": 1}
    (tmp_path / "two.jsonl").write_text(2 * f"{json.dumps(question)}\n")
    batch = ("batch", model, tmp_path / "two.jsonl", *store, "--prefix", "lamps")
    with count_compiled() as compiled:
        code, _, err = here(*batch, "--out", tmp_path / "out.jsonl")
    assert code == 0 and not compiled, err


def test_ingest_prints_no_salt(home: Path, here: Here, tmp_path: Path) -> None:
    salt = "correct horse"
    ingest = ("ingest", home / "checkpoint", home / "text.txt", "--store", tmp_path / "kv")
    code, out, err = here(*ingest, "--salt", salt)
    assert code == 0 and out.rstrip().endswith("--salt …")
    assert salt not in out + err
    assert salt not in here(*ingest, "--salt", salt, "--json")[1]


def test_what_is_refused_makes_no_store(home: Path, tmp_path: Path, here: Here) -> None:
    store = tmp_path / "kv"
    (tmp_path / "long.txt").write_text(TEXT * 16)
    for command, text, more, says in (
        ("ingest", home / "text.txt", ("--system", "magic"), "contiguous-kv"),
        ("ingest", home / "text.txt", ("--turn", "sideways"), ""),
        ("ingest", home / "text.txt", ("--raw", "--turn", "user"), "raw text"),
        ("ingest", tmp_path / "long.txt", (), "the model's context"),
        ("chat", tmp_path / "long.txt", (), "the model's context"),
    ):
        code, out, err = here(command, home / "checkpoint", text, "--store", store, *more)
        assert (code, out) == (1, "") and says in err and len(err.splitlines()) == 1, err
        assert not store.exists()


def test_a_full_disk_leaves_nothing_half_written(home: Path, tmp_path: Path, here: Here) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs more rights")
    try:
        code, _, err = here(
            "ingest", home / "checkpoint", home / "text.txt", "--store", disk / "kv"
        )
        assert code == 1 and len(err.strip().splitlines()) == 1
        assert "room" in err or "full" in err
        found = json.loads(here("inspect", disk / "kv", "--json")[1])
        assert (found["prefixes"], found["segments"]) == ({}, [])
        assert not list(disk.rglob("*.zarr")) and not list(disk.rglob("zarr.json"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# -- codecs ----------------------------------------------------------------------------------------


WORDS = "the lamp was lit at two and the keeper wrote of rain, fog and a broken fuse. "


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    coded = tmp_path_factory.mktemp("codecs")
    small_checkpoint(coded / "model")
    (coded / "text.txt").write_text(WORDS * 10)
    return coded


def test_ask_finds_the_codec_that_ingest_was_given(coded: Path, tmp_path: Path, here: Here) -> None:
    store = tmp_path / "kv"
    ingest = ("ingest", coded / "model", coded / "text.txt", "--store", store, "--json")
    code, said, err = here(*ingest, "--codec", "k8v4")
    assert code == 0, err
    stored = json.loads(said)
    assert stored["codec"] == "k8v4"
    assert "codec k8v4:1" in here("inspect", store)[1]
    ask = ("ask", coded / "model", "lamp", "--store", store, "--max-tokens", 1, "--json")
    code, said, err = here(*ask)
    assert code == 0 and json.loads(said)["codec"] == "k8v4:1", err
    code, out, err = here(*ingest, "--codec", "int4-rotated")
    assert (code, out) == (1, "") and len(err.splitlines()) == 1
    assert "got codec='int4-rotated', expected one of none, int8, k8v4" in err


def test_a_store_whose_codec_is_gone_says_to_ingest_again(
    coded: Path, tmp_path: Path, here: Here
) -> None:
    store = tmp_path / "kv"
    codec = Quantised(name="int4-rotated", bits=(4, 4))
    config = EngineConfig(system=dataclasses.replace(system_named("ckv"), codec=codec))
    with Engine.from_pretrained(coded / "model", store=store, config=config) as engine:
        prefix = engine.ingest((coded / "text.txt").read_text())
    says = "stored with codec 'int4-rotated:1', expected one of none, int8:1, k8v4:1: ingest the"
    for prefix_id in ((), ("--prefix", prefix.id[:8])):
        code, out, err = here("ask", coded / "model", "lamp", "--store", store, *prefix_id)
        assert (code, out) == (1, "") and says in err and len(err.splitlines()) == 1
    code, out, _ = here("inspect", store, prefix.id)
    assert code == 0 and "codec int4-rotated:1" in out
    assert here("verify", store)[0] == 0
    ingest = ("ingest", coded / "model", coded / "text.txt", "--store", store, "--json")
    code, said, _ = here(*ingest)  # beside it, as another prefix
    assert code == 0 and json.loads(said)["prefix"] != prefix.id
