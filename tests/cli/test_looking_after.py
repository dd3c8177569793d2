"""Looking after a store by any name of it: which prefix is meant, and where the store lies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Here

from bench.truth import ingest, some_tokens
from ckv_jax.storage import ChunkStore
from ckv_jax.storage.place.url import folder_of


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
