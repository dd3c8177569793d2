"""inspect, verify, plot; digests; other readers of our arrays; memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zarr
from segment_support import hurt, segment_folder, write

from ckv_jax.storage import (
    ChunkStore,
    Layout,
    PrefixNotFound,
    inspect_store,
    plot_importance,
    verify_store,
)
from ckv_jax.storage.tools.verify import Damage, ranges
from tests.support.truth import (
    FINGERPRINT,
    SMALL,
    digest_keys,
    ingest,
    kv_of,
    read_all,
    some_tokens,
)

SHAPE = {"num_layers": 6, "num_kv_heads": 2, "head_dim": 8}
WIDE = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 32, "dtype": "float32"}


def real_keys(layout: Layout, tokens: int, seed: int = 0) -> np.ndarray:
    """KV like a model's: every dim has a mean and a spread of its own."""
    rng = np.random.default_rng(seed)
    shape = (layout.num_layers, 2, tokens, layout.num_kv_heads, layout.head_dim)
    spread = np.random.default_rng(99).lognormal(size=(layout.num_layers, 2, 1, *shape[3:]))
    shift = np.random.default_rng(98).normal(size=spread.shape) * 3
    return ((rng.normal(size=shape) + shift) * spread).astype(layout.numpy_dtype)


@pytest.mark.parametrize(
    ("kind", "error", "layers"), [("int4", 0.2, (0, 1, 2)), ("pq", 0.9, (0, 2))]
)
def test_digests_rank_as_the_keys_do_across_segments(
    store: ChunkStore, kind: str, error: float, layers: tuple[int, ...]
) -> None:
    layout = Layout(**WIDE, digest=kind, digest_layers=layers, probe="none")
    tokens, kv = some_tokens(512), real_keys(layout, 512)
    prefix = write(store, layout, tokens[:320], kv[:, :, :320])
    prefix = write(store, layout, tokens[320:], kv[:, :, 320:], prefix)
    with store.reader(prefix) as reader:
        digest = reader.read_digest()
        assert digest is not None and digest.kind == kind
    codes = digest.arrays["codes"]
    kv, rows = kv[list(layers)], len(layers)
    assert codes.shape[:3] == (rows, 512, 2) and codes.dtype == np.uint8
    lost = kv[:, 0] - digest_keys(digest)
    lost -= lost.mean(1, keepdims=True)  # a shift that all keys share does not count
    spread = kv[:, 0] - kv[:, 0].mean(1, keepdims=True)
    assert np.square(lost).mean() ** 0.5 < error * np.square(spread).mean() ** 0.5
    if kind == "pq":
        assert digest.arrays["codebooks"].shape == (rows, 2, 2, 64, 16) and codes.shape[3] == 2
    else:
        assert digest.arrays["scale"].shape == (rows, 512, 2)
    cut = store.longest_prefix(tokens[:100], fingerprint=FINGERPRINT, layout=layout)
    with store.reader(cut) as reader:
        part = reader.read_digest()
        assert part is not None
        np.testing.assert_array_equal(part.arrays["codes"], codes[:, :96])


def test_inspect_tells_what_is_there(store: ChunkStore, folder: Path) -> None:
    tokens = some_tokens(150)
    root = ingest(store, tokens[:96])
    leaf = ingest(store, tokens, salt="")
    ingest(store, some_tokens(20, 1), salt="secret")
    found = inspect_store(store)
    assert found.prefixes[leaf.id] == 150 and len(found.prefixes) == 2
    assert [s.salted for s in found.children(None)] == [False, True]
    (below,) = found.children(root.spans[0].segment_id)
    assert (below.prefix_id, below.first_chunk, below.tokens) == (leaf.id, 6, 54)
    assert found.bytes == sum(s.bytes for s in found.segments) and found.prefix is None
    assert "secret" not in json.dumps(found.to_dict())

    detail = inspect_store(store, leaf.id).prefix
    assert detail is not None and detail.bad_packs == 0 and detail.importance is None
    kv = kv_of(SMALL, tokens).astype(np.float32)
    for stats in detail.layers:
        keys, values = kv[stats.layer]
        assert stats.key_min == keys.min() and stats.value_max == values.max()
        assert stats.key_mean_abs == pytest.approx(np.abs(keys).mean(), rel=1e-4)
    with pytest.raises(PrefixNotFound):
        inspect_store(store, "0" * 32)


def test_verify_finds_and_repairs(folder: Path) -> None:
    tokens = some_tokens(160)
    with ChunkStore.open(folder) as store:
        root = ingest(store, tokens[:64])
        ingest(store, tokens)
        other = ingest(store, some_tokens(64, 1))
        lost = ingest(store, some_tokens(64, 2))
        calls: list[tuple[int, int]] = []
        report = verify_store(store, progress=lambda done, total: calls.append((done, total)))
        assert report.ok and report.segments == 4 and report.bytes == store.usage()
        assert calls[-1][0] == calls[-1][1] == report.bytes and report.packs > 0

        def shard(prefix_: object) -> Path:
            id_ = prefix_.spans[-1].segment_id  # type: ignore[attr-defined]
            return sorted((folder / "segments" / id_[:2] / id_).glob("packs/c.0.*"))[0]

        bad = 2 * SMALL.pack_bytes  # of chunk 2: what continues the segment is lost with it
        hurt(shard(root), bad)
        (shard(lost).parents[1] / "manifest.json").write_text("{}")
        found = verify_store(store)
        assert {d.chunk for d in found.damages} == {0, 2} and len(found.damages) == 3
        assert store.stats()["quarantined"] == 0  # looking changes nothing
        fixed = verify_store(store, repair=True)
        assert len(fixed.removed) == 2 and fixed.quarantined == [root.spans[0].segment_id]
        assert store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=SMALL).num_tokens == 32
        assert read_all(store, other).right == SMALL.groups * 4

        hurt(shard(root), bad)
        assert verify_store(store, repair=True).pardoned == [root.spans[0].segment_id]
        assert store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=SMALL).num_tokens == 64
        assert verify_store(store).ok and json.dumps(verify_store(store).to_dict())


def test_verify_sweeps_what_a_dead_writer_left_where_it_repairs(
    store: ChunkStore, folder: Path
) -> None:
    left = folder / "tmp" / ("ab" * 16)
    left.mkdir()
    assert verify_store(store).swept == 0 and left.exists()
    assert verify_store(store, repair=True).swept == 1 and not left.exists()


@pytest.mark.parametrize(
    "layout",
    [
        Layout(**SHAPE, digest="int4", probe="keys"),
        Layout(**SHAPE, dtype="float32", pack_layers=1, kv_together=False, probe="keys"),
        Layout(**SHAPE, pack_layers=2, heads_apart=True, probe="keys"),
    ],
    ids=["together", "K and V apart", "heads apart"],
)
def test_zarr_python_reads_our_arrays_bit_for_bit(
    store: ChunkStore, folder: Path, layout: Layout
) -> None:
    """However packs are cut, a layer's keys and values are a slice of one array."""
    tokens = some_tokens(100)
    group = zarr.open_group(segment_folder(folder, ingest(store, tokens, layout=layout)), mode="r")
    packs = group["packs"]
    assert packs.attrs["element_type"] == layout.dtype and packs.shape[1:] == (7, 2, 16, 2, 8)
    assert packs.chunks[4] == (1 if layout.heads_apart else 2)
    kv = kv_of(layout, tokens)
    found = packs[:6].transpose(0, 2, 1, 3, 4, 5).reshape(6, 2, -1, 2, 8)[:, :, :100]
    np.testing.assert_array_equal(found, kv.view(layout.disk_dtype))
    row = layout.probe_layers.index(4)
    np.testing.assert_array_equal(group["probe"][row, :100], kv[4, 0].view(layout.disk_dtype))


def test_damages_are_told_in_runs_of_neighbours() -> None:
    found = [Damage("a", chunk, f"chunk {chunk} is bad") for chunk in (3, 1, 2, 7, 2)]
    many = [Damage("c", 2 * chunk, "torn") for chunk in range(10)]
    assert ranges([*found, Damage("b", 0, "gone"), *many]) == [
        "a, 4 chunks: 1 to 3, 7: chunk 3 is bad",
        "b, chunk 0: gone",
        "c, 10 chunks: 0, 2, 4, 6, 8, 10, 12, 14 and 2 more runs: torn",
    ]


def test_importance_is_drawn(store: ChunkStore, tmp_path: Path) -> None:
    tokens = some_tokens(150)
    ingest(store, tokens[:96])
    prefix = ingest(store, tokens)
    path = tmp_path / "map.png"
    with pytest.raises(ValueError, match="no scores of prefix"):
        plot_importance(store, prefix.id, path)
    for span in prefix.spans:
        shape = (SMALL.groups, span.segment_chunks)
        store.save_scores(span.segment_id, np.full(shape, 0.5), np.ones(shape))
    plot_importance(store, prefix.id, path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    info = inspect_store(store, prefix.id).prefix
    assert info is not None and info.importance == [0.5] * 10
