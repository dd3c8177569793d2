"""Digests by their arithmetic: what a code stands for, however records are cut into pieces."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from segment_support import find

from ckv_jax.storage import ChunkStore, Layout, Prefix, inspect_store, verify_store
from ckv_jax.storage import digest as digests
from ckv_jax.storage.digest import DigestData, quantise, turn
from ckv_jax.storage.layout import LANDMARKS
from tests.faults.tally import LAYOUT, read_prefix
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
    codes = digests.pq_encode(keys, old)
    scale = np.empty((0, 0), np.float32)
    turned, same = turn(layout, codes, scale, old.reshape(-1), new.reshape(-1))
    assert same is scale
    known = np.stack(
        [[[old[h, p, codes[t, h, p]] for p in range(2)] for h in range(2)] for t in range(300)]
    )
    np.testing.assert_array_equal(turned, digests.pq_encode(known.reshape(300, 2, 16), new))
    digest = DigestData("pq", {"codes": codes[None], "codebooks": old[None]})
    np.testing.assert_array_equal(digest.keys()[0], known.reshape(300, 2, 16))


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
        monkeypatch.setattr(digests, "_WINDOW_BYTES", 1)
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
        patch.setattr(digests.Deadline, "wait", lambda *_: False)

        def prove(_: object, row: int, part: int) -> bool:
            asked.append((row, part))
            return True

        with digests.Deadline(5.0, store.gate) as deadline:
            runs = opened._runs.of_tokens()
            assert digests.read_digest(prefix, runs, deadline, prove) is None
    assert asked == [(0, 0), (0, 1), (0, 2)]


def test_landmarks_of_a_last_chunk_are_of_its_own_tokens() -> None:
    layout = Layout(**WIDE, dtype="float32", digest="means+cosines")
    keys = np.random.default_rng(5).normal(size=(16 * 2 + 3, 2, 16)).astype(np.float32)
    keys[20, 1] = 0  # says nothing: its cosine is 0
    keys[:16, 0] = 3.0
    found = digests.landmark_arrays(digests.landmark_codes(keys, layout)[None], layout, len(keys))
    means = np.stack([keys[at : at + 16].mean(0) for at in (0, 16, 32)])
    np.testing.assert_allclose(found["mean"][0], means, rtol=1e-5, atol=1e-6)
    assert np.exp(found["log_size"][0, :, 0]).round(4).tolist() == [16, 16, 3]
    assert found["oddity"][0, :, 0].tolist()[0] == 2  # all of its keys are alike
    one = digests.landmark_arrays(digests.landmark_codes(keys[:32], layout)[None], layout, 32)
    assert np.exp(one["log_size"][0, :, 0]).round(4).tolist() == [16, 16]
    large = digests.landmark_codes(np.full((16, 2, 16), 1e30, np.float32), dataclasses.replace(
        layout, dtype="float16", digest="bounds"
    ))  # fmt: skip
    assert (large.view(np.float16) == np.finfo(np.float16).max).all()


# -- damaged digests -----------------------------------------------------------------------------


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
def test_blocks_do_not_matter(tmp_path: Path, kind: str) -> None:
    layout = layout_of(kind)
    kv = keys_of(layout, ENDS[-1])
    found = []
    for block in (16, 32, 512):
        with ChunkStore.open(tmp_path / str(block)) as store:
            prefix = write(store, layout, kv, block)
            found.append(b"".join(a.tobytes() for a in read(store, prefix).arrays.values()))
    assert found[0] == found[1] == found[2]


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
