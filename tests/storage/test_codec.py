"""Packs that lie on disk in another form than in memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from segment_support import find, hurt, segment_folder

from ckv_jax.storage import ChunkStore, Layout, Prefix, inspect_store, verify_store
from ckv_jax.storage.codec import check_codec, codec_id, decoded, encoded
from ckv_jax.storage.tools.damage import losses
from tests.support.truth import FINGERPRINT, SMALL, kv_of, packs_of, some_tokens


class Halves:
    """The high bytes of all elements, then the low ones; what is left over is a mark."""

    name, version = "halves", 3

    def num_bytes(self, layout: Layout) -> int:
        return layout.pack_bytes + 1

    def encode(self, packs: np.ndarray, layout: Layout) -> np.ndarray:
        pairs = packs.reshape(len(packs), -1).view(np.uint8).reshape(len(packs), -1, 2)
        halves = [pairs[:, :, 1], pairs[:, :, 0], np.full((len(packs), 1), 7, np.uint8)]
        return np.concatenate(halves, axis=1)

    def decode(self, stored: Any, layout: Layout) -> np.ndarray:
        high, low = np.split(np.asarray(stored)[:, :-1], 2, axis=1)
        bits = np.stack([low, high], axis=2).reshape(len(high), -1).view(np.uint16)
        return bits.reshape(-1, *layout.pack_shape)


CODEC = Halves()


def coded(layout: Layout) -> Layout:
    return dataclasses.replace(layout, codec=codec_id(CODEC), codec_bytes=CODEC.num_bytes(layout))


LAYOUT = coded(SMALL)


def write(store: ChunkStore, tokens: np.ndarray, kv: np.ndarray, layout: Layout) -> Prefix:
    codec = CODEC if layout.codec == codec_id(CODEC) else None
    with store.writer(fingerprint=FINGERPRINT, layout=layout, tokens=tokens, codec=codec) as writer:
        writer.write(0, kv)
        return writer.commit()


def read(store: ChunkStore, prefix: Prefix, group: int) -> tuple[np.ndarray, np.ndarray]:
    layout = prefix.layout
    stored = np.empty((prefix.num_chunks, *layout.stored_shape), layout.stored_dtype)
    with store.reader(prefix) as reader:
        good = reader.read_packs(group, np.arange(prefix.num_chunks), stored)
    return good, stored


def test_a_layout_without_a_codec_is_what_it_was() -> None:
    """The name of what was written before there were codecs."""
    layout = Layout(num_layers=4, num_kv_heads=2, head_dim=16)
    assert layout.hex == "5994fe73f9567fde6243da08aebc225fef23cf8c7cd17467e8a0dfaceedf01b6"
    assert not {"codec", "codec_bytes"} & layout.to_dict().keys()
    assert Layout.from_dict(layout.to_dict()) == layout
    assert Layout.from_dict(LAYOUT.to_dict()) == LAYOUT and LAYOUT.hex != SMALL.hex


def test_a_codec_of_a_long_name_is_of_a_version_that_older_programs_leave_alone() -> None:
    for letters, version in ((64, 3), (65, 6)):
        layout = dataclasses.replace(SMALL, codec="a" * letters + ":1", codec_bytes=8)
        assert (
            layout.to_dict()["version"] == version and Layout.from_dict(layout.to_dict()) == layout
        )
    with pytest.raises(ValueError, match="fields"):
        Layout.from_dict(layout.to_dict() | {"version": 3})


@pytest.mark.parametrize(
    "change",
    [{"codec": "x"}, {"codec": "x:1"}, {"codec_bytes": 5}, {"codec": 3}, {"codec": "X:1"},
     {"codec": "x:1", "codec_bytes": 1 << 31}, {"codec": "x:1", "codec_bytes": True}],
)  # fmt: skip
def test_a_layout_with_half_a_codec_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="codec"):
        dataclasses.replace(SMALL, **change)
    with pytest.raises(ValueError, match="layout"):
        Layout.from_dict(LAYOUT.to_dict() | {"version": 2})
    check_codec(CODEC, LAYOUT)
    with pytest.raises(ValueError, match=r"halves:3.*none"):
        check_codec(CODEC, SMALL)


def test_what_a_codec_gives_is_as_many_bytes_as_it_said() -> None:
    packs = packs_of(SMALL, some_tokens(32), 0, np.arange(32))
    right = CODEC.encode(packs, SMALL)
    np.testing.assert_array_equal(encoded(CODEC, packs, LAYOUT), right)
    for wrong in (right[:, :-1], right[:-1], right.astype(np.uint16)):

        class Wrong(Halves):
            def encode(
                self, packs: np.ndarray, layout: Layout, wrong: np.ndarray = wrong
            ) -> np.ndarray:
                return wrong

        with pytest.raises(ValueError, match=r"halves:3: got uint.* expected uint8 \(2, "):
            encoded(Wrong(), packs, LAYOUT)
    assert encoded(None, packs, SMALL) is packs is decoded(None, packs, SMALL)


@pytest.mark.parametrize("kv_together", [True, False])
def test_bytes_on_disk_are_the_codecs(folder: Path, kv_together: bool) -> None:
    plain = dataclasses.replace(
        SMALL, num_layers=3, kv_together=kv_together, pack_layers=2 if kv_together else 1
    )
    layout, tokens = coded(plain), some_tokens(16 * 9 + 5)
    order = np.arange(len(tokens))
    with ChunkStore.open(folder) as store:
        both = [write(store, tokens, kv_of(plain, tokens), one) for one in (plain, layout)]
        assert both[0].id != both[1].id
    with ChunkStore.open(folder) as store:  # from the manifests
        found = store.prefix(both[1].id)
        assert found.layout == layout
        for group in range(layout.groups):
            good, stored = read(store, found, group)
            truth = packs_of(plain, tokens, group, order)
            assert good.all() and (stored[:, -1] == 7).all()
            np.testing.assert_array_equal(stored, encoded(CODEC, truth, layout))
            packs = decoded(CODEC, stored, layout)
            np.testing.assert_array_equal(packs.view(np.uint16), truth.view(np.uint16))
        assert verify_store(store).ok
        info = inspect_store(store, prefix=found.id).prefix
        assert info is not None and info.layers == []  # by a codec that inspection does not know
        with pytest.raises(ValueError, match="codec"):
            store.writer(fingerprint=FINGERPRINT, layout=layout, tokens=tokens)


def test_what_is_bad_is_replaced_in_its_own_form(folder: Path) -> None:
    tokens = some_tokens(16 * 20)
    kv = kv_of(SMALL, tokens)
    with ChunkStore.open(folder) as store:
        prefix = write(store, tokens, kv, LAYOUT)
        _, before = read(store, prefix, 0)
        shard = sorted((folder / "segments").glob("*/*/packs/c.0*"))[0]
        data = bytearray(shard.read_bytes())
        data[4 * LAYOUT.stored_bytes + 3] ^= 1
        shard.write_bytes(data)
        good, _ = read(store, prefix, 0)
        assert np.flatnonzero(~good).tolist() == [4]
        marked = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=LAYOUT, marked=True)
        with pytest.raises(ValueError, match="codec"):
            store.replace_packs(marked, 4, kv[:, :, 64:80])
        assert store.replace_packs(marked, 4, kv[:, :, 64:80], codec=CODEC) == 1
        found = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=LAYOUT)
        assert found.num_tokens == len(tokens)
        good, after = read(store, found, 0)
        assert good.all()
        np.testing.assert_array_equal(after, before)


def test_a_digest_is_of_the_keys_and_not_of_the_bytes(folder: Path) -> None:
    """Also the kind that is made by reading the packs back."""
    tokens = some_tokens(300)
    digests = []
    with ChunkStore.open(folder) as store:
        for plain in (dataclasses.replace(SMALL, digest="pq", probe="none"),):
            for layout in (plain, coded(plain)):
                prefix = write(store, tokens, kv_of(plain, tokens), layout)
                with store.reader(prefix) as reader:
                    digest = reader.read_digest()
                assert digest is not None
                digests.append(digest.keys())
    np.testing.assert_array_equal(digests[0], digests[1])


def test_a_repair_keeps_what_only_its_codec_could_mend(folder: Path) -> None:
    layout = coded(dataclasses.replace(SMALL, digest="int8"))
    tokens = some_tokens(64)
    with ChunkStore.open(folder) as store:
        prefix = write(store, tokens, kv_of(SMALL, tokens), layout)
        digest = next(segment_folder(folder, prefix).glob("digest/c.*"))
        pack = next(segment_folder(folder, prefix).glob("packs/c.0.*"))
        hurt(digest, 0)
        report = verify_store(store, repair=True)
        id_ = prefix.spans[0].segment_id
        assert report.unrepaired == report.quarantined == [id_] and not report.removed
        assert find(store, tokens, layout).num_tokens == 0
        hurt(digest, 0)  # as it was
        assert verify_store(store, repair=True).pardoned == [id_]
        assert find(store, tokens, layout).num_tokens == len(tokens)
        hurt(pack, 0)  # for which no codec is needed
        assert verify_store(store, repair=True).removed == [id_]


def test_a_repair_keeps_what_continues_it_too(folder: Path) -> None:
    """As it was said before, and though nothing of either is served until then."""
    layout = coded(dataclasses.replace(SMALL, digest="int8"))
    tokens = some_tokens(128)
    with ChunkStore.open(folder) as store:
        parent = write(store, tokens[:64], kv_of(SMALL, tokens[:64]), layout)
        with store.writer(
            fingerprint=FINGERPRINT, layout=layout, tokens=tokens[64:], parent=parent, codec=CODEC
        ) as writer:
            writer.write(0, kv_of(SMALL, tokens[64:], 64))
            prefix = writer.commit()
        digest = next(segment_folder(folder, prefix).glob("digest/c.*"))
        hurt(digest, 0)
        (line,) = losses(store, verify_store(store))
        id_ = prefix.spans[0].segment_id
        assert line == f"{id_}: be kept and not served, until its text is ingested again"
        report = verify_store(store, repair=True)
        assert report.unrepaired == report.quarantined == [id_] and not report.removed
        hurt(digest, 0)  # as it was
        assert verify_store(store, repair=True).pardoned == [id_]
        assert find(store, tokens, layout) == prefix
