"""Tenants: neither ids nor models nor salts of one are told to another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import segment_support
from segment_support import segment_folder

from ckv_jax.storage import (
    ChunkStore,
    Fingerprint,
    FingerprintMismatch,
    Prefix,
    PrefixNotFound,
    PrefixRecord,
    chain,
)
from ckv_jax.storage.place.local import LocalFiles
from ckv_jax.storage.segment import manifest as manifests
from ckv_jax.storage.segment.manifest import Manifest
from tests.faults import corruption
from tests.support.truth import FINGERPRINT, SMALL, ingest, kv_of, read_all, some_tokens

SECRET = "correct horse battery staple"
ASKED = {"fingerprint": FINGERPRINT, "layout": SMALL}


def test_another_tenants_prefix_does_not_exist(store: ChunkStore) -> None:
    mine, public = ingest(store, some_tokens(64), salt=SECRET), ingest(store, some_tokens(64, 1))
    other = Fingerprint({"weights": "other"})
    near = mine.id[:-1] + ("0" if mine.id[-1] != "0" else "1")
    for salt in ("", "another", None):
        for name in (near, mine.id[:7] + "zz"):
            with pytest.raises(PrefixNotFound) as error:
                store.prefix(name, salt=salt)
            assert mine.id not in str(error.value) and mine.id not in error.value.close
    for salt in ("", "another"):
        for name in (mine.id, mine.id[:9]):
            with pytest.raises(PrefixNotFound):  # before its model is compared
                store.prefix(name, salt=salt, fingerprint=other)
    with pytest.raises(PrefixNotFound) as error:
        store.prefix(near, salt=SECRET)
    assert error.value.close == (mine.id,)
    with pytest.raises(FingerprintMismatch):
        store.prefix(mine.id, salt=SECRET, fingerprint=other)
    found = store.prefix(mine.id[:6], salt=SECRET)
    assert found == mine and found.salt == SECRET and read_all(store, found).refused == 0
    assert [p.id for p in store.prefixes(salt="")] == [public.id]
    assert [p.salt for p in store.prefixes(salt=SECRET)] == [SECRET]


def test_nothing_of_another_tenant_is_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(folder) as store:
        hers = [ingest(store, some_tokens(64, n), salt="alice") for n in range(5)]
        his = ingest(store, some_tokens(64, 9), salt="bob")
        middle = store.longest_prefix(hers[0].tokens[:32], **ASKED, salt="alice")
    asked: list[str] = []
    stamp = LocalFiles.stamp

    def noted_stamp(self: LocalFiles, segment_id: str) -> object:
        asked.append(segment_id)
        return stamp(self, segment_id)

    monkeypatch.setattr(LocalFiles, "stamp", noted_stamp)
    with ChunkStore.open(folder) as store:
        asked.clear()
        for prefix in (*hers, middle):
            for name in (prefix.id, prefix.id[:12]):
                with pytest.raises(PrefixNotFound) as error:
                    store.prefix(name, salt="bob")
                assert not set(error.value.close) & {p.id for p in hers}
        assert asked == []
        assert [p.id for p in store.prefixes(salt="bob")] == [his.id]
        assert asked == [his.spans[0].segment_id]
        assert store.sizes(salt="bob").keys() == {his.spans[0].segment_id}
        store.set_record(his.id, PrefixRecord(name="n"))
        store.set_record(hers[0].id, PrefixRecord(name="n"))
        assert store.records(salt="bob").keys() == {his.id}
        assert len(store.records()) == 2 and len(store.sizes()) == 6
        assert len(store.prefixes()) == 6


def test_ids_that_begin_alike_are_named_to_their_tenant_alone() -> None:
    store = ChunkStore.open("memory://")
    texts = [some_tokens(16, seed) for seed in range(40)]
    mine = [ingest(store, text, salt=SECRET).id for text in texts]
    public = [ingest(store, text).id for text in texts]
    start = next(s for s in "0123456789abcdef" if sum(i[0] == s for i in mine + public) > 5)
    several = [i for i in mine + public if i[0] == start]
    with pytest.raises(PrefixNotFound, match=f"^{len(several)} stored prefixes begin") as error:
        store.prefix(start)
    assert error.value.several == len(several)
    assert error.value.close == tuple(sorted(i for i in public if i[0] == start)[:5])
    assert not any(i in str(error.value) for i in mine)
    with pytest.raises(PrefixNotFound) as error:
        store.prefix(start, salt=SECRET)
    assert error.value.close == tuple(sorted(i for i in mine if i[0] == start)[:5])
    store.close()


def test_a_tool_that_says_no_salt_gets_one_that_is_nobodys(store: ChunkStore) -> None:
    mine = ingest(store, some_tokens(64), salt=SECRET)
    found = store.prefix(mine.id)
    assert found == mine and found.salt not in ("", SECRET) and "\0" in found.salt
    with pytest.raises(ValueError, match="salt"):
        find(store, some_tokens(64), salt=found.salt)
    with pytest.raises(ValueError, match="same layout and salt"):
        store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=some_tokens(5), parent=found)


def test_no_salt_lies_in_clear_on_the_disk(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        ingest(store, some_tokens(64), salt=SECRET)
        ingest(store, some_tokens(100), salt=SECRET)
    for path in folder.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_a_manifest_that_is_shown_tells_neither_the_text_nor_whose_it_is(folder: Path) -> None:
    """In a log or a traceback: it looks the same whatever the tokens are."""
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64), salt=SECRET)
    data = (segment_folder(folder, prefix) / manifests.FILE).read_bytes()
    manifest, _ = manifests.Manifest.decode(data, prefix.spans[0].segment_id)
    assert manifest.tenant == chain.tenant_mark(SECRET)
    other = replace(manifest, tokens=some_tokens(64, 1), tenant=chain.tenant_mark("another"))
    assert repr(other) == repr(manifest)


def test_salts_that_older_code_wrote_are_understood(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64), salt=SECRET)

    def older(body: dict[str, object]) -> None:
        assert body.pop("tenant") == chain.tenant_mark(SECRET)
        body["salt"] = SECRET

    corruption.forge(folder, older)
    with ChunkStore.open(folder) as store:
        assert store.prefix(prefix.id, salt=SECRET).num_tokens == 64
        with pytest.raises(PrefixNotFound):
            store.prefix(prefix.id, salt="")


def test_a_tenants_mark_does_not_make_a_prefix_its(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64), salt=SECRET)
    corruption.forge(folder, lambda body: body.update(tenant=chain.tenant_mark("thief")))
    with ChunkStore.open(folder) as store:
        with pytest.raises(PrefixNotFound):
            store.prefix(prefix.id, salt="thief")
        found = find(store, some_tokens(64), salt="thief")
        assert not found.num_tokens and np.array_equal(found.tokens, [])


# -- provenance ----------------------------------------------------------------------------------


BUDGET = "budget:0.25"


def write(store: ChunkStore, tokens: np.ndarray, parent: Prefix | None, made: str) -> Prefix:
    kv = kv_of(SMALL, tokens, parent.num_tokens if parent else 0)
    return segment_support.write(store, SMALL, tokens, kv, parent, provenance=made)


def find(store: ChunkStore, tokens: np.ndarray, provenance: str = "exact", **more: str) -> Prefix:
    return store.longest_prefix(tokens, **ASKED, provenance=provenance, **more)


@pytest.mark.parametrize("length", [70, 96, 200])
@pytest.mark.parametrize("before", [0, 64])
def test_an_exact_lookup_never_finds_approximate_kv(
    store: ChunkStore, before: int, length: int
) -> None:
    tokens = some_tokens(length)
    exact = ingest(store, tokens[:before]) if before else None
    made = write(store, tokens[before:], exact, BUDGET)
    assert made.provenance == BUDGET and made.exact_chunks == before // 16
    assert find(store, tokens).num_tokens == before
    assert find(store, tokens, "budget:0.5").num_tokens == before
    found = find(store, tokens, BUDGET)
    assert found == made and found.num_tokens == length and found.provenance == BUDGET
    assert found.exact_chunks == made.exact_chunks
    assert read_all(store, found).right == SMALL.groups * found.num_chunks
    assert store.prefix(made.id) == made and store.prefix(made.id).provenance == BUDGET
    assert store.prefix(made.id).exact_chunks == made.exact_chunks
    whole = find(store, tokens[: length // 16 * 16 + 1], BUDGET)
    assert made.whole_chunks() == whole


def test_turn_after_turn_of_a_chat_under_a_budget(store: ChunkStore) -> None:
    tokens = some_tokens(400)
    prefix = ingest(store, tokens[:100])
    for end in (150, 219, 400):
        parent = find(store, tokens[:end], BUDGET).whole_chunks()
        prefix = write(store, tokens[parent.num_tokens : end], parent, BUDGET)
        assert find(store, tokens[:end], BUDGET) == prefix
    assert len(prefix.spans) == 4 and prefix.exact_chunks == 6
    assert find(store, tokens).num_tokens == 100
    assert find(store, tokens[:310], BUDGET).num_tokens == 304
    cut = prefix.whole_chunks()
    assert cut is prefix and find(store, tokens[:100], BUDGET).provenance == "exact"
    short = find(store, tokens[:111], BUDGET).whole_chunks()
    assert (short.num_tokens, short.provenance) == (96, "exact")
    exact = ingest(store, tokens)  # computed in full when there is time
    assert exact.provenance == "exact" and find(store, tokens) == exact
    assert find(store, tokens, BUDGET).provenance == "exact"  # the better one, where both are there
    assert store.prefix(prefix.id).provenance == BUDGET


def test_kv_of_a_budget_is_found_though_more_exact_kv_came_to_the_store_since(
    store: ChunkStore,
) -> None:
    """Where it turns off lies within the exact KV then, and not at its end."""
    tokens = some_tokens(200)
    made = write(store, tokens[48:], ingest(store, tokens[:48]), BUDGET)
    exact = ingest(store, tokens[:128])
    assert find(store, tokens) == exact
    found = find(store, tokens, BUDGET)
    assert found == made and (found.num_tokens, found.exact_chunks) == (200, 3)
    assert read_all(store, found).right == SMALL.groups * found.num_chunks


def test_exact_ids_are_what_they_were(store: ChunkStore) -> None:
    """Stores from before provenance existed stay readable: ids and manifests of exact KV."""
    prefix = ingest(store, some_tokens(40))
    text = f"ckv-chain\0{FINGERPRINT.hex}\0{SMALL.hex}\0"
    assert chain.seed(FINGERPRINT, SMALL, "") == chain.hashlib.sha256(text.encode()).digest()[:16]
    data = store.files.manifest(prefix.spans[0].segment_id)
    assert b"provenance" not in data and b'"salt":""' in data
    made = write(store, some_tokens(40, 1), None, BUDGET)
    data = store.files.manifest(made.spans[0].segment_id)
    assert Manifest.decode(data, made.spans[0].segment_id)[0].provenance == BUDGET


def test_what_may_follow_what(store: ChunkStore) -> None:
    tokens = some_tokens(64)
    made = write(store, tokens[:32], None, BUDGET)
    for other in ("exact", "budget:0.5"):
        with pytest.raises(ValueError, match="expected the same"):
            write(store, tokens[32:], made, other)
    for bad in ("", "Budget", "a b", "x" * 65, "a\0b"):
        with pytest.raises(ValueError, match="provenance"):
            find(store, tokens, bad)
    assert find(store, tokens, BUDGET, salt="tenant").num_tokens == 0


def test_a_forged_provenance_is_no_manifest(tmp_path) -> None:
    with ChunkStore.open(tmp_path / "store") as store:
        write(store, some_tokens(64), None, BUDGET)
        ingest(store, some_tokens(64, 1))
    for which in range(2):
        corruption.forge(
            tmp_path / "store",
            lambda body: (
                body.update(provenance="budget:0.5")
                if "provenance" not in body
                else body.pop("provenance")
            ),
            which,
        )
    with ChunkStore.open(tmp_path / "store") as store:
        assert store.prefixes() == [] and find(store, some_tokens(64)).num_tokens == 0
