"""Ask one question about every text file in a folder.

    python examples/folder_questions.py docs "What does a budget cost?" --store /tmp/folder

The model reads each file once, and the file's KV stays in the store. For a later question, today or
in a month, the engine reads only the tenth of each file that matters for it. The answers of which
the model is most certain come first.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from ckv_jax import Engine, EngineConfig, Generation, Request, SamplingParams
from ckv_jax.demo import NOISE, demo_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask one question about each file of a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--store", required=True, help="folder or URL that keeps the KV")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="a model (folder or .gguf file); without it the answers are noise",
    )
    parser.add_argument("--budget", type=float, default=0.10)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    files = sorted(path for path in args.folder.rglob("*") if path.suffix in (".md", ".txt"))
    if not files:
        parser.error(f"there is no .md or .txt file in {args.folder}")
    if args.checkpoint is None:
        print(NOISE, file=sys.stderr)
    checkpoint = args.checkpoint or demo_checkpoint()
    config = EngineConfig(budget=args.budget)
    with Engine.from_pretrained(checkpoint, store=args.store, config=config) as engine:
        prefixes = [engine.ingest(path.read_text(encoding="utf-8")) for path in files]
        requests = [
            Request(prefix=prefix, suffix=engine.question(prefix, args.question), id=str(path))
            for prefix, path in zip(prefixes, files, strict=True)
        ]
        sampling = SamplingParams(max_tokens=args.max_tokens, logprobs=0)
        answers = engine.generate(requests, sampling).results()
        for answer in sorted(answers, key=confidence, reverse=True):
            print(f"{confidence(answer):6.1%}  {answer.request.id}: {answer.text.strip()}")


def confidence(answer: Generation) -> float:
    """The geometric mean of the probabilities of the answer's tokens."""
    tokens = answer.completion().logprobs
    return math.exp(sum(one.token for one in tokens) / len(tokens)) if tokens else 0.0


if __name__ == "__main__":
    main()
