"""Ten thousand steps of decode with texts that come and go: does anything grow?

    python -m bench.long_decode --json OUT --plot PNG

A small model with random weights decodes `sequences` texts together, over a few stored prefixes,
every token choosing anew. Each text ends after `shortest` to `longest` tokens, or is given up
midway, one in `given_up`; another one, over another prefix, takes its place. A step is a token of
the first of them: whatever runs beside it is decoded in the same pass. After every `every` steps
(`rows`): memory of the process, device packs that texts pin and that caches have, compiled
programs, memory mappings, and steps per second since the row before.

Bar: past the first tenth of the steps memory, pins and mappings are at most a tenth above the most
of that tenth, programs not at all. When all is over nothing is pinned and nobody waits (`left`).
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.common import Json, existing_folder, finish, positive, result_file, whole
from bench.figures import save
from bench.held import MORE, growth, held, show
from bench.random_engine import SMALL, random_engine, random_prefix, random_tokens
from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.storage.prefix import Prefix
from ckv_jax.systems import SYSTEMS

BARS = {"rss_mb": MORE, "mappings": MORE, "pinned_packs": MORE, "programs": 0.0}
EARLY = 0.10
"""Share of the steps after which nothing may grow."""
MODEL = dataclasses.replace(SMALL, num_layers=8, hidden_size=128, intermediate_size=256)
QUESTION = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What is decoded."""

    steps: int = 10_000
    every: int = 100
    sequences: int = 3
    prefixes: int = 4
    prefix_tokens: int = 2_000
    shortest: int = 50
    longest: int = 250
    given_up: int = 8
    budget: float = 1 / 16
    system: str = "ckv"
    seed: int = 0

    def to_json(self) -> Json:
        """Plain JSON values."""
        return dataclasses.asdict(self)


def texts_of(engine: Engine, prefixes: Sequence[Prefix], steps: Steps, place: int) -> Iterator[int]:
    """The texts that take one place, one after the other; yields at each token. Endless."""
    rng = np.random.default_rng((steps.seed, place))
    while True:
        length = int(rng.integers(steps.shortest, steps.longest + 1))
        leaves = int(rng.integers(1, length)) if rng.integers(steps.given_up) == 0 else length
        suffix = rng.integers(0, engine.model_config.vocab_size, QUESTION).tolist()
        request = Request(
            prefix=prefixes[rng.integers(len(prefixes))], suffix=suffix, budget=steps.budget
        )
        sampling = SamplingParams(max_tokens=length, temperature=1.0, seed=int(rng.integers(99)))
        seen = 0
        with engine.generate(request, sampling) as stream:  # leaving it gives the text up
            for event in stream:
                if event.token_id is not None:
                    seen += 1
                    yield seen
                    if seen == leaves:
                        break
            else:
                for text in stream.results():
                    text.raise_for_error()


def decode(engine: Engine, prefixes: Sequence[Prefix], steps: Steps) -> list[Json]:
    """A row after every few steps."""
    ended, errors = threading.Event(), []

    def beside(place: int) -> None:
        try:
            for _ in texts_of(engine, prefixes, steps, place):
                if ended.is_set():
                    return
        except Exception as error:  # told by the thread that counts
            errors.append(error)

    threads = [threading.Thread(target=beside, args=[n]) for n in range(1, steps.sequences)]
    for thread in threads:
        thread.start()
    rows: list[Json] = []
    start, first = time.perf_counter(), texts_of(engine, prefixes, steps, 0)
    try:
        for step, _ in enumerate(first, 1):
            if errors:
                raise errors[0]
            if step % steps.every == 0:
                spent = time.perf_counter() - start
                rows.append({"steps": step, **held(engine), "steps_s": steps.every / spent})
                if step % (10 * steps.every) == 0:
                    print(", ".join(f"{name} {v:.0f}" for name, v in rows[-1].items()), flush=True)
                start = time.perf_counter()
            if step == steps.steps:
                break
    finally:
        first.close()
        ended.set()
        for thread in threads:
            thread.join()
    return rows


def left(engine: Engine) -> Json:
    """What is held for texts when all have ended, which the engine lets go of within seconds."""
    until = time.monotonic() + 10
    while True:
        stats = engine.stats()
        found = {"pinned_packs": stats.pinned_packs, "running": stats.running, "queue": stats.queue}
        if not any(found.values()) or time.monotonic() > until:
            return found
        time.sleep(0.05)


def run(steps: Steps, folder: Path) -> Json:
    """Rows, what grew, and what is left."""
    with random_engine(
        MODEL, folder, system=steps.system, max_batch=steps.sequences, device_cache_bytes=32 << 20,
        host_cache_bytes=32 << 20,
    ) as engine:  # fmt: skip
        prefixes = [
            random_prefix(engine, random_tokens(engine, steps.prefix_tokens, seed=n), seed=n)
            for n in range(steps.prefixes)
        ]
        engine.warmup(
            prefixes[0], max_batch=steps.sequences, max_suffix=QUESTION, budgets=[steps.budget],
            max_tokens=steps.longest,
        )  # fmt: skip
        rows = decode(engine, prefixes, steps)
        remains = left(engine)
    early = [row for row in rows if row["steps"] <= EARLY * steps.steps]
    grown = growth(early, rows[len(early) :], BARS)
    met = all(one["met"] for one in grown.values()) and not any(remains.values())
    return {"rows": rows, "growth": grown, "left": remains, "met": met}


def main() -> None:
    """The command."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--json", type=result_file, help="write the result to this file")
    p.add_argument("--plot", type=result_file, help="draw the figure into this PNG")
    p.add_argument("--folder", type=existing_folder, help="folder for the store")
    p.add_argument("--system", choices=SYSTEMS, default=Steps().system)
    for option in ("--steps", "--every", "--sequences", "--seed"):
        kind = whole if option == "--seed" else positive
        p.add_argument(option, type=kind, default=getattr(Steps(), option[2:]))
    args = p.parse_args()
    if not 0 < args.every <= EARLY * args.steps:
        p.error(f"got --every {args.every}, expected 1 to {EARLY * args.steps:.0f}: a tenth of all")
    named = ("steps", "every", "sequences", "seed", "system")
    steps = Steps(**{name: getattr(args, name) for name in named})
    with tempfile.TemporaryDirectory(prefix="ckv-bench-", dir=args.folder) as folder:
        found = run(steps, Path(folder))
    print(show(found["growth"], "in the first tenth"))
    print("left when all is over: " + ", ".join(f"{k} {v}" for k, v in found["left"].items()))
    save("long_decode", finish(args, steps, found), args.plot)


if __name__ == "__main__":
    main()
