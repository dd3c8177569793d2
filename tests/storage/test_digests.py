"""Digests of the keys: exact where they can be, found out where they are damaged."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from segment_support import hurt, segment_folder

from ckv_jax.storage import ChunkStore, Layout, Prefix, verify_store
from ckv_jax.storage.digest import DigestData
from ckv_jax.storage.layout import LANDMARKS
from tests.faults.tally import LAYOUT, read_prefix
from tests.support.truth import FINGERPRINT, SMALL, ingest, kv_of, some_tokens

# -- damaged digests -----------------------------------------------------------------------------


TOKENS = some_tokens(160)


def params_of(store: ChunkStore, prefix: Prefix) -> np.ndarray | None:
    """What a segment that continues `prefix` would inherit."""
    span = prefix.spans[-1]
    manifest = store.index.manifest(span.segment_id, span.checksum)
    segment = store.open_segment(manifest, span.checksum)
    try:
        return segment.digest_params()
    finally:
        segment.close()


def mean_keys(layout: Layout, tokens: np.ndarray, first: int) -> np.ndarray:
    """float32 [R, K * D]."""
    keys = kv_of(layout, tokens, first)[list(layout.digest_layers), 0]
    return keys.astype(np.float32).mean(axis=1).reshape(len(keys), -1)


def test_damaged_parameters_are_not_inherited(folder: Path) -> None:
    layout = dataclasses.replace(LAYOUT, digest="int4", digest_layers=(0, 2))
    with ChunkStore.open(folder) as store:
        root = ingest(store, TOKENS[:96], layout=layout)
        kept = params_of(store, root)
        np.testing.assert_allclose(kept, mean_keys(layout, TOKENS[:96], 0), rtol=1e-5)
        (shard,) = segment_folder(folder, root).glob("digest/c.*")
        place = sum(layout.digest_record(96))  # the second row's first byte
        hurt(shard, place)
        assert params_of(store, root) is None
        child = ingest(store, TOKENS, layout=layout)
        assert child.spans[:1] == root.spans and len(child.spans) == 2
        own = params_of(store, child)
        np.testing.assert_allclose(own, mean_keys(layout, TOKENS[96:], 96), rtol=1e-5)
        served = read_prefix(store, child)
        assert not served.whole and not served.wrong
        hurt(shard, place)  # it is what it was
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
