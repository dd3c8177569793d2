"""What a layout takes, and ids that earlier code gave."""

from __future__ import annotations

import dataclasses

import pytest

from ckv_jax.storage import Layout

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
        ({"heads_apart": "yes"}, "heads_apart: got 'yes'"),
        ({"pack_layers": 0}, "pack_layers: got 0"),
        ({"pack_layers": True}, "pack_layers: got True"),
        ({"pack_layers": 8}, "pack_layers: got 8"),
        ({"kv_together": False}, "pack_layers: got 4, expected 1"),
        ({"kv_together": False, "pack_layers": 2}, "pack_layers: got 2, expected 1"),
        ({"heads_apart": True, "kv_together": False, "pack_layers": 1}, "expected"),
        ({"heads_apart": True, "reordered": True}, "expected"),
        ({"heads_apart": True, "codec": "int8:1", "codec_bytes": 512}, "expected"),
        ({"digest": "int4", "head_dim": 15}, "head_dim: got 15, expected an even one"),
        ({"digest": "pq", "head_dim": 15}, "head_dim: got 15, expected an even one for pq"),
        ({"digest": "int4", "digest_layers": (6,)}, "digest_layers: got"),
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
    with pytest.raises(ValueError, match="got a digest of single heads"):
        Layout.from_dict(layout.to_dict() | {"digest_heads": [0]})
    assert layout.to_dict()["layer_orders"] is False
    ordered = changed(BASE, reordered=True)
    assert ordered.hex.startswith("001410bebc33c2ed")
    assert Layout.from_dict(ordered.to_dict()) == ordered
    with pytest.raises(ValueError, match="got one order for all layers"):
        Layout.from_dict(ordered.to_dict() | {"layer_orders": False})
