"""A digest of one head a layer: what that head's part of a digest of all heads is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import zarr
from segment_support import find, hurt, segment_folder

from ckv_jax.storage import ChunkStore, Layout, Prefix, verify_store
from ckv_jax.storage.digest.data import DigestData
from tests.support.truth import FINGERPRINT, some_tokens

LAYERS, HEADS = (0, 2, 3), (1, 0, 1)
ENDS = (16 * 12, 16 * 20, 16 * 26 + 7)


def layouts(kind: str) -> tuple[Layout, Layout]:
    """With all heads, and with one of each layer."""
    every = Layout(
        num_layers=4, num_kv_heads=2, head_dim=32, dtype="float32", pack_layers=2, probe="none",
        digest=kind, digest_layers=LAYERS,
    )  # fmt: skip
    return every, dataclasses.replace(every, digest_heads=HEADS)


def keys_of(layout: Layout) -> np.ndarray:
    """KV whose dims have a mean of their own."""
    shape = (layout.num_layers, 2, ENDS[-1], layout.num_kv_heads, layout.head_dim)
    shift = np.random.default_rng(98).normal(size=(*shape[:2], 1, *shape[3:])) * 3
    return (np.random.default_rng(0).normal(size=shape) + shift).astype(layout.numpy_dtype)


def write(store: ChunkStore, layout: Layout) -> Prefix:
    """A prefix over three segments."""
    tokens, kv, parent = some_tokens(ENDS[-1]), keys_of(layout), None
    for start, end in zip((0, *ENDS), ENDS, strict=False):
        with store.writer(
            fingerprint=FINGERPRINT, layout=layout, tokens=tokens[start:end], parent=parent
        ) as writer:
            for at in range(start, end, 64):
                writer.write(at - start, kv[:, :, at : min(at + 64, end)])
            parent = writer.commit()
    assert parent is not None and len(parent.spans) == 3
    return parent


def read(store: ChunkStore, prefix: Prefix) -> DigestData:
    with store.reader(prefix) as reader:
        found = reader.read_digest()
    assert found is not None and not found.mixed
    return found


@pytest.mark.parametrize("kind", ["int8", "int4", "pq", "means", "bounds"])
def test_it_is_the_heads_part_of_a_digest_of_all(store: ChunkStore, kind: str) -> None:
    every, few = (read(store, write(store, layout)) for layout in layouts(kind))
    assert few.nbytes < 0.51 * every.nbytes
    for name, array in every.arrays.items():
        axis = 1 if name == "codebooks" else 2
        for row, head in enumerate(HEADS):
            part = np.take(array[row], [head], axis=axis - 1)
            if kind == "pq":  # which trains on what there is
                assert few.arrays[name][row].shape == part.shape
            else:
                np.testing.assert_array_equal(few.arrays[name][row], part)
    if kind == "pq":
        kv = keys_of(layouts(kind)[1])
        for row, (layer, head) in enumerate(zip(LAYERS, HEADS, strict=True)):
            keys = kv[layer, 0, :, head]
            lost = few.keys()[row, :, 0] - keys
            spread = keys - keys.mean(0)
            assert np.square(lost).mean() < 0.5 * np.square(spread).mean()


@pytest.mark.parametrize("kind", ["int4", "bounds"])
def test_what_is_damaged_is_made_again_as_it_was(folder: Path, kind: str) -> None:
    _, layout = layouts(kind)
    with ChunkStore.open(folder) as store:
        prefix = write(store, layout)
        before = read(store, prefix)
        (shard,) = segment_folder(folder, prefix, 1).glob("digest/c.*")
        hurt(shard, 40)
        with store.reader(prefix) as reader:
            assert reader.read_digest() is None
        report = verify_store(store, repair=True)
        assert len(report.remade) == 1
        after = read(store, find(store, some_tokens(ENDS[-1]), layout))
        assert verify_store(store).ok
    for name, array in before.arrays.items():
        np.testing.assert_array_equal(after.arrays[name], array)


def test_others_read_its_bytes(folder: Path) -> None:
    _, layout = layouts("int4")
    with ChunkStore.open(folder) as store:
        prefix = write(store, layout)
        scale = read(store, prefix).arrays["scale"]
    array = zarr.open_array(segment_folder(folder, prefix), path="digest", mode="r")
    assert array.attrs["heads"] == list(HEADS)
    params, sizes, codes = array.attrs["record"]
    assert (params, sizes, codes) == (4 * 32, 4 * ENDS[0], 16 * ENDS[0])
    first = np.asarray(array[1])[params : params + sizes].view(np.float32)
    np.testing.assert_array_equal(first, scale[1, : ENDS[0], 0])


def test_it_is_of_a_version_of_its_own() -> None:
    every, few = layouts("int4")
    assert every.to_dict()["version"] == 2 and few.to_dict()["version"] == 8
    assert Layout.from_dict(json.loads(json.dumps(few.to_dict()))) == few
    assert few.hex != every.hex != dataclasses.replace(few, digest_heads=(1, 0, 0)).hex
    with pytest.raises(ValueError, match="got fields"):
        Layout.from_dict(few.to_dict() | {"version": 7})


@pytest.mark.parametrize("heads", [(0, 1), (0, 1, 2), (0, -1, 0), [0, 1, 0], (0, 1, True)])
def test_heads_that_are_none_are_refused(heads: object) -> None:
    with pytest.raises(ValueError, match="digest_heads"):
        dataclasses.replace(layouts("int4")[0], digest_heads=heads)  # type: ignore[arg-type]
