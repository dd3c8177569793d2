"""What a layout may be, up to the last value that is allowed, and what follows from it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ckv_jax.storage import Layout
from ckv_jax.storage.grouping import RUN, alike, bounded, by_position, order_of, runs, steady

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


@pytest.mark.parametrize(
    "right",
    [
        {"pack_layers": 1},
        {"pack_layers": 2},
        {"pack_layers": 4},
        {"kv_together": False, "pack_layers": 1},
        {"digest": "int4", "head_dim": 2},
        {"digest": "pq", "head_dim": 2},
        {"digest": "int8", "digest_layers": (5,)},
        {"digest": "means+cosines"},
        {"reordered": True, "layer_orders": True},
    ],
    ids=str,
)
def test_what_goes_together_is_not(right: dict[str, object]) -> None:
    made = changed(BASE, **right)
    assert {name: getattr(made, name) for name in right} == right
    assert Layout.from_dict(made.to_dict()) == made


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


def test_every_layer_is_in_one_group() -> None:
    for layout in (BASE, changed(BASE, pack_layers=1), changed(BASE, num_layers=9), APART):
        layers = [layer for g in range(layout.groups) for layer in layout.group_layers(g)]
        assert sorted(layers) == sorted([*range(layout.num_layers)] * layout.parts)
        for group in (-1, layout.groups):
            with pytest.raises(ValueError, match=f"group: got {group}"):
                layout.group_layers(group)
    assert (BASE.parts, APART.parts) == (1, 4)
    apart = changed(BASE, kv_together=False, pack_layers=1)
    assert (apart.parts, apart.groups, apart.pack_shape) == (2, 12, (1, 1, 16, 4, 16))
    assert [APART.group_heads(group) for group in (0, 3, 4)] == [
        slice(0, 1), slice(3, 4), slice(0, 1),
    ]  # fmt: skip
    assert BASE.group_heads(1) == apart.group_heads(1) == slice(None)


@pytest.mark.parametrize(
    ("layout", "groups", "shards"),
    [
        (BASE, 1, 2),
        (changed(BASE, pack_layers=2), 1, 3),
        (changed(BASE, pack_layers=1), 2, 3),
        (changed(BASE, pack_layers=1, num_layers=7), 2, 4),
        (changed(BASE, pack_layers=1, kv_together=False), 4, 3),
        (APART, 8, 3),
    ],
    ids=str,
)
def test_a_shard_file_has_at_least_two_layers(layout: Layout, groups: int, shards: int) -> None:
    assert (layout.shard_groups, layout.shards) == (groups, shards)


def test_probes_are_of_a_layer_of_each_group_or_of_heads_of_every_layer() -> None:
    keys, heads = changed(BASE, probe="keys"), changed(BASE, probe="heads", probe_width=2)
    assert (keys.probe_layers, keys.probe_heads) == ((0, 4), 4)
    assert (heads.probe_layers, heads.probe_heads) == ((0, 1, 2, 3, 4, 5), 2)
    assert changed(heads, probe_width=9).probe_heads == 4
    assert BASE.probe_layers == ()
    # A slot has room for 4 layers of keys and values, and a page for as many keys.
    assert (keys.probe_page_chunks, heads.probe_page_chunks) == (8, 16)
    assert type(keys.probe_page_chunks) is int
    assert [keys.probe_block(chunks) for chunks in (1, 63, 64, 65)] == [1, 63, 64, 64]
    assert changed(keys, chunk_tokens=2048).probe_block(3) == 1


def test_a_digest_s_record_is_as_long_as_its_parts() -> None:
    """Of 33 tokens in three chunks: parameters, scales, codes."""
    sizes = {
        "none": (0, 0, 0),
        "int8": (4 * 64, 4 * 4 * 33, 64 * 33),
        "int4": (4 * 64, 4 * 4 * 33, 32 * 33),
        "pq": (4 * 64 * 64, 0, 4 * 2 * 33),
        "means": (0, 0, 2 * 64 * 3),
        "bounds": (0, 0, 2 * 2 * 64 * 3),
        "means+cosines": (0, 0, (2 * 64 + 4 * 4) * 3),
    }
    for kind, record in sizes.items():
        assert changed(BASE, digest=kind).digest_record(33) == record


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


def test_the_chunks_that_are_grouped_lie_between_the_first_and_the_last_tokens() -> None:
    assert steady(0, 1000, 16) == (1, 58)
    assert steady(0, 1000, 12) == (2, 78)
    assert steady(16, 1000, 16) == (0, 58)  # the text began in another segment
    assert steady(8, 1000, 16) == (1, 58)
    assert steady(0, 50, 16) == (1, 1)
    assert steady(32, 63, 16) == (0, 0)
    assert list(runs(1, 1100, 16)) == [(1, 512), (512, 1024), (1024, 1100)]
    assert list(runs(512, 1024, 16)) == [(512, 1024)]
    assert list(runs(3, 3, 16)) == []


def test_tokens_that_are_not_grouped_are_in_order() -> None:
    tokens = RUN + 37
    found = by_position(tokens, 16)
    assert found.dtype == np.dtype("<u2")
    assert (found[0], found[15], found[16], found[RUN - 1], found[RUN]) == (0, 0, 1, 511, 0)
    order = order_of(found[None], 16)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(order, np.arange(tokens)[None])


def test_tokens_are_put_in_the_order_of_their_chunks_run_by_run() -> None:
    where = np.stack([by_position(RUN + 32, 16)] * 2)
    where[1, :32] = [1, 0] * 16
    where[1, RUN:] = [1] * 16 + [0] * 16
    order = order_of(where, 16)
    np.testing.assert_array_equal(order[0], np.arange(RUN + 32))
    np.testing.assert_array_equal(order[1, :32], [*range(1, 32, 2), *range(0, 32, 2)])
    np.testing.assert_array_equal(order[1, 32:RUN], np.arange(32, RUN))
    np.testing.assert_array_equal(
        order[1, RUN:], [*range(RUN + 16, RUN + 32), *range(RUN, RUN + 16)]
    )


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


@pytest.mark.parametrize("kind", ["keys", "heads"])
def test_probes_take_whole_blocks_of_1024_tokens(kind: str) -> None:
    probed, size = changed(BASE, probe=kind), 1024
    layers, heads = {"keys": (2, 4), "heads": (6, 3)}[kind]
    row = layers * heads * 16 * 2  # bytes a token

    def more(tokens: int) -> int:
        chunks = -(-tokens // 16)
        return probed.segment_bytes(tokens) - BASE.segment_bytes(tokens) - layers * chunks * 24

    assert [more(tokens) // row for tokens in (1, 16, 17, size, size + 1, 2 * size, 3 * size)] == [
        16, 16, 32, size, 2 * size, 2 * size, 3 * size,
    ]  # fmt: skip


def test_an_assignment_takes_two_bytes_a_token_and_head() -> None:
    apart = changed(ALIKE, grouping="position")
    assert ALIKE.segment_bytes(1000) - apart.segment_bytes(1000) == 2 * 6 * 4 * 1000
    wide = changed(BASE, codec="x:1", codec_bytes=512)
    assert BASE.segment_bytes(1000) - wide.segment_bytes(1000) == 2 * 63 * (16 * 1024 - 512)


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
