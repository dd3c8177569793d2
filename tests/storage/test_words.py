"""What the store says to people, and what it takes from them: up to the last value that is one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from threading import TIMEOUT_MAX

import numpy as np
import pytest

from ckv_jax.storage import (
    Fingerprint,
    FingerprintMismatch,
    Prefix,
    StoreConfig,
    chain,
    fingerprint,
)
from ckv_jax.storage.errors import (
    PrefixNotFound,
    ReadTimeout,
    StoreError,
    StoreFull,
    StoreUnavailable,
    as_store_error,
    as_unavailable,
)
from ckv_jax.storage.fingerprint import hash_files
from ckv_jax.storage.place.place import folder_of
from ckv_jax.storage.prefix import ProbePages, Span
from tests.support.truth import FINGERPRINT, SMALL, some_tokens


def said(*args: object, **named: object) -> str:
    return str(PrefixNotFound(*args, **named))  # type: ignore[arg-type]


def test_who_asks_for_a_prefix_that_is_not_there_is_told_what_there_is() -> None:
    assert said("ab") == "no stored prefix with id 'ab'"
    assert said("ab", ["abc", "abd"]) == "no stored prefix with id 'ab'; close ids: abc, abd"
    assert said("ab", stored="x, y") == "no stored prefix has the name or id 'ab'; stored: x, y"
    assert said("ab", ["abc"], within="abc").startswith("prefix 'ab' ends inside of abc, whose")
    one = PrefixNotFound("ab", ["abc"], several=1)
    assert (one.prefix_id, one.close, one.several) == ("ab", ("abc",), 0)
    assert "close ids: abc" in str(one)


def test_of_several_that_begin_so_some_are_named_and_the_others_counted() -> None:
    two = PrefixNotFound("a", ["ab", "ac"], several=2)
    assert two.several == 2 and str(two) == "2 stored prefixes begin with 'a': ab, ac"
    assert said("a", ["ab"], several=3) == "3 stored prefixes begin with 'a': ab and 2 more"
    assert said("a", several=3) == "3 stored prefixes begin with 'a'"


def test_what_differs_is_named() -> None:
    with pytest.raises(FingerprintMismatch) as error:
        Fingerprint({"dtype": "f32", "rope": "a"}).require(
            Fingerprint({"dtype": "f32", "rope": "b", "x": "1"})
        )
    assert error.value.fields == ("rope", "x")
    assert str(error.value) == (
        "stored KV belongs to another model; these differ: rope (stored 'a', got 'b'), "
        "x (stored None, got '1')"
    )
    alone = FingerprintMismatch({"dtype": "f32", "w": "0"}, {"dtype": "bf16", "w": "0"})
    assert str(alone) == "stored with dtype f32, asked with dtype bf16"
    same = Fingerprint({"b": "1", "a": "2"})
    same.require(Fingerprint({"a": "2", "b": "1"}))
    assert same.differences(same) == [] and hash(same) == hash(Fingerprint({"a": "2", "b": "1"}))
    assert same != {"a": "2", "b": "1"}
    for wrong in ({"a": 1}, {1: "a"}, [("a", "b")]):
        with pytest.raises(ValueError, match="fields: got"):
            Fingerprint(wrong)  # type: ignore[arg-type]


def test_a_full_disk_is_not_one_that_fails() -> None:
    for code in (errno.ENOSPC, errno.EDQUOT):
        full = as_store_error("/x", OSError(code, os.strerror(code)))
        assert isinstance(full, StoreFull) and str(full).startswith("/x: no room on the disk: ")
    other = as_store_error("/x", OSError(errno.EIO, "broken"))
    assert type(other) is StoreUnavailable and str(other) == "/x: cannot be written: broken"
    assert str(as_store_error("/x", OSError("no number"))) == "/x: cannot be written: no number"
    seen = as_unavailable("/x", OSError(errno.EIO, "broken"))
    assert type(seen) is StoreUnavailable and str(seen) == "/x: cannot be looked at: broken"
    assert str(as_unavailable("/x", OSError("odd"))) == "/x: cannot be looked at: odd"
    late = ReadTimeout("a read", 1.5, lambda: True)
    assert str(late) == "a read did not return within 1.5 s" and late.settled()
    assert isinstance(late, StoreError)


def prefix_of(tokens: int, *spans: tuple[int, int, int], **more: object) -> Prefix:
    """With spans of (first chunk, chunks, chunks of the segment)."""
    return Prefix(
        id="ab" * 16, tokens=chain.as_tokens(np.arange(tokens)), layout=SMALL,
        spans=tuple(
            Span(segment_id=str(n), first_chunk=a, num_chunks=b, segment_chunks=c, checksum="")
            for n, (a, b, c) in enumerate(spans)
        ),
        fingerprint=FINGERPRINT, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_prefix_in_one_line() -> None:
    assert str(prefix_of(0)) == "prefix abababababab: 0 tokens in 0 chunks"
    assert str(prefix_of(1, (0, 1, 1))) == "prefix abababababab: 1 token in 1 chunk"
    many = prefix_of(16_001, (0, 1001, 1001), provenance="budget:0.25")
    assert str(many) == (
        "prefix abababababab: 16,001 tokens in 1,001 chunks, made under budget:0.25"
    )


def test_prefixes_are_equal_by_id_and_by_where_they_lie() -> None:
    one, other = prefix_of(16, (0, 1, 2)), prefix_of(16, (0, 1, 3))
    assert one == prefix_of(16, (0, 1, 2)) and hash(one) == hash(prefix_of(16, (0, 1, 2)))
    assert one != other and one != one.id


def test_nothing_stored_is_a_prefix_too() -> None:
    none = Prefix.empty(FINGERPRINT, SMALL, "salt")
    assert (none.num_tokens, none.num_chunks, none.spans, none.salt) == (0, 0, (), "salt")
    assert none.id == chain.seed(FINGERPRINT, SMALL, "salt").hex()
    assert none.whole_chunks() is none


def test_pages_end_where_segments_and_spans_do() -> None:
    """A page of this layout has 4 chunks; a whole one is cut by its segment alone."""
    assert SMALL.probe_page_chunks == 4
    prefix = prefix_of(16 * 16 + 5, (0, 6, 6), (3, 7, 10), (0, 4, 9))
    pages = ProbePages(prefix)
    assert pages.span.tolist() == [0, 0, 1, 1, 1, 2]
    assert pages.first.tolist() == [0, 4, 3, 4, 8, 0]
    assert pages.chunks.tolist() == [4, 2, 1, 4, 2, 4]
    assert pages.start.tolist() == [0, 64, 96, 112, 176, 208]
    assert pages.tokens.tolist() == [64, 32, 16, 64, 32, 53]
    assert [pages.whole(page) for page in range(6)] == [True, True, False, True, True, True]
    assert pages.place.dtype == np.int32 and pages.place.tolist() == [
        0, 1, 2, 3, 4, 5, 8, 12, 13, 14, 15, 16, 17, 20, 21, 22, 23,
    ]  # fmt: skip
    assert pages.token_bytes == 2 * 8 * 2
    cut = ProbePages(prefix_of(16 * 6, (0, 6, 9)))
    assert [cut.whole(page) for page in range(len(cut))] == [True, False]
    later = ProbePages(prefix_of(16 * 7, (5, 7, 12)))
    assert (later.first.tolist(), later.chunks.tolist()) == ([5, 8], [3, 4])
    assert [later.whole(page) for page in range(2)] == [False, True]
    assert len(ProbePages(prefix_of(0))) == 0


def test_tokens_are_whole_numbers_that_fit() -> None:
    most = 2**31 - 1
    found = chain.as_tokens(np.array([0, most], np.int64))
    assert found.dtype == np.int32 and found.tolist() == [0, most]
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1
    mine = np.array([1, 2], np.int32)
    copy = chain.as_tokens(mine)
    mine[0] = 7
    assert copy.tolist() == [1, 2]
    assert chain.as_tokens(np.array([3], np.uint8)).tolist() == [3]
    assert chain.as_tokens([]).tolist() == []  # type: ignore[arg-type]
    for wrong in ([-1], [most + 1], [2**40]):
        with pytest.raises(ValueError, match="outside int32"):
            chain.as_tokens(np.array(wrong))
    for wrong in ([[1]], 3, [1.0], [True], np.zeros((1, 0), int)):
        with pytest.raises(ValueError, match=r"expected integers \[T\]"):
            chain.as_tokens(np.array(wrong))


def test_links_are_chained_over_the_bytes_of_tokens() -> None:
    tokens, before = some_tokens(37), b"start"
    found = list(chain.links(before, tokens, 16))
    for place, link in enumerate(found):
        part = tokens[16 * place : 16 * place + 16].astype("<i4").tobytes()
        before = hashlib.sha256(before + part).digest()[:16]
        assert link == before
    assert len(found) == 3 and list(chain.links(b"", tokens[:0], 16)) == []
    assert chain.link(b"start", tokens[:16].tobytes()) == found[0]
    assert chain.branch(b"at", "exact") == b"at"
    for name in ("budget:0.5", "zone"):
        text = f"ckv-branch\0{name}\0at".encode()
        assert chain.branch(b"at", name) == hashlib.sha256(text).digest()[:16]


def test_a_provenance_is_a_short_name() -> None:
    for right in ("exact", "a", "x" * 64, "budget:0.25_a-b"):
        assert chain.check_provenance(right) == right
    for wrong in ("", "x" * 65, "A", "a b", 3, None):
        with pytest.raises(ValueError, match="provenance: got"):
            chain.check_provenance(wrong)


def test_a_salt_is_a_short_text_whose_mark_does_not_give_it_away() -> None:
    for right in ("", "x" * 4096, "ü"):
        assert chain.check_salt(right) == right
    for wrong in ("x" * 4097, "a\0b", 3, None):
        with pytest.raises(ValueError, match="salt: expected"):
            chain.check_salt(wrong)  # type: ignore[arg-type]
    assert chain.tenant_mark("") == "" and len(chain.tenant_mark("a")) == 32
    assert chain.tenant_mark("a") != chain.tenant_mark("b")
    assert chain.unsaid_salt("") == "" and chain.unsaid_salt("m") == "\0m"


def test_a_store_s_settings_up_to_the_last_value() -> None:
    made = StoreConfig()
    assert (made.max_bytes, made.tenant_bytes, made.direct_io) == (None, None, None)
    assert (made.io_concurrency, made.eviction) == (32, "attention")
    assert (made.deadline_s, made.wait_s, made.write_s) == (10.0, 10.0, 120.0)
    for right in (
        {"max_bytes": 0}, {"tenant_bytes": 0}, {"quotas": {"a": 0}}, {"io_concurrency": 1},
        {"io_concurrency": 1024}, {"deadline_s": TIMEOUT_MAX}, {"wait_s": 1e-6},
        {"write_s": TIMEOUT_MAX}, {"eviction": "lru"},
    ):  # fmt: skip
        StoreConfig(**right)  # type: ignore[arg-type]
    for wrong in (
        {"io_concurrency": 1025}, {"deadline_s": TIMEOUT_MAX * 1.01}, {"wait_s": float("inf")},
        {"write_s": 0.0}, {"quotas": {"a": -1}}, {"eviction": "LRU"},
    ):  # fmt: skip
        (name,) = wrong
        with pytest.raises(ValueError, match=f"{name}: got"):
            StoreConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="salt"):
        StoreConfig(quotas={"a\0b": 1})


def test_a_tenant_s_own_bound_comes_before_that_of_all() -> None:
    config = StoreConfig(tenant_bytes=5, quotas={"a": 7, "": 9})
    assert config.bound_of(chain.tenant_mark("a")) == 7
    assert config.bound_of(chain.PUBLIC) == 9
    assert config.bound_of(chain.tenant_mark("b")) == 5
    assert StoreConfig().bound_of(chain.tenant_mark("b")) is None


def test_which_folder_a_url_names() -> None:
    assert folder_of("a/b") == Path("a/b") and folder_of(Path("/a b")) == Path("/a b")
    assert folder_of("file:///a%20b/c") == folder_of("file://localhost/a%20b/c") == Path("/a b/c")
    assert folder_of("s3://bucket/x") is folder_of("memory://") is None
    with pytest.raises(ValueError, match="url: got 'file://host/x'"):
        folder_of("file://host/x")


def test_a_cache_of_hashes_is_read_up_to_8_mib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_SETTLED_S", -1.0)  # files of this moment are trusted
    path, cache = tmp_path / "weights", tmp_path / "cache"
    path.write_bytes(b"x")
    true = hash_files([path], cache)
    (key,) = json.loads(cache.read_text())
    for more, used in ((0, True), (1, False)):
        forged = json.dumps({key: "0" * 64})
        cache.write_text(" " * ((8 << 20) + more - len(forged)) + forged)
        assert (hash_files([path], cache) != true) == used


def test_hashes_of_files_are_of_names_and_contents_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_bytes(name.encode() * 10)
    total = hashlib.sha256()
    for name in ("a", "b"):
        digest = hashlib.sha256(name.encode() * 10).hexdigest()
        total.update(f"{name}\0{digest}\0".encode())
    assert hash_files([tmp_path / "b", tmp_path / "a"]) == total.hexdigest()
