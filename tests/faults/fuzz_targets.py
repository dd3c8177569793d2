"""What is fuzzed: everything that is read from a disk, as a function of the bytes there."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import math
import resource
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from ckv_jax.errors import CkvError
from ckv_jax.model.checkpoint import SafetensorsFile, write_safetensors
from ckv_jax.model.config import ModelConfig
from ckv_jax.storage import ChunkStore, Layout
from ckv_jax.storage.place import marker
from ckv_jax.storage.segment import arrays
from ckv_jax.storage.segment.manifest import Manifest
from tests.faults import corruption, scene
from tests.faults.tally import read_prefix
from tests.support.truth import FINGERPRINT

BASE_S, PER_MB_S = 0.5, 1.0
"""Processor time that an input may take, and what it may take more for each of its megabytes."""
MEMORY = 1 << 30
"""Bytes of address space that reading an input may take beyond what the process has."""
_BY_HAND_S = 20.0
_GONE = "e" * 64
"""The id of a prefix that was evicted."""


@dataclass(frozen=True, slots=True)
class Target:
    """Something that is read.

    Attributes:
      seeds: what is well formed: JSON values, or bytes.
      read: reads bytes: True for an answer, False for less than an answer; raises `typed`.
      typed: the errors that say that it is not well formed.
    """

    seeds: tuple[Any, ...]
    read: Callable[[bytes], bool]
    typed: tuple[type[Exception], ...] = (CkvError,)


class Slow(BaseException):
    """An input took far too long."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """A process in which memory has a bound, and what never ends is stopped by `Slow`."""

    def stop(*_: object) -> None:
        raise Slow

    before = signal.signal(signal.SIGPROF, stop)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGPROF, before)


def feed(target: Target, data: bytes) -> str:
    """One input: "answer", "caught", or what is wrong with what came of it."""
    allowed = BASE_S + PER_MB_S * len(data) / 1e6
    start = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, _BY_HAND_S)
    try:
        found = "answer" if target.read(data) else "caught"
    except target.typed:
        found = "caught"
    except Slow:
        return "hang"
    except Exception as e:
        return f"{type(e).__name__}: {e}"[:160]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    took = time.process_time() - start
    return found if took <= allowed else f"slow: {took:.1f} s for {len(data)} bytes"


def targets(folder: Path) -> dict[str, Target]:
    """All targets, working in `folder`."""
    scene.prepare(folder)
    manifest = next((folder / "whole" / "segments").glob("*/*/manifest.json"))
    body = json.loads(manifest.read_bytes())["body"]
    config = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8,
    )  # fmt: skip
    layouts = (
        scene.LAYOUT,
        Layout(num_layers=4, num_kv_heads=2, head_dim=8, digest="pq", probe="keys"),
    )
    return {
        "manifest": Target((body,), lambda data: _manifest(data, manifest.parent.name)),
        "layout": Target(tuple(lay.to_dict() for lay in layouts), _layout, (ValueError, CkvError)),
        "config.json": Target((config.to_hf(),), lambda data: _config(data, folder)),
        "safetensors": Target((_header(folder),), lambda data: _safetensors(data, folder)),
        "catalog": Target(
            ((folder / "whole" / "catalog.sqlite").read_bytes(),),
            lambda data: _catalog(data, folder),
        ),
        "catalog rows": Target((["segments", "bytes", 0],), lambda data: _rows(data, folder)),
        "digest": Target(_records(folder), lambda data: _digest(data, folder, fit=False)),
        "digest that fits": Target(_records(folder), lambda data: _digest(data, folder, fit=True)),
        "store.json": Target((json.loads(marker.data_of()),), lambda data: _marker(data, folder)),
    }


def _manifest(data: bytes, expected: str) -> bool:
    manifest, _ = Manifest.decode(corruption.wrapped(data), expected)
    assert manifest.segment_id == expected
    assert manifest.tables["packs"].shape == (manifest.layout.groups, manifest.chunks)
    return bool(manifest.files) and manifest.size(len(data)) > 0


def _layout(data: bytes) -> bool:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return False
    layout = Layout.from_dict(value)
    assert Layout.from_dict(layout.to_dict()) == layout
    assert 0 < layout.pack_bytes <= layout.segment_bytes(1 << 20)
    return layout.groups > 0


def _config(data: bytes, folder: Path) -> bool:
    path = folder / "config.json"
    path.write_bytes(data)
    config = ModelConfig.from_hf(path)
    sizes = (config.vocab_size, config.hidden_size, config.num_layers, config.num_kv_heads)
    assert all(type(size) is int and size > 0 for size in sizes)
    assert all(type(id_) is int for id_ in config.eos_token_ids), config.eos_token_ids
    assert math.isfinite(config.rope_theta) and math.isfinite(config.rms_norm_eps)
    return True


def _marker(data: bytes, folder: Path) -> bool:
    root = folder / "marked"
    root.mkdir(exist_ok=True)
    (root / marker.FILE).write_bytes(data)
    return marker.check(root)


def _header(folder: Path) -> Any:
    path = folder / "seed.safetensors"
    shapes = [("a", (4, 8)), ("b", (3,)), ("c", (2, 2, 2))]
    write_safetensors(path, shapes, np.dtype(np.float32), lambda n: np.ones(dict(shapes)[n], "f4"))
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def _safetensors(data: bytes, folder: Path) -> bool:
    path = folder / "model.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data + np.ones(43, "f4").tobytes())
    file = SafetensorsFile(path)
    for name, shape in list(file.shapes.items())[:8]:
        assert file.read(name).shape == shape
    return True


@contextlib.contextmanager
def _copy(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        scene.lay_out(folder, scene.OPERATIONS["lookup"], Path(name) / "store")
        yield Path(name) / "store"


def _served(folder: Path) -> bool:
    """Serve all documents; whether they were there. Wrong ones are an error."""
    whole = True
    with ChunkStore.open(
        folder, config=dataclasses.replace(scene.CONFIG, direct_io=False)
    ) as store:
        for name in scene.STORED:
            tokens = scene.DOCS[name]
            found = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=scene.LAYOUT)
            served = read_prefix(store, found)
            assert not served.wrong and np.array_equal(found.tokens, tokens[: found.num_tokens])
            whole &= served.whole and found.num_tokens == len(tokens)
            if found.spans:
                store.load_scores(found.spans[0].segment_id)
        gone = store.why_evicted(_GONE[:9])
        if gone is not None:
            assert time.localtime(gone.time).tm_year and gone.prefix_id + gone.reason
        store.usage()
    return whole


def _catalog(data: bytes, folder: Path) -> bool:
    with _copy(folder) as store:
        (store / "catalog.sqlite").write_bytes(data)
        return _served(store)


def _rows(data: bytes, folder: Path) -> bool:
    """`data`: JSON of table, column and a value that all its rows are given."""
    try:
        table, column, value = json.loads(data)
        if not all(type(n) is str and n.isidentifier() for n in (table, column)):
            return False
    except (ValueError, TypeError, RecursionError):
        return False
    with _copy(folder) as store:
        with contextlib.closing(sqlite3.connect(store / "catalog.sqlite")) as db:
            try:
                with db:
                    row = ("e" * 32, _GONE, "", 1000, 1.7e9, "room was needed")
                    columns = "id, prefix, tenant, bytes, time, reason"
                    db.execute(f"INSERT INTO evictions({columns}) VALUES(?,?,?,?,?,?)", row)
                    kept = (
                        value if isinstance(value, int | float | str | None) else json.dumps(value)
                    )
                    db.execute(f"UPDATE {table} SET {column} = ?", (kept,))
            except (sqlite3.Error, OverflowError, UnicodeError):
                return False
        return _served(store)


def _shard(folder: Path) -> Path:
    return next((folder / "whole" / "segments").glob("*/*/digest/c.*"))


def _records(folder: Path) -> tuple[bytes, ...]:
    return (_shard(folder).read_bytes(),)


def _digest(data: bytes, folder: Path, *, fit: bool) -> bool:
    """Read records that are not those that were written; `fit`: with checksums that are theirs."""
    original = _shard(folder)
    with _copy(folder) as store:
        path = store / original.relative_to(folder / "whole")
        path.unlink()
        path.write_bytes(data)
        if fit:
            _fit(path, store)
        with ChunkStore.open(
            store, config=dataclasses.replace(scene.CONFIG, direct_io=False)
        ) as opened:
            for prefix in opened.prefixes():
                with opened.reader(prefix) as reader:
                    found = reader.read_digest()
                if found is None:
                    return False
                assert all(a.shape[1] == prefix.num_tokens for a in found.arrays.values())
                if not fit and read_prefix(opened, prefix).wrong:
                    raise AssertionError("a digest that was not written was served")
    return True


def _fit(path: Path, store: Path) -> None:
    """Give a segment's manifest the checksums of the digest that lies there now."""
    segment = path.parents[1]
    raw = json.loads((segment / "manifest.json").read_bytes())["body"]
    manifest, _ = Manifest.decode((segment / "manifest.json").read_bytes(), segment.name)
    spec, layout = manifest.arrays["digest"], manifest.layout
    sizes, data = layout.digest_record(len(manifest.tokens)), path.read_bytes()
    rows = len(layout.digest_layers)
    record = spec.entries // rows * spec.entry_bytes
    table = np.zeros((rows, 3), np.uint32)
    seed = arrays.seed(manifest.segment_id, "digest")
    for row in range(rows):
        at = row * record
        for part, size in enumerate(sizes):
            start = arrays.placed(seed, row, part)
            table[row, part] = google_crc32c.extend(start, data[at : at + size])
            at += size
    raw["digest_crc"] = base64.b64encode(table.astype("<u4").tobytes()).decode()
    whole = corruption.wrapped(json.dumps(raw, separators=(",", ":")).encode())
    (segment / "manifest.json").unlink()  # it is a link to the pristine one
    (segment / "manifest.json").write_bytes(whole)
