"""Memory of an ingest by its length: the peak must not grow with the text.

    python -m bench.memory --json OUT

Each length is ingested in a process of its own, by a small model whose keys and values weigh more
than its layers (4 KiB per token): of 64,000 tokens, 262 MB. `before_mb` is what the process
holds with model and engine made, `peak_mb` the most during the ingest (Linux's VmHWM, set back when
it begins), `ingest_mb` the difference: buffers, compiled programs and blocks on their way to disk.
Then the same again, with the `programs` of the first time from JAX's compilation cache, as every
process has them but the first: XLA's compiler needs memory, more for the programs of a longer text.

Bar: `ingest_mb` of the longest at most 10% above that of the shortest.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common import Json, command, existing_folder, finish, positive, table, whole
from bench.random_engine import SMALL, random_engine, random_tokens

MORE = 0.10
PROGRAMS = ("compiled", "from the cache")
MODEL = dataclasses.replace(SMALL, num_layers=4, num_kv_heads=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """What is ingested."""

    tokens: tuple[int, ...] = (8_000, 16_000, 64_000)
    seed: int = 0


def status_mb(name: str) -> float:
    """A figure of /proc/self/status in MB: VmRSS is held now, VmHWM was the most."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"got no {name} in /proc/self/status, expected one: is this Linux?")


def release_heap() -> None:
    """Gives back to the system what is free in C's heap; where its library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def ingest(tokens: int, store: Path, seed: int) -> Json:
    """Memory of one ingest. For a process of its own."""
    with random_engine(MODEL, store, seed=seed) as engine:
        text = random_tokens(engine, tokens, seed=seed)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts over
        before, start = status_mb("VmRSS"), time.perf_counter()
        prefix = engine.ingest(text)
        seconds, peak = time.perf_counter() - start, status_mb("VmHWM")
        if prefix.num_tokens != tokens:
            raise RuntimeError(f"got {prefix.num_tokens} tokens stored, expected {tokens}")
        kv_mb = tokens * engine.layout.token_bytes / 1e6
    return {
        "tokens": tokens,
        "kv_mb": kv_mb,
        "before_mb": before,
        "peak_mb": peak,
        "ingest_mb": peak - before,
        "seconds": seconds,
    }


def rows_of(lengths: Lengths, folder: Path) -> list[Json]:
    """Two rows for each length, each from a process of its own."""
    everything = {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    rows = []
    for programs in PROGRAMS:
        for tokens in lengths.tokens:  # none finds in the cache what another length compiled
            kept = everything | {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache" / str(tokens))}
            command = [
                sys.executable, "-m", "bench.memory", "--seed", str(lengths.seed),
                "--ingest", str(tokens), str(folder / "stores" / programs / str(tokens)),
            ]  # fmt: skip
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=os.environ | kept
            )
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
            rows.append({"programs": programs} | json.loads(done.stdout.splitlines()[-1]))
            print(f"{tokens} tokens, {programs}: {rows[-1]['ingest_mb']:.0f} MB", flush=True)
    return rows


def bars_of(rows: Sequence[Json]) -> list[Json]:
    """The longest against the shortest, with programs compiled and from the cache."""
    bars = []
    for programs in PROGRAMS:
        mb = {row["tokens"]: row["ingest_mb"] for row in rows if row["programs"] == programs}
        more = mb[max(mb)] / mb[min(mb)] - 1
        bars.append({"programs": programs, "more": more, "bar": MORE, "met": more <= MORE})
    return bars


def main() -> None:
    """The command."""
    p = command(__doc__)
    p.add_argument("--folder", type=existing_folder, help="folder for the stores")
    p.add_argument(
        "--tokens", type=positive, nargs="+", default=Lengths().tokens, help="lengths of the texts"
    )
    p.add_argument("--seed", type=whole, default=0, help="seed of weights and texts")
    p.add_argument("--ingest", nargs=2, metavar=("TOKENS", "STORE"), help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.ingest:
        tokens, store = args.ingest
        print(json.dumps(ingest(int(tokens), Path(store), args.seed)))
        return
    lengths = Lengths(tokens=tuple(args.tokens), seed=args.seed)
    with tempfile.TemporaryDirectory(prefix="ckv-bench-", dir=args.folder) as folder:
        rows = rows_of(lengths, Path(folder))
    bars = bars_of(rows)
    names = list(rows[0])
    print(table([[row[name] for name in names] for row in rows], names))
    for bar in bars:
        print(
            f"longest over shortest, programs {bar['programs']}: {bar['more']:+.1%} "
            f"(bar {MORE:+.0%}: {'met' if bar['met'] else 'missed'})"
        )
    finish(args, {"setting": dataclasses.asdict(lengths), "rows": rows, "bars": bars})


if __name__ == "__main__":
    main()
