"""Fidelity of small budgets on a real model: every system against full attention on real text.

    python -m bench.fidelity [--model DIR] [--quick] [--json OUT] [--plot OUT.png]

Tasks: `continuation` (the text goes on), `recall` (a passage is begun again and must go on word by
word), `needle` (facts in plain words), `facts` (two tables, written out again whole by decode),
`few-shot` classification with `--dataset FILE...` (`{"text", "label"}` lines, files named after
sst2, subj, trec or rte), and `greedy` (128 tokens of decode after continuations). The reference is
the same engine at budget 1.0.

JSON: `{"rows": [{"task", "text", "system", "budget", "questions", "kl", "kl_median", "agree",
"perplexity_ratio", "right", "right_full", "kept", "bytes", "reads", "selected", "covered",
"covered_least", "ttft_ms"}]}`. `kl` is KL(full || system) of the next token in nats, `agree` the
share of questions with full attention's first token, `perplexity_ratio` exp of the mean loss of the
true next token less full attention's, `kept` how many of full attention's right answers stay right,
`selected` the mean share of the chunks (or tokens) that a question selects. `bytes`, `reads` (the
number of packs) and `ttft_ms` are those of cold requests, asked one at a time. A row of `facts` has
`f1` and `f1_full`. In a row of `greedy` the system follows full attention's answer: `same_tokens`
counts tokens until its own choice differs. It also has `agree_per_token`, and `kl_per_token` over
the tokens that both have among their 20 likeliest and all others as one: at most the whole KL.

What cannot be measured has a row with `why_skipped`. If that is a text or a data set, such as a
missing file, the exit status is 3. If nothing can be measured, nothing is written.
"""

from __future__ import annotations

import argparse
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_softmax

from bench import fidelity_tasks
from bench.common import Json, add_systems, command, finish, positive, result_file, table
from bench.fidelity_tasks import MANUAL, Extraction, Question, Task, f1, labelled, name_of
from bench.figures import save
from bench.figures.fidelity import mean
from bench.figures.style import percent
from bench.kept import Kept
from ckv_jax import Engine, EngineConfig, Generation, Request, Result, SamplingParams, SystemConfig
from ckv_jax.cli.options import parse_budget
from ckv_jax.data.smollm2 import fetch
from ckv_jax.errors import CheckpointError
from ckv_jax.model.sampling import MOST_LOGPROBS, Logprobs

SYSTEMS_MEASURED = ("ckv", "contiguous-kv", "impress", "as-h2o-lfu")
BUDGETS = (0.05, 0.10, 0.25)
TASKS = ("continuation", "recall", "needle", "facts", "greedy")
Budget = float | str
BATCH = 8
"""Questions that are asked together."""
COLD = 6
"""Questions of a task that are asked one at a time, for bytes, packs and milliseconds."""
GREEDY_TOKENS = 128


class Reference:
    """Full attention's answers, by task."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._logits: dict[int, np.ndarray] = {}
        self._texts: dict[int, list[Generation]] = {}

    def of(self, task: Task) -> np.ndarray:
        """Log probabilities float32 [Q, V] of the next token."""
        if id(task) not in self._logits:
            self._logits[id(task)] = logs_of(first_tokens(self._engine, task, 1.0))
        return self._logits[id(task)]

    def texts(
        self, task: Task | Extraction, asked: Sequence[Question], sampling: SamplingParams
    ) -> list[Generation]:
        """What follows some of a task's questions, always the same ones."""
        if id(task) not in self._texts:
            self._texts[id(task)] = decoded(self._engine, task.prefix, asked, 1.0, sampling)
        return self._texts[id(task)]


def logs_of(found: Sequence[Result]) -> np.ndarray:
    """Log probabilities float32 [Q, V] of first tokens."""
    logits = np.stack([one.logits for one in found]).astype(np.float64)
    logs: np.ndarray = log_softmax(logits, axis=1).astype(np.float32)
    return logs


def first_tokens(
    engine: Engine, task: Task, budget: Budget, *, batch: int = BATCH, most: int | None = None
) -> list[Result]:
    """First tokens of a task's questions."""
    prefix, asked = engine.ingest(task.prefix), task.questions[:most]
    requests = [Request(prefix=prefix, suffix=q.suffix.tolist(), budget=budget) for q in asked]
    found: list[Result] = []
    for start in range(0, len(requests), batch):
        found += engine.reprefill(requests[start : start + batch])
    for result in found:
        result.raise_for_error()
    return found


def selected(found: Sequence[Result | Generation]) -> float:
    """The mean share of the chunks (or tokens) that a question selects."""
    chunks = [one.trace.chunks for one in found]
    return float(np.mean([one["selected"] / max(1, one["total"]) for one in chunks]))


def next_tokens(warm: Engine, fresh: Engine, full: Reference, task: Task, budget: Budget) -> Json:
    """The next tokens of a task's questions, and what cold requests read."""
    found = first_tokens(warm, task, budget)
    cold = [one.trace for one in first_tokens(fresh, task, budget, batch=1, most=COLD)]
    packs = [s.args.get("packs", 0) for trace in cold for s in trace.spans if s.lane == "ssd"]
    least = [min(one.trace.period_attention_mass, default=1.0) for one in found]
    return compared(task, full.of(task), logs_of(found)) | {
        "prefix_tokens": len(task.prefix),
        "bytes": float(np.mean([trace.bytes["ssd"] for trace in cold])),
        "reads": sum(packs) / len(cold),
        "ttft_ms": float(np.median([trace.ttft_ms for trace in cold])),
        "selected": selected(found),
        "covered": float(np.mean([one.trace.attention_mass for one in found])),
        "covered_least": float(np.mean(least)),
    }


def compared(task: Task, full: np.ndarray, got: np.ndarray) -> Json:
    """What a system's log probabilities [Q, V] say against full attention's."""
    kl = (np.exp(full) * (full - got)).sum(axis=1)
    truth = np.array([-1 if q.truth is None else q.truth for q in task.questions])
    rows = np.arange(len(truth))
    best = _answers(task, got), _answers(task, full)
    right, right_full = best[0] == truth, best[1] == truth
    loss = full[rows, truth] - got[rows, truth]
    return {
        "questions": len(truth),
        "kl": float(kl.mean()),
        "kl_median": float(np.median(kl)),
        "agree": float((best[0] == best[1]).mean()),
        "perplexity_ratio": float(np.exp(loss.mean())),
        "right": int(right.sum()),
        "right_full": int(right_full.sum()),
        "kept": int((right & right_full).sum()),
    }


def _answers(task: Task, logs: np.ndarray) -> np.ndarray:
    if task.labels is None:
        return logs.argmax(axis=1)
    found: np.ndarray = task.labels[logs[:, task.labels].argmax(axis=1)]
    return found


def decoded(
    engine: Engine, prefix: np.ndarray, asked: Sequence[Question], budget: Budget,
    sampling: SamplingParams | Sequence[SamplingParams],
) -> list[Generation]:  # fmt: skip
    """What follows each question."""
    stored = engine.ingest(prefix)
    requests = [Request(prefix=stored, suffix=q.suffix.tolist(), budget=budget) for q in asked]
    texts = engine.generate(requests, sampling).results()
    for text in texts:
        text.raise_for_error()
    return texts


def greedy(engine: Engine, full: Reference, task: Task, count: int, budget: Budget) -> Json:
    """How decode under a budget follows full attention's greedy texts."""
    asked = task.questions[:count]
    sampling = SamplingParams(max_tokens=GREEDY_TOKENS, logprobs=MOST_LOGPROBS)
    texts = full.texts(task, asked, sampling)
    led = [
        SamplingParams(
            max_tokens=len(text.token_ids), forced_ids=tuple(map(int, text.token_ids)),
            logprobs=MOST_LOGPROBS,
        )
        for text in texts
    ]  # fmt: skip
    same, kl, until = [], [], []
    followed = decoded(engine, task.prefix, asked, budget, led)
    for one, other in zip(texts, followed, strict=True):
        pairs = [*zip(one.completion().logprobs, other.completion().logprobs, strict=True)]
        alike = [a.top[0][0] == b.top[0][0] for a, b in pairs]
        same += alike
        kl += [least_kl(a, b) for a, b in pairs]
        until.append([*alike, False].index(False))
    return {
        "questions": len(until),
        "tokens": len(same),
        "same_tokens": float(np.mean(until)),
        "agree_per_token": float(np.mean(same)),
        "kl_per_token": float(np.mean(kl)),
        "kl_per_token_median": float(np.median(kl)),
        "selected": selected(followed),
    }


def least_kl(full: Logprobs, got: Logprobs) -> float:
    """KL(full || got) in nats over the tokens that both list and all others as one."""
    known = dict(got.top)
    pairs = [(p, known[token]) for token, p in full.top if token in known]
    logs = np.array(pairs).reshape(-1, 2)
    chances = np.exp(logs)
    rest = np.maximum(1 - chances.sum(axis=0), np.finfo(np.float32).tiny)
    listed = (chances[:, 0] * (logs[:, 0] - logs[:, 1])).sum()
    return float(listed + rest[0] * np.log(rest[0] / rest[1]))


def extracted(engine: Engine, full: Reference, task: Extraction, budget: Budget) -> Json:
    """Mean F1 of the rows of a text's tables, and full attention's."""
    assert engine.tokenizer is not None
    sampling = SamplingParams(max_tokens=task.tokens)
    texts = decoded(engine, task.prefix, task.questions, budget, sampling)
    decode, whole = engine.tokenizer.decode, full.texts(task, task.questions, sampling)
    found, best = (
        [f1(decode(one.token_ids), rows) for one, rows in zip(some, task.rows, strict=True)]
        for some in (texts, whole)
    )
    row = {"questions": len(texts), "f1": float(np.mean(found)), "f1_full": float(np.mean(best))}
    return row | {"selected": selected(texts)}


def tasks_of(args: argparse.Namespace, engine: Engine) -> Iterator[Task | Extraction | Json]:
    """Every task, or a row that says why one is left out."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    gap = tokenizer.encode("\n\n")
    read = cache(lambda path: tokenizer.encode(fidelity_tasks.read_text(path), begins=True))
    makers: dict[str, Callable[..., Task | Extraction]] = {
        "continuation": partial(fidelity_tasks.continuations, count=args.questions),
        "recall": partial(fidelity_tasks.recalls, count=(args.questions + 1) // 2, gap=gap),
        "needle": partial(fidelity_tasks.needles, tokenizer=tokenizer),
        "facts": partial(fidelity_tasks.extractions, tokenizer=tokenizer),
    }
    wanted = {*args.tasks, *(["continuation"] if "greedy" in args.tasks else [])}
    for path, (kind, make) in product(args.texts, makers.items()):
        if kind in wanted:
            name = name_of(path)
            try:
                yield fitting(engine, make(name, read(path), args.tokens), args.tasks)
            except (OSError, EOFError, zlib.error, ValueError) as error:
                yield {"task": kind, "text": name, "why_skipped": str(error)}
    for path in args.dataset:
        try:
            for task in labelled(path, tokenizer, args.tokens, args.labelled_questions):
                yield fitting(engine, task, args.tasks)
        except (OSError, ValueError) as error:
            yield {"task": path.stem, "text": path.name, "why_skipped": str(error)}


def fitting(engine: Engine, task: Task | Extraction, tasks: Sequence[str]) -> Task | Extraction:
    """`task`; `ValueError` where its prefix, a question and what is decoded are too long."""
    limit = engine.model_config.max_position_embeddings
    decodes = "greedy" in tasks and isinstance(task, Task) and task.kind == "continuation"
    more = task.tokens if isinstance(task, Extraction) else GREEDY_TOKENS * decodes
    found = len(task.prefix) + max(len(q.suffix) for q in task.questions) + more
    if found > limit:
        raise ValueError(
            f"got {found} tokens in {task.text}, expected at most {limit}, the model's context"
        )
    return task


def measure(args: argparse.Namespace, engine: Engine, kept: Kept) -> Iterator[Json]:
    """Rows of every task, system and budget."""
    tasks: list[Task | Extraction] = []
    for task in tasks_of(args, engine):
        if isinstance(task, dict):
            print(f"{task['task']} of {task['text']} is left out: {task['why_skipped']}")
            yield task
        else:
            tasks.append(task)
    full = Reference(engine)
    cold = replace(engine.config, device_cache_bytes=0, host_cache_bytes=0)
    for name in args.systems:
        with (
            engine.variant(replace(engine.config, system=name)) as warm,
            engine.variant(replace(cold, system=name)) as fresh,
        ):
            asked = [job for task in tasks for job in jobs(args, task, full, warm, fresh)]
            for (kind, text, make), budget in product(asked, args.budgets):
                row = {"task": kind, "text": text, "system": name, "budget": budget}
                if why := refusal(warm.system, kind, budget):
                    yield row | {"why_skipped": f"{name} {why}"}
                    continue
                label = f"{name} {kind} {text} {percent(budget)}"
                row |= kept.part(f"{name} {kind} {text} {budget}", partial(make, budget))
                figures = [f"{key} {row[key]:.3g}" for key in PRINTED if key in row]
                print(f"{label}: {', '.join(figures)}", flush=True)
                yield row


def jobs(
    args: argparse.Namespace, task: Task | Extraction, full: Reference, warm: Engine, fresh: Engine
) -> Iterator[tuple[str, str, Callable[[Budget], Json]]]:
    """What is measured of a task: kind, text, and the row of a budget."""
    if isinstance(task, Extraction):
        yield "facts", task.text, partial(extracted, warm, full, task)
        return
    if task.kind in args.tasks or task.labels is not None:
        yield task.kind, task.text, partial(next_tokens, warm, fresh, full, task)
    if task.kind == "continuation" and "greedy" in args.tasks:
        yield "greedy", task.text, partial(greedy, warm, full, task, args.greedy)


def refusal(system: SystemConfig, kind: str, budget: Budget) -> str | None:
    """Why a system has no row of a task at a budget; None: it has one."""
    if kind in ("greedy", "facts") and not system.own.generates:
        return "computes first tokens only"
    if isinstance(budget, str) and system.own.selects == "token":
        return f"selects tokens: got {budget}, expected a share"
    return None


def grouped(rows: Sequence[Json], key: str) -> list[tuple[list[object], list[Json], object]]:
    """The rows with a figure `key` by task, budget and system: first cells, rows, last cell."""
    groups: dict[Any, list[Json]] = {}
    for row in rows:
        if key in row:
            place = row["task"], str(type(row["budget"])), row["budget"], row["system"]
            groups.setdefault(place, []).append(row)
    return [
        (
            [task, percent(budget), system, sum(row["questions"] for row in some)],
            some,
            100 * mean(some, "selected") if "selected" in some[0] else None,
        )
        for (task, _, budget, system), some in sorted(groups.items())
    ]


def summary_rows(rows: Sequence[Json]) -> list[list[object]]:
    """One line a task, system and budget: means over texts, weighted by questions."""
    out: list[list[object]] = []
    for head, some, last in grouped(rows, "kl"):
        asked, full = (sum(row[key] for row in some) for key in ("questions", "right_full"))
        kl, agree, read, *rest = (
            mean(some, key) for key in ("kl", "agree", "bytes", "reads", "ttft_ms", "covered")
        )
        out.append(
            [
                *head, kl, 100 * agree, 100 * sum(r["kept"] for r in some) / max(full, 1),
                100 * sum(r["right"] for r in some) / asked, 100 * full / asked,
                read / 2**20, *rest, last,
            ]
        )  # fmt: skip
    return out


HEADER = (
    "task", "budget", "system", "questions", "KL", "agree %", "kept %", "right %", "full %",
    "MiB", "packs", "ms", "covered", "selected %",
)  # fmt: skip
GENERATED = ("kl_per_token", "agree_per_token", "same_tokens"), ("f1", "f1_full")
"""Figures of `greedy` and of `facts`."""
PRINTED = ("kl", "agree", *GENERATED[0], *GENERATED[1], "selected")


def budget_of(text: str) -> Budget:
    """Parses a share of the prefix, or of the attention (`mass:0.8`)."""
    try:
        return parse_budget(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    p = command(__doc__)
    p.add_argument("--quick", action="store_true", help="one text, few questions, a few minutes")
    p.add_argument("--model", type=Path, help="folder or GGUF file (default: SmolLM2, fetched)")
    p.add_argument(
        "--texts", type=Path, nargs="+", default=[*map(Path, MANUAL)], metavar="FILE",
        help=f"plain text, also .gz, or a part of Python's manual: {', '.join(MANUAL)} (default)",
    )  # fmt: skip
    p.add_argument(
        "--dataset", type=Path, nargs="+", default=[], metavar="FILE",
        help="JSONL files of labelled texts, asked few-shot beside any other tasks",
    )  # fmt: skip
    p.add_argument(
        "--tasks", nargs="+", choices=(*TASKS, "few-shot"), default=list(TASKS), metavar="TASK",
        help=f"{', '.join(TASKS)}; few-shot: those of --dataset alone",
    )  # fmt: skip
    add_systems(p, SYSTEMS_MEASURED)
    p.add_argument(
        "--budgets", type=budget_of, nargs="+", default=list(BUDGETS), metavar="BUDGET",
        help="shares of a text, or of the attention: mass:0.8, mass:0.8:0.05-0.5",
    )  # fmt: skip
    p.add_argument("--tokens", type=positive, default=4000, help="tokens of a prefix")
    p.add_argument("--questions", type=positive, default=170, help="continuations of each text")
    p.add_argument("--labelled-questions", type=positive, default=400, help="of each dataset")
    p.add_argument("--greedy", type=positive, default=6, help="generations decoded per task")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of all KV")
    p.add_argument("--plot", type=result_file, help="draw the figure into this PNG")
    args = p.parse_args(argv)
    if "few-shot" in args.tasks and not args.dataset:
        p.error("got --tasks few-shot without --dataset, expected a file of labelled texts")
    for option in ("texts", "dataset"):
        names = [name_of(path) for path in getattr(args, option)]
        if twice := {name for name in names if names.count(name) > 1}:
            p.error(f"got --{option} with two files named {', '.join(twice)}, expected one of each")
    if args.quick:
        args.tokens, args.questions, args.labelled_questions = 1000, 8, 16
        args.greedy, args.budgets = 1, [0.25]
        args.systems = args.systems[:2]
        args.texts = [path for path in args.texts if str(path) not in [*MANUAL][1:]]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    args = parse(argv)
    config = EngineConfig(system="ckv", budget=1.0, dtype=args.dtype, warm_batch=0)
    try:
        args.model = args.model or fetch()
        about = {key: value for key, value in vars(args).items() if key not in ("json", "plot")}
        about["model"] = args.model.name
        about |= {key: [path.name for path in about[key]] for key in ("texts", "dataset")}
        kept = Kept(args.json, about)
        with (
            tempfile.TemporaryDirectory() as folder,
            Engine.from_pretrained(args.model, store=folder, config=config) as engine,
        ):
            rows = list(measure(args, engine, kept))
    except CheckpointError as error:
        raise SystemExit(str(error)) from error
    skipped = [row for row in rows if "why_skipped" in row]
    for why in dict.fromkeys(f"{r['task']}: {r['why_skipped']}" for r in skipped if "system" in r):
        print(why)
    if len(skipped) == len(rows):
        print("nothing can be measured: nothing is written")
        raise SystemExit(3)
    if found := summary_rows(rows):
        print(table(found, HEADER))
    for keys in GENERATED:
        if found := [
            [*head, *(mean(some, key) for key in keys), last]
            for head, some, last in grouped(rows, keys[0])
        ]:
            print(table(found, (*HEADER[:4], *keys, HEADER[-1])))
    result = finish(args, {"setting": about, "rows": rows, **kept.said()})
    kept.forget()
    save("fidelity", result, args.plot)
    if any("system" not in row for row in skipped):
        raise SystemExit(3)


if __name__ == "__main__":
    main()
