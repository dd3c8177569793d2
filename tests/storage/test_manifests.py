"""What a manifest says of its segment, and which ones are believed."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from segment_support import at_most, find

from ckv_jax.errors import CheckpointError
from ckv_jax.model import weights
from ckv_jax.model.checkpoint import SafetensorsFile
from ckv_jax.model.config import ModelConfig
from ckv_jax.storage import ChunkStore, Layout, chain, hash_files
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.errors import SegmentDamaged, SegmentForeign
from ckv_jax.storage.layout import PQ_VERSION
from ckv_jax.storage.segment import manifest
from ckv_jax.storage.segment.manifest import Manifest, check_order, draft_manifest
from ckv_jax.user_cache import cache_folder, partial_of
from tests.faults import corruption
from tests.support.truth import FINGERPRINT, SMALL, ingest, some_tokens

PLAIN = Layout(num_layers=4, num_kv_heads=2, head_dim=8, pack_layers=2, probe="keys")
FIRST_LAYERS = dataclasses.replace(PLAIN, digest="means", digest_layers=(0, 3))
REORDERED = dataclasses.replace(PLAIN, probe="none", reordered=True)
ALIKE = Layout(
    num_layers=2, num_kv_heads=2, head_dim=8, pack_layers=1, probe="none", heads_apart=True,
    grouping="alike",
)  # fmt: skip
EACH = np.tile(np.arange(40), (4, 1))
WHOSE = Fingerprint({"weights": "w", "dtype": "d"})
OTHER = "ab" * chain.BYTES


def made(layout: Layout = PLAIN, *, salt: str = "", first: int = 0, **more: Any) -> Manifest:
    """Of three chunks, the last one partial; of a child where it has chunks before."""
    link = chain.seed(WHOSE, layout, salt) if not first else bytes(chain.BYTES)
    order = [np.roll(row, layer) for layer, row in enumerate(EACH)] if layout.reordered else None
    tokens = np.arange(40, 80, dtype=np.int32)
    draft = draft_manifest(
        layout=layout, fingerprint=WHOSE, tenant=chain.tenant_mark(salt), tokens=tokens,
        start=link, parent=OTHER if first else None, first_chunk=first, order=order,
        **({"provenance": chain.EXACT} | more),
    )  # fmt: skip
    for at, table in enumerate(draft.tables.values()):
        table[...] = np.arange(table.size).reshape(table.shape) + 2**32 - 1 - 100 * (at + 1)
    return draft


def body_of(manifest: Manifest) -> dict[str, Any]:
    return dict(json.loads(manifest.encode()[0])["body"])


def wrapped(body: Any) -> bytes:
    return corruption.wrapped(json.dumps(body, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    "manifest",
    [
        made(), made(first=3), made(first=1 << 40), made(FIRST_LAYERS), made(REORDERED),
        made(ALIKE), made(salt="s"), made(salt="s", first=2),
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
        if field.name == "tables":
            assert got.keys() == want.keys()
            assert all(np.array_equal(got[kind], want[kind]) for kind in want)
        else:
            assert np.array_equal(got, want) if isinstance(want, np.ndarray) else got == want
    assert ("provenance" in body_of(manifest)) == (manifest.provenance != chain.EXACT)
    assert found.chunks == 3 and found.links == manifest.links and found.files == manifest.files


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


@pytest.mark.parametrize("digit", [b"0", b"f"])
def test_a_manifest_of_another_checksum_or_name_is_damaged(digit: bytes) -> None:
    manifest = made()
    data, checksum = manifest.encode()
    with pytest.raises(SegmentDamaged, match="checksum does not match"):
        Manifest.decode(data.replace(checksum.encode(), digit * 64), manifest.segment_id)
    with pytest.raises(SegmentDamaged, match="does not belong to these tokens"):
        Manifest.decode(data, digit.decode() * 32)


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
    body["layout"] |= {"digest": "pq", "version": PQ_VERSION - 1}
    refused = r"got a pq digest of version 11, expected at least 12: .* in"
    with pytest.raises(SegmentForeign, match=refused):
        Manifest.decode(wrapped(body), manifest.segment_id)
    body["layout"]["digest"] = 7
    with pytest.raises(SegmentDamaged):
        Manifest.decode(wrapped(body), manifest.segment_id)


def test_one_order_for_all_layers_is_not_damage() -> None:
    """As earlier code wrote it: in version 2, which has no field `layer_orders`."""
    body = body_of(made())
    body["layout"]["reordered"] = True
    with pytest.raises(SegmentForeign, match=r"got one order for all layers, .* ingest"):
        Manifest.decode(wrapped(body), OTHER)


# -- limits --------------------------------------------------------------------------------------


def settle(path: Path) -> None:
    """Wait until the file's last change is old enough to be trusted."""
    while time.time() - path.stat().st_ctime <= chain._SETTLED_S:
        time.sleep(0.1)


def test_a_file_of_equal_size_and_time_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "_SETTLED_S", 0.2)
    path, cache = tmp_path / "model.safetensors", tmp_path / "cache.json"
    path.write_bytes(b"a" * 5_000_000)
    os.utime(path, ns=(10**18, 10**18))
    settle(path)
    first = hash_files([path], cache)
    assert cache.exists()
    path.write_bytes(b"b" * 5_000_000)  # in its place
    os.utime(path, ns=(10**18, 10**18))
    settle(path)
    second = hash_files([path], cache)
    assert second != first == hash_files_of(tmp_path, b"a" * 5_000_000)
    other = tmp_path / "other"
    other.write_bytes(b"c" * 5_000_000)  # over it, as `cp -p` and image builds do
    os.utime(other, ns=(10**18, 10**18))
    other.rename(path)
    settle(path)
    assert len({first, second, hash_files([path], cache)}) == 3


def hash_files_of(folder: Path, data: bytes) -> str:
    (folder / "fresh").mkdir()
    path = folder / "fresh" / "model.safetensors"
    path.write_bytes(data)
    return hash_files([path])


def test_the_arithmetic_is_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
    )

    def made() -> chain.Fingerprint:
        return weights.fingerprint_of(config, dtype="float32", weights="w", tokenizer="t")

    first = made()
    monkeypatch.setattr(weights, "KV_ARITHMETIC", weights.KV_ARITHMETIC + 1)
    assert {name for name, _ in first.fields.items() ^ made().fields.items()} == {"arithmetic"}


@pytest.mark.parametrize("said", ["", ".", "cache", "./x"])
def test_the_cache_is_never_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", said)
    assert cache_folder() == tmp_path / "home" / ".cache" / "ckv_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "said"))
    assert cache_folder() == tmp_path / "said" / "ckv_jax"


def test_what_was_never_finished_goes_after_a_day(tmp_path: Path) -> None:
    """And nothing of another name or form."""
    path, day = tmp_path / "out[1].json", time.time() - 90_000
    names = {
        ".out[1].json.7.tmp": False, ".out[1].json.8.tmp": True, ".out[1].json.mine.tmp": True,
        ".out1.json.7.tmp": True, "out[1].json": True,
    }  # fmt: skip
    for name in names:
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, None if ".8." in name else (day, day))
    folder = tmp_path / ".out[1].json.9.tmp"
    (folder / "weights").mkdir(parents=True)
    os.utime(folder, (day, day))
    assert partial_of(path) == tmp_path / f".out[1].json.{os.getpid()}.tmp"
    assert {p.name for p in tmp_path.iterdir()} == {name for name, stays in names.items() if stays}


def header(path: Path, text: bytes) -> Path:
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


def test_a_hostile_header_costs_no_more_than_its_length(tmp_path: Path) -> None:
    entry = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    names = b",".join(b'"%d":%s' % (i, entry) for i in range(100_000))
    path = header(tmp_path / "many", b"{" + names + b"}")
    start = time.process_time()
    assert len(SafetensorsFile(path).shapes) == 100_000
    assert time.process_time() - start < 20  # two minutes if each name were looked for in all
    path = header(tmp_path / "twice", b'{"7":' + entry + b',"8":' + entry + b',"7":' + entry + b"}")
    with pytest.raises(CheckpointError, match="duplicate tensor '7'"):
        SafetensorsFile(path)
    more = b",".join(b'"%d":0' % i for i in range(200_001))
    path = header(tmp_path / "more", b"{" + more + b"}")
    with pytest.raises(CheckpointError, match="expected at most 200000"):
        SafetensorsFile(path)
    for text in (b"[" * 50_000, b'{"a":' * 50_000, b'{"a":{"dtype":"F32"}}', b'{"a":1e999}'):
        with pytest.raises(CheckpointError, match="header"):
            SafetensorsFile(header(tmp_path / "bad", text))


@pytest.mark.parametrize(
    "order",
    [1.0 * EACH, EACH[:, 1:], EACH + 1, 0 * EACH, EACH[0], EACH[:1], EACH // [[1], [1], [1], [2]]],
)
def test_an_order_is_a_permutation_for_each_list(order: np.ndarray) -> None:
    with pytest.raises(ValueError, match="order: "):
        check_order(order, 40, REORDERED)


def test_a_manifest_that_is_too_large_is_not_read(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64))
        path = next((folder / "segments").glob("*/*/manifest.json"))
        os.truncate(path, manifest.MAX_BYTES + 1)  # a hole
        with at_most(5):
            assert find(store, prefix.tokens, SMALL).num_tokens == 0


def test_what_no_manifest_has_room_for_is_refused_before_it_is_written(folder: Path) -> None:
    """Heads apart have a checksum each: of many, a text is too long that others have room for."""
    apart = Layout(
        num_layers=80, num_kv_heads=64, head_dim=8, chunk_tokens=4, pack_layers=1, probe="none",
        heads_apart=True,
    )  # fmt: skip
    tokens = some_tokens(10_000)
    with ChunkStore.open(folder) as store:
        with pytest.raises(ValueError, match=r"got 10000, .* 5120 packs for each chunk"):
            store.writer(fingerprint=FINGERPRINT, layout=apart, tokens=tokens)
        assert not list((folder / "tmp").iterdir()) and store.usage() == 0
        together = dataclasses.replace(apart, heads_apart=False)
        store.writer(fingerprint=FINGERPRINT, layout=together, tokens=tokens).close()
