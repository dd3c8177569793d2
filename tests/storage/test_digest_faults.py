"""Digests that are not what was written: found by `verify`, never inherited, never mixed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ckv_jax.storage import ChunkStore, Layout, Prefix, verify_store
from ckv_jax.storage.layout import LANDMARKS
from tests.faults.tally import LAYOUT, read_prefix
from tests.support.truth import ingest, kv_of, some_tokens

TOKENS = some_tokens(160)
LAYOUTS = {
    kind: dataclasses.replace(LAYOUT, digest=kind, digest_layers=(0, 2))
    for kind in ("int8", "int4", "pq", *LANDMARKS)
}
EMPTY = {"pq": ("scale",), **dict.fromkeys(LANDMARKS, ("params", "scale"))}
PARTS = ("params", "scale", "codes")


@contextmanager
def flipped(folder: Path, prefix: Prefix, row: int, part: int) -> Iterator[None]:
    """One bit of a part of a row's record in the prefix's last segment, and back again."""
    id_ = prefix.spans[-1].segment_id
    (path,) = (folder / "segments" / id_[:2] / id_).glob("digest/c.*")
    tokens = prefix.num_tokens - sum(s.num_chunks for s in prefix.spans[:-1]) * 16
    sizes = prefix.layout.digest_record(tokens)
    assert sizes[part], "nothing to flip"
    at = row * sum(sizes) + sum(sizes[:part]) + sizes[part] // 2  # a record is one piece here
    good = path.read_bytes()
    bad = bytearray(good)
    bad[at] ^= 0x10
    path.write_bytes(bad)
    yield
    path.write_bytes(good)


def params_of(store: ChunkStore, prefix: Prefix) -> np.ndarray | None:
    """What a segment that continues `prefix` would inherit."""
    span = prefix.spans[-1]
    manifest = store.index.manifest(span.segment_id, span.checksum)
    segment = store.open_segment(manifest, span.checksum)
    try:
        return segment.digest_params()
    finally:
        segment.close()


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize(
    ("kind", "part"),
    [(kind, part) for kind in LAYOUTS for part in PARTS if part not in EMPTY.get(kind, ())],
)
def test_verify_finds_a_flipped_bit_in_any_part_of_a_digest(
    folder: Path, kind: str, part: str, row: int
) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS[:96], layout=LAYOUTS[kind])
        assert verify_store(store).ok
        with flipped(folder, prefix, row, PARTS.index(part)):
            (damage,) = verify_store(store).damages
            assert damage.segment_id == prefix.spans[0].segment_id
            assert damage.what.startswith("digest")
            with store.reader(prefix) as reader:
                assert reader.read_digest() is None
            assert store.stats()["quarantined"] == 1
        assert verify_store(store, repair=True).pardoned == [prefix.spans[0].segment_id]
        with store.reader(prefix) as reader:
            assert reader.read_digest() is not None


def mean_keys(layout: Layout, tokens: np.ndarray, first: int) -> np.ndarray:
    """float32 [R, K * D]."""
    keys = kv_of(layout, tokens, first)[list(layout.digest_layers), 0]
    return keys.astype(np.float32).mean(axis=1).reshape(len(keys), -1)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_damaged_parameters_are_not_inherited(folder: Path, kind: str) -> None:
    layout = LAYOUTS[kind]
    with ChunkStore.open(folder) as store:
        root = ingest(store, TOKENS[:96], layout=layout)
        kept = params_of(store, root)
        np.testing.assert_allclose(kept, mean_keys(layout, TOKENS[:96], 0), rtol=1e-5)
        with flipped(folder, root, 1, 0):
            assert params_of(store, root) is None
            child = ingest(store, TOKENS, layout=layout)
            assert child.spans[:1] == root.spans and len(child.spans) == 2
            own = params_of(store, child)
            np.testing.assert_allclose(own, mean_keys(layout, TOKENS[96:], 96), rtol=1e-5)
            served = read_prefix(store, child)
            assert not served.whole and not served.wrong
        # Whole again, but made around two means, which reading takes into account.
        verify_store(store, repair=True)
        assert verify_store(store).ok
        served = read_prefix(store, child)
        assert served.whole and not served.wrong
        for prefix in (root, child):
            with store.reader(prefix) as reader:
                assert reader.read_digest() is not None


@pytest.mark.parametrize("kind", ["int8", "int4", "pq"])
def test_good_parameters_are_inherited(folder: Path, kind: str) -> None:
    layout = LAYOUTS[kind]
    with ChunkStore.open(folder) as store:
        root = ingest(store, TOKENS[:96], layout=layout)
    with ChunkStore.open(folder) as store:
        child = ingest(store, TOKENS, layout=layout)
        assert len(child.spans) == 2
        np.testing.assert_array_equal(params_of(store, child), params_of(store, root))
        with store.reader(child) as reader:
            digest = reader.read_digest()
        assert digest is not None and digest.arrays["codes"].shape[1] == len(TOKENS)
