"""Chat about a text; the history is stored turn by turn, and the text is never computed again.

    python examples/chat.py --store /tmp/kv --text handbook.txt

Each turn is appended to the stored prefix, so that the next one computes its own tokens only. With
a budget below 1 a turn is computed a second time for that, so that what is stored is exact. Ends
with end-of-file (Ctrl-D).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from ckv_jax import Engine, EngineConfig, Request, SamplingParams
from ckv_jax.demo import NOISE, demo_checkpoint

TURN = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat about a text.")
    parser.add_argument("--store", required=True, help="folder or URL that keeps the KV")
    parser.add_argument("--text", type=Path, help="what the chat is about")
    parser.add_argument(
        "--checkpoint", type=Path, help="a model's folder; without it the answers are noise"
    )
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    text = args.text.read_text(encoding="utf-8") if args.text else "You are a friendly helper."
    sampling = SamplingParams(max_tokens=args.max_tokens)
    if args.checkpoint is None:
        print(NOISE, file=sys.stderr)
    checkpoint = args.checkpoint or demo_checkpoint()
    config = EngineConfig(budget=args.budget)
    with Engine.from_pretrained(checkpoint, store=args.store, config=config) as engine:
        history = engine.ingest(f"<|im_start|>system\n{text}<|im_end|>\n")
        for line in prompt():
            request = Request(prefix=history, suffix=TURN.format(question=line))
            stream = engine.generate(request, sampling, keep_kv=True)
            for event in stream:
                print(event.text, end="", flush=True)
            (generation,) = stream.results()
            history = engine.append(generation)
            print(f"\n[{generation.trace.ttft_ms:.0f} ms, {history.num_tokens} tokens stored]")


def prompt() -> Iterator[str]:
    """The questions: typed one by one, or lines from a pipe."""
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


if __name__ == "__main__":
    main()
