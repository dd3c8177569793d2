"""Tables of bits: as names, as files, on disk, and which one is best for so many bytes."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from ckv_jax.storage import ChunkStore, Layout, inspect_store, verify_store
from ckv_jax.storage.bits_table import TABLES, fitting, pairs_of, read_table, table
from ckv_jax.storage.codec import codec_id, codec_named, codec_of, decoded, encoded, known
from ckv_jax.storage.quantised import Quantised
from tests.support.truth import FINGERPRINT, SMALL, kv_of, packs_of, some_tokens

PLAIN = dataclasses.replace(SMALL, num_layers=6, pack_layers=4)
BITS = [(8, 8), (4, 2), (8, 2), (4, 4), (2, 8), (8, 4)]
SEVEN = Layout(num_layers=28, num_kv_heads=4, head_dim=128)  # of Qwen2.5-7B


def coded(codec: Quantised, layout: Layout) -> Layout:
    return dataclasses.replace(layout, codec=codec_id(codec), codec_bytes=codec.num_bytes(layout))


def test_a_name_spells_its_table() -> None:
    codec = table(BITS)
    assert codec.name == "table-88-42-82-44-28-84"
    assert codec_named(codec.name) == codec
    layout = coded(codec, PLAIN)
    assert codec_of(layout) == codec and Layout.from_dict(layout.to_dict()) == layout
    assert layout.hex != coded(table(BITS[::-1]), PLAIN).hex
    for name in ("table", "table-83", "table-8", "table-88-", "table-80-88"):
        with pytest.raises(ValueError, match="table"):
            codec_named(name)


def test_names_that_older_versions_knew_keep_their_layouts() -> None:
    """What is named longer is of a version of its own, which older programs leave alone."""
    assert coded(table(BITS), PLAIN).to_dict()["version"] == 3
    layout = coded(TABLES["kvtuner-qwen2.5-7b"], SEVEN)
    assert layout.to_dict()["version"] == 6 and Layout.from_dict(layout.to_dict()) == layout
    with pytest.raises(ValueError, match="fields"):
        Layout.from_dict(layout.to_dict() | {"version": 3})
    for letters, version in ((64, 3), (65, 6)):
        named = dataclasses.replace(PLAIN, codec="a" * letters + ":1", codec_bytes=8)
        assert named.to_dict()["version"] == version


def test_the_published_table() -> None:
    """KVTuner's for Qwen2.5-7B: 4.0 bits on average."""
    codec = TABLES["kvtuner-qwen2.5-7b"]
    assert codec is codec_named("kvtuner-qwen2.5-7b")
    assert np.mean(codec.bits) == 4.0 and len(codec.bits) == 28
    assert codec.name == "table-" + (
        "88-42-42-82-42-42-44-44-42-44-44-44-44-82-44-44-44-44-44-44-44-44-44-44-42-42-44-82"
    )
    size = codec.num_bytes(SEVEN) * SEVEN.groups / SEVEN.chunk_tokens
    bare = sum(4 * 2 * 4 + 4 * 128 * sum(pair) // 8 for pair in codec.bits)
    assert (size / 1024, bare / 1024) == (17.5, 14.875)  # with what packs of one size cost


def test_another_models_table_is_refused() -> None:
    codec = table(BITS[:5])
    with pytest.raises(ValueError, match="bits of 5 layers, expected 6"):
        codec.num_bytes(PLAIN)
    layout = coded(table(BITS), PLAIN)
    for change in ({"codec": codec_id(codec)}, {"codec_bytes": layout.codec_bytes - 512}):
        assert not known(dataclasses.replace(layout, **change))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1"), ("\xff", "utf-8"), ("[]", "bits"), ("{}", "bits"), ('{"bits": []}', "bits"),
        ('{"bits": 3}', "bits"), ('{"bits": [[8, 8], [8]]}', "layer 1"),
        ('{"bits": [[8, 3]]}', "one of 8, 4, 2"), ('{"bits": [[8, true]]}', "layer 0"),
        ('{"bits": [[8, "4"]]}', "layer 0"), ('{"bits": [[8.0, 4]]}', "layer 0"),
        ("[" * 10_000, "recursion"), ('{"bits": "' + "x" * (1 << 20) + '"}', "bytes"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_table(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"x.json is not a table of bits.*{says}"):
        read_table(path)


def test_a_file_is_its_table(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"bits": BITS, "loss": 0.1}))
    assert read_table(path) == table(BITS)
    path.write_text('{"bits": [[4, 4]]}')
    even = read_table(path)  # of all layers
    assert even.num_bytes(PLAIN) == table([(4, 4)] * 6).num_bytes(PLAIN) and even.bits_of(5) == (
        4,
        4,
    )
    with pytest.raises(FileNotFoundError):
        read_table(tmp_path / "y.json")


def test_layers_are_rounded_to_their_own_bits_and_zarr_reads_them(folder: Path) -> None:
    """By the description in `quantised.py` alone; old segments beside them stay as they are."""
    codec = table(BITS)
    layout, tokens = coded(codec, PLAIN), some_tokens(16 * 5 + 3)
    kv = kv_of(PLAIN, tokens)
    with ChunkStore.open(folder) as store:
        for one, coder in ((PLAIN, None), (layout, codec)):
            with store.writer(
                fingerprint=FINGERPRINT, layout=one, tokens=tokens, codec=coder
            ) as writer:
                writer.write(0, kv)
                prefix = writer.commit()
    with ChunkStore.open(folder) as store:  # from the manifests
        assert verify_store(store).ok and len(store.prefixes()) == 2
        info = inspect_store(store, prefix=prefix.id).prefix
        assert info is not None and info.bits == BITS and len(info.layers) == 6
        with store.reader(prefix) as reader:
            stored = np.empty((2, prefix.num_chunks, *layout.stored_shape), np.uint8)
            for group in range(2):
                chunks = np.arange(prefix.num_chunks)
                assert reader.read_packs(group, chunks, stored[group]).all()
    root = folder / "segments" / prefix.spans[0].segment_id[:2] / prefix.spans[0].segment_id
    array: Any = zarr.open_group(str(root), mode="r")["packs"]
    assert array.attrs["codec"] == f"{codec.name}:1"
    np.testing.assert_array_equal(array[:], stored)
    rows, dim = 16 * SMALL.num_kv_heads, SMALL.head_dim
    for group, chunk in itertools.product(range(2), range(prefix.num_chunks)):
        data = array[group, chunk]
        at = 4 * 4 * 2 * rows
        both = data[:at].view(ml_dtypes.bfloat16).astype(np.float32).reshape(4, 2, rows, 2)
        truth = packs_of(PLAIN, tokens, group, np.arange(len(tokens)))[chunk]
        exact = truth.view(PLAIN.numpy_dtype).astype(np.float32).reshape(4, 2, rows, dim)
        for layer in range(4 * group, min(4 * group + 4, 6)):
            for kind in range(2):
                bits = BITS[layer][kind]
                size = rows * dim * bits // 8
                part = data[at : at + size].reshape(rows, -1)
                at += size
                codes = np.concatenate(
                    [part >> place & (2**bits - 1) for place in range(0, 8, bits)], axis=-1
                )
                scale, zero = both[layer % 4, kind].T[..., None]
                error = np.abs(zero + scale * codes - exact[layer % 4, kind])
                assert (error <= scale / 2 * (1 + 1e-5)).all()


def test_keys_and_values_in_packs_of_their_own() -> None:
    """Layers may differ, keys and values of one may not."""
    apart = dataclasses.replace(PLAIN, kv_together=False, pack_layers=1)
    codec = table([(8, 8), (4, 4), (2, 2)] * 2)
    layout = coded(codec, apart)
    packs = np.random.default_rng(0).standard_normal((3, *apart.pack_shape))
    packs = packs.astype(apart.numpy_dtype)
    for group in range(apart.groups):
        stored = encoded(codec, packs.view(apart.disk_dtype), group, layout)
        error = np.abs(decoded(codec, stored, group, layout) - packs).max()
        assert error < {8: 0.03, 4: 0.4, 2: 1.6}[codec.bits_of(group // 2)[0]]
    with pytest.raises(ValueError, match="keys and values"):
        table(BITS).num_bytes(apart)
    assert pairs_of(apart) == [(8, 8), (4, 4), (2, 2)]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), layers=st.integers(1, 5), room=st.floats(0, 1))
def test_no_table_that_fits_loses_less(seed: int, layers: int, room: float) -> None:
    """Against all tables, of few layers in packs of two."""
    layout = Layout(num_layers=layers, num_kv_heads=2, head_dim=64, pack_layers=2)
    pairs = [(8, 8), (8, 4), (4, 4)]
    every = pairs_of(layout)
    losses = np.full((layers, len(every)), np.inf)
    for pair in pairs:  # few, so that all tables can be tried
        losses[:, every.index(pair)] = np.random.default_rng([seed, *pair]).random(layers)
    sizes = {pair: table([pair] * layers).num_bytes(layout) for pair in pairs}
    size = round(sizes[4, 4] + room * (sizes[8, 8] - sizes[4, 4]))
    bits, loss = fitting(losses, layout, size)
    assert table(bits).num_bytes(layout) <= size
    tried = [
        sum(losses[layer, every.index(pair)] for layer, pair in enumerate(some))
        for some in itertools.product(pairs, repeat=layers)
        if table(some).num_bytes(layout) <= size
    ]
    assert loss == pytest.approx(min(tried))
    with pytest.raises(ValueError, match=r"expected at least the \d+ of \(2, 2\) bits"):
        fitting(losses, layout, table([(2, 2)] * layers).num_bytes(layout) - 512)
