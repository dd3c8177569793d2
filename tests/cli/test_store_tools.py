"""Looking after a store by any name of it: which prefix is meant, and where the store lies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import Here

from ckv_jax.storage import ChunkStore
from ckv_jax.storage.place.place import folder_of
from tests.support.truth import ingest, some_tokens


def test_a_start_of_several_ids_was_not_evicted(tmp_path: Path, here: Here) -> None:
    with ChunkStore.open(tmp_path / "kv") as store:
        found = [ingest(store, some_tokens(16, seed)) for seed in range(40)]
        start = next(s for s in "0123456789abcdef" if sum(p.id[0] == s for p in found) > 2)
        gone = next(p for p in found if p.id[0] == start)
        store.delete(gone)
        left = sum(p.id[0] == start for p in found) - 1
    code, _, err = here("inspect", tmp_path / "kv", start)
    assert code == 1 and f"{left} stored prefixes begin with" in err and "evicted" not in err
    code, _, err = here("inspect", tmp_path / "kv", gone.id[:16])
    assert code == 1 and f"prefix {gone.id} was evicted on" in err


@pytest.mark.parametrize("host", ["", "localhost"])
def test_a_store_is_found_by_its_url(tmp_path: Path, here: Here, host: str) -> None:
    folder = tmp_path / "my store"
    url = f"file://{host}{tmp_path}/my%20store"
    with ChunkStore.open(url) as store:
        prefix = ingest(store, some_tokens(64))
    assert (folder / "store.json").exists() and folder_of(url) == folder
    for command in (
        ["inspect", url, prefix.id],
        ["verify", url],
        ["pin", url, prefix.id],
        ["prune", url, "--max-bytes", "1GB"],
    ):
        code, out, _ = here(*command, "--json")
        assert code == 0 and json.loads(out), command


def test_a_url_of_another_machine_is_refused(here: Here) -> None:
    assert folder_of("s3://bucket/kv") is None
    code, _, err = here("verify", "file://elsewhere/kv")
    assert code == 1 and "expected file:///path" in err


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["prune", "--max-bytes", "0"]])
def test_looking_after_no_store_makes_none(tmp_path: Path, here: Here, command: list[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    code, _, err = here(*command, empty)
    assert code == 1 and "there is no store" in err
    assert list(empty.iterdir()) == []


def test_the_store_is_shown_checked_pinned_and_pruned(
    home: Path, prefix: dict, tmp_path: Path, here: Here
) -> None:
    store, name = tmp_path / "kv", str(prefix["prefix"])
    shutil.copytree(home / "kv", store)

    def look_after(*args: object) -> dict:
        code, out, _ = here(*args, "--json")
        assert code == 0
        found: dict = json.loads(out)
        return found

    shown = look_after("inspect", store, name)
    assert shown["prefixes"] == {name: prefix["tokens"]}
    assert len(shown["prefix"]["layers"]) == 2
    (segment,) = shown["segments"]
    assert segment["name"] == "handbook"
    assert segment["source"] in ("text.txt", "stdin")  # another test stores it again from there
    assert segment["begins"] == "The lamp of room 0 is number 0. The lamp of room 1 is …"
    seen = here("inspect", store, name[:5])[1]
    assert name in seen and "handbook" in seen
    assert look_after("verify", store)["ok"]

    assert here("inspect", store, "handbook")[1] == here("inspect", store, name)[1]
    code, _, err = here("inspect", store, "handbok")
    assert code == 1 and "handbook" in err

    assert look_after("pin", store, "handbook")["prefix"] == name
    code, out, err = here("prune", store, "--max-bytes", "0", "--json")
    assert (code, json.loads(out)["removed"]) == (3, 0) and "the rest is pinned" in err
    assert not look_after("pin", store, name, "--unpin")["pinned"]
    pruned = look_after("prune", store, "--max-bytes", "1kB")
    assert (pruned["removed"], pruned["bytes_after"]) == (1, 0)


def test_an_encrypted_store_needs_its_key(
    home: Path, prefix: dict, tmp_path: Path, here: Here
) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_text("ab" * 32)
    other.write_text("cd" * 32)
    store, texts, model = tmp_path / "kv", home / "text.txt", home / "checkpoint"
    mine = ("--encrypt-key-file", key)
    assert here("ingest", model, texts, "--store", store, "--name", "book", *mine)[0] == 0
    code, out, _ = here("ask", model, "Which?", "--store", store, "--max-tokens", 2, *mine)
    assert code == 0 and out.strip()
    assert "book" in here("inspect", store, *mine)[1]
    assert json.loads(here("verify", store, "--json", *mine)[1])["ok"]
    assert here("pin", store, "book", *mine)[0] == 0
    for command in (
        ("inspect", store), ("verify", store, "--repair"), ("pin", store, "book"),
        ("prune", store, "--max-bytes", 0), ("ask", model, "Which?", "--store", store),
    ):  # fmt: skip
        code, out, err = here(*command)
        assert code == 1 and "not readable without --encrypt-key-file" in err
        assert len(err.strip().splitlines()) <= 2 and not out
        code, _, err = here(*command, "--encrypt-key-file", other)
        assert code == 1 and "with another key than that in --encrypt-key-file" in err
    assert json.loads(here("verify", store, "--json", *mine)[1])["ok"]
    code, _, err = here("inspect", home / "kv", *mine)
    assert code == 1 and "not encrypted: leave --encrypt-key-file out" in err


@pytest.mark.slow
def test_damage_is_found_and_repaired(home: Path, prefix: dict, tmp_path: Path, here: Here) -> None:
    store = tmp_path / "kv"
    shutil.copytree(home / "kv", store)
    largest = max(store.rglob("packs/c.*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    code, out, _ = here("verify", store, "--json")
    assert code == 1
    (damage,) = json.loads(out)["damages"]
    assert here("verify", store, "--dry-run")[0] == 1  # without --repair it has nothing to say
    code, out, _ = here("verify", store, "--repair", "--dry-run")
    assert code == 1 and "handbook" in out and f"its first {damage['chunk']} of" in out
    assert len(json.loads(here("verify", store, "--json")[1])["damages"]) == 1  # nothing was done
    assert here("verify", store, "--repair")[0] == 0

    def ask(of: Path) -> tuple[int, int, str]:
        code, out, err = here(
            "ask", home / "checkpoint", "why?", "--store", of, "--prefix", "handbook",
            "--budget", 1, "--max-tokens", 1, "--json",
        )  # fmt: skip
        assert code == 0
        found = json.loads(out)
        return found["token_id"], found["recomputed_chunks"], err

    whole = ask(home / "kv")
    assert whole[1] == 0 and "computed again" not in whole[2]
    token, again, err = ask(store)  # what is damaged is computed again, and said
    assert (token, again) == (whole[0], 1)
    assert "1 chunk is damaged on disk and was computed again" in err
