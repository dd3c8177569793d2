"""Classify the texts of a JSONL file, many at once, after one block of examples.

    python examples/classify_jsonl.py texts.jsonl --examples examples.jsonl --store /tmp/classes

Each line of `examples.jsonl` is `{"text": …, "label": …}`, each line of `texts.jsonl` is
`{"text": …}`. The examples are the shared prefix: the engine computes them once and keeps their KV
on disk. For each text it reads only the part of the examples that the text attends to. A text's
class is the label whose first token the model finds most likely.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckv_jax import Engine, EngineConfig, Request
from ckv_jax.demo import NOISE, demo_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description="Classify texts by examples.")
    parser.add_argument("texts", type=Path, help='JSONL of {"text"}')
    parser.add_argument("--examples", type=Path, required=True, help='JSONL of {"text", "label"}')
    parser.add_argument("--store", required=True, help="folder or URL that keeps the KV")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="a model (folder or .gguf file); without it the answers are noise",
    )
    parser.add_argument("--budget", type=float, default=0.25)
    args = parser.parse_args()

    examples = list(read(args.examples))
    labels = sorted({example["label"] for example in examples})
    texts = list(read(args.texts))
    if args.checkpoint is None:
        print(NOISE, file=sys.stderr)
    checkpoint = args.checkpoint or demo_checkpoint()
    config = EngineConfig(budget=args.budget)
    with Engine.from_pretrained(checkpoint, store=args.store, config=config) as engine:
        first = {label: int(engine.encode(f" {label}")[0]) for label in labels}
        if len(set(first.values())) < len(labels):
            sys.exit("two labels begin with the same token; rename one")
        shots = "".join(block(e["text"]) + f" {e['label']}\n" for e in examples)
        prefix = engine.ingest(shots, raw=True)
        requests = [Request(prefix=prefix, suffix=block(item["text"])) for item in texts]
        for item, result in zip(texts, engine.reprefill(requests), strict=True):
            label = max(labels, key=lambda name: result.logits[first[name]])
            print(json.dumps({**item, "label": label}, ensure_ascii=False))


def block(text: str) -> str:
    """One text as the model reads it, up to its label."""
    return f"Text: {text}\nLabel:"


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file. Reports bad lines and skips them."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            item = json.loads(line)
            item["text"]
        except (ValueError, TypeError, KeyError) as error:
            print(f"{path}, line {number}: {error!r}", file=sys.stderr)
        else:
            yield item


if __name__ == "__main__":
    main()
