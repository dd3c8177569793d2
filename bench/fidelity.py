"""Fidelity of small budgets on a real model: every system against full attention on real text.

    python -m bench.fidelity [--model DIR] [--quick] [--json OUT] [--plot OUT.png]

Tasks: `continuation` (the text goes on), `recall` (a passage is begun again and must go on word by
word), `needle` (facts in plain words), `facts` (two tables, written out again whole by decode),
few-shot classification with `--dataset FILE...` (`{"text", "label"}` lines, files named after sst2,
subj or trec), and `greedy` (128 tokens of decode after continuations). The reference of each is the
same engine at budget 1.0.

JSON: `{"rows": [{"task", "text", "system", "budget", "questions", "kl", "kl_median", "agree",
"perplexity_ratio", "right", "right_full", "kept", "bytes", "reads", "covered", "covered_least",
"ttft_ms"}]}`. `kl` is KL(full || system) of the next token in nats, `agree` the share of questions
with full attention's first token, `perplexity_ratio` exp of the mean loss of the true next token
less full attention's, `kept` the share of what full attention answers right that stays right, and
`bytes`, `reads` and `ttft_ms` are those of cold requests, asked one at a time. A row of `facts` has
`f1` and `f1_full`. A row of `greedy` is of full attention's text, which the system is led along:
`same_tokens` before its own choice is another one, `agree_per_token`, and `kl_per_token` over the
tokens that both have among their 20 likeliest and all others as one, which is at most the whole KL.
A task that cannot be made has a row with `why_skipped`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from bench.common import (
    Json,
    budget_share,
    command,
    existing_path,
    finish,
    positive,
    result_file,
    system_name,
    table,
)
from bench.fidelity_tasks import (
    Extraction,
    Question,
    Task,
    continuations,
    extractions,
    f1,
    labelled,
    needles,
    read_texts,
    recalls,
)
from bench.figures import save
from bench.figures.fidelity import mean
from bench.kept import Kept
from ckv_jax import Engine, EngineConfig, Generation, Request, SamplingParams
from ckv_jax.data.smollm2 import fetch
from ckv_jax.errors import CheckpointError
from ckv_jax.model.sampling import MOST_LOGPROBS, Logprobs
from ckv_jax.systems import SYSTEMS

SYSTEMS_MEASURED = ("ckv", "contiguous-kv", "impress", "as-h2o-lfu")
BUDGETS = (0.05, 0.10, 0.25)
TASKS = ("continuation", "recall", "needle", "facts", "greedy")
BATCH = 8
"""Questions that are asked together."""
COLD = 6
"""Questions of a task that are asked one at a time, for bytes, reads and milliseconds."""
GREEDY_TOKENS = 128


class Reference:
    """Full attention's answers, by task."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._logits: dict[int, np.ndarray] = {}
        self._greedy: dict[tuple[int, int], list[Generation]] = {}

    def of(self, task: Task) -> np.ndarray:
        """Log probabilities float32 [Q, V] of the next token."""
        if id(task) not in self._logits:
            self._logits[id(task)] = log_softmax(logits_of(self._engine, task, 1.0)[0])
        return self._logits[id(task)]

    def greedy(self, task: Task, count: int) -> list[Generation]:
        """Greedy generations, up to GREEDY_TOKENS, of a task's first questions."""
        key = id(task), count
        if key not in self._greedy:
            asked = task.questions[:count]
            sampling = SamplingParams(max_tokens=GREEDY_TOKENS, logprobs=MOST_LOGPROBS)
            self._greedy[key] = decoded(self._engine, task.prefix, asked, 1.0, sampling)
        return self._greedy[key]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities of logits float32 [Q, V]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    out: np.ndarray = (wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))).astype(np.float32)
    return out


def logits_of(
    engine: Engine, task: Task, budget: float, *, batch: int = BATCH, most: int | None = None
) -> tuple[np.ndarray, list[Json]]:
    """Logits float32 [Q, V] of a task's questions, and what each request's trace counted."""
    prefix = engine.ingest(task.prefix)
    asked = task.questions[:most]
    logits, counted = [], []
    for start in range(0, len(asked), batch):
        requests = [
            Request(prefix=prefix, suffix=question.suffix.tolist(), budget=budget)
            for question in asked[start : start + batch]
        ]
        for result in engine.reprefill(requests):
            result.raise_for_error()
            logits.append(result.logits)
            trace = result.trace
            reads = sum(span.args.get("packs", 0) for span in trace.spans if span.lane == "ssd")
            counted.append(
                {
                    "bytes": trace.bytes["ssd"],
                    "reads": reads,
                    "covered": trace.attention_mass,
                    "covered_least": min(trace.period_attention_mass, default=1.0),
                    "ttft_ms": trace.ttft_ms,
                }
            )
    return np.stack(logits), counted


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
    engine: Engine, prefix: np.ndarray, asked: Sequence[Question], budget: float,
    sampling: SamplingParams | Sequence[SamplingParams],
) -> list[Generation]:  # fmt: skip
    """What follows each question."""
    stored = engine.ingest(prefix)
    requests = [Request(prefix=stored, suffix=q.suffix.tolist(), budget=budget) for q in asked]
    texts = engine.generate(requests, sampling).results()
    for text in texts:
        text.raise_for_error()
    return texts


def greedy(engine: Engine, full: Reference, task: Task, budget: float, count: int) -> Json:
    """How decode under a budget follows full attention's greedy texts."""
    texts = full.greedy(task, count)
    led = [
        SamplingParams(
            max_tokens=len(text.token_ids), forced_ids=tuple(map(int, text.token_ids)),
            logprobs=MOST_LOGPROBS,
        )
        for text in texts
    ]  # fmt: skip
    same, kl, until = [], [], []
    for one, other in zip(
        texts, decoded(engine, task.prefix, task.questions[:count], budget, led), strict=True
    ):
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


def extracted(engine: Engine, task: Extraction, budget: float) -> float:
    """Mean F1 of the rows of a text's tables."""
    assert engine.tokenizer is not None
    sampling = SamplingParams(max_tokens=task.tokens)
    texts = decoded(engine, task.prefix, task.questions, budget, sampling)
    found = [
        f1(engine.tokenizer.decode(text.token_ids), rows)
        for text, rows in zip(texts, task.rows, strict=True)
    ]
    return float(np.mean(found))


def tasks_of(args: argparse.Namespace, engine: Engine) -> Iterator[Task | Extraction | Json]:
    """Every task, or a row that says why one is left out."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    gap = tokenizer.encode("\n\n")
    wanted = {*args.tasks, *(["continuation"] if "greedy" in args.tasks else [])}
    for name, text in read_texts(args.texts).items():
        tokens = np.asarray(tokenizer.encode(text, begins=True), np.int32)
        makers = {
            "continuation": partial(continuations, count=args.questions),
            "recall": partial(recalls, count=args.questions // 2, gap=gap),
            "needle": partial(needles, tokenizer=tokenizer),
            "facts": partial(extractions, tokenizer=tokenizer),
        }
        for kind, make in makers.items():
            if kind in wanted:
                try:
                    yield fitting(engine, make(name, tokens, args.tokens), args.tasks)
                except ValueError as error:
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
    tasks, tables = [], []
    for task in tasks_of(args, engine):
        if isinstance(task, Task):
            tasks.append(task)
        elif isinstance(task, Extraction):
            tables.append(task)
        else:
            print(f"{task['task']} of {task['text']} is left out: {task['why_skipped']}")
            yield task
    reference = Reference(engine)
    cold = replace(engine.config, device_cache_bytes=0, host_cache_bytes=0)
    for name in args.systems:
        with (
            engine.variant(replace(engine.config, system=name)) as warm,
            engine.variant(replace(cold, system=name)) as fresh,
        ):
            asked = [t for t in tasks if t.kind in args.tasks or t.labels is not None]
            for task, budget in product(asked, args.budgets):
                yield kept.part(
                    f"{name} {task.kind} {task.text} {budget:g}",
                    partial(_row, name, warm, fresh, reference, task, budget),
                )
            if warm.system.decode is None:
                continue
            for task, budget in product(tasks, args.budgets):
                if task.kind == "continuation" and "greedy" in args.tasks:
                    yield kept.part(
                        f"{name} greedy {task.text} {budget:g}",
                        partial(_greedy_row, name, warm, reference, task, budget, args.greedy),
                    )
            for table_task, budget in product(tables, args.budgets):
                yield kept.part(
                    f"{name} facts {table_task.text} {budget:g}",
                    partial(_facts_row, name, warm, engine, table_task, budget),
                )


def _row(
    name: str, warm: Engine, fresh: Engine, reference: Reference, task: Task, budget: float
) -> Json:
    full = reference.of(task)
    logits, counted = logits_of(warm, task, budget)
    _, single = logits_of(fresh, task, budget, batch=1, most=COLD)
    row = {"task": task.kind, "text": task.text, "system": name, "budget": budget}
    row |= {"prefix_tokens": len(task.prefix), **compared(task, full, log_softmax(logits))}
    row |= {key: float(np.mean([c[key] for c in single])) for key in ("bytes", "reads")}
    row["ttft_ms"] = float(np.median([c["ttft_ms"] for c in single]))
    row |= {
        key: float(np.mean([c[key] for c in counted if c[key] is not None] or [np.nan]))
        for key in ("covered", "covered_least")
    }
    print(
        f"{name} {task.kind} {task.text} {budget:.0%}: KL {row['kl']:.3f}, "
        f"agrees {row['agree']:.0%}, keeps {row['kept']} of {row['right_full']}",
        flush=True,
    )
    return row


def _greedy_row(
    name: str, warm: Engine, full: Reference, task: Task, budget: float, count: int
) -> Json:
    found = greedy(warm, full, task, budget, count)
    print(
        f"{name} greedy {task.text} {budget:.1%}: {found['same_tokens']:.1f} tokens, "
        f"agrees {found['agree_per_token']:.0%}, KL {found['kl_per_token']:.3f}",
        flush=True,
    )
    return {"task": "greedy", "text": task.text, "system": name, "budget": budget, **found}


def _facts_row(name: str, warm: Engine, full: Engine, task: Extraction, budget: float) -> Json:
    found, whole = extracted(warm, task, budget), extracted(full, task, 1.0)
    print(f"{name} facts {task.text} {budget:.0%}: F1 {found:.2f}, in full {whole:.2f}", flush=True)
    row: Json = {"task": "facts", "text": task.text, "system": name, "budget": budget}
    return row | {"questions": len(task.questions), "f1": found, "f1_full": whole}


def summary_rows(rows: Sequence[Json]) -> list[list[object]]:
    """One line a task, system and budget: means over texts, weighted by questions."""
    groups: dict[tuple[str, float, str], list[Json]] = {}
    for row in rows:
        if "kl" in row:
            groups.setdefault((row["task"], row["budget"], row["system"]), []).append(row)
    out: list[list[object]] = []
    for (task, budget, system), some in sorted(groups.items()):
        asked = sum(r["questions"] for r in some)
        full = sum(r["right_full"] for r in some)
        kl, agree, read, *rest = (
            mean(some, key) for key in ("kl", "agree", "bytes", "reads", "ttft_ms", "covered")
        )
        out.append(
            [
                task, f"{budget:.0%}", system, asked, kl, 100 * agree,
                100 * sum(r["kept"] for r in some) / max(full, 1),
                100 * sum(r["right"] for r in some) / asked, 100 * full / asked,
                read / 2**20, *rest,
            ]
        )  # fmt: skip
    return out


HEADER = (
    "task", "budget", "system", "questions", "KL", "agree %", "kept %", "right %", "full %",
    "MiB", "reads", "ms", "covered",
)  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    p = command(__doc__)
    p.add_argument("--quick", action="store_true", help="one text, few questions, a few minutes")
    p.add_argument(
        "--model", type=existing_path, help="folder or GGUF file (default: SmolLM2, fetched)"
    )
    p.add_argument("--texts", type=existing_path, nargs="+", default=[], help="plain text files")
    p.add_argument(
        "--dataset", type=existing_path, nargs="+", default=[], help="JSONL files of labelled texts"
    )
    p.add_argument("--tasks", nargs="+", default=list(TASKS), help=", ".join(TASKS))
    p.add_argument(
        "--systems", nargs="+", type=system_name, default=list(SYSTEMS_MEASURED), metavar="SYSTEM",
        help=f"{', '.join(SYSTEMS)}, or package.module:NAME",
    )  # fmt: skip
    p.add_argument("--budgets", type=budget_share, nargs="+", default=list(BUDGETS))
    p.add_argument("--tokens", type=positive, default=4000, help="tokens of a prefix")
    p.add_argument("--questions", type=positive, default=170, help="continuations of each text")
    p.add_argument(
        "--labelled-questions", type=positive, default=400, help="questions of each dataset"
    )
    p.add_argument("--greedy", type=positive, default=6, help="generations decoded per task")
    p.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="element type"
    )
    p.add_argument("--plot", type=result_file, help="draw the figure into this PNG")
    args = p.parse_args(argv)
    if args.quick:
        args.tokens, args.questions, args.labelled_questions = 1000, 8, 16
        args.greedy, args.budgets = 1, [0.25]
        args.systems = args.systems[:2]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    args = parse(argv)
    if args.model is None:
        try:
            args.model = fetch()
        except CheckpointError as error:
            raise SystemExit(str(error)) from error
    about: Json = {key: value for key, value in vars(args).items() if key not in ("json", "plot")}
    about["model"] = args.model.name
    about |= {key: [path.name for path in about[key]] for key in ("texts", "dataset")}
    kept = Kept(args.json, about)
    config = EngineConfig(system="ckv", budget=1.0, dtype=args.dtype, warm_batch=0)
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine.from_pretrained(args.model, store=folder, config=config) as engine,
    ):
        rows = list(measure(args, engine, kept))
    print(table(summary_rows(rows), HEADER))
    result = finish(args, {"setting": about, "rows": rows, **kept.said()})
    kept.forget()
    save("fidelity", result, args.plot)


if __name__ == "__main__":
    main()
