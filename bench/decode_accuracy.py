"""Accuracy of decode, when every token selects the chunks that it attends to.

    python -m bench.decode_accuracy [--quick] [--json OUT] [--plot PNG]

The engine decodes given texts over ledgers, with the reference checkpoint: either filler sentences
with a question at the end, or questions with their answers one after the other. The first token is
re-prefilled, every other one is a step of decode; where an answer is due, the likeliest next token
is compared with it. Budget 1 is everything. Intervals are Wilson's (95%). JSON: `{"rows":
[{"trace", "system", "budget", "selected", "answers", "accuracy", "ci95", "device_hits",
"ssd_bytes", "attention_mass", "by_document"}], "bars"}`; `selected`: tokens of a selection,
`by_document`: right answers of each document, and all of them.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from bench.accuracy import DOT, first, lengthened
from bench.common import (
    Json,
    add_systems,
    budget_share,
    command,
    finish,
    half_widths,
    interval,
    positive,
    result_file,
    table,
)
from bench.figures import save
from bench.kept import Kept, checkpoint_fingerprint
from ckv_jax.config import EngineConfig, SystemConfig
from ckv_jax.data.ledger import Ledger
from ckv_jax.data.reference import demo_ledger, reference_folder
from ckv_jax.engine import Engine
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.request import Generation, Request
from ckv_jax.systems import system_named

NAMES = ("ckv", "kvdrive", "quest", "shadowkv", "retroinfer", "pqcache")
BUDGETS = (1 / 64, 0.05, 0.25, 1.0)
BARS = {("ckv", 1 / 64): 0.03, ("ckv", 0.05): 0.01}
"""Share of answers that may be lost against budget 1."""
CLUSTERED, RIVALS = "kvdrive", ("quest", "shadowkv", "retroinfer")
"""A system that may lose no more answers than the best of these, which select as many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequences:
    """Token sequences to feed one by one, and what should be said after some of the tokens."""

    tokens: np.ndarray
    """int32 [S, T]."""
    wanted: np.ndarray
    """int32 [S, T], the right next token; -1 where nothing was asked."""


def single_questions(page: Ledger) -> TokenSequences:
    """Suffixes of one length as they are: the answer is wanted after the last token.

    Raises ValueError for suffixes of different lengths.
    """
    if (page.lengths != page.questions.shape[1]).any():
        raise ValueError("got suffixes of different lengths, expected one (`lengthened`)")
    wanted = np.full_like(page.questions, -1)
    wanted[:, -1] = page.answers
    return TokenSequences(tokens=page.questions, wanted=wanted)


def questions_in_turn(page: Ledger, sequences: int, tokens: int, seed: int = 0) -> TokenSequences:
    """Questions of the page with their right answers, one after the other, cut at `tokens`.

    Sentences like those of the document, drawn without repeating within a sequence; every answer
    has to be looked up. Raises ValueError where the page has too few questions for that.
    """
    rng = np.random.default_rng((seed, tokens, 12))
    out = np.zeros((sequences, tokens), np.int32)
    wanted = np.full_like(out, -1)
    for row in range(sequences):
        at = 0
        for i in rng.permutation(len(page.answers)):
            if at >= tokens:
                break
            length = int(page.lengths[i])
            sentence = [*page.questions[i, :length], page.answers[i], DOT]
            part = sentence[: tokens - at]
            out[row, at : at + len(part)] = part
            if at + length - 1 < tokens:
                wanted[row, at + length - 1] = page.answers[i]
            at += len(part)
        if at < tokens:
            raise ValueError(
                f"got {len(page.answers)} questions, expected enough for {tokens} tokens"
            )
    return TokenSequences(tokens=out, wanted=wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is asked."""

    documents: int = 4
    sequences: int = 8
    steps: int = 64
    tokens: int = 4096
    budgets: tuple[float, ...] = BUDGETS


def ask(
    engine: Engine, tokens: np.ndarray, given: TokenSequences, budget: float
) -> list[Generation]:
    """Every sequence fed token by token over one document."""
    prefix = engine.ingest(tokens)
    requests = [
        Request(prefix=prefix, suffix=row[:1].tolist(), budget=budget) for row in given.tokens
    ]
    ways = [
        SamplingParams(max_tokens=len(row), forced_ids=tuple(row[1:].tolist()), logprobs=1)
        for row in given.tokens
    ]
    texts = engine.generate(requests, ways).results()
    for text in texts:
        text.raise_for_error()
    return texts


def right(texts: Sequence[Generation], given: TokenSequences) -> np.ndarray:
    """bool [n]: for every answer that was due, whether it was the likeliest token."""
    said = np.array([[one.top[0][0] for one in text.completion().logprobs] for text in texts])
    due = given.wanted >= 0
    found: np.ndarray = (said == given.wanted)[due]
    return found


def measure(
    engine: Engine, systems: Mapping[str, SystemConfig], setting: Setting, kept: Kept
) -> Iterator[Json]:
    """A row for every kind of sequence, system and budget."""
    pages = [demo_ledger(seed, setting.tokens) for seed in range(setting.documents)]
    count, steps = setting.sequences, setting.steps
    asked = [
        {
            "fillers, then a question": single_questions(
                lengthened(first(page, count), steps, seed)
            ),
            "questions and answers": questions_in_turn(page, count, steps, seed),
        }
        for seed, page in enumerate(pages)
    ]
    for system, config in systems.items():
        with engine.variant(EngineConfig(system=config)) as served:
            for budget in setting.budgets:
                for trace in asked[0]:
                    of_trace = [sequences[trace] for sequences in asked]
                    make = partial(_answered, served, pages, of_trace, budget)
                    row = kept.part(f"{system} at {budget:g}, {trace}", make)
                    yield {"trace": trace, "system": system} | row


def _answered(
    engine: Engine, pages: Sequence[Ledger], given: Sequence[TokenSequences], budget: float
) -> Json:
    """A row of one system, but for whose it is."""
    began = time.monotonic()
    texts = [ask(engine, page.tokens, one, budget) for page, one in zip(pages, given, strict=True)]
    of_each = [right(part, one) for part, one in zip(texts, given, strict=True)]
    answers = np.concatenate(of_each)
    traces = [text.trace.decode for part in texts for text in part]
    print(
        f"{engine.system.name} at {budget:.2%}: {answers.mean():.3f} right of {len(answers)}, "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )
    return {
        "budget": budget,
        "selected": math.ceil(budget * pages[0].tokens.size),
        "answers": len(answers),
        "accuracy": float(answers.mean()),
        "ci95": interval(int(answers.sum()), len(answers)),
        "by_document": [[int(one.sum()), len(one)] for one in of_each],
        **{
            name: float(np.mean([trace[name] for trace in traces]))
            for name in ("device_hits", "ssd_bytes", "attention_mass")
            if all(traces)
        },
    }


def bars(rows: Sequence[Json]) -> list[Json]:
    """Answers lost against everything, over both kinds of sequences, held to `BARS`."""

    def total(system: str, budget: float) -> tuple[int, int]:
        mine = [row for row in rows if (row["system"], row["budget"]) == (system, budget)]
        answers = sum(row["answers"] for row in mine)
        return round(sum(row["answers"] * row["accuracy"] for row in mine)), answers

    found = []
    there = {(row["system"], row["budget"]) for row in rows}
    for (system, budget), most in BARS.items():
        if {(system, budget), (system, 1.0)} <= there:
            (some, asked), (every, all_asked) = total(system, budget), total(system, 1.0)
            lost = every / all_asked - some / asked
            found.append({"claim": f"{system}: answers lost", "budget": budget, "value": lost,
                          "bar": most, "answers": asked, "met": lost <= most})  # fmt: skip
    for budget in sorted({budget for system, budget in there if system == CLUSTERED} - {1.0}):
        rivals = [total(name, budget) for name in RIVALS if (name, budget) in there]
        if rivals:
            (some, asked), best = total(CLUSTERED, budget), max(r / all_ for r, all_ in rivals)
            lost = best - some / asked
            found.append({"claim": f"{CLUSTERED}: answers lost to {', '.join(RIVALS)}",
                          "budget": budget, "value": lost, "bar": 0.0, "answers": asked,
                          "met": lost <= 0})  # fmt: skip
    return found


def show(rows: Sequence[Json]) -> str:
    """Right answers in percent, a line for every system and kind of sequence."""
    budgets = sorted({row["budget"] for row in rows})
    lines = []
    for trace in dict.fromkeys(row["trace"] for row in rows):
        for system in dict.fromkeys(row["system"] for row in rows):
            cells = {row["budget"]: f"{100 * row['accuracy']:.1f}" for row in rows
                     if (row["trace"], row["system"]) == (trace, system)}  # fmt: skip
            lines.append([trace, system, *(cells.get(budget, "") for budget in budgets)])
    return table(lines, ("right, %", "system", *(f"{budget:.2%}" for budget in budgets)))


def main() -> None:
    """The command."""
    parser = command(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one document, two budgets")
    parser.add_argument("--plot", type=result_file, help="draw the figure into this PNG")
    add_systems(parser, NAMES, generates=True)
    parser.add_argument("--budgets", nargs="+", type=budget_share, help="shares in (0, 1]")
    parser.add_argument("--documents", type=positive, help="number of ledgers")
    parser.add_argument("--tokens", type=positive, default=4096, help="tokens of a ledger")
    args = parser.parse_args()
    try:
        demo_ledger(0, args.tokens)
    except ValueError as error:
        parser.error(f"--tokens: {error}")
    setting = Setting(
        documents=args.documents or (1 if args.quick else 4),
        budgets=tuple(args.budgets or (BUDGETS[::3] if args.quick else BUDGETS)),
        tokens=args.tokens,
    )
    folder = reference_folder()
    systems = {name: system_named(name) for name in args.systems}
    about = {"setting": asdict(setting), "systems": [str(one) for one in systems.values()]}
    about["model"] = checkpoint_fingerprint(folder)
    kept = Kept(args.json, about)
    with tempfile.TemporaryDirectory() as store:
        config = EngineConfig(system=systems[args.systems[0]])
        with Engine.from_pretrained(folder, store=store, config=config) as engine:
            rows = list(measure(engine, systems, setting, kept))
    print(show(rows))
    words = {True: "met", False: "MISSED"}
    lines = [[bar["claim"], f"{bar['budget']:.2%}", f"{bar['value']:.3f}", f"{bar['bar']:.3f}",
              bar["answers"], words[bar["met"]]] for bar in bars(rows)]  # fmt: skip
    if lines:
        print(table(lines, ("claim", "budget", "value", "bar", "answers", "")))
    found = {
        "checkpoint": folder.name, "documents": setting.documents, "tokens": setting.tokens,
        "sequences": setting.sequences, "steps": setting.steps,
        "half_width": half_widths(sum(row["answers"] for row in rows[:2])),
        "rows": rows, "bars": bars(rows),
    }  # fmt: skip
    save("decode_accuracy", finish(args, kept.said() | found), args.plot)
    kept.forget()


if __name__ == "__main__":
    main()
