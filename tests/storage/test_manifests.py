"""What a manifest says of its segment, and which ones are believed."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckv_jax.storage import chain
from ckv_jax.storage.errors import SegmentDamaged, SegmentForeign
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.segment import manifest as manifests
from ckv_jax.storage.segment.arrays import ArrayWriter
from ckv_jax.storage.segment.manifest import (
    Manifest,
    ManifestCache,
    check_order,
    check_size,
    draft_manifest,
    is_id,
    most_bytes,
    servable,
    starts,
)

PLAIN = Layout(num_layers=4, num_kv_heads=2, head_dim=8, pack_layers=2)
FIRST_LAYERS = dataclasses.replace(PLAIN, digest="means", digest_layers=(0, 3))
REORDERED = dataclasses.replace(PLAIN, probe="none", reordered=True)
BY_LAYER = dataclasses.replace(REORDERED, layer_orders=True)
ALIKE = Layout(
    num_layers=2, num_kv_heads=2, head_dim=8, pack_layers=1, probe="none", heads_apart=True,
    grouping="alike",
)  # fmt: skip
WHOSE = Fingerprint({"weights": "w", "dtype": "d"})
OTHER = "ab" * chain.BYTES


def made(layout: Layout = PLAIN, *, salt: str = "", first: int = 0, **more: Any) -> Manifest:
    """Of three chunks, the last one partial; of a child where it has chunks before."""
    link = chain.seed(WHOSE, layout, salt) if not first else bytes(chain.BYTES)
    order = np.arange(40)[::-1] if layout.reordered else None
    if layout.layer_orders:
        order = np.stack([np.roll(np.arange(40), layer) for layer in range(layout.num_layers)])
    tokens = np.arange(40, 80, dtype=np.int32)
    draft = draft_manifest(
        layout=layout, fingerprint=WHOSE, tenant=chain.tenant_mark(salt), tokens=tokens,
        start=link, parent=OTHER if first else None, first_chunk=first, order=order,
        **({"provenance": chain.EXACT} | more),
    )  # fmt: skip
    for at, table in enumerate(
        (draft.pack_crc, draft.probe_crc, draft.digest_crc, draft.assignment_crc)
    ):
        table[...] = np.arange(table.size).reshape(table.shape) + 2**32 - 1 - 100 * (at + 1)
    return draft


def body_of(manifest: Manifest) -> dict[str, Any]:
    return dict(json.loads(manifest.encode()[0])["body"])


def wrapped(body: Any) -> bytes:
    raw = json.dumps(body, separators=(",", ":")).encode()
    return b'{"sha256":"%s","body":%s}\n' % (hashlib.sha256(raw).hexdigest().encode(), raw)


@pytest.mark.parametrize(
    "manifest",
    [
        made(), made(first=3), made(first=1 << 40), made(FIRST_LAYERS), made(REORDERED),
        made(BY_LAYER), made(ALIKE), made(salt="s"), made(salt="s", first=2),
        made(first=2, provenance="budget:0.5"),
    ],
)  # fmt: skip
def test_what_was_written_is_read_again(manifest: Manifest) -> None:
    data, checksum = manifest.encode()
    found, same = Manifest.decode(data, manifest.segment_id)
    assert (
        same == checksum == hashlib.sha256(data[len(b'{"sha256":"","body":') + 64 : -2]).hexdigest()
    )
    for field in dataclasses.fields(Manifest):
        want, got = getattr(manifest, field.name), getattr(found, field.name)
        assert np.array_equal(got, want) if isinstance(want, np.ndarray) else got == want
    assert ("provenance" in body_of(manifest)) == (manifest.provenance != chain.EXACT)
    assert found.chunks == 3 and found.links == manifest.links and found.files == manifest.files


def test_a_manifest_does_not_show_whose_text_it_is_of() -> None:
    shown = repr(made(salt="s", first=2))
    assert chain.tenant_mark("s") not in shown and "array(" not in shown and OTHER in shown


def again(text: str, part: slice) -> str:
    """A part of some bytes, in base64 as they are."""
    return base64.b64encode(base64.b64decode(text)[part]).decode()


LIES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "no tokens": ("tokens", lambda body: ""),
    "a chunk before that is none": ("first_chunk", lambda body: -1),
    "chunks before that nobody could have": ("first_chunk", lambda body: (1 << 40) + 1),
    "true chunks before": ("first_chunk", lambda body: True),
    "no parent": ("parent", lambda body: None),
    "a parent that is a path": ("parent", lambda body: "../" + OTHER[3:]),
    "a parent with a longer name": ("parent", lambda body: OTHER + "ab"),
    "an order": ("order", lambda body: body["tokens"]),
    "no time": ("created", lambda body: float("inf")),
    "one checksum less": ("pack_crc", lambda body: again(body["pack_crc"], slice(4, None))),
    "half a checksum": ("pack_crc", lambda body: again(body["pack_crc"], slice(2, None))),
    "one checksum more": ("digest_crc", lambda body: body["probe_crc"]),
    "an assignment": ("assignment_crc", lambda body: base64.b64encode(bytes(4)).decode()),
    "base64 with blanks": ("pack_crc", lambda body: " " + body["pack_crc"]),
    "tokens with blanks": ("tokens", lambda body: "\n" + body["tokens"]),
    "a tenant in upper case": ("tenant", lambda body: OTHER.upper()),
    "a tenant with a shorter name": ("tenant", lambda body: OTHER[2:]),
    "a start that is longer": ("start", lambda body: body["start"] + "00"),
    "another start": ("start", lambda body: "01" * chain.BYTES),
    "a later format": ("format", lambda body: "ckv-segment-2"),
    "an earlier format": ("format", lambda body: "ckv-segment-0"),
}


@pytest.mark.parametrize(("name", "lie"), LIES.values(), ids=LIES)
def test_one_lie_is_enough(name: str, lie: Callable[[dict[str, Any]], Any]) -> None:
    manifest = made(salt="s", first=2)
    body = body_of(manifest)
    Manifest.decode(wrapped(body), manifest.segment_id)
    body[name] = lie(body)
    with pytest.raises(SegmentDamaged, match="bad manifest"):
        Manifest.decode(wrapped(body), manifest.segment_id)


def test_a_root_has_no_parent_and_starts_as_its_salt_does() -> None:
    manifest = made()
    for name, lie in (("parent", OTHER), ("salt", "another"), ("salt", 3), ("layout", [])):
        with pytest.raises(SegmentDamaged, match="bad manifest"):
            Manifest.decode(wrapped(body_of(manifest) | {name: lie}), manifest.segment_id)
    assert starts(manifest, "") and not starts(manifest, "s")
    assert starts(made(salt="s"), "s") and starts(made(salt="s", first=1), "anything")


@pytest.mark.parametrize(
    ("before", "after"),
    [(b'{"sha', b' {"sha'), (b"}\n", b"}"), (b"}\n", b"}\n\n"), (b'"body"', b'"Body"'),
     (b'"created"', b'"Created"')],
)  # fmt: skip
def test_a_manifest_is_exactly_what_was_written(before: bytes, after: bytes) -> None:
    manifest = made()
    data = manifest.encode()[0]
    with pytest.raises(SegmentDamaged, match="bad manifest"):
        Manifest.decode(data.replace(before, after, 1), manifest.segment_id)


@pytest.mark.parametrize("digit", [b"0", b"f"])
def test_a_manifest_of_another_checksum_or_name_is_damaged(digit: bytes) -> None:
    manifest = made()
    data, checksum = manifest.encode()
    with pytest.raises(SegmentDamaged, match="checksum does not match"):
        Manifest.decode(data.replace(checksum.encode(), digit * 64), manifest.segment_id)
    with pytest.raises(SegmentDamaged, match="does not belong to these tokens"):
        Manifest.decode(data, digit.decode() * 32)


@pytest.mark.parametrize("length", [chain.BYTES - 1, chain.BYTES + 1])
def test_a_link_of_another_length_is_none(length: int) -> None:
    manifest = dataclasses.replace(made(first=2), start=bytes(length))
    with pytest.raises(SegmentDamaged, match="bad manifest"):
        Manifest.decode(manifest.encode()[0], manifest.segment_id)


@pytest.mark.parametrize("version", [0, 10**6])
def test_another_version_is_not_damage(version: int) -> None:
    """A number of a version, that is: what is no number is damaged."""
    manifest = made()
    body = body_of(manifest)
    body["layout"]["version"] = version
    with pytest.raises(SegmentForeign, match=f"of version {version}, .* ingest"):
        Manifest.decode(wrapped(body), manifest.segment_id)
    for none in (str(version), True, None):
        body["layout"]["version"] = none
        with pytest.raises(SegmentDamaged):
            Manifest.decode(wrapped(body), manifest.segment_id)


def test_a_digest_of_unknown_kind_is_not_damage() -> None:
    """Such as one that an earlier version had."""
    manifest = made()
    body = body_of(manifest)
    body["layout"]["digest"] = "means+values"
    with pytest.raises(SegmentForeign, match=r"digest='means\+values', expected one of .* ingest"):
        Manifest.decode(wrapped(body), manifest.segment_id)
    body["layout"]["digest"] = 7
    with pytest.raises(SegmentDamaged):
        Manifest.decode(wrapped(body), manifest.segment_id)


def test_a_digest_of_single_heads_is_not_damage() -> None:
    """Earlier code wrote them."""
    manifest = made(FIRST_LAYERS)
    body = body_of(manifest)
    body["layout"] |= {"version": 8, "probe_width": 3, "codec": "none", "codec_bytes": 0}
    body["layout"] |= {"layer_orders": False, "digest_heads": [1, 0]}
    with pytest.raises(SegmentForeign, match=r"got a digest of single heads, .* ingest"):
        Manifest.decode(wrapped(body), manifest.segment_id)
    for none in (3, {"1": 0}, None):
        body["layout"]["digest_heads"] = none
        with pytest.raises(SegmentDamaged, match="digest_heads"):
            Manifest.decode(wrapped(body), manifest.segment_id)


@pytest.mark.parametrize(
    ("name", "good"),
    [("0123456789abcdef" * 2, True), ("0" * 31, False), ("0" * 33, False), ("0" * 31 + "g", False),
     ("A" * 32, False), (["0"] * 32, False), (None, False)],
)  # fmt: skip
def test_an_id_is_32_hex_digits(name: object, good: bool) -> None:
    assert is_id(name) is good


def test_an_id_is_of_the_tokens_their_order_and_what_is_before_them() -> None:
    plain, other = made(), made(first=2)
    assert plain.segment_id == made(provenance="budget:0.5").segment_id
    turned = made(REORDERED)
    straight = dataclasses.replace(turned, order=np.arange(40, dtype=np.int32)[None])
    ids = {one.segment_id for one in (plain, other, turned, straight)}
    assert len(ids) == 4 and all(is_id(one) for one in ids)


@pytest.mark.parametrize(
    ("order", "layout"),
    [
        (np.arange(40.0), REORDERED), (np.zeros(40, bool), REORDERED), (np.arange(39), REORDERED),
        (np.arange(1, 41), REORDERED), (np.zeros(40, int), REORDERED),
        (np.arange(40)[None].repeat(2, 0), REORDERED), (np.arange(40), BY_LAYER),
        (np.stack([*[np.arange(40)] * 3, np.arange(40) // 2]), BY_LAYER),
    ],
)  # fmt: skip
def test_an_order_is_a_permutation_for_each_list(order: np.ndarray, layout: Layout) -> None:
    with pytest.raises(ValueError, match="order: "):
        check_order(order, 40, layout)
    good = np.arange(40, dtype=np.uint8)[::-1]
    assert check_order(good, 40, REORDERED).tolist() == [good.tolist()]
    found = check_order([good, *[np.arange(40)] * 3], 40, BY_LAYER)
    assert found.dtype == np.int32 and found.shape == (4, 40) and found[0].tolist() == good.tolist()


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [FIRST_LAYERS, ALIKE])
def test_a_segment_is_as_large_as_its_files(tmp_path: Path, layout: Layout) -> None:
    manifest = made(layout)
    for spec in manifest.arrays.values():
        writer = ArrayWriter(tmp_path, spec, direct=False)
        writer.finish(lambda: None)
    data = manifest.encode()[0]
    (tmp_path / manifests.FILE).write_bytes(data)
    (tmp_path / "zarr.json").write_bytes(manifests.GROUP)
    files = {p.relative_to(tmp_path).as_posix(): p for p in tmp_path.rglob("*") if p.is_file()}
    assert manifest.size(len(data)) == sum(path.stat().st_size for path in files.values())
    for name, size in manifest.files.items():
        assert files[name].stat().st_size == size


def test_half_a_million_tokens_of_48_layers_with_heads_apart_fill_a_manifest() -> None:
    layout = Layout(
        num_layers=48, num_kv_heads=8, head_dim=128, pack_layers=1, probe="none", heads_apart=True
    )
    check_size(layout, 500_000)
    with pytest.raises(ValueError, match=r"got 505000, .* 384 packs for each chunk$"):
        check_size(layout, 505_000)


@pytest.mark.parametrize("layout", [FIRST_LAYERS, REORDERED, BY_LAYER, ALIKE])
def test_a_manifest_s_size_is_foretold_within_twenty_thousand_bytes(layout: Layout) -> None:
    manifest = made(layout)
    numbers = manifest.tokens.size + manifest.pack_crc.size + manifest.probe_crc.size
    numbers += manifest.digest_crc.size + manifest.assignment_crc.size
    numbers += 0 if manifest.order is None else manifest.order.size
    most = most_bytes(layout, 40)
    assert len(manifest.encode()[0]) < most
    assert numbers * 16 // 3 <= most - (1 << 14) <= numbers * 16 // 3 + 1 + 64


@pytest.mark.parametrize(
    ("layout", "served"),
    [(PLAIN, [0, 1, 2, 3, 3]), (REORDERED, [0, 0, 0, 3, 3]), (BY_LAYER, [0, 0, 0, 3, 3])],
)
def test_what_lies_before_the_first_bad_chunk_can_be_served(
    layout: Layout, served: list[int]
) -> None:
    manifest = made(layout)
    assert [servable(manifest, chunk) for chunk in range(5)] == served


# -- what is kept in memory ----------------------------------------------------------------------


class Shelf:
    """Manifests as they are on a disk, with the stamps of their files."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.stamps: dict[str, tuple[int, ...]] = {}
        self.reads = 0

    def stamp(self, name: str) -> tuple[int, ...] | None:
        return self.stamps.get(name)

    def manifest(self, name: str) -> bytes:
        self.reads += 1
        return self.kept[name]


@pytest.mark.parametrize("stamp", [(4, 10), (6, 10), (5, 9), (5, 11)])
def test_any_other_stamp_is_that_of_another_file(stamp: tuple[int, ...]) -> None:
    """A file that took another's place may have any number, and any time."""
    shelf, first = Shelf(), made()
    files: Any = shelf
    cache, name = ManifestCache(files), first.segment_id
    shelf.kept[name], shelf.stamps[name] = first.encode()[0], (5, 10)
    assert cache.load(name)[1] == cache.load(name)[1] == first.encode()[1] and shelf.reads == 1
    other = dataclasses.replace(first, created=7.0)
    shelf.kept[name], shelf.stamps[name] = other.encode()[0], stamp
    assert cache.load(name)[0].created == 7.0 and shelf.reads == 2


@pytest.mark.parametrize(("size", "reads"), [(16 << 20, 2), ((16 << 20) + 1, 3)])
def test_manifests_of_32_mib_are_kept(
    monkeypatch: pytest.MonkeyPatch, size: int, reads: int
) -> None:
    shelf, text = Shelf(), bytes(size)
    files: Any = shelf
    named = SimpleNamespace(decode=lambda data, name: (name, str(len(data))))
    monkeypatch.setattr("ckv_jax.storage.segment.manifest.Manifest", named)
    cache = ManifestCache(files)
    for name in ("a", "b", "a"):
        shelf.kept[name], shelf.stamps[name] = text, (1,)
        assert cache.load(name) == (name, str(size))
    assert shelf.reads == reads
