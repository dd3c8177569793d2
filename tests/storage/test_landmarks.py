"""Digests of one landmark for each chunk: written, read over segments, cut, and of what version."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from segment_support import find

from ckv_jax.storage import ChunkStore, Layout, Prefix, inspect_store
from ckv_jax.storage.digest.data import DigestData
from ckv_jax.storage.layout import LANDMARKS
from tests.support.truth import FINGERPRINT, SMALL, ingest, some_tokens

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


def test_the_oddest_chunk_has_the_key_that_is_least_like_its_mean(store: ChunkStore) -> None:
    layout = layout_of("means+cosines")
    kv = keys_of(layout, ENDS[-1])
    kv[0, 0, 16 * 4 : 16 * 5] = 1.0
    kv[0, 0, 16 * 4 + 3] = -0.5  # one of chunk 4 points the other way
    kv[3, 0, 16 * 7 : 16 * 8] = 0.0  # nothing is said of these
    prefix = write(store, layout, kv)
    oddity = read(store, prefix).arrays["oddity"]
    assert oddity.dtype == np.int32 and oddity.shape == (2, 13, 2)
    assert (oddity[0, 4] == 0).all()
    for row, layer in enumerate((0, 3)):
        for head in range(2):
            least = []
            for chunk in range(13):
                keys = kv[layer, 0, 16 * chunk : 16 * chunk + 16, head].astype(np.float64)
                lengths = np.linalg.norm(keys, axis=1) * np.linalg.norm(keys.mean(0))
                product = keys @ keys.mean(0)
                least.append(
                    min(p / n if n else 0.0 for p, n in zip(product, lengths, strict=True))
                )
            order = np.argsort(oddity[row, :, head])
            np.testing.assert_array_equal(order, np.argsort(np.array(least), kind="stable"))
    cut = store.longest_prefix(prefix.tokens[:100], fingerprint=FINGERPRINT, layout=layout)
    some = read(store, cut).arrays["oddity"]  # places among fewer
    np.testing.assert_array_equal(np.sort(some, axis=1)[0, :, 0], np.arange(6))
    np.testing.assert_array_equal(np.argsort(some, axis=1), np.argsort(oddity[:, :6], axis=1))


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


@pytest.mark.parametrize("kind", LANDMARKS)
def test_no_single_key_is_known(store: ChunkStore, kind: str) -> None:
    digest = read(store, ingest(store, some_tokens(40), layout=layout_of(kind)))
    with pytest.raises(ValueError, match="knows no single key"):
        digest.keys()


@pytest.mark.parametrize("kind", LANDMARKS)
def test_blocks_do_not_matter(tmp_path: Path, kind: str) -> None:
    layout = layout_of(kind)
    kv = keys_of(layout, ENDS[-1])
    found = []
    for block in (16, 32, 512):
        with ChunkStore.open(tmp_path / str(block)) as store:
            prefix = write(store, layout, kv, block)
            found.append(b"".join(a.tobytes() for a in read(store, prefix).arrays.values()))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("kind", "each"), [("means", 16), ("bounds", 32), ("means+cosines", 16 + 4)]
)
def test_they_take_so_many_bytes_of_each_chunk_and_head(kind: str, each: int) -> None:
    layout = layout_of(kind)
    assert layout.digest_params == 0
    params, scale, codes = layout.digest_record(16 * 10)
    assert (params, scale, codes) == (0, 0, 10 * 2 * each)
    assert layout.digest_record(16 * 10 + 1)[2] == 11 * 2 * each


@pytest.mark.parametrize("kind", LANDMARKS)
def test_they_are_of_a_version_of_their_own(folder: Path, kind: str) -> None:
    """Code that knows no landmarks leaves their segments alone, as those of any other version."""
    layout = layout_of(kind)
    assert layout.to_dict()["version"] == (11 if "+" in kind else 4)
    assert layout_of("int8").to_dict()["version"] == 2
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(40), layout=layout)
    with ChunkStore.open(folder) as store:
        assert find(store, some_tokens(40), layout) == prefix
        (segment,) = inspect_store(store).segments
        assert segment.layout["digest"] == kind
