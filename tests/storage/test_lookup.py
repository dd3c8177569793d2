"""Longest common prefixes, ids, salts and fingerprints."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from segment_support import ALIKE

from ckv_jax.storage import (
    ChunkStore,
    Fingerprint,
    FingerprintMismatch,
    Layout,
    Prefix,
    PrefixNotFound,
    StoreUnavailable,
    chain,
    hash_files,
)
from ckv_jax.storage.segment.manifest import FILE as MANIFEST
from tests.support.truth import FINGERPRINT, SMALL, ingest, kv_of, read_all, some_tokens, stored_kv


def find(store: ChunkStore, tokens: np.ndarray, **changes: object) -> Prefix:
    asked = {"fingerprint": FINGERPRINT, "layout": SMALL} | changes
    return store.longest_prefix(tokens, **asked)


def test_the_longest_common_prefix_counts_in_chunks(store: ChunkStore) -> None:
    tokens = some_tokens(100)
    prefix = ingest(store, tokens)
    for cut, expected in ((100, 100), (99, 96), (96, 96), (95, 80), (17, 16), (15, 0), (0, 0)):
        assert find(store, tokens[:cut]).num_tokens == expected
    other = tokens.copy()
    other[50] += 1
    assert find(store, other).num_tokens == 48
    assert find(store, np.concatenate([tokens, [1, 2, 3]])) == prefix
    assert find(store, some_tokens(100, seed=1)).num_tokens == 0


def test_what_two_prefixes_share_is_stored_once(store: ChunkStore, folder: Path) -> None:
    def stored() -> int:  # without manifests: the time in one has a digit more or less
        files = [p for p in (folder / "segments").rglob("*") if p.is_file()]
        return sum(p.stat().st_size for p in files if p.name != MANIFEST)

    shared, usage = some_tokens(160), []
    for seed in (1, 2, 3):
        ingest(store, np.concatenate([shared, some_tokens(32, seed)]))
        usage.append(stored())
    assert usage[1] - usage[0] == usage[2] - usage[1] < usage[0] / 2
    assert len(store.prefixes()) == 3


def test_a_partial_chunk_does_not_hide_what_continues_its_prefix(store: ChunkStore) -> None:
    tokens = some_tokens(300)
    short = ingest(store, tokens[:100])
    full = ingest(store, tokens)
    assert find(store, tokens) == full and full.num_tokens == 300
    assert find(store, tokens[:100]) == short
    assert find(store, tokens[:101]).num_tokens == 100
    assert read_all(store, full).right == SMALL.groups * full.num_chunks


def test_a_partial_chunk_alone_is_a_segment(store: ChunkStore) -> None:
    tokens = some_tokens(64 + 7)
    ingest(store, tokens[:64])
    for length in (3, 7, 5):
        ingest(store, tokens[: 64 + length])
    assert find(store, tokens).num_tokens == 71
    assert find(store, tokens[:70]).num_tokens == 69
    assert find(store, some_tokens(5)).num_tokens == 0
    ingest(store, some_tokens(5))
    assert find(store, some_tokens(5)).num_tokens == 5


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90)), min_size=1, max_size=6))
def test_lookup_agrees_with_a_plain_model(texts: list[tuple[int, int]]) -> None:
    """Texts over one stem that branch in three ways at token 40; the model compares them all."""
    stem = some_tokens(40)

    def text(branch: int, length: int) -> np.ndarray:
        return np.concatenate([stem, some_tokens(50, seed=branch)])[:length]

    with ChunkStore.open("memory://") as store:
        for branch, length in texts:
            ingest(store, text(branch, length))
        for branch in range(3):
            prompt = text(branch, 90)
            best = 0
            for other, length in texts:
                stored = text(other, length)
                agree = int(np.argmin(np.append(stored == prompt[:length], False)))
                best = max(best, length if agree == length else agree // 16 * 16)
            found = find(store, prompt)
            assert found.num_tokens == best
            assert read_all(store, found).wrong == read_all(store, found).refused == 0


def test_salts_and_models_do_not_meet(store: ChunkStore) -> None:
    tokens = some_tokens(64)
    prefix = ingest(store, tokens, salt="tenant a")
    assert find(store, tokens, salt="tenant a") == prefix
    for changes in (
        {},
        {"salt": "tenant b"},
        {"salt": "tenant a", "fingerprint": Fingerprint({"weights": "other"})},
        {"salt": "tenant a", "layout": Layout(num_layers=4, num_kv_heads=2, head_dim=8)},
    ):
        assert find(store, tokens, **changes).num_tokens == 0


def test_a_forced_collision_is_a_miss(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every link the same, only the comparison of tokens is left."""
    same = b"0" * chain.BYTES
    monkeypatch.setattr(chain, "seed", lambda *_: same)
    monkeypatch.setattr(chain, "link", lambda *_: same)
    monkeypatch.setattr(chain, "links", lambda _, t, c: iter([same] * -(-len(t) // c)))
    tokens = some_tokens(64)
    ingest(store, tokens)
    assert find(store, tokens).num_tokens == 64
    other = tokens.copy()
    other[20] += 1
    assert find(store, other).num_tokens == 16
    assert find(store, some_tokens(64, seed=5)).num_tokens == 0


def test_prefixes_by_id(store: ChunkStore) -> None:
    tokens = some_tokens(100)
    inner, leaf = ingest(store, tokens[:48]), ingest(store, tokens)
    assert store.prefix(leaf.id) == leaf and store.prefix(inner.id) == inner
    assert store.prefix(leaf.id[:9]) == leaf
    assert [p.id for p in store.prefixes()] == [leaf.id]
    middle = find(store, tokens[:64])  # ends within a segment
    again = store.prefix(middle.id)
    assert again == middle and np.array_equal(again.tokens, tokens[:64])
    assert again.whole_chunks() is again
    assert leaf.whole_chunks() == find(store, tokens[:96])
    close = leaf.id[:-1] + ("0" if leaf.id[-1] != "0" else "1")
    with pytest.raises(PrefixNotFound) as error:
        store.prefix(close)
    assert error.value.close == (leaf.id,) and leaf.id in str(error.value)
    with pytest.raises(PrefixNotFound):
        store.prefix("../../etc/passwd")


def test_an_id_inside_of_two_segments_is_that_of_the_one_that_can_end_there(
    store: ChunkStore,
) -> None:
    """Of alike tokens: inside of the longer text no prefix ends there."""
    tokens = some_tokens(16 * 40)
    ingest(store, tokens, layout=ALIKE)
    short = ingest(store, tokens[: 16 * 12], layout=ALIKE)
    assert len(short.spans) == 1 and short.spans[0].num_chunks == 12
    links = list(chain.links(chain.seed(FINGERPRINT, ALIKE, ""), tokens, 16))
    found = store.prefix(links[8].hex())
    assert found.num_tokens == 16 * 9
    assert [span.segment_id for span in found.spans] == [short.spans[0].segment_id]
    with pytest.raises(PrefixNotFound, match="ends inside of"):
        store.prefix(links[3].hex())


def test_what_has_an_order_of_its_own_is_not_entered_in_the_middle(store: ChunkStore) -> None:
    """A longer text that is stored by itself: its last chunk holds tokens from elsewhere."""
    layout = replace(SMALL, reordered=True)
    tokens = some_tokens(16 * 5 + 3)
    rng = np.random.default_rng(0)
    ingest(store, tokens[: 16 * 5], layout=layout, order=rng.permutation(16 * 5))
    order = np.roll(np.arange(len(tokens)), 20)
    with store.writer(fingerprint=FINGERPRINT, layout=layout, tokens=tokens, order=order) as writer:
        writer.write(0, stored_kv(kv_of(layout, tokens), order))
        writer.commit()
    found = find(store, tokens, layout=layout)
    assert found.num_tokens == 16 * 5 and len(found.spans) == 1
    assert read_all(store, found).right == layout.groups * 5


def test_a_segment_that_cannot_be_looked_at_now_counts_as_unread(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (span,) = ingest(store, some_tokens(40)).spans

    def late(_: str) -> None:
        raise StoreUnavailable("the disk has not answered")

    monkeypatch.setattr(store.index, "find", late)
    before = store.stats()["unread"]
    assert store.index.load(span.segment_id) is None
    assert store.stats()["unread"] == before + 1


def test_another_models_prefix_is_refused_with_what_differs(store: ChunkStore) -> None:
    prefix = ingest(store, some_tokens(32))
    other = Fingerprint({"weights": "truth", "dtype": "float32", "rope": "yarn"})
    assert store.prefix(prefix.id, fingerprint=FINGERPRINT) == prefix
    with pytest.raises(FingerprintMismatch, match="stored 'bits', got 'float32'") as error:
        store.prefix(prefix.id, fingerprint=other)
    assert error.value.fields == ("dtype", "rope") == tuple(other.differences(FINGERPRINT))
    with pytest.raises(FingerprintMismatch):
        store.writer(fingerprint=other, layout=SMALL, tokens=some_tokens(5), parent=prefix)


def test_file_hashes_follow_content_and_are_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "_SETTLED_S", -1.0)  # files of this moment are trusted
    files = [tmp_path / "b.bin", tmp_path / "a.bin"]
    for i, path in enumerate(files):
        path.write_bytes(bytes([i]) * 1000)
    cache = tmp_path / "cache" / "hashes.json"
    first = hash_files(files, cache)
    assert first == hash_files(reversed(files), cache) == hash_files(files)
    marked = cache.read_text().replace('": "', '": "0', 1)
    cache.write_text(marked)  # not 64 digits any more: ignored
    assert hash_files(files, cache) == first
    cache.write_text("[" * 10_000)
    assert hash_files(files, cache) == first
    files[0].write_bytes(b"other")
    assert hash_files(files, cache) != first


def test_files_are_private_and_hex(store: ChunkStore, folder: Path) -> None:
    ingest(store, some_tokens(100))
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    for path in (folder / "segments").glob("*/*"):
        assert set(path.name) <= set("0123456789abcdef") and path.name.startswith(path.parent.name)


def test_a_folder_that_is_something_else_is_refused(tmp_path: Path) -> None:
    from ckv_jax.storage import StoreError

    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(StoreError, match="not a store"):
        ChunkStore.open(tmp_path)
    with pytest.raises(StoreError, match="is a file, expected a folder"):
        ChunkStore.open(tmp_path / "thesis.txt")
    with pytest.raises(StoreError, match="cannot be used"):
        ChunkStore.open(tmp_path / "thesis.txt" / "store")
    with pytest.raises(ValueError, match="got nothing"):
        ChunkStore.open("")
    with pytest.raises(ValueError, match="url: got"):
        ChunkStore.open("http://example.org/x")
    newer = tmp_path / "newer"
    ChunkStore.open(newer).close()
    (newer / "store.json").write_text('{"format": "ckv-store", "version": 99}')
    with pytest.raises(StoreError, match="a store of version 99, expected 2: name another folder"):
        ChunkStore.open(newer)
