"""Longest common prefixes, ids, salts and fingerprints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from segment_support import write

from ckv_jax.storage import (
    ChunkStore,
    Fingerprint,
    FingerprintMismatch,
    Layout,
    Prefix,
    PrefixNotFound,
    chain,
)
from tests.support.truth import FINGERPRINT, SMALL, ingest, kv_of, read_all, some_tokens, stored_kv


def find(store: ChunkStore, tokens: np.ndarray, **changes: object) -> Prefix:
    asked = {"fingerprint": FINGERPRINT, "layout": SMALL} | changes
    return store.longest_prefix(tokens, **asked)


@settings(max_examples=12, deadline=None)
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


def test_what_has_an_order_of_its_own_is_not_entered_in_the_middle(store: ChunkStore) -> None:
    """A longer text that is stored by itself: its last chunk holds tokens from elsewhere."""
    layout = replace(SMALL, reordered=True)
    tokens = some_tokens(16 * 5 + 3)
    rng = np.random.default_rng(0)
    ingest(store, tokens[: 16 * 5], layout=layout, order=rng.permutation(16 * 5))
    order = np.tile(np.roll(np.arange(len(tokens)), 20), (layout.num_layers, 1))
    write(store, layout, tokens, stored_kv(kv_of(layout, tokens), order), order=order)
    found = find(store, tokens, layout=layout)
    assert found.num_tokens == 16 * 5 and len(found.spans) == 1
    assert read_all(store, found).right == layout.groups * 5


def test_another_models_prefix_is_refused_with_what_differs(store: ChunkStore) -> None:
    prefix = ingest(store, some_tokens(32))
    other = Fingerprint({"weights": "truth", "dtype": "float32", "rope": "yarn"})
    assert store.prefix(prefix.id, fingerprint=FINGERPRINT) == prefix
    with pytest.raises(FingerprintMismatch, match="stored 'bits', got 'float32'") as error:
        store.prefix(prefix.id, fingerprint=other)
    assert error.value.fields == ("dtype", "rope")
    long = Fingerprint({"weights": "f" * 64, "config": '{"model_type": "llama", "num_layers": 30}'})
    with pytest.raises(FingerprintMismatch) as error:
        store.prefix(prefix.id, fingerprint=long)
    assert "(stored: unknown; yours: llama, 30 layers)" in str(error.value)
    assert "ffff" not in str(error.value) and "ingest the text again" in str(error.value)
    with pytest.raises(FingerprintMismatch):
        store.writer(fingerprint=other, layout=SMALL, tokens=some_tokens(5), parent=prefix)


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
