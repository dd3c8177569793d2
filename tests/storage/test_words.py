"""What the store says to people, and what it takes from them: up to the last value that is one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ckv_jax.storage import Layout, Prefix, chain
from ckv_jax.storage.errors import PrefixNotFound
from ckv_jax.storage.prefix import ProbePages, Span
from tests.support.truth import FINGERPRINT, SMALL


def said(*args: object, **named: object) -> str:
    return str(PrefixNotFound(*args, **named))  # type: ignore[arg-type]


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


# -- layouts -------------------------------------------------------------------------------------


BASE = Layout(num_layers=6, num_kv_heads=4, head_dim=16, probe="none")
APART = dataclasses.replace(BASE, pack_layers=1, heads_apart=True)
ALIKE = dataclasses.replace(APART, grouping="alike", digest="means")
MOST = 1 << 20


def changed(layout: Layout, **changes: object) -> Layout:
    return dataclasses.replace(layout, **changes)  # type: ignore[arg-type]


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
