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
from segment_support import find, hurt, segment_folder

from ckv_jax.storage import ChunkStore, Layout, Prefix, inspect_store, verify_store
from ckv_jax.storage.codec import (
    CODECS,
    Quantised,
    _upward,
    check_codec,
    codec_id,
    codec_named,
    codec_of,
    decoded,
    encoded,
    known,
)
from ckv_jax.storage.tools.verify import planned_repairs
from tests.support.truth import FINGERPRINT, SMALL, kv_of, packs_of, some_tokens


class Halves:
    """The high bytes of all elements, then the low ones; what is left over is a mark."""

    name, version = "halves", 3

    def num_bytes(self, layout: Layout) -> int:
        return layout.pack_bytes + 1

    def encode(self, packs: np.ndarray, layout: Layout) -> np.ndarray:
        pairs = packs.reshape(len(packs), -1).view(np.uint8).reshape(len(packs), -1, 2)
        halves = [pairs[:, :, 1], pairs[:, :, 0], np.full((len(packs), 1), 7, np.uint8)]
        return np.concatenate(halves, axis=1)

    def decode(self, stored: Any, layout: Layout) -> np.ndarray:
        high, low = np.split(np.asarray(stored)[:, :-1], 2, axis=1)
        bits = np.stack([low, high], axis=2).reshape(len(high), -1).view(np.uint16)
        return bits.reshape(-1, *layout.pack_shape)


CODEC = Halves()


def coded(layout: Layout) -> Layout:
    return dataclasses.replace(layout, codec=codec_id(CODEC), codec_bytes=CODEC.num_bytes(layout))


LAYOUT = coded(SMALL)


def write(store: ChunkStore, tokens: np.ndarray, kv: np.ndarray, layout: Layout) -> Prefix:
    codec = CODEC if layout.codec == codec_id(CODEC) else None
    with store.writer(fingerprint=FINGERPRINT, layout=layout, tokens=tokens, codec=codec) as writer:
        writer.write(0, kv)
        return writer.commit()


def read(store: ChunkStore, prefix: Prefix, group: int) -> tuple[np.ndarray, np.ndarray]:
    layout = prefix.layout
    stored = np.empty((prefix.num_chunks, *layout.stored_shape), layout.stored_dtype)
    with store.reader(prefix) as reader:
        good = reader.read_packs(group, np.arange(prefix.num_chunks), stored)
    return good, stored


def test_a_layout_without_a_codec_is_what_it_was() -> None:
    """The name of what was written before there were codecs."""
    layout = Layout(num_layers=4, num_kv_heads=2, head_dim=16)
    assert layout.hex == "5994fe73f9567fde6243da08aebc225fef23cf8c7cd17467e8a0dfaceedf01b6"
    assert not {"codec", "codec_bytes"} & layout.to_dict().keys()
    assert Layout.from_dict(layout.to_dict()) == layout
    assert Layout.from_dict(LAYOUT.to_dict()) == LAYOUT and LAYOUT.hex != SMALL.hex


def test_a_codec_of_a_long_name_is_of_a_version_that_older_programs_leave_alone() -> None:
    for letters, version in ((64, 3), (65, 6)):
        layout = dataclasses.replace(SMALL, codec="a" * letters + ":1", codec_bytes=8)
        assert (
            layout.to_dict()["version"] == version and Layout.from_dict(layout.to_dict()) == layout
        )
    with pytest.raises(ValueError, match="fields"):
        Layout.from_dict(layout.to_dict() | {"version": 3})


@pytest.mark.parametrize(
    "change",
    [{"codec": "x"}, {"codec": "x:1"}, {"codec_bytes": 5}, {"codec": 3}, {"codec": "X:1"},
     {"codec": "x:1", "codec_bytes": 1 << 31}, {"codec": "x:1", "codec_bytes": True}],
)  # fmt: skip
def test_a_layout_with_half_a_codec_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="codec"):
        dataclasses.replace(SMALL, **change)
    with pytest.raises(ValueError, match="layout"):
        Layout.from_dict(LAYOUT.to_dict() | {"version": 2})
    check_codec(CODEC, LAYOUT)
    with pytest.raises(ValueError, match=r"halves:3.*none"):
        check_codec(CODEC, SMALL)


def test_what_a_codec_gives_is_as_many_bytes_as_it_said() -> None:
    packs = packs_of(SMALL, some_tokens(32), 0, np.arange(32))
    right = CODEC.encode(packs, SMALL)
    np.testing.assert_array_equal(encoded(CODEC, packs, LAYOUT), right)
    for wrong in (right[:, :-1], right[:-1], right.astype(np.uint16)):

        class Wrong(Halves):
            def encode(
                self, packs: np.ndarray, layout: Layout, wrong: np.ndarray = wrong
            ) -> np.ndarray:
                return wrong

        with pytest.raises(ValueError, match=r"halves:3: got uint.* expected uint8 \(2, "):
            encoded(Wrong(), packs, LAYOUT)
    assert encoded(None, packs, SMALL) is packs is decoded(None, packs, SMALL)


@pytest.mark.parametrize("kv_together", [True, False])
def test_bytes_on_disk_are_the_codecs(folder: Path, kv_together: bool) -> None:
    plain = dataclasses.replace(
        SMALL, num_layers=3, kv_together=kv_together, pack_layers=2 if kv_together else 1
    )
    layout, tokens = coded(plain), some_tokens(16 * 9 + 5)
    order = np.arange(len(tokens))
    with ChunkStore.open(folder) as store:
        both = [write(store, tokens, kv_of(plain, tokens), one) for one in (plain, layout)]
        assert both[0].id != both[1].id
    with ChunkStore.open(folder) as store:  # from the manifests
        found = store.prefix(both[1].id)
        assert found.layout == layout
        for group in range(layout.groups):
            good, stored = read(store, found, group)
            truth = packs_of(plain, tokens, group, order)
            assert good.all() and (stored[:, -1] == 7).all()
            np.testing.assert_array_equal(stored, encoded(CODEC, truth, layout))
            packs = decoded(CODEC, stored, layout)
            np.testing.assert_array_equal(packs.view(np.uint16), truth.view(np.uint16))
        assert verify_store(store).ok
        info = inspect_store(store, prefix=found.id).prefix
        assert info is not None and info.layers == []  # by a codec that inspection does not know
        with pytest.raises(ValueError, match="codec"):
            store.writer(fingerprint=FINGERPRINT, layout=layout, tokens=tokens)


def test_what_is_bad_is_replaced_in_its_own_form(folder: Path) -> None:
    tokens = some_tokens(16 * 20)
    kv = kv_of(SMALL, tokens)
    with ChunkStore.open(folder) as store:
        prefix = write(store, tokens, kv, LAYOUT)
        _, before = read(store, prefix, 0)
        shard = sorted((folder / "segments").glob("*/*/packs/c.0*"))[0]
        data = bytearray(shard.read_bytes())
        data[4 * LAYOUT.stored_bytes + 3] ^= 1
        shard.write_bytes(data)
        good, _ = read(store, prefix, 0)
        assert np.flatnonzero(~good).tolist() == [4]
        marked = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=LAYOUT, marked=True)
        with pytest.raises(ValueError, match="codec"):
            store.replace_packs(marked, 4, kv[:, :, 64:80])
        assert store.replace_packs(marked, 4, kv[:, :, 64:80], codec=CODEC) == 1
        found = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=LAYOUT)
        assert found.num_tokens == len(tokens)
        good, after = read(store, found, 0)
        assert good.all()
        np.testing.assert_array_equal(after, before)


def test_a_digest_is_of_the_keys_and_not_of_the_bytes(folder: Path) -> None:
    """Also the kind that is made by reading the packs back."""
    tokens = some_tokens(300)
    digests = []
    with ChunkStore.open(folder) as store:
        for plain in (dataclasses.replace(SMALL, digest="pq", probe="none"),):
            for layout in (plain, coded(plain)):
                prefix = write(store, tokens, kv_of(plain, tokens), layout)
                with store.reader(prefix) as reader:
                    digest = reader.read_digest()
                assert digest is not None
                digests.append(digest.keys())
    np.testing.assert_array_equal(digests[0], digests[1])


def test_a_repair_keeps_what_only_its_codec_could_mend(folder: Path) -> None:
    layout = coded(dataclasses.replace(SMALL, digest="int8"))
    tokens = some_tokens(64)
    with ChunkStore.open(folder) as store:
        prefix = write(store, tokens, kv_of(SMALL, tokens), layout)
        digest = next(segment_folder(folder, prefix).glob("digest/c.*"))
        pack = next(segment_folder(folder, prefix).glob("packs/c.0.*"))
        hurt(digest, 0)
        report = verify_store(store, repair=True)
        id_ = prefix.spans[0].segment_id
        assert report.unrepaired == report.quarantined == [id_] and not report.removed
        assert find(store, tokens, layout).num_tokens == 0
        hurt(digest, 0)  # as it was
        assert verify_store(store, repair=True).pardoned == [id_]
        assert find(store, tokens, layout).num_tokens == len(tokens)
        hurt(pack, 0)  # for which no codec is needed
        assert verify_store(store, repair=True).removed == [id_]


def test_a_repair_keeps_what_continues_it_too(folder: Path) -> None:
    """As it was said before, and though nothing of either is served until then."""
    layout = coded(dataclasses.replace(SMALL, digest="int8"))
    tokens = some_tokens(128)
    with ChunkStore.open(folder) as store:
        parent = write(store, tokens[:64], kv_of(SMALL, tokens[:64]), layout)
        with store.writer(
            fingerprint=FINGERPRINT, layout=layout, tokens=tokens[64:], parent=parent, codec=CODEC
        ) as writer:
            writer.write(0, kv_of(SMALL, tokens[64:], 64))
            prefix = writer.commit()
        digest = next(segment_folder(folder, prefix).glob("digest/c.*"))
        hurt(digest, 0)
        (line,) = planned_repairs(store, verify_store(store))
        id_ = prefix.spans[0].segment_id
        assert line == f"{id_}: be kept and not served, until its text is ingested again"
        report = verify_store(store, repair=True)
        assert report.unrepaired == report.quarantined == [id_] and not report.removed
        hurt(digest, 0)  # as it was
        assert verify_store(store, repair=True).pardoned == [id_]
        assert find(store, tokens, layout) == prefix


# -- codecs that round ---------------------------------------------------------------------------


NAMES = ("int8", "k8v4")
KV_BYTES = {"int8": 28.875, "k8v4": 21.875}  # KiB a token of a 7B model


def quantised(name: str, layout: Layout = SMALL) -> tuple[Quantised, Layout]:
    codec = codec_named(name)
    assert isinstance(codec, Quantised)
    size = codec.num_bytes(layout)
    return codec, dataclasses.replace(layout, codec=codec_id(codec), codec_bytes=size)


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
def test_every_device_reads_the_same_bits(name: str) -> None:
    codec, layout = quantised(name)
    packs = np.random.default_rng(1).standard_normal((9, *layout.pack_shape)) * 3 + 1
    stored = codec.encode(packs.astype(layout.numpy_dtype), layout)
    codes = stored[:, 4 * int(np.prod(layout.pack_shape[:4])) :]
    codes[8] = np.random.default_rng(2).integers(0, 256, codes.shape[1])
    here = decoded(codec, stored, layout)
    there: Any = jax.jit(lambda rows: codec.decode(rows, layout))(stored)
    np.testing.assert_array_equal(here.view(np.uint16), np.asarray(there).view(np.uint16))


def test_a_scale_is_the_bfloat16_above_that_no_device_takes_for_zero() -> None:
    tiny = float(np.finfo(np.float32).tiny)
    found = _upward(np.array([0, 1e-45, tiny / 2, tiny, 1, 1.001], np.float32))
    assert found.tolist() == [0, tiny, tiny, tiny, 1, 1.0078125]


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
def test_bytes_are_as_computed(name: str) -> None:
    large = Layout(num_layers=28, num_kv_heads=4, head_dim=128)
    codec = codec_named(name)
    assert codec is not None
    assert codec.num_bytes(large) * large.groups / 16 / 1024 == KV_BYTES[name]


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


@pytest.mark.parametrize("name", NAMES)
def test_zarr_reads_it(folder: Path, name: str) -> None:
    """By the description in `codec.py` alone."""
    codec, layout = quantised(name)
    tokens = some_tokens(16 * 5 + 3)
    kv = kv_of(SMALL, tokens)
    with ChunkStore.open(folder) as store:
        with store.writer(
            fingerprint=FINGERPRINT, layout=layout, tokens=tokens, codec=codec
        ) as writer:
            writer.write(0, kv)
            prefix = writer.commit()
        assert verify_store(store).ok
        info = inspect_store(store, prefix=prefix.id).prefix
        assert info is not None and len(info.layers) == layout.num_layers and not info.bad_packs
        with store.reader(prefix) as reader:
            stored = np.empty((prefix.num_chunks, *layout.stored_shape), np.uint8)
            assert reader.read_packs(1, np.arange(prefix.num_chunks), stored).all()
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
