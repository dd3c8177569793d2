"""Digests of the keys: exact where they can be, found out where they are damaged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ckv_jax.storage import ChunkStore, Layout, Prefix, verify_store
from ckv_jax.storage.digest import DigestData
from ckv_jax.storage.layout import LANDMARKS
from tests.faults.tally import LAYOUT, read_prefix
from tests.support.truth import FINGERPRINT, SMALL, ingest, kv_of, some_tokens

# -- damaged digests -----------------------------------------------------------------------------


TOKENS = some_tokens(160)
LAYOUTS = {
    kind: dataclasses.replace(LAYOUT, digest=kind, digest_layers=(0, 2))
    for kind in ("int4", "pq", *LANDMARKS)
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


def test_damaged_parameters_are_not_inherited(folder: Path) -> None:
    layout = LAYOUTS["int4"]
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


# -- landmarks -----------------------------------------------------------------------------------


ENDS = (16 * 5, 16 * 9, 16 * 12 + 7)


def layout_of(kind: str, **more: object) -> Layout:
    return dataclasses.replace(SMALL, digest=kind, digest_layers=(0, 3), probe="none", **more)


def keys_of(layout: Layout, tokens: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    shape = (layout.num_layers, 2, tokens, layout.num_kv_heads, layout.head_dim)
    return rng.normal(size=shape).astype(layout.numpy_dtype)


def write(store: ChunkStore, layout: Layout, kv: np.ndarray, block: int = 32) -> Prefix:
    """A prefix over three segments."""
    tokens, parent = some_tokens(kv.shape[2]), None
    for start, end in zip((0, *ENDS), ENDS, strict=False):
        with store.writer(
            fingerprint=FINGERPRINT, layout=layout, tokens=tokens[start:end], parent=parent
        ) as writer:
            for at in range(start, end, block):
                writer.write(at - start, kv[:, :, at : min(at + block, end)])
            parent = writer.commit()
    assert parent is not None and len(parent.spans) == 3
    return parent


def read(store: ChunkStore, prefix: Prefix) -> DigestData:
    with store.reader(prefix) as reader:
        found = reader.read_digest()
    assert found is not None and not found.mixed
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_means_are_those_of_the_keys(store: ChunkStore, dtype: str) -> None:
    layout = layout_of("means", dtype=dtype)
    kv = keys_of(layout, ENDS[-1])
    prefix = write(store, layout, kv)
    digest = read(store, prefix)
    keys = kv[[0, 3], 0].astype(np.float64)
    mean, log_size = digest.arrays["mean"], digest.arrays["log_size"]
    assert mean.shape == (2, 13, 2, 8) and mean.dtype == layout.numpy_dtype
    assert log_size.shape == (2, 13, 2) and log_size.dtype == np.float32
    for chunk in range(13):
        part = keys[:, 16 * chunk : 16 * chunk + 16]
        step = float(ml_dtypes.finfo(layout.numpy_dtype).eps)
        np.testing.assert_allclose(
            mean[:, chunk].astype(np.float64), part.mean(1), rtol=step, atol=1e-6
        )
        np.testing.assert_allclose(np.exp(log_size[:, chunk]), part.shape[1], rtol=1e-6)
    cut = store.longest_prefix(prefix.tokens[:100], fingerprint=FINGERPRINT, layout=layout)
    part_ = read(store, cut).arrays
    np.testing.assert_array_equal(part_["mean"], mean[:, :6])
    assert part_["log_size"].shape == (2, 6, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bounds_are_exact(store: ChunkStore, dtype: str) -> None:
    layout = layout_of("bounds", dtype=dtype)
    kv = keys_of(layout, ENDS[-1])
    digest = read(store, write(store, layout, kv))
    low, high = digest.arrays["low"], digest.arrays["high"]
    for chunk in range(13):
        part = kv[[0, 3], 0, 16 * chunk : 16 * chunk + 16].astype(np.float32)
        np.testing.assert_array_equal(low[:, chunk].astype(np.float32), part.min(1))
        np.testing.assert_array_equal(high[:, chunk].astype(np.float32), part.max(1))


@pytest.mark.parametrize("kind", LANDMARKS)
def test_numbers_that_are_none_do_not_spread(store: ChunkStore, kind: str) -> None:
    layout = layout_of(kind, dtype="float16")
    kv = keys_of(layout, ENDS[-1])
    clean = read(store, write(store, layout, kv)).arrays
    kv[0, 0, 3], kv[3, 0, 40] = np.nan, np.inf
    bad = dataclasses.replace(layout, chunk_tokens=8)  # another prefix
    found = read(store, write(store, bad, kv)).arrays
    assert all(np.isfinite(array.astype(np.float32)).all() for array in found.values())
    assert clean.keys() == found.keys()
