"""Chat about a text. The history is stored turn by turn, and the text is computed only once.

    python examples/chat.py --store /tmp/talk --text handbook.txt

The model's own chat template renders the messages so far. The engine reads the stored part of them
from the store and computes the rest. It then stores the turn, so the next turn computes only its
own tokens. With a budget below 1 the engine computes each turn a second time before it stores the
turn, so that the stored KV is exact. End-of-file (Ctrl-D) ends the chat.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from ckv_jax import Engine, EngineConfig, Request, SamplingParams
from ckv_jax.demo import NOISE, demo_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat about a text.")
    parser.add_argument("--store", required=True, help="folder or URL that keeps the KV")
    parser.add_argument("--text", type=Path, help="the text to chat about")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="a model (folder or .gguf file); without it the answers are noise",
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
        engine.ingest(text, turn="system")
        messages = [{"role": "system", "content": text.rstrip()}]
        for line in prompt():
            messages.append({"role": "user", "content": line})
            tokens = engine.chat(messages).tolist()
            request = Request(prefix=tokens[:-1], suffix=tokens[-1:])
            stream = engine.generate(request, sampling, keep_kv=True)
            for event in stream:
                print(event.text, end="", flush=True)
            (generation,) = stream.results()
            messages.append({"role": "assistant", "content": generation.text})
            stored = engine.append(generation).num_tokens
            print(f"\n[{generation.trace.ttft_ms:.0f} ms, {stored} tokens stored]")


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
