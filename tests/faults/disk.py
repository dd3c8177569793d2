"""Faults of the disk: full, and never answering. And manifests that are forged."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ckv_jax.storage import ChunkStore, ReadTimeout, StoreFull
from tests.faults.tally import (
    CONFIG,
    LAYOUT,
    Served,
    Tally,
    copy_of,
    prompts,
    read_prefix,
)
from tests.support.truth import FINGERPRINT, ingest, some_tokens

# -- full -------------------------------------------------------------------------------------


def full_disks(count: int) -> Tally:
    """Ingest on a tmpfs of one megabyte until it is full, `count` times, in a mount of its own."""
    with tempfile.TemporaryDirectory() as folder:
        mount = f'mount -t tmpfs -o size=1m tmpfs "{folder}" && exec "$@"'
        command = ["sh", "-c", mount, "sh", sys.executable, "-m", __name__, folder, str(count)]
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--mount", *command],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    if "Operation not permitted" in done.stderr or "unshare" in done.stderr:
        raise PermissionError(f"no mounts for ordinary users here: {done.stderr.strip()}")
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return Tally(**json.loads(done.stdout))


def fill(folder: Path, count: int) -> Tally:
    """Fill a small file system with segments; each is stored whole or leaves nothing."""
    tally = Tally()
    with ChunkStore.open(folder / "store", config=CONFIG) as store:
        kept: list[np.ndarray] = []
        for seed in range(count):
            with tally.fault(f"full disk {seed}"):
                tokens = some_tokens(400 + 37 * seed % 300, seed)
                before = store.usage()
                try:
                    ingest(store, tokens, layout=LAYOUT, block=64)
                    kept.append(tokens)
                except StoreFull:
                    left = list((folder / "store" / "tmp").iterdir())
                    if left or store.usage() != before:
                        raise RuntimeError(f"left {left}, {store.usage()} bytes") from None
                served = Served(len(kept) == seed + 1, 0)
                for stored in kept:
                    found = store.longest_prefix(stored, fingerprint=FINGERPRINT, layout=LAYOUT)
                    if found.num_tokens != len(stored):
                        raise RuntimeError("what was stored is not served any more")
                    served += read_prefix(store, found)
                tally.judge(served, f"full disk {seed}")
    with ChunkStore.open(folder / "store", config=CONFIG) as store:  # a full disk opens, too
        if len(store.prefixes()) != len(kept):
            raise RuntimeError("the index does not hold what was stored")
    return tally


# -- not answering ----------------------------------------------------------------------------


def silent_disks(pristine: Path, count: int) -> Tally:
    """A shard whose reads never return (a FIFO that nobody writes): abandoned at the deadline."""
    tally = Tally()
    for number in range(count):
        with copy_of(pristine) as folder, ChunkStore.open(folder, config=CONFIG) as store:
            found = store.longest_prefix(prompts()[0], fingerprint=FINGERPRINT, layout=LAYOUT)
            with store.reader(found) as reader, tally.fault(f"silent {number}"):
                path = sorted((folder / "segments").glob("*/*/packs/c.0.*"))
                for shard in path:
                    shard.unlink()
                    os.mkfifo(shard)
                out = np.empty((2, *LAYOUT.pack_shape), LAYOUT.numpy_dtype)
                start = time.monotonic()
                try:
                    reader.read_packs(0, np.arange(2), out, deadline_s=0.2)
                    raise RuntimeError("a read of a FIFO returned")
                except ReadTimeout as e:
                    late = time.monotonic() - start
                    waiting = not e.settled() and store.gate.bytes > 0
                    for shard in path:  # let the abandoned threads go
                        os.close(os.open(shard, os.O_RDWR))
                    end = time.monotonic() + 5
                    while (store.gate.bytes or not e.settled()) and time.monotonic() < end:
                        time.sleep(0.01)
                    if late > 5 or not waiting or not e.settled() or store.gate.bytes:
                        raise RuntimeError(f"{late:.2f} s late, {waiting}, {e.settled()}") from e
                    tally.caught += 1
    return tally


# -- forged manifests ---------------------------------------------------------------------------


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


def main() -> None:
    """Run `fill` for `full_disks`, inside its mount."""
    tally = fill(Path(sys.argv[1]), int(sys.argv[2]))
    json.dump({name: getattr(tally, name) for name in tally.__dataclass_fields__}, sys.stdout)


if __name__ == "__main__":
    main()
