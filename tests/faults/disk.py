"""Faults of the disk: full, and never answering. And manifests that lie."""

from __future__ import annotations

import base64
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

from ckv_jax.storage import ChunkStore, ReadTimeout, StoreError, StoreFull
from tests.faults.tally import (
    CONFIG,
    LAYOUT,
    Served,
    Tally,
    copy_of,
    prompts,
    read_prefix,
    serve,
    sweep_over,
)
from tests.support.truth import FINGERPRINT, SMALL, ingest, kv_of, some_tokens

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


# -- lying manifests ---------------------------------------------------------------------------


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


def lies(pristine: Path, count: int) -> Tally:
    """Manifests with fitting checksums that are huge, nested, negative, overlapping, elsewhere."""

    def hurt(folder: Path, rng: np.random.Generator) -> str:
        which = int(rng.integers(3))
        name = str(rng.choice(list(LIES)))
        forge(folder, lambda body: LIES[name](body, rng), which)
        return f"manifest {which}: {name}"

    return sweep_over(pristine, count, hurt)


def _set(field: str, *values: Any) -> Callable[[dict[str, Any], np.random.Generator], None]:
    def change(body: dict[str, Any], rng: np.random.Generator) -> None:
        body[field] = values[int(rng.integers(len(values)))]

    return change


def _nest(body: dict[str, Any], rng: np.random.Generator) -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    body[str(rng.choice(list(body)))] = deep


def _tokens(body: dict[str, Any], rng: np.random.Generator) -> None:
    """Other tokens, so that the KV belongs to another text."""
    tokens = np.frombuffer(base64.b64decode(body["tokens"]), "<i4").copy()
    tokens[int(rng.integers(len(tokens)))] += int(rng.choice([-1, 1, 2**30]))
    body["tokens"] = base64.b64encode(tokens.tobytes()).decode()


def _layout(body: dict[str, Any], rng: np.random.Generator) -> None:
    name = str(rng.choice(list(body["layout"])))
    body["layout"][name] = [-1, 0, 2**19, 2**63, 3.5, "x", None, True][int(rng.integers(8))]


def _drop(body: dict[str, Any], rng: np.random.Generator) -> None:
    del body[str(rng.choice(list(body)))]


LIES: dict[str, Callable[[dict[str, Any], np.random.Generator], None]] = {
    "huge": lambda body, rng: body.update(tokens="AAAA" * 1_000_000),
    "nested": _nest,
    "negative first chunk": _set("first_chunk", -1, -(2**63), 10**30),
    "overlapping its parent": _set("first_chunk", 1, 2, 3, 4),
    "elsewhere": _set("segment", "../../../etc", "0" * 32, "/etc/passwd"),
    "parent elsewhere": _set("parent", "../../x", "f" * 32, 7, None),
    "start": _set("start", "00" * 16, "zz", "", None),
    "other tokens": _tokens,
    "other layout": _layout,
    "other salt": _set("salt", "tenant", 5),
    "other model": _set("fingerprint", {"weights": "other"}, {}, [], {"a": 1}),
    "order": _set("order", "AAAA", "", []),
    "checksums": _set("pack_crc", "", "AAAA", "!", None),
    "time": _set("created", float("nan"), 1e400, -1, "now"),
    "a field less": _drop,
}


def wrong_salts(folder: Path, count: int) -> Tally:
    """A tenant asks for what another tenant stored."""
    tally = Tally()
    with ChunkStore.open(folder, config=CONFIG) as store:
        for number in range(count):
            tokens = some_tokens(64, number)
            with tally.fault(f"salt {number}"):
                ingest(store, tokens, salt=f"tenant {number}")
                for salt in ("", f"tenant {number + 1}", f"tenant {number} "):
                    found = store.longest_prefix(
                        tokens, fingerprint=FINGERPRINT, layout=SMALL, salt=salt
                    )
                    tally.wrong_tokens += found.num_tokens
                tally.caught += 1
    return tally


def refused_writes(folder: Path, count: int) -> Tally:
    """Writers that fail half-way, or are left without a commit, leave nothing."""
    tally = Tally()
    with ChunkStore.open(folder, config=CONFIG) as store:
        for number in range(count):
            tokens = some_tokens(64, number)
            kv = kv_of(SMALL, tokens)
            with tally.fault(f"left writer {number}"):
                try:
                    with store.writer(
                        fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens
                    ) as writer:
                        writer.write(0, kv[:, :, :32])
                        if number % 2:
                            raise StoreError("the engine gave up")
                except StoreError:
                    pass
                left = list((folder / "tmp").iterdir())
                if left or store.usage():
                    raise RuntimeError(f"left {left}, {store.usage()} bytes")
                tally.judge(serve(store), f"left writer {number}")
    return tally


def main() -> None:
    """Run `fill` for `full_disks`, inside its mount."""
    tally = fill(Path(sys.argv[1]), int(sys.argv[2]))
    json.dump({name: getattr(tally, name) for name in tally.__dataclass_fields__}, sys.stdout)


if __name__ == "__main__":
    main()
