"""Faults that are drawn at random: flipped bits, and shards cut, blanked, deleted, swapped or
replaced; rival evictors, folders that vanish; and manifests that are forged."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ckv_jax.storage import ChunkStore, prune_store
from tests.faults import farm
from tests.faults.tally import (
    CONFIG,
    HANG_S,
    LAYOUT,
    Served,
    Tally,
    copy_of,
    prompts,
    read_prefix,
    serve,
    sweep_over,
)
from tests.support.truth import FINGERPRINT, ingest

FLIPS = {
    "flip data": "packs/c.*",
    "flip index": "packs/c.*",
    "flip probe": "probe/c.*",
    "flip digest": "digest/c.*",
    "flip manifest": "manifest.json",
    "flip zarr.json": "*/zarr.json",
    "flip catalog": "",
}


def flips(pristine: Path, count: int, kind: str) -> Tally:
    """Single flipped bits in one kind of file."""

    def hurt(folder: Path, rng: np.random.Generator) -> str:
        if kind == "flip catalog":
            path = folder / "catalog.sqlite"
        else:
            path = _pick(folder, rng, FLIPS[kind])
        data = bytearray(path.read_bytes())
        tail = 16 * len(data) // LAYOUT.pack_bytes + 4 if kind == "flip index" else len(data)
        place = len(data) - 1 - int(rng.integers(max(1, min(tail, len(data)))))
        data[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        return f"{kind} {path.name} byte {place}"

    return sweep_over(pristine, count, hurt)


def shards(pristine: Path, count: int, kind: str) -> Tally:
    """Shard files, and whole segments, that are not what they were."""

    def hurt(folder: Path, rng: np.random.Generator) -> str:
        pattern = str(rng.choice(["packs/c.*", "probe/c.*", "digest/c.*"]))
        path = _pick(folder, rng, pattern)
        SHARDS[kind](path, folder, rng)
        return f"{kind} {path.parent.name}/{path.name}"

    return sweep_over(pristine, count, hurt)


def _truncate(path: Path, folder: Path, rng: np.random.Generator) -> None:
    os.truncate(path, int(rng.integers(path.stat().st_size)))


def _extend(path: Path, folder: Path, rng: np.random.Generator) -> None:
    with path.open("ab") as file:
        file.write(rng.bytes(int(rng.integers(1, 5000))))


def _blank(path: Path, folder: Path, rng: np.random.Generator) -> None:
    """Zeros over a part or all, as a lost write leaves them."""
    size = path.stat().st_size
    start = int(rng.integers(size)) if rng.random() < 0.7 else 0
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(int(rng.integers(1, size - start + 1))))


def _delete(path: Path, folder: Path, rng: np.random.Generator) -> None:
    path.unlink()


def _swap(path: Path, folder: Path, rng: np.random.Generator) -> None:
    """Two shards change places, within a segment or between two."""
    other = _pick(folder, rng, f"{path.parent.name}/c.*")
    aside = folder / "tmp" / "aside"
    path.rename(aside)
    if other.exists():
        other.rename(path)
    aside.rename(other)


def _swap_chunks(path: Path, folder: Path, rng: np.random.Generator) -> None:
    """Two equally long runs of bytes of a shard change places: valid packs, elsewhere."""
    data = bytearray(path.read_bytes())
    size = LAYOUT.pack_bytes if path.parent.name == "packs" else len(data) // 8
    places = len(data) // size
    if places > 1:
        a, b = (int(i) * size for i in rng.choice(places, 2, replace=False))
        data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    path.write_bytes(data)


def _swap_segments(path: Path, folder: Path, rng: np.random.Generator) -> None:
    """Two whole segments change names, or only their shards do."""
    first = path.parents[1]
    second = _pick(folder, rng, "manifest.json").parent
    names = ["."] if rng.random() < 0.5 else ["packs", "probe", "digest"]
    aside = folder / "tmp" / "aside"
    for name in names if first != second else ():
        (first / name).resolve().rename(aside)
        (second / name).resolve().rename((first / name).resolve())
        aside.rename((second / name).resolve())


def _link(path: Path, folder: Path, rng: np.random.Generator) -> None:
    """A symlink in the place of a file or a folder; even to the very bytes, it is not followed."""
    target = path if rng.random() < 0.5 else path.parent
    away = folder.parent / "elsewhere"
    if away.is_dir():
        shutil.rmtree(away)
    else:
        away.unlink(missing_ok=True)
    target.rename(away)
    target.symlink_to(away)


SHARDS: dict[str, Callable[[Path, Path, np.random.Generator], None]] = {
    "truncated": _truncate,
    "extended": _extend,
    "zero-filled": _blank,
    "deleted": _delete,
    "swapped shards": _swap,
    "swapped packs": _swap_chunks,
    "swapped segments": _swap_segments,
    "symlinks": _link,
}


def short_reads(pristine: Path, count: int) -> Tally:
    """Shards that are cut while a reader has them open."""
    tally = Tally()
    rng = np.random.default_rng(0)
    for _ in range(count):
        with copy_of(pristine) as folder, ChunkStore.open(folder, config=CONFIG) as store:
            tokens = prompts()[0]
            found = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=LAYOUT)
            with store.reader(found):  # keeps the segments open
                path = _pick(folder, rng, "*/c.*")
                _truncate(path, folder, rng)
                with tally.fault("short read"):
                    tally.judge(serve(store), f"short read {path.name}")
    return tally


def prune_for_ever(folder: Path, stop: object) -> None:
    """Remove whatever may be removed, over and over."""
    with ChunkStore.open(folder, config=CONFIG) as store:
        while not stop.is_set():  # type: ignore[attr-defined]
            prune_store(store, 0)
            store.refresh()
            time.sleep(0.002)


def evictions(pristine: Path, count: int) -> Tally:
    """Another process evicts everything it may while prefixes are looked up and read."""
    folder = pristine.with_name("evictions")
    tally = Tally()
    processes = farm.context()
    stop = processes.Event()
    evictor = processes.Process(target=prune_for_ever, args=(folder, stop), daemon=True)
    with ChunkStore.open(folder, config=CONFIG) as store:
        evictor.start()
        try:
            for number in range(count):
                with tally.fault(f"eviction {number}"):
                    for tokens in prompts():
                        ingest(store, tokens, layout=LAYOUT)
                    tally.judge(serve(store), f"eviction {number}")
        finally:
            stop.set()
            evictor.join(HANG_S)
    return tally


def vanished_folders(pristine: Path, count: int) -> Tally:
    """The folder is deleted under a running engine, which then stores everything again."""
    tally = Tally()
    for number in range(count):
        with copy_of(pristine) as folder, ChunkStore.open(folder, config=CONFIG) as store:
            tokens = prompts()[0]
            found = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=LAYOUT)
            with store.reader(found), tally.fault(f"vanished {number}"):
                shutil.rmtree(folder)
                tally.judge(serve(store) + read_prefix(store, found), f"vanished {number}")
                for again in prompts():
                    ingest(store, again, layout=LAYOUT)
                if serve(store) != Served(True, 0):
                    raise RuntimeError("not served after it was stored again")
    return tally


RUNS: dict[str, tuple[int, Callable[[Path, int], Tally]]] = {
    **{kind: (143, partial(flips, kind=kind)) for kind in FLIPS},  # 1,001 in all
    **{kind: (40, partial(shards, kind=kind)) for kind in SHARDS},
    "short reads": (40, short_reads),
    "eviction during reads": (60, evictions),
    "vanished folder": (20, vanished_folders),
}
"""Of each kind: how many faults make a full run, and what makes so many of them to a store."""


def _pick(folder: Path, rng: np.random.Generator, pattern: str) -> Path:
    paths = sorted((folder / "segments").glob(f"*/*/{pattern}"))
    return paths[int(rng.integers(len(paths)))]


def forge(folder: Path, change: Callable[[dict[str, Any]], None], which: int = 0) -> None:
    """Change a manifest's content and give it a checksum that fits."""
    path = sorted((folder / "segments").glob("*/*/manifest.json"))[which]
    body = json.loads(path.read_bytes())["body"]
    change(body)
    path.write_bytes(wrapped(json.dumps(body, separators=(",", ":")).encode()))


def wrapped(body: bytes) -> bytes:
    """Any bytes as a manifest whose checksum fits."""
    digest = hashlib.sha256(body).hexdigest().encode()
    return b'{"sha256":"' + digest + b'","body":' + body + b"}\n"
