"""Tenants: neither ids nor models nor salts of one are told to another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from segment_support import segment_folder

from ckv_jax.storage import ChunkStore, Fingerprint, FingerprintMismatch, PrefixNotFound, chain
from ckv_jax.storage.segment import manifest as manifests
from tests.faults import disk
from tests.support.truth import FINGERPRINT, SMALL, ingest, read_all, some_tokens

SECRET = "correct horse battery staple"


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


def test_ids_that_begin_alike_are_named_to_their_tenant_alone(store: ChunkStore) -> None:
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


def test_a_tool_that_says_no_salt_gets_one_that_is_nobodys(store: ChunkStore) -> None:
    mine = ingest(store, some_tokens(64), salt=SECRET)
    found = store.prefix(mine.id)
    assert found == mine and found.salt not in ("", SECRET) and "\0" in found.salt
    with pytest.raises(ValueError, match="salt"):
        store.longest_prefix(
            some_tokens(64), fingerprint=FINGERPRINT, layout=SMALL, salt=found.salt
        )
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

    disk.forge(folder, older)
    with ChunkStore.open(folder) as store:
        assert store.prefix(prefix.id, salt=SECRET).num_tokens == 64
        with pytest.raises(PrefixNotFound):
            store.prefix(prefix.id, salt="")


def test_a_tenants_mark_does_not_make_a_prefix_its(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64), salt=SECRET)
    disk.forge(folder, lambda body: body.update(tenant=chain.tenant_mark("thief")))
    with ChunkStore.open(folder) as store:
        with pytest.raises(PrefixNotFound):
            store.prefix(prefix.id, salt="thief")
        found = store.longest_prefix(
            some_tokens(64), fingerprint=FINGERPRINT, layout=SMALL, salt="thief"
        )
        assert not found.num_tokens and np.array_equal(found.tokens, [])
