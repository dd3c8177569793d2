"""What the store rests on in TensorStore: the end of a failed read, and the bytes of its arrays."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from segment_support import hurt, segment_folder

from ckv_jax.storage import ChunkStore, Layout
from ckv_jax.storage.tools.verify import verify_store
from tests.support.truth import SMALL, Outcome, ingest, kv_of, read_all, some_tokens

ENTRIES, SIZE = 200, 1 << 16


@pytest.mark.parametrize("concurrency", [1, 32])
def test_a_read_that_failed_no_longer_writes(tmp_path: Path, concurrency: int) -> None:
    """One bad entry among many, with checks by the library itself, so that it fails in the middle.

    If this ever fails, a buffer that was given back after an error could be written to later.
    """
    sharding = {"chunk_shape": [1, SIZE], "codecs": [{"name": "bytes"}, {"name": "crc32c"}]}
    metadata = {
        "shape": [ENTRIES, SIZE],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [ENTRIES, SIZE]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    context = ts.Context(
        {"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": concurrency}}
    )
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/"}}
    array = ts.open(spec | {"metadata": metadata}, context=context, create=True).result()
    rows = np.random.default_rng(0).integers(1, 255, (ENTRIES, SIZE), dtype=np.uint8)
    array.write(rows).result()
    for bad in (3, 60):
        hurt(tmp_path / "c" / "0" / "0", bad * (SIZE + 4) + SIZE)  # its checksum
    for _ in range(3):
        out = np.zeros((ENTRIES, SIZE), np.uint8)
        with ts.Batch() as batch:
            future = ts.array(out).write(array.oindex[np.arange(ENTRIES)], batch=batch)
        with pytest.raises(ValueError, match="DATA_LOSS"):
            future.result()
        before = out.copy()
        time.sleep(0.1)
        np.testing.assert_array_equal(out, before)


@pytest.mark.parametrize(
    "layout",
    [
        dataclasses.replace(SMALL, digest="int4"),
        Layout(num_layers=5, num_kv_heads=2, head_dim=8, pack_layers=1, probe="keys"),
        Layout(
            num_layers=4, num_kv_heads=2, head_dim=8, pack_layers=4, dtype="float32", probe="keys"
        ),
    ],
    ids=["two layers", "one layer", "four layers"],
)
def test_tensorstore_writes_the_same_bytes(folder: Path, tmp_path: Path, layout: Layout) -> None:
    """Its writer makes of the arrays' values the very files that the store writes as KV comes."""
    with ChunkStore.open(folder) as store:
        segment = segment_folder(folder, ingest(store, some_tokens(213), layout=layout, block=64))
    for array in ("packs", "probe", "digest"):
        if not (segment / array).exists():
            continue

        def spec(where: Path, array: str = array) -> dict[str, Any]:
            return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{where}/{array}/"}}

        ours = ts.open(spec(segment), read=True).result()
        metadata = json.loads((segment / array / "zarr.json").read_text())
        theirs = ts.open(spec(tmp_path) | {"metadata": metadata}, create=True).result()
        with ts.Transaction() as transaction:
            theirs.with_transaction(transaction).write(ours.read().result()).result()
        for file in (segment / array).glob("c.*"):
            assert file.read_bytes() == (tmp_path / array / file.name).read_bytes(), file.name


def test_the_last_pack_holds_the_layers_that_there_are(folder: Path) -> None:
    """On disk as in what any reader of zarr finds; what is damaged there is found."""
    tokens = some_tokens(90)
    layout = Layout(num_layers=7, num_kv_heads=2, head_dim=8, short_last=True, probe="keys")
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, tokens, layout=layout)
        packs = segment_folder(folder, prefix) / "packs"
        first, last = sorted(packs.glob("c.*"))
        chunks, index = prefix.num_chunks, 4 * prefix.num_chunks * 16 + 4
        assert first.stat().st_size == chunks * layout.pack_bytes + index
        assert last.stat().st_size == chunks * layout.pack_bytes * 3 // 4 + index
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{packs}/"}}
        array = ts.open(spec, read=True).result().read().result()  # [L, M, 2, C, K, D]
        found = array.transpose(0, 2, 1, 3, 4, 5).reshape(7, 2, -1, 2, 8)[:, :, :90]
        np.testing.assert_array_equal(found, kv_of(layout, tokens).view(np.uint16))

        hurt(last, 2 * layout.group_bytes(1) + 5)
        report = verify_store(store)
        assert [(one.kind, one.chunk) for one in report.damages] == [("packs", 2)]
        assert read_all(store, prefix) == Outcome(2 * chunks - 1, 1, 0)
