"""Texts of ten thousand tokens: do memory, device slots and programs stay what they were?

    python -m bench.long_text --json OUT

A small model with random weights generates from a stored prefix, choosing at every token; every
`segment_tokens` of the text become a segment of the store, which is chosen from like the prefix.
After every `--every` tokens: memory of the process (`rss_mb`), the digests' part of it
(`digest_mb`, which has an entry for every chunk of the text), device slots that the text pins,
packs that caches hold, compiled programs, memory mappings, and tokens per second since the row
before.

Bar: from the first quarter's end to the last token, memory less the digests and mappings grow by at
most a tenth, pinned slots and programs by none. When the text is over nothing of it is left in the
store (`segments_left`).
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.common import Json, budget_share, existing_folder, finish, positive, result_file, whole
from bench.held import MORE, growth, held, show
from bench.random_engine import SMALL, random_engine, random_prefix, random_tokens
from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.systems import SYSTEMS

BARS = {"rss_mb": MORE, "mappings": MORE, "pinned_packs": 0.0, "programs": 0.0}
MODEL = dataclasses.replace(SMALL, num_layers=8, hidden_size=128, intermediate_size=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What is generated."""

    tokens: int = 10_000
    every: int = 500
    sequences: int = 1
    prefix_tokens: int = 8_000
    budget: float = 1 / 16
    system: str = "ckv"
    seed: int = 0

    def to_json(self) -> Json:
        """Plain JSON values."""
        return dataclasses.asdict(self)


def generate(engine: Engine, texts: Texts) -> list[Json]:
    """A row after every few tokens of the first text."""
    requests = [
        Request(
            prefix=random_prefix(
                engine, random_tokens(engine, texts.prefix_tokens, seed=which), seed=which
            ),
            suffix=random_tokens(engine, 16, seed=100 + which).tolist(),
            budget=texts.budget,
        )
        for which in range(texts.sequences)
    ]
    sampling = SamplingParams(max_tokens=texts.tokens, temperature=1.0, seed=texts.seed)
    rows: list[Json] = []
    seen, start = 0, time.perf_counter()
    with engine.generate(requests, sampling) as stream:
        for event in stream:
            if event.index or event.token_id is None:
                continue
            seen += 1
            if seen % texts.every == 0:
                spent = time.perf_counter() - start
                speed = texts.sequences * texts.every / spent
                rows.append({"tokens": seen, **held(engine), "tokens_s": speed})
                print(", ".join(f"{name} {value:.0f}" for name, value in rows[-1].items()))
                start = time.perf_counter()
        for text in stream.results():
            text.raise_for_error()
    return rows


def main() -> None:
    """The command."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--json", type=result_file, help="write the result to this file")
    p.add_argument("--folder", type=existing_folder, help="folder for the store")
    p.add_argument("--system", choices=SYSTEMS, default=Texts().system)
    p.add_argument("--budget", type=budget_share, default=Texts().budget)
    for option in ("--tokens", "--every", "--sequences", "--prefix-tokens", "--seed"):
        default = getattr(Texts(), option[2:].replace("-", "_"))
        p.add_argument(option, type=whole if option == "--seed" else positive, default=default)
    args = p.parse_args()
    if args.tokens < args.every or args.every < 1:
        p.error(f"got --tokens {args.tokens} with --every {args.every}, expected one row at least")
    texts = Texts(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Texts)})
    with tempfile.TemporaryDirectory(prefix="ckv-bench-", dir=args.folder) as folder:
        with random_engine(
            MODEL, Path(folder), system=texts.system, device_cache_bytes=64 << 20,
            host_cache_bytes=64 << 20,
        ) as engine:  # fmt: skip
            rows = generate(engine, texts)
        left = sum(1 for _ in Path(folder).rglob("manifest.json")) - texts.sequences
    quarter = next(n for n, row in enumerate(rows) if row["tokens"] >= texts.tokens / 4)
    found = growth(rows[quarter : quarter + 1], rows[quarter:], BARS)
    print(show(found, "after a quarter"))
    print(f"segments left in the store beside the prefixes: {left}")
    finish(args, texts, {"rows": rows, "growth": found, "segments_left": left})


if __name__ == "__main__":
    main()
