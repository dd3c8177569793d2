"""Digests by their arithmetic: what a code stands for, however records are cut into pieces."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ckv_jax.storage import ChunkStore, Layout
from ckv_jax.storage.digest import data, reader
from ckv_jax.storage.digest.data import DigestData, as_float32, quantise, turn
from ckv_jax.storage.digest.reader import _Target
from tests.support.truth import FINGERPRINT, SMALL, ingest, kv_of, some_tokens

WIDE = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 16, "probe": "none", "pack_layers": 1}
LEVELS = {"int8": 127, "int4": 7}


def unpacked(codes: np.ndarray, kind: str) -> np.ndarray:
    """Whole numbers [..., D]."""
    if kind == "int8":
        return codes.view(np.int8).astype(int)
    return np.concatenate([codes & 15, codes >> 4], -1).astype(int) - 8


@pytest.mark.parametrize("kind", LEVELS)
def test_the_largest_value_gets_the_largest_code(kind: str) -> None:
    keys = np.random.default_rng(0).normal(size=(40, 2, 16)).astype(np.float32)
    keys[0, 0] = 0
    keys[1, 0], keys[1, 0, 3], keys[1, 0, 9] = 0.0, -2.5, 1.25
    codes, scale = quantise(keys, kind)
    most = LEVELS[kind]
    assert codes.dtype == np.uint8 and codes.shape[-1] == (16 if kind == "int8" else 8)
    np.testing.assert_allclose(scale, np.abs(keys).max(-1) / most, rtol=1e-6)
    found = unpacked(codes, kind)
    assert scale[0, 0] == 0 and not found[0, 0].any()
    assert found[1, 0, 3] == -most and found[1, 0, 9] == round(most / 2)
    assert (np.abs(found).max(-1)[1:] == most).all()
    assert (np.abs(found * scale[..., None] - keys) <= scale[..., None] * 0.5001).all()
    digest = DigestData(kind, {
        "codes": (codes.view(np.int8) if kind == "int8" else codes)[None], "scale": scale[None],
    })  # fmt: skip
    np.testing.assert_allclose(digest.keys()[0], found * scale[..., None], rtol=1e-6)
    assert digest.nbytes == codes.nbytes + scale.nbytes and not digest.mixed


@pytest.mark.parametrize("kind", LEVELS)
def test_codes_around_one_mean_become_codes_around_another(kind: str) -> None:
    rng = np.random.default_rng(1)
    layout = Layout(**WIDE, digest=kind)
    old, new = rng.normal(size=(2, 32)).astype(np.float32)
    codes, scale = quantise(rng.normal(size=(40, 2, 16)).astype(np.float32), kind)
    keys = unpacked(codes, kind) * scale[..., None] + old.reshape(2, 16)
    turned, its = turn(layout, codes, scale, old, new)
    again = unpacked(turned, kind) * its[..., None] + new.reshape(2, 16)
    assert (np.abs(again - keys) <= its[..., None] * 0.501).all()


def test_a_code_of_one_codebook_becomes_the_nearest_of_another() -> None:
    rng = np.random.default_rng(2)
    layout = Layout(**WIDE, digest="pq")
    old, new = rng.normal(size=(2, 2, 2, 64, 8)).astype(np.float32)
    keys = rng.normal(size=(300, 2, 16)).astype(np.float32)
    codes = data.pq_encode(keys, old)
    scale = np.empty((0, 0), np.float32)
    turned, same = turn(layout, codes, scale, old.reshape(-1), new.reshape(-1))
    assert same is scale
    known = np.stack(
        [[[old[h, p, codes[t, h, p]] for p in range(2)] for h in range(2)] for t in range(300)]
    )
    np.testing.assert_array_equal(turned, data.pq_encode(known.reshape(300, 2, 16), new))
    digest = DigestData("pq", {"codes": codes[None], "codebooks": old[None]})
    np.testing.assert_array_equal(digest.keys()[0], known.reshape(300, 2, 16))


def test_a_codebook_has_what_it_was_trained_on_whatever_its_size() -> None:
    """Of fewer kinds of keys than it has codes each is one, large or small."""
    rng = np.random.default_rng(3)
    kinds = rng.normal(size=(8, 2, 2, 8)) * np.array([1e-4, 1e4]).reshape(2, 1, 1)
    keys = kinds[rng.permutation(np.arange(400) % 8)].reshape(400, 2, 16).astype(np.float32)
    books = data.pq_train(keys)
    assert books.shape == (2, 2, 64, 8) and books.dtype == np.float32
    codes = data.pq_encode(keys, books)
    digest = DigestData("pq", {"codes": codes[None], "codebooks": books[None]})
    off = np.abs(digest.keys()[0] - keys).max((0, 2))
    assert (off <= np.abs(keys).max((0, 2)) * 1e-5).all()
    np.testing.assert_array_equal(data.pq_train(keys), books)
    none = data.pq_train(np.zeros((5, 2, 16), np.float32))
    assert not none.any()


def test_a_codebook_is_trained_on_all_of_a_segment(store: ChunkStore) -> None:
    """And not on its beginning."""
    layout = Layout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", digest="pq",
                    probe="none", pack_layers=1)  # fmt: skip
    tokens = some_tokens(2 * data.PQ_SAMPLES + 100)
    kv = np.zeros((1, 2, len(tokens), 1, 8), np.float32)
    kinds = np.random.default_rng(4).normal(size=(7, 8)).astype(np.float32)
    kv[0, 0, data.PQ_SAMPLES :, 0] = kinds[np.arange(data.PQ_SAMPLES + 100) % 7]
    with store.writer(fingerprint=FINGERPRINT, layout=layout, tokens=tokens) as writer:
        writer.write(0, kv)
        prefix = writer.commit()
    with store.reader(prefix) as opened:
        digest = opened.read_digest()
    assert digest is not None
    assert np.abs(digest.keys()[0] - kv[0, 0]).max() < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_numbers_that_are_none_become_zero_and_large_ones(dtype: str) -> None:
    layout = dataclasses.replace(SMALL, dtype=dtype)
    values = np.array([1.5, np.nan, np.inf, -np.inf, -0.25]).astype(layout.numpy_dtype)
    found = as_float32(values.view(layout.disk_dtype), layout)
    assert found.dtype == np.float32
    assert found.tolist() == [1.5, 0.0, np.float32(1e30), np.float32(-1e30), -0.25]
    plain = np.array([1.5, -2.0]).astype(layout.numpy_dtype)
    assert as_float32(plain.view(layout.disk_dtype), layout).tolist() == [1.5, -2.0]


@pytest.mark.parametrize("step", [1, 3, 7, 16, 40])
@pytest.mark.parametrize(("skip", "size"), [(0, 14), (0, 5), (4, 10), (6, 3)])
def test_a_part_is_put_together_from_the_pieces_of_its_record(
    step: int, skip: int, size: int
) -> None:
    """The part's bytes are 9 to 22; a run has some of them."""
    record = np.arange(40, dtype=np.uint8)
    memory = np.full(size, 99, np.uint8)
    target = _Target(memory, skip, 9, 14)
    pieces = [target.take(record[at : at + step], at) for at in range(0, 40, step)]
    np.testing.assert_array_equal(np.concatenate(pieces), record[9:23])
    np.testing.assert_array_equal(memory, record[9 + skip : 9 + skip + size])


@pytest.mark.parametrize("kind", ["int8", "int4", "pq", "means", "bounds"])
def test_digests_are_the_same_read_in_one_go_or_in_many(
    store: ChunkStore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = dataclasses.replace(SMALL, digest=kind)
    tokens = some_tokens(16 * 7 + 3)
    ingest(store, tokens[: 16 * 4], layout=layout)
    prefix = ingest(store, tokens, layout=layout)
    with store.reader(prefix) as opened:
        before = opened.read_digest()
        monkeypatch.setattr(reader, "_WINDOW_BYTES", 1)
        after = opened.read_digest()
    assert before is not None and after is not None and not before.mixed
    for name, array in before.arrays.items():
        np.testing.assert_array_equal(array, after.arrays[name])
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_of_bytes_that_cannot_be_read_every_part_is_suspect(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = dataclasses.replace(SMALL, digest="int8", digest_layers=(1, 3))
    prefix = ingest(store, some_tokens(40), layout=layout)
    asked: list[tuple[int, int]] = []
    with store.reader(prefix) as opened, monkeypatch.context() as patch:
        patch.setattr(reader.Deadline, "wait", lambda *_: False)

        def prove(_: object, row: int, part: int) -> bool:
            asked.append((row, part))
            return True

        with reader.Deadline(5.0, store.gate) as deadline:
            runs = opened._runs.of_tokens()
            assert reader.read_digest(prefix, runs, deadline, prove) is None
    assert asked == [(0, 0), (0, 1), (0, 2)]


def test_landmarks_of_a_last_chunk_are_of_its_own_tokens() -> None:
    layout = Layout(**WIDE, dtype="float32", digest="means+cosines")
    keys = np.random.default_rng(5).normal(size=(16 * 2 + 3, 2, 16)).astype(np.float32)
    keys[20, 1] = 0  # says nothing: its cosine is 0
    keys[:16, 0] = 3.0
    found = data.landmark_arrays(data.landmark_codes(keys, layout)[None], layout, len(keys))
    means = np.stack([keys[at : at + 16].mean(0) for at in (0, 16, 32)])
    np.testing.assert_allclose(found["mean"][0], means, rtol=1e-5, atol=1e-6)
    assert np.exp(found["log_size"][0, :, 0]).round(4).tolist() == [16, 16, 3]
    assert found["oddity"][0, :, 0].tolist()[0] == 2  # all of its keys are alike
    one = data.landmark_arrays(data.landmark_codes(keys[:32], layout)[None], layout, 32)
    assert np.exp(one["log_size"][0, :, 0]).round(4).tolist() == [16, 16]
    large = data.landmark_codes(np.full((16, 2, 16), 1e30, np.float32), dataclasses.replace(
        layout, dtype="float16", digest="bounds"
    ))  # fmt: skip
    assert (large.view(np.float16) == np.finfo(np.float16).max).all()


def test_kv_of_digests_is_that_of_the_truth(store: ChunkStore) -> None:
    """The mean of a first block is that of the layer's keys, head by head."""
    layout = dataclasses.replace(SMALL, digest="int8", digest_layers=(2,))
    tokens = some_tokens(48)
    prefix = ingest(store, tokens, layout=layout)
    span = prefix.spans[0]
    segment = store.open_segment(
        store.index.manifest(span.segment_id, span.checksum), span.checksum
    )
    try:
        params = segment.digest_params()
    finally:
        segment.close()
    keys = kv_of(layout, tokens)[2, 0].astype(np.float32)
    np.testing.assert_allclose(params, keys.mean(0, dtype=np.float64).reshape(1, -1), rtol=1e-6)
