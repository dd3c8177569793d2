"""Storing texts: again, over bounds and quotas, on a full disk."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import TEXT, Here

from ckv_jax.cli.options import store_config
from ckv_jax.storage import ChunkStore, PrefixRecord
from ckv_jax.storage.config import StoreConfig


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
    settings = store_config(max_bytes="1.5MiB", eviction="lru", direct_io=False, io_concurrency=4)
    assert settings == StoreConfig(
        max_bytes=3 * 2**19, eviction="lru", direct_io=False, io_concurrency=4
    )
    default = store_config(max_bytes=None, eviction="attention", direct_io=None, io_concurrency=32)
    assert default == StoreConfig()


def test_a_text_larger_than_the_bound_is_refused(home: Path, here: Here, tmp_path: Path) -> None:
    code, _, err = here(
        "ingest", home / "checkpoint", home / "text.txt", "--store", tmp_path / "kv",
        "--max-bytes", "10kB", "--no-direct-io", "--eviction", "lru", "--io-concurrency", 4,
    )  # fmt: skip
    assert code == 1
    assert len(err.strip().splitlines()) == 1 and "10000" in err.replace(",", "")


def test_a_tenant_over_its_quota_makes_room_of_its_own(
    home: Path, here: Here, tmp_path: Path
) -> None:
    (tmp_path / "more.txt").write_text(TEXT.replace("lamp", "desk"))
    model, kv = home / "checkpoint", ("--store", tmp_path / "kv")
    mine = ("--salt", "correct horse")

    def ingested(text: Path, *options: object) -> dict:
        code, out, err = here("ingest", model, text, *kv, *options, "--raw", "--json")
        assert code == 0, err
        found: dict = json.loads(out)
        return found

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
    assert code == 1 and len(err.strip().splitlines()) == 1 and "tenant_bytes" in err
    with ChunkStore.open(tmp_path / "kv", readonly=True) as store:
        assert {p.id for p in store.prefixes()} == {other["prefix"], second["prefix"]}


def test_ingest_prints_no_salt(home: Path, here: Here, tmp_path: Path) -> None:
    salt = "correct horse"
    ingest = ("ingest", home / "checkpoint", home / "text.txt", "--store", tmp_path / "kv")
    code, out, err = here(*ingest, "--salt", salt)
    assert code == 0 and out.rstrip().endswith("--salt …")
    assert salt not in out + err
    assert salt not in here(*ingest, "--salt", salt, "--json")[1]


def test_a_wrong_system_makes_no_store(home: Path, tmp_path: Path, here: Here) -> None:
    store = tmp_path / "kv"
    text = home / "text.txt"
    assert here("ingest", home / "checkpoint", text, "--system", "magic", "--store", store)[0] == 1
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
