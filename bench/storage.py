"""The store against fio on the same file system, in the same run.

    python -m bench.storage --json OUT [--folder FOLDER]

Needs fio. Writes {"reads": [{"share", "fio_mb_s", "store_mb_s", "ratio"}], "write": {"fio_mb_s",
"store_mb_s", "ratio"}, "first_pack_ms", "open_10k_s", "lookup_ms", "rebuild_10k_s"}.

Reads are random packs of 128 KiB of a 5,008-token prefix shaped like Qwen2.5-7B's, checked, past
the page cache, 32 in flight; fio reads the same files in blocks of that size, at the same depth.
Each figure is the median of pairs of runs that alternate, so that a busy disk is busy for both.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import command, existing_folder, finish
from ckv_jax.storage import ChunkStore, Fingerprint, Layout, Prefix, chain
from ckv_jax.storage.segment.arrays import aligned
from ckv_jax.storage.segment.manifest import ZARR_GROUP, Manifest, draft_manifest

FINGERPRINT = Fingerprint({"weights": "random", "dtype": "bits"})
QWEN_7B = Layout(num_layers=28, num_kv_heads=4, head_dim=128, probe="keys")
"""The KV of Qwen2.5-7B, packed by four layers: packs of 128 KiB."""
HOLLOW = Layout(num_layers=1, num_kv_heads=1, head_dim=8, pack_layers=1, probe="none")
"""Of segments without KV."""
TOKENS = 5008
SHARES = (0.05, 0.25, 1.0)
DEPTH = 32
PAIRS = 7
BURSTS = 8  # requests timed together, each of other packs
BLOCK = 512  # tokens of one block of ingest

TEXTS, PARTS, PART = 2000, 5, 1008  # 10,000 segments: 2,000 texts of 5 segments of 1,008 tokens


def some_tokens(count: int, seed: int = 0) -> np.ndarray:
    """int32 [count]."""
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


def write_prefix(folder: Path, block: np.ndarray) -> float:
    """Store one prefix; returns the seconds from first block to published segment."""
    tokens = some_tokens(TOKENS)
    with ChunkStore.open(folder) as store:
        start = time.perf_counter()
        with store.writer(fingerprint=FINGERPRINT, layout=QWEN_7B, tokens=tokens) as writer:
            for first in range(0, TOKENS, BLOCK):
                writer.write(first, block[:, :, : min(BLOCK, TOKENS - first)])
            writer.commit()
        return time.perf_counter() - start


def read_share(store: ChunkStore, prefix: Prefix, share: float) -> float:
    """MB/s of reading a share of the packs of every layer group, each burst other ones."""
    layout = prefix.layout
    count = max(1, round(share * prefix.num_chunks))
    bursts = max(1, BURSTS if share < 1 else 2)
    rng = np.random.default_rng(int(time.time_ns()) % 2**32)
    memory = aligned(layout.groups * count * layout.pack_bytes)  # as the engine's buffers are
    out = memory.view(layout.numpy_dtype).reshape(layout.groups, count, *layout.pack_shape)
    total = 0.0
    with store.reader(prefix) as reader, ThreadPoolExecutor(layout.groups) as threads:

        def read(group: int) -> bool:
            return bool(reader.read_packs(group, ids[group], out[group]).all())

        for burst in range(bursts + 1):
            ids = [
                np.sort(rng.choice(prefix.num_chunks, count, replace=False))
                for _ in range(layout.groups)
            ]
            start = time.perf_counter()
            good = all(threads.map(read, range(layout.groups)))
            total += (time.perf_counter() - start) * (burst > 0)  # the first one starts threads
            if not good:
                raise RuntimeError("packs were refused")
    return bursts * out.nbytes / total / 1e6


def fio(*options: str) -> dict[str, Any]:
    """One job of fio; its report."""
    command = ["fio", "--name=job", "--ioengine=libaio", "--direct=1", f"--iodepth={DEPTH}"]
    done = subprocess.run(
        [*command, "--output-format=json", *options], check=True, capture_output=True, text=True
    )
    job: dict[str, Any] = json.loads(done.stdout)["jobs"][0]
    return job


def fio_read(files: list[Path]) -> float:
    """MB/s of random reads of pack size over the shards."""
    names = ":".join(str(f) for f in files)
    block = f"--bs={QWEN_7B.pack_bytes}"
    job = fio("--rw=randread", block, "--time_based", "--runtime=1", f"--filename={names}")
    return float(job["read"]["bw_bytes"]) / 1e6


def fio_write(folder: Path, size: int) -> float:
    """MB/s of a sequential write of `size` bytes that ends with an fsync."""
    name = f"--filename={folder / 'fio'}"
    job = fio("--rw=write", "--bs=1m", f"--size={size}", "--end_fsync=1", name)
    (folder / "fio").unlink()
    return size / (float(job["job_runtime"]) / 1e3) / 1e6


def paired(fio_mb_s: list[float], store_mb_s: list[float]) -> dict[str, float]:
    """Medians, and the median of the pairs' ratios."""
    ratios = [s / f for s, f in zip(store_mb_s, fio_mb_s, strict=True)]
    return {
        "fio_mb_s": round(statistics.median(fio_mb_s), 1),
        "store_mb_s": round(statistics.median(store_mb_s), 1),
        "ratio": round(statistics.median(ratios), 3),
    }


def measure_writes(folder: Path) -> dict[str, float]:
    """Ingest against fio's sequential write of as many bytes."""
    rng = np.random.default_rng(0)
    shape = (QWEN_7B.num_layers, 2, BLOCK, QWEN_7B.num_kv_heads, QWEN_7B.head_dim)
    block = rng.integers(0, 1 << 14, shape, dtype=np.uint16).view(QWEN_7B.numpy_dtype)
    theirs, ours = [], []
    for _ in range(PAIRS):
        shutil.rmtree(folder / "store", ignore_errors=True)
        seconds = write_prefix(folder / "store", block)
        with ChunkStore.open(folder / "store") as store:
            size = store.usage()
        ours.append(size / seconds / 1e6)
        theirs.append(fio_write(folder, size))
    return paired(theirs, ours)


def measure_reads(folder: Path) -> list[dict[str, float]]:
    """Random pack reads against fio's, for each share."""
    rows = []
    files = sorted((folder / "store" / "segments").glob("*/*/packs/c.*"))
    with ChunkStore.open(folder / "store") as store:
        (prefix,) = store.prefixes()
        for share in SHARES:
            theirs, ours = [], []
            for _ in range(PAIRS):
                theirs.append(fio_read(files))
                ours.append(read_share(store, prefix, share))
            rows.append({"share": share, **paired(theirs, ours)})
    return rows


_FIRST = """
import sys, time, numpy as np
from bench.storage import FINGERPRINT, QWEN_7B, some_tokens
from ckv_jax.storage import ChunkStore
from ckv_jax.storage.segment.arrays import aligned
out = aligned(QWEN_7B.pack_bytes).view(QWEN_7B.numpy_dtype).reshape(1, *QWEN_7B.pack_shape)
tokens = some_tokens(int(sys.argv[2]))
start = time.perf_counter()
with ChunkStore.open(sys.argv[1]) as store:
    prefix = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=QWEN_7B)
    with store.reader(prefix) as reader:
        assert reader.read_packs(3, np.array([200]), out).all()
        print(time.perf_counter() - start)
"""


def first_pack_ms(folder: Path) -> float:
    """From opening a store to its first pack, in a new process, nothing of it in the page cache."""
    found = []
    for _ in range(PAIRS):
        for path in folder.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        command = [sys.executable, "-c", _FIRST, str(folder), str(TOKENS)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found.append(float(done.stdout) * 1e3)
    return round(statistics.median(found), 2)


def make_many(folder: Path) -> None:
    """10,000 segments whose KV is a hole: enough for everything but reading packs."""
    layout = HOLLOW
    ChunkStore.open(folder).close()
    for text in range(TEXTS):
        tokens = some_tokens(PARTS * PART, text)
        start, parent = chain.seed(FINGERPRINT, layout, ""), None
        for part in range(PARTS):
            manifest = draft_manifest(
                layout=layout,
                fingerprint=FINGERPRINT,
                tenant="",
                provenance=chain.EXACT,
                tokens=chain.as_tokens(tokens[part * PART : (part + 1) * PART]),
                start=start,
                parent=parent,
                first_chunk=part * PART // layout.chunk_tokens,
                order=None,
            )
            publish_hole(folder, manifest)
            start, parent = manifest.links[-1], manifest.segment_id


def publish_hole(folder: Path, manifest: Manifest) -> None:
    """A segment's files without the KV."""
    path = folder / "segments" / manifest.segment_id[:2] / manifest.segment_id
    for name, spec in manifest.arrays.items():
        (path / name).mkdir(parents=True)
        (path / name / "zarr.json").write_bytes(spec.encoded())
    for name, size in manifest.files.items():
        with (path / name).open("wb") as file:
            file.truncate(size)
    (path / "zarr.json").write_bytes(ZARR_GROUP)
    (path / "manifest.json").write_bytes(manifest.encode()[0])


def measure_many(folder: Path) -> dict[str, float]:
    """Opening, looking up and rebuilding at 10,000 segments."""
    make_many(folder)
    start = time.perf_counter()
    ChunkStore.open(folder).close()  # has no index yet
    rebuild = time.perf_counter() - start
    opened, lookups = [], []
    for _ in range(PAIRS):
        start = time.perf_counter()
        with ChunkStore.open(folder) as store:
            opened.append(time.perf_counter() - start)
            for text in np.random.default_rng().integers(0, TEXTS, 40):
                tokens = some_tokens(PARTS * PART, int(text))[:5000]
                start = time.perf_counter()
                found = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=HOLLOW)
                lookups.append(time.perf_counter() - start)
                if found.num_tokens != 4992:
                    raise RuntimeError(f"found {found.num_tokens} tokens, expected 4992")
    return {
        "open_10k_s": round(statistics.median(opened), 3),
        "lookup_ms": round(statistics.median(lookups) * 1e3, 3),
        "rebuild_10k_s": round(rebuild, 2),
    }


def main() -> None:
    """Measure everything."""
    parser = command(__doc__, prog="python -m bench.storage")
    parser.add_argument(
        "--folder", type=existing_folder, help="folder on the disk to measure (default: this one)"
    )
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed (Debian and Ubuntu: apt-get install fio)")
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as name:
        folder = Path(name)
        found: dict[str, Any] = {"write": measure_writes(folder)}
        print("write", found["write"], flush=True)
        found["reads"] = measure_reads(folder)
        for row in found["reads"]:
            print("read", row, flush=True)
        found["first_pack_ms"] = first_pack_ms(folder / "store")
        print("first pack", found["first_pack_ms"], "ms", flush=True)
        found |= measure_many(folder / "many")
        print({name: found[name] for name in ("open_10k_s", "lookup_ms", "rebuild_10k_s")})
    finish(options, found)


if __name__ == "__main__":
    main()
