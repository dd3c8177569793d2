"""Packs that lie on disk in another form than in memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from segment_support import write

from ckv_jax.storage import ChunkStore, Layout, Prefix, StoreConfig, inspect_store, verify_store
from ckv_jax.storage.codec import (
    CODECS,
    Quantised,
    codec_id,
    codec_named,
    codec_of,
    decoded,
    encoded,
    known,
)
from tests.support.truth import FINGERPRINT, SMALL, kv_of, packs_of, some_tokens

NAMES = ("int8", "k8v4")
UNKNOWN = Quantised(name="mine", bits=(8, 8))
"""Of a name that the store does not know."""


def coded(codec: Quantised, layout: Layout = SMALL) -> Layout:
    return dataclasses.replace(layout, codec=codec_id(codec), codec_bytes=codec.num_bytes(layout))


def quantised(name: str, layout: Layout = SMALL) -> tuple[Quantised, Layout]:
    codec = codec_named(name)
    assert isinstance(codec, Quantised)
    return codec, coded(codec, layout)


def read(store: ChunkStore, prefix: Prefix, group: int) -> np.ndarray:
    layout = prefix.layout
    stored = np.empty((prefix.num_chunks, *layout.stored_shape), layout.stored_dtype)
    with store.reader(prefix) as reader:
        assert reader.read_packs(group, np.arange(prefix.num_chunks), stored).all()
    return stored


def test_a_layout_without_a_codec_is_what_it_was() -> None:
    """The name of what was written before there were codecs."""
    layout = Layout(num_layers=4, num_kv_heads=2, head_dim=16, probe="keys")
    assert Layout(num_layers=4, num_kv_heads=2, head_dim=16).probe == "none"
    assert layout.hex == "5994fe73f9567fde6243da08aebc225fef23cf8c7cd17467e8a0dfaceedf01b6"
    assert not {"codec", "codec_bytes"} & layout.to_dict().keys()
    assert Layout.from_dict(layout.to_dict()) == layout
    other = coded(UNKNOWN)
    assert Layout.from_dict(other.to_dict()) == other and other.hex != SMALL.hex


@pytest.mark.parametrize(
    ("kv_together", "encrypted"), [(True, False), (False, False), (True, True)]
)
def test_bytes_on_disk_are_the_codecs(
    folder: Path, tmp_path: Path, kv_together: bool, encrypted: bool
) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    config = StoreConfig(encrypt_key_file=key if encrypted else None)
    plain = dataclasses.replace(
        SMALL, num_layers=3, kv_together=kv_together, pack_layers=2 if kv_together else 1
    )
    layout, tokens = coded(UNKNOWN, plain), some_tokens(16 * 9 + 5)
    with ChunkStore.open(folder, config=config) as store:
        prefix = write(store, layout, tokens, kv_of(layout, tokens), codec=UNKNOWN)
    with ChunkStore.open(folder, config=config) as store:  # from the manifests
        found = store.prefix(prefix.id)
        raw = b"".join(path.read_bytes() for path in folder.glob("segments/*/*/packs/c.*"))
        assert found.layout == layout
        for group in range(layout.groups):
            truth = packs_of(plain, tokens, group, np.arange(len(tokens)))
            stored = encoded(UNKNOWN, truth, layout)
            np.testing.assert_array_equal(read(store, found, group), stored)
            assert (stored[3].tobytes() in raw) != encrypted
        assert verify_store(store).ok
        info = inspect_store(store, prefix=found.id).prefix
        assert info is not None and info.layers == []  # by a codec that inspection does not know
        with pytest.raises(ValueError, match="codec"):
            store.writer(fingerprint=FINGERPRINT, layout=layout, tokens=tokens)


# -- codecs that round ---------------------------------------------------------------------------


def scales(stored: np.ndarray, layout: Layout) -> np.ndarray:
    """Scale of every row [n, pl, 2, C, K], float32."""
    rows = int(np.prod(layout.pack_shape[:4]))
    both = stored[:, : 4 * rows].copy().view(ml_dtypes.bfloat16).astype(np.float32)
    return both.reshape(-1, *layout.pack_shape[:4], 2)[..., 0]


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    power=st.integers(-20, 20),
    shift=st.floats(-30, 30, width=32),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_off_by_half_a_scale_at_most(
    name: str, seed: int, power: int, shift: float, dtype: str
) -> None:
    codec, layout = quantised(name, dataclasses.replace(SMALL, dtype=dtype))
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((3, *layout.pack_shape)) + shift) * 2.0**power
    x[0] *= rng.random(layout.pack_shape) > 0.9  # few large values among zeros
    packs = x.astype(layout.numpy_dtype)
    stored = encoded(codec, packs.view(layout.disk_dtype), layout)
    back = decoded(codec, stored, layout).astype(np.float64)
    exact = packs.astype(np.float64)
    last = np.abs(back) * 2.0 ** (-8 if dtype == "bfloat16" else -21)  # of the element type
    bound = scales(stored, layout)[..., None] / 2 * (1 + 1e-5)
    size = np.abs(exact).max(-1, keepdims=True) * 1e-6  # of sums in float32
    assert (np.abs(back - exact) <= bound + last + size).all()
    low, high = exact.min(-1), exact.max(-1)
    bits = np.array(codec.bits).reshape(1, 1, 2, 1, 1)
    room = (high - low + np.maximum(np.abs(low), np.abs(high)) / 64) / (2.0**bits - 1)
    assert (
        scales(stored, layout) <= room * (1 + 2.0**-7) + 2e-38
    ).all()  # and no wider than needed


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_are_all_alike_or_not_finite(name: str) -> None:
    codec, layout = quantised(name)
    packs = np.zeros((3, *layout.pack_shape), layout.numpy_dtype)
    packs[1, 0, 1] = 0.3
    packs[2, 0, 1, 3, 0, 5], packs[2, 0, 1, 4, 0, 0] = np.nan, -np.inf
    back = decoded(codec, codec.encode(packs, layout), layout).astype(np.float32)
    np.testing.assert_array_equal(back[:2], packs[:2].astype(np.float32))
    lost = np.zeros(back[2].shape, bool)
    lost[0, 1, 3:5, 0] = True
    np.testing.assert_array_equal(np.isnan(back[2]), lost)


@pytest.mark.parametrize("name", NAMES)
def test_every_device_reads_the_same_bits(name: str) -> None:
    codec, layout = quantised(name)
    packs = np.random.default_rng(1).standard_normal((9, *layout.pack_shape)) * 3 + 1
    stored = codec.encode(packs.astype(layout.numpy_dtype), layout)
    codes = stored[:, 4 * int(np.prod(layout.pack_shape[:4])) :]
    codes[8] = np.random.default_rng(2).integers(0, 256, codes.shape[1])
    here = decoded(codec, stored, layout)
    there: Any = jax.jit(lambda rows: codec.decode(rows, layout))(stored)
    np.testing.assert_array_equal(here.view(np.uint16), np.asarray(there).view(np.uint16))


@pytest.mark.parametrize("name", NAMES)
def test_zarr_reads_it(folder: Path, name: str) -> None:
    """By the description in `codec.py` alone."""
    codec, layout = quantised(name)
    tokens = some_tokens(16 * 5 + 3)
    with ChunkStore.open(folder) as store:
        prefix = write(store, layout, tokens, kv_of(layout, tokens), codec=codec)
        assert verify_store(store).ok
        info = inspect_store(store, prefix=prefix.id).prefix
        assert info is not None and len(info.layers) == layout.num_layers and not info.bad_packs
        stored = read(store, prefix, 1)
    root = next((folder / "segments").glob("*/*"))
    array: Any = zarr.open_group(str(root), mode="r")["packs"]
    assert array.attrs["codec"] == layout.codec
    data = array[1]
    np.testing.assert_array_equal(data, stored)
    layers, _, chunk, heads, dim = layout.pack_shape
    count = layers * 2 * chunk * heads
    both = data[:, : 4 * count].copy().view(ml_dtypes.bfloat16).astype(np.float32)
    scale, zero = np.moveaxis(both.reshape(-1, layers, 2, chunk, heads, 2), -1, 0)
    sizes = [chunk * heads * dim * bits // 8 for bits in codec.bits]
    bits = codec.bits[1]
    packed = data[:, 4 * count :][:, : layers * sum(sizes)].reshape(-1, layers, sum(sizes))
    packed = packed[:, :, sizes[0] :].reshape(-1, layers, chunk, heads, dim * bits // 8)
    codes = packed if bits == 8 else np.concatenate([packed & 15, packed >> 4], -1)
    values = codes * scale[:, :, 1, ..., None] + zero[:, :, 1, ..., None]
    truth = packs_of(SMALL, tokens, 1, np.arange(len(tokens)))[:, :, 1].view(SMALL.numpy_dtype)
    error = np.abs(values - truth.astype(np.float32))
    assert (error <= scale[:, :, 1, ..., None] / 2 * (1 + 1e-5)).all()


def test_what_a_codec_does_not_suit_is_refused() -> None:
    apart = dataclasses.replace(SMALL, kv_together=False, pack_layers=1)
    assert quantised("int8", apart)[1].codec_bytes
    with pytest.raises(ValueError, match="keys and values"):
        quantised("k8v4", apart)
    with pytest.raises(ValueError, match="head_dim"):
        quantised("k8v4", dataclasses.replace(SMALL, head_dim=15))
    with pytest.raises(ValueError, match="bits"):
        Quantised(name="x", bits=(8, 3))
    with pytest.raises(ValueError, match="int8"):
        codec_named("int7")
    layout = quantised("int8")[1]
    assert codec_of(layout) is CODECS["int8"] and codec_of(SMALL) is None
    for gone in ("int8:2", "int4-rotated:1", "none:1", "table-84-44:1"):
        with pytest.raises(ValueError, match=f"stored with codec '{gone}', .*: ingest the text"):
            codec_of(dataclasses.replace(layout, codec=gone))
        assert not known(dataclasses.replace(layout, codec=gone))
