"""The judge of faults by itself: it calls wrong what is wrong, and only that."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ckv_jax.storage import ChunkStore, Prefix
from ckv_jax.storage.digest.data import DigestData
from ckv_jax.storage.segment.reader import PrefixReader
from tests.faults import tally
from tests.faults.tally import CONFIG, LAYOUT, Served, Tally, make_store, prompts, serve
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


@pytest.mark.parametrize("lie", ["codes", "scale", "place", "none"])
def test_a_digest_that_lies_about_a_few_tokens(
    pristine: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """Two tokens of the document, in one layer of four: as many wrong tokens, no more."""
    real = PrefixReader.read_digest

    def lying(self: PrefixReader) -> DigestData | None:
        found = real(self)
        assert found is not None and found.kind == "int8"
        arrays = {name: array.copy() for name, array in found.arrays.items()}
        codes, scale = arrays["codes"], arrays["scale"]  # [R, T, K, D], [R, T, K]
        if lie == "codes":
            loud = np.argsort(scale[1].max(axis=1))[-2:]  # a step of theirs is a step of all
            codes[1, loud] = np.where(codes[1, loud] > 0, codes[1, loud] - 40, codes[1, loud] + 40)
        elif lie == "scale":
            scale[2, [0, 77]] *= 3
        elif lie == "place":  # each is what was written, for the other's token
            codes[3, [20, 21]], scale[3, [20, 21]] = codes[3, [21, 20]], scale[3, [21, 20]]
        return DigestData(found.kind, arrays)

    monkeypatch.setattr(PrefixReader, "read_digest", lying)
    with ChunkStore.open(pristine, config=CONFIG) as store:
        served = tally.read_prefix(store, document(store))
    assert served == Served(True, 0 if lie == "none" else 2)


def test_a_shift_of_all_keys_is_no_lie(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax does not see it, and int8 digests leave it out."""
    keys = DigestData.keys
    monkeypatch.setattr(DigestData, "keys", lambda self: keys(self) + np.float32(0.25))
    with ChunkStore.open(pristine, config=CONFIG) as store:
        assert tally.read_prefix(store, document(store)) == Served(True, 0)


@pytest.mark.parametrize("token", [0, 149])
def test_a_probe_that_lies(pristine: Path, monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    real = PrefixReader.read_probe

    def lying(self: PrefixReader, layer: int, out: np.ndarray) -> int:
        good = real(self, layer, out)
        out[token] = -out[token]
        return good

    monkeypatch.setattr(PrefixReader, "read_probe", lying)
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


def test_a_store_that_serves_another_text_is_wrong_by_all_of_it(
    pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ChunkStore.longest_prefix

    def lying(self: ChunkStore, tokens: np.ndarray, **asked: object) -> Prefix:
        found = real(self, tokens, **asked)
        return dataclasses.replace(found, tokens=found.tokens[::-1].copy())

    monkeypatch.setattr(ChunkStore, "longest_prefix", lying)
    with ChunkStore.open(pristine, config=CONFIG) as store:
        assert serve(store) == Served(False, 150)


def test_what_is_missing_is_caught_and_not_wrong(tmp_path: Path) -> None:
    make_store(tmp_path)
    for shard in (tmp_path / "segments").glob("*/*/digest/c.*"):
        shard.unlink()
    with ChunkStore.open(tmp_path, config=CONFIG) as store:
        assert serve(store) == Served(False, 0)


def test_the_tally_accounts_for_every_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(tally.time, "monotonic", lambda: now[0])
    found = Tally()
    for served in (Served(True, 0), Served(False, 0)):
        with found.fault("fine"):
            found.judge(served, "fine")
            now[0] += tally.HANG_S
    assert found == Tally(states=2, caught=1, harmless=1) and found.ok

    wrong, crashed, hung, lost = Tally(), Tally(), Tally(), Tally()
    with wrong.fault("wrong"):
        wrong.judge(Served(True, 3), "wrong")
    assert (wrong.wrong_tokens, wrong.harmless, wrong.caught, wrong.ok) == (3, 0, 0, False)
    with crashed.fault("crash"):
        raise RuntimeError("no miss")
    assert crashed.crashes == 1 and not crashed.ok and "no miss" in crashed.notes[0]
    with hung.fault("hang"):
        hung.judge(Served(False, 0), "hang")
        now[0] += tally.HANG_S + 1
    assert hung.hangs == 1 and not hung.ok
    with lost.fault("lost"):  # nobody judged it
        pass
    assert not lost.ok
    total = found + wrong + crashed + hung + lost
    assert (total.states, total.wrong_tokens, total.crashes, total.hangs) == (6, 3, 1, 1)
    assert len(total.notes) == 3 and not total.ok
