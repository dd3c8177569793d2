"""Comparison with other programs: first tokens, further tokens and correct answers, in one run.

    python -m bench.peers --quick --json OUT
    python -m bench.peers --peers llama.cpp,kvpress --json OUT

`speed`: a random checkpoint of a published shape; a text of `--text-tokens` goes on from each
question where the KV for it is kept. `answers`: the shipped checkpoint, asked about generated
documents whose answers are known. In both cases, every peer gets every question, in rounds; within
a round, each way of answering gets another question:

- `ckv`, which reads a share of the stored KV from the SSD for each question, with no cache of KV
  between them (direct I/O where the file system has it), and with all of it in memory;
- `transformers` on PyTorch: a recompute of everything, and the suffix over KV in memory;
- `llama.cpp` (llama-cpp-python): a slot saved to a file is restored, then the suffix is computed;
- `llama.cpp-Q8_0`: the same with weights of Q8_0, compared with `ckv-int8`, which is `ckv` with
  int8 weights (not with --quick);
- `kvpress`: 95% of the KV is evicted before a question is known (answers only).

A peer that is not installed, or fails, has a row with the reason, and the others run. You install
all peers except `ckv` and transformers yourself; kvpress needs an older transformers, so install it
in a separate environment. Rows: {case, peer, what, tokens, suffix_tokens, kept, prefill_ms,
ttft_ms, token_ms, parts_ms, right, questions, why_skipped}; times are wall clock around a whole
first token, of each token after it (`token_ms`), and of computing and keeping the prefix
(`prefill_ms`; `ckv` and llama.cpp write its KV to the SSD).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.common import (
    SHAPES,
    Json,
    budget_share,
    command,
    existing_folder,
    finish,
    positive,
    system_name,
    table,
    versions,
    whole,
)
from bench.peers import INT8, PEERS
from bench.peers.base import Case, Page, Peer, compare
from bench.peers.ours import Ours
from ckv_jax.data.reference import demo_ledger, reference_folder
from ckv_jax.model.weights import random_model, save_pretrained

QUICK = {
    "prefix_tokens": 2000, "repeats": 7, "recomputes": 1, "documents": 1, "document_tokens": 2048,
    "text_tokens": 17, "peers": [name for name in PEERS if name != INT8],
}  # fmt: skip
FULL = {
    "prefix_tokens": 5000, "repeats": 15, "recomputes": 3, "documents": 8, "document_tokens": 4096,
    "text_tokens": 33, "peers": list(PEERS),
}  # fmt: skip


def peers_named(text: str) -> list[str]:
    """Names from the command line, separated by commas."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in PEERS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"got {', '.join(unknown) or 'no name'}, expected some of {', '.join(PEERS)}"
        )
    return list(dict.fromkeys(names))


def speed_case(folder: Path, args: argparse.Namespace) -> Case:
    """A random checkpoint, made in `folder`, one prefix and as many suffixes as repeats."""
    config = SHAPES[args.model]
    save_pretrained(random_model(config, seed=args.seed), folder)
    rng = np.random.default_rng(args.seed)
    tokens = rng.integers(0, config.vocab_size, args.prefix_tokens).astype(np.int32)
    shape = (args.repeats, args.suffix_tokens)
    suffixes = rng.integers(0, config.vocab_size, shape).astype(np.int32)
    text = rng.integers(0, 100, args.text_tokens).astype(np.int32)  # none that ends a text
    page = Page(tokens=tokens, suffixes=tuple(suffixes), text=text if len(text) else None)
    return Case(name="speed", folder=folder, pages=(page,), recomputes=args.recomputes)


def answers_case(args: argparse.Namespace) -> Case:
    """The shipped checkpoint over generated documents of 50 questions."""
    try:
        ledgers = [demo_ledger(seed, args.document_tokens) for seed in range(args.documents)]
    except ValueError as error:
        raise SystemExit(f"--document-tokens: {error}") from error
    pages = tuple(
        Page(
            tokens=ledger.tokens,
            suffixes=tuple(
                question[:length]
                for question, length in zip(ledger.questions, ledger.lengths, strict=True)
            ),
            answers=ledger.answers,
        )
        for ledger in ledgers
    )
    return Case(name="answers", folder=reference_folder(), pages=pages, recomputes=args.recomputes)


def show(rows: Sequence[Json]) -> str:
    """The rows as a table, then those that were skipped."""
    cells = [
        [
            row["case"], row["peer"], row["what"], row["tokens"], f"{row['kept']:.0%}",
            "" if row["prefill_ms"] is None else row["prefill_ms"]["p50"] / 1e3,
            row["ttft_ms"]["p50"], row["ttft_ms"]["p95"], row["ttft_ms"]["n"],
            "" if row["token_ms"] is None else 1e3 / row["token_ms"]["p50"],
            "" if row["right"] is None else f"{row['right']} of {row['questions']}",
        ]
        for row in rows
        if row["why_skipped"] is None
    ]  # fmt: skip
    header = ("case", "peer", "what", "tokens", "kept", "prefill s", "p50 ms", "p95 ms", "asked",
              "tokens/s", "right")  # fmt: skip
    skipped = [
        f"{row['case']}: {' '.join(filter(None, (row['peer'], row['what'])))} skipped: "
        f"{row['why_skipped']}"
        for row in rows
        if row["why_skipped"] is not None
    ]
    return "\n".join([table(cells, header), *skipped])


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; `--quick` changes the defaults."""
    p = command(__doc__)
    p.add_argument("--quick", action="store_true", help="at most 4 minutes on 2 quiet cores")
    p.add_argument("--peers", type=peers_named, metavar="A,B", help=", ".join(PEERS))
    p.add_argument("--system", type=system_name, default="ckv", help="this engine's system")
    p.add_argument(
        "--budgets", type=budget_share, nargs="+", default=[0.05, 0.25, 1.0],
        help="this engine's budgets, shares in (0, 1]",
    )  # fmt: skip
    p.add_argument("--model", choices=SHAPES, default="0.5B", help="shape, in the speed case")
    p.add_argument("--prefix-tokens", type=positive, help="tokens of the prefix, in the speed case")
    p.add_argument(
        "--suffix-tokens", type=positive, default=32, help="tokens of a suffix, in the speed case"
    )
    p.add_argument("--repeats", type=whole, help="suffixes, in the speed case; 0: skip it")
    p.add_argument("--recomputes", type=whole, help="number of questions that are recomputed")
    p.add_argument("--text-tokens", type=whole, help="generated tokens, in the speed case; 0: none")
    p.add_argument("--documents", type=whole, help="documents, in the answers case; 0: skip it")
    p.add_argument("--document-tokens", type=positive, help="tokens of a document")
    p.add_argument("--seed", type=whole, default=0, help="seed of weights and documents")
    p.add_argument(
        "--folder", type=existing_folder, help="folder for stores, on the disk to measure"
    )
    args = p.parse_args(arguments)
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if not args.repeats and not args.documents:
        p.error("got --repeats 0 and --documents 0, expected at least one above 0")
    if args.text_tokens == 1:
        p.error(
            f"got --text-tokens {args.text_tokens}, expected 0 or at least 2: the first is not "
            "counted"
        )
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    args = parsed(arguments)
    peers: dict[str, Peer] = {args.system: Ours(args.system, args.budgets)}
    if INT8 in args.peers:
        peers[f"{args.system}-int8"] = Ours(args.system, args.budgets, weights="int8")
    peers |= {name: PEERS[name] for name in args.peers}
    rows: list[Json] = []
    load = os.getloadavg()[0]  # other people's work, which no peer likes
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="ckv-peers-") as work:
        folder = Path(work)
        cases = [speed_case(folder / "checkpoint", args)] if args.repeats else []
        cases += [answers_case(args)] if args.documents else []
        for case in cases:
            rows += compare(case, peers, folder)
    print(show(rows))
    setting = {name: value for name, value in vars(args).items() if name not in ("json", "folder")}
    known = versions("torch", "transformers", "llama-cpp-python", "kvpress")
    finish(args, {"setting": setting, "load_average": load, "versions": known, "rows": rows})


if __name__ == "__main__":
    main()
