"""Every fault becomes a miss: one test a row of the promise; `python -m tests.faults` does bulk."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from segment_support import at_most, hurt, lose_index

from ckv_jax.storage import ChunkStore, verify_store
from ckv_jax.storage.segment import segment
from tests.faults import __main__ as faults
from tests.faults import corruption
from tests.faults.tally import CONFIG, LAYOUT, Served, Tally, serve
from tests.support.truth import FINGERPRINT, SMALL, ingest, read_all, some_tokens


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.disable(logging.WARNING)  # an index that is lost on purpose need not be reported
    yield
    logging.disable(logging.NOTSET)


def passed(tally: Tally, *, caught: bool = True) -> None:
    assert tally.ok, tally
    assert not caught or tally.caught, tally


@pytest.mark.parametrize("kind", corruption.FLIPS)
def test_flipped_bits(pristine: Path, kind: str) -> None:
    # Nothing of ours needs the index of a shard of packs while they are read directly.
    unread = ("flip zarr.json", "flip catalog", "flip index")
    passed(corruption.flips(pristine, 6, kind), caught=kind not in unread)


@pytest.mark.parametrize("kind", corruption.SHARDS)
def test_shards_that_are_not_what_they_were(pristine: Path, kind: str) -> None:
    passed(corruption.shards(pristine, 4, kind))


def test_the_judge_sees_wrong_kv(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks, the same faults are served as wrong tokens."""

    def all_good(self: segment.Segment, group: int, chunks: np.ndarray, *_: object) -> np.ndarray:
        return np.ones(len(chunks), bool)

    monkeypatch.setattr(segment.Segment, "packs_good", all_good)
    assert corruption.flips(pristine, 4, "flip data").wrong_tokens > 0
    assert corruption.shards(pristine, 4, "swapped packs").wrong_tokens > 0


def test_short_reads(pristine: Path) -> None:
    passed(corruption.short_reads(pristine, 4))


@pytest.mark.slow
def test_eviction_while_another_process_reads(tmp_path: Path) -> None:
    passed(corruption.evictions(tmp_path / "store", 10), caught=False)


def test_a_folder_that_vanishes(pristine: Path) -> None:
    passed(corruption.vanished_folders(pristine, 2))


@pytest.mark.parametrize(
    "body", [b"[" * 200_000, b'{"a":' * 50_000, b"null", b"1e999", b"\xff" * 10, b""]
)
def test_bodies_that_are_no_manifest(pristine: Path, body: bytes) -> None:
    for path in (pristine / "segments").glob("*/*/manifest.json"):
        path.write_bytes(corruption.wrapped(body))
    with ChunkStore.open(pristine, config=CONFIG) as store:
        assert serve(store) == Served(False, 0)
        assert store.prefixes() == []


@pytest.mark.parametrize("kind", ["fifo", "folder", "symlink", "endless"])
def test_manifests_that_are_no_plain_files(pristine: Path, tmp_path: Path, kind: str) -> None:
    for i, path in enumerate((pristine / "segments").glob("*/*/manifest.json")):
        away = path.rename(tmp_path / str(i))
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(away if kind == "symlink" else "/dev/zero")
    with at_most(10), ChunkStore.open(pristine, config=CONFIG) as store:
        assert serve(store) == Served(False, 0)
        assert verify_store(store, repair=True).segments == 0
        assert verify_store(store).ok


def test_a_prefix_is_served_up_to_the_last_good_chunk(folder: Path) -> None:
    tokens = some_tokens(16 * 8)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, tokens)
        shard = sorted((folder / "segments").glob("*/*/packs/c.1.*"))[0]
        hurt(shard, 5 * SMALL.pack_bytes + 3)  # chunk 5 of group 1
        with store.reader(prefix) as reader:
            out = np.ones((8, *SMALL.pack_shape), SMALL.numpy_dtype)
            good = reader.read_packs(1, np.arange(8), out)
        assert good.tolist() == [i != 5 for i in range(8)]
        assert not out[5].view(np.uint16).any()
        assert store.stats()["bad_packs"] == store.stats()["quarantined"] == 1
    with ChunkStore.open(folder) as store:  # the mark outlives the process
        found = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=SMALL)
        assert found.num_tokens == 80
        healed = ingest(store, tokens)  # what is bad is computed and stored again
        assert healed.num_tokens == 128 and len(healed.spans) == 2
        assert read_all(store, healed).right == SMALL.groups * 8


@pytest.mark.parametrize("damage", ["deleted", "emptied", "text", "cut", "wal"])
def test_a_lost_index_is_made_anew(pristine: Path, damage: str) -> None:
    path = pristine / "catalog.sqlite"
    if damage == "deleted":
        path.unlink()
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_text("this is not a database, but it is long enough to look at" * 50)
    elif damage == "cut":
        os.truncate(path, 5000)
    else:
        Path(f"{path}-wal").write_bytes(os.urandom(70_000))
    with ChunkStore.open(pristine, config=CONFIG) as store:
        assert serve(store) == Served(True, 0)
    with ChunkStore.open(pristine, config=CONFIG) as store:
        assert serve(store) == Served(True, 0)
    segments = list((pristine / "segments").glob("*/*"))
    with contextlib.closing(sqlite3.connect(path)) as db:  # what was damaged has been replaced
        assert db.execute("SELECT count(*) FROM segments").fetchone() == (len(segments),)


def test_an_index_that_breaks_while_it_is_used(pristine: Path) -> None:
    with ChunkStore.open(pristine, config=CONFIG) as store:
        assert serve(store) == Served(True, 0)
        path = pristine / "catalog.sqlite"
        path.write_bytes(os.urandom(path.stat().st_size))
        assert serve(store) == Served(True, 0)
        lose_index(pristine)
        assert serve(store) == Served(True, 0)
        ingest(store, some_tokens(77, seed=7), layout=LAYOUT)
        assert store.stats()["rebuilds"] >= 1
        with ChunkStore.open(pristine, config=CONFIG) as other:
            assert len(other.prefixes()) == 4


def test_what_was_published_behind_the_index_is_found(pristine: Path, tmp_path: Path) -> None:
    """A writer that is killed between the rename and the index leaves a good segment."""
    bare = tmp_path / "bare"
    ChunkStore.open(bare).close()
    shutil.copytree(pristine / "segments", bare / "segments", dirs_exist_ok=True)
    with ChunkStore.open(bare, config=CONFIG) as store:
        assert serve(store) == Served(True, 0)


@pytest.mark.slow
def test_the_bulk_run_reports_no_fault_that_got_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "faults.json"
    command = ["faults", "--only", "flip data", "--quick", "--json", str(out)]
    monkeypatch.setattr("sys.argv", command)
    assert faults.main() == 0
    found = json.loads(out.read_text())
    total = found["total"]
    assert 0 < total["states"] == total["caught"] + total["harmless"]
    assert [row["kind"] for row in found["rows"]] == ["flip data"]
