"""What the store says to people, and what it takes from them: up to the last value that is one."""

from __future__ import annotations

import dataclasses
from threading import TIMEOUT_MAX

import numpy as np
import pytest

from ckv_jax.storage import (
    Fingerprint,
    FingerprintMismatch,
    Layout,
    Prefix,
    StoreConfig,
    chain,
)
from ckv_jax.storage.errors import (
    PrefixNotFound,
)
from ckv_jax.storage.layout import RUN
from ckv_jax.storage.prefix import ProbePages, Span
from ckv_jax.storage.segment.alike import alike, bounded
from tests.support.truth import FINGERPRINT, SMALL


def said(*args: object, **named: object) -> str:
    return str(PrefixNotFound(*args, **named))  # type: ignore[arg-type]


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


def test_a_salt_is_a_short_text_whose_mark_does_not_give_it_away() -> None:
    for right in ("", "x" * 4096, "ü"):
        assert chain.check_salt(right) == right
    for wrong in ("x" * 4097, "a\0b", 3, None):
        with pytest.raises(ValueError, match="salt: expected"):
            chain.check_salt(wrong)  # type: ignore[arg-type]
    assert chain.tenant_mark("") == "" and len(chain.tenant_mark("a")) == 32
    assert chain.tenant_mark("a") != chain.tenant_mark("b")
    assert chain.unknown_salt("") == "" and chain.unknown_salt("m") == "\0m"


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


# -- layouts -------------------------------------------------------------------------------------


BASE = Layout(num_layers=6, num_kv_heads=4, head_dim=16, probe="none")
APART = dataclasses.replace(BASE, pack_layers=1, heads_apart=True)
ALIKE = dataclasses.replace(APART, grouping="alike", digest="means")
MOST = 1 << 20


def changed(layout: Layout, **changes: object) -> Layout:
    return dataclasses.replace(layout, **changes)  # type: ignore[arg-type]


def test_what_nobody_says_of_a_layout_is_the_paper_s_and_bfloat16() -> None:
    said = Layout(
        num_layers=6, num_kv_heads=4, head_dim=16, dtype="bfloat16", chunk_tokens=16, pack_layers=4,
        kv_together=True, probe="keys", probe_width=3, digest="none", digest_layers=(),
        reordered=False, layer_orders=False, codec="none", codec_bytes=0,
        heads_apart=False, grouping="position",
    )  # fmt: skip
    assert Layout(num_layers=6, num_kv_heads=4, head_dim=16) == said
    assert changed(said, probe="heads").probe_heads == 3  # IMPRESS (4.3)


@pytest.mark.parametrize(
    "name", ["num_layers", "num_kv_heads", "head_dim", "chunk_tokens", "probe_width"]
)
def test_sizes_are_whole_numbers_from_1_to_2_to_the_20th(name: str) -> None:
    small = Layout(num_layers=1, num_kv_heads=1, head_dim=1, chunk_tokens=1, pack_layers=1)
    for size in (1, MOST):
        assert getattr(changed(small, **{name: size}), name) == size
    for size in (0, -1, MOST + 1, 2.0, True):
        with pytest.raises(ValueError, match=f"{name}: got"):
            changed(small, **{name: size})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kv_together": 1}, "kv_together: got 1"),
        ({"reordered": None}, "reordered: got None"),
        ({"layer_orders": 0}, "layer_orders: got 0"),
        ({"heads_apart": "yes"}, "heads_apart: got 'yes'"),
        ({"layer_orders": True}, "layer_orders: got True, expected a reordered"),
        ({"pack_layers": 0}, "pack_layers: got 0"),
        ({"pack_layers": True}, "pack_layers: got True"),
        ({"pack_layers": 8}, "pack_layers: got 8"),
        ({"kv_together": False}, "pack_layers: got 4, expected 1"),
        ({"kv_together": False, "pack_layers": 2}, "pack_layers: got 2, expected 1"),
        ({"digest": "int4", "head_dim": 15}, "head_dim: got 15, expected an even one"),
        ({"digest": "pq", "head_dim": 15}, "head_dim: got 15, expected an even one for pq"),
        ({"digest": "int8", "digest_layers": (6,)}, "digest_layers: got"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        changed(BASE, **wrong)


def test_a_pack_has_at_most_a_gibibyte_encoded_or_not() -> None:
    most = Layout(num_layers=4, num_kv_heads=1, head_dim=MOST, chunk_tokens=64)
    assert most.pack_bytes == 1 << 30
    with pytest.raises(ValueError, match="pack: got"):
        changed(most, chunk_tokens=65)
    for size in (1, 1 << 30):
        assert changed(BASE, codec="x:1", codec_bytes=size).stored_bytes == size
    for size in (0, (1 << 30) + 1):
        with pytest.raises(ValueError, match=r"codec_bytes: got .* in \[1, 1073741824\]"):
            changed(BASE, codec="x:1", codec_bytes=size)
    with pytest.raises(ValueError, match=r"codec_bytes: got 1, expected one in \[0, 0\]"):
        changed(BASE, codec_bytes=1)


@pytest.mark.parametrize("layout", [BASE, changed(BASE, reordered=True), ALIKE], ids=str)
def test_how_much_of_a_segment_can_be_used(layout: Layout) -> None:
    """Whole chunks; of what has an order of its own nothing, or runs, or up to its last tokens."""
    total = 2 * RUN + 1000  # the last 64 begin in chunk 1082
    wanted = [total, total - 1, 16 * 1082 + 15, 16 * 1082, 16 * 1082 - 1, 2 * RUN, RUN + 17, 15, 0]
    found = [layout.cut(tokens, total) for tokens in wanted]
    if layout.alike:
        assert found == [total, 16 * 1086, 16 * 1082, 16 * 1082, 2 * RUN, 2 * RUN, RUN, 0, 0]
    elif layout.reordered:
        assert found == [total] + [0] * 8
    else:
        whole = [tokens // 16 * 16 for tokens in wanted[1:]]
        assert found == [total, *whole]


@pytest.mark.parametrize(
    ("layout", "start"),
    [(APART, "e327c73545ba7c1c"), (ALIKE, "d72604ecb7ccaa74")], ids=["apart", "alike"],
)  # fmt: skip
def test_a_layout_keeps_the_id_that_earlier_code_gave_it(layout: Layout, start: str) -> None:
    """Which could name a head for each layer of a digest, and wrote that it did not."""
    assert layout.hex.startswith(start) and layout.to_dict()["digest_heads"] == []
    assert "digest_heads" not in BASE.to_dict()
    with pytest.raises(ValueError, match=r"got digest_heads=\[0\], expected none"):
        Layout.from_dict(layout.to_dict() | {"digest_heads": [0]})


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, 0),
        ({"reordered": True}, 6),
        ({"reordered": True, "layer_orders": True}, 6 * 6),
        ({"digest": "int8"}, 6 * (64 + 4 * 4)),
        ({"probe": "keys"}, 2 * 64 * 2 + 2 * 24 / 16),
        ({"probe": "heads"}, 6 * 48 * 2 + 6 * 24 / 16),
        ({"pack_layers": 1}, -2 * 2 * 64 * 2 + (6 - 2) * 24 / 16),
        ({"dtype": "float32"}, 8 * 2 * 64 * 2),
    ],
    ids=str,
)
def test_room_is_reserved_for_every_part_of_a_segment(
    changes: dict[str, object], more: float
) -> None:
    """Bytes a token, beside what packs of 4 layers take: keys and values of 8, 24 bytes for each
    pack's place and checksums, 12 for the token itself and its links."""
    layout, far = changed(BASE, **changes), 1 << 20
    base = 8 * 2 * 64 * 2 + 2 * 24 / 16 + 12
    assert (layout.segment_bytes(2 * far) - layout.segment_bytes(far)) / far == base + more
    assert layout.segment_bytes(1) > 1 << 14  # descriptions, however short the text is


def test_tokens_are_parted_along_the_direction_in_which_they_differ_most() -> None:
    """Which is not where the one lies that is farthest from the others."""
    rng = np.random.default_rng(0)
    along = rng.permutation(np.linspace(-5, 5, 32))
    keys = np.stack([along, rng.uniform(-1, 1, 32)], axis=1)
    keys[np.abs(along - 1).argmin(), 1] = 8.0
    unit = alike(np.repeat(keys, 4, axis=0).astype(np.float32), 64)
    low, high = (set(unit[::4][side]) for side in (along < -1.5, along > 1.5))
    assert len(low) == len(high) == 1 and low != high
    assert np.bincount(unit).tolist() == [64, 64]
    large = alike(np.random.default_rng(1).normal(size=(4096, 2)), 2048)
    assert np.bincount(large).tolist() == [2048, 2048]
    with pytest.raises(ValueError, match="got 64 tokens in units of 6, expected"):
        alike(np.zeros((64, 2)), 6)
    with pytest.raises(ValueError, match="got 60 tokens in units of 16, expected"):
        alike(np.zeros((60, 2)), 16)
    assert alike(np.zeros((0, 2)), 16).shape == (0,)
    far = np.array([np.inf, -np.inf, 1e30, -3e15, 7], np.float32)
    assert bounded(far).tolist() == [np.float32(1e15), -np.float32(1e15)] * 2 + [7]
