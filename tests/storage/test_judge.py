"""The judge of faults by itself: it calls wrong what is wrong, and only that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckv_jax.storage import ChunkStore, Prefix
from ckv_jax.storage.prefix import ProbePages
from ckv_jax.storage.segment.reader import PrefixReader
from tests.faults import tally
from tests.faults.tally import CONFIG, LAYOUT, Served, make_store, prompts, serve
from tests.support.truth import FINGERPRINT, Outcome, read_all


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge") / "store"
    make_store(folder)
    return folder


def document(store: ChunkStore) -> Prefix:
    return store.longest_prefix(prompts()[0], fingerprint=FINGERPRINT, layout=LAYOUT)


def test_a_good_store_is_served_whole(pristine: Path) -> None:
    with ChunkStore.open(pristine, config=CONFIG) as store:
        assert serve(store) == Served(True, 0)
        packs = LAYOUT.groups * document(store).num_chunks
        assert read_all(store, document(store)) == Outcome(packs, 0, 0)


@pytest.mark.parametrize("token", [0, 149])
def test_a_probe_that_lies(pristine: Path, monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    real = PrefixReader.read_probe_pages

    def lying(
        self: PrefixReader, layer: int, pages: ProbePages, ids: np.ndarray, out: np.ndarray
    ) -> np.ndarray:
        good = real(self, layer, pages, ids, out)
        out[token // 16, token % 16 * pages.token_bytes + 1] ^= 128  # a sign
        return good

    monkeypatch.setattr(PrefixReader, "read_probe_pages", lying)
    with ChunkStore.open(pristine, config=CONFIG) as store:
        served = tally.read_prefix(store, document(store))
    assert served == Served(True, len(LAYOUT.probe_layers))


@pytest.mark.parametrize("claim", [True, False])
def test_packs_that_lie(pristine: Path, monkeypatch: pytest.MonkeyPatch, claim: bool) -> None:
    """Wrong bytes are wrong whether they are called good, or called bad and handed out."""
    real = PrefixReader.read_packs

    def lying(
        self: PrefixReader, group: int, chunks: np.ndarray, out: np.ndarray, **more: object
    ) -> np.ndarray:
        good = real(self, group, chunks, out, **more)
        out[3].reshape(-1)[7] += 1
        good[3] = claim
        return good

    monkeypatch.setattr(PrefixReader, "read_packs", lying)
    with ChunkStore.open(pristine, config=CONFIG) as store:
        found = document(store)
        outcome = read_all(store, found)
        packs = LAYOUT.groups * found.num_chunks
        assert outcome == Outcome(packs - LAYOUT.groups, 0, LAYOUT.groups)
        wrong = tally.read_prefix(store, found).wrong
        assert wrong == LAYOUT.groups * LAYOUT.chunk_tokens
