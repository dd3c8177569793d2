"""What decode windows save: hit rates and bytes over choices of the shipped checkpoint.

    python -m bench.decode_cache --json OUT [--quick] [--plot PNG]

`bench.decode_traces` records what every token of many sequences chooses, at budgets of 1.56, 3.1
and 6.25%: by int4 keys, all heads and four layers together (`ckv`'s), by the last token alone or by
the last 4 or 16, and by means, each head and layer by itself (KVDrive's). The sequences are either
filler sentences with a question at the end, or questions with their answers one after the other, so
that the topic changes every few tokens; "right" is the share of answers that were. The recorded
choices are run through `cache.window.advance` at every way of keeping and at windows of 0 to 4
times one choice; Belady's is the same function, told the future. Windows begin empty; the first 16
steps are reported apart.

Widths by layer and head are chosen on one half of the documents and judged on the other. Intervals
are bootstrapped over sequences (95%, percentiles of 2,000 resamples), in pairs where two ways are
compared. What misses its bar is said in the output and in the JSON: `{"parts": [{"trace",
"choosing", "budget", "right", "rows": [{"keep", "times", "hits", "ci95", "first_hits",
"bytes_per_token"}], "leads", "widths"}], "bars"}`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from bench.common import Json, finish, positive, result_file, table
from bench.decode_traces import CHOOSING, CHUNK, STEADY, Choosing, Trace, Tracer
from bench.figures import save
from bench.tasks.suffixes import Told, lengthened, retold, told
from ckv_jax.cache.replay import misses_by_width, replay
from ckv_jax.cache.widths import TIMES, spread
from ckv_jax.cache.window import KEEP, Keep, empty_window, lookahead_within
from ckv_jax.data.ledger import Ledger
from ckv_jax.data.reference import LEARNED, demo_ledger, reference_folder
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.weights import load_pretrained

BUDGETS = (1 / 64, 1 / 32, 1 / 16)
WINDOWS = (1, 2, 3, 4)
"""Times one choice; 0 fetches everything at every step."""
KEEPS = ("lru", "lfu", "lookahead of 1.25", "lookahead", "belady")
FIRST = 16
"""Steps that fill the window."""
MEAN_TIMES = 2.0
"""Of 2D widths: the device memory that they share."""
BARS = {"lead": 0.01, "hits": 0.80, "fewer_bytes": 40.0, "widths": 0.95}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is recorded."""

    documents: int = 4
    sequences: int = 8
    steps: int = 64
    tokens: int = 4096
    budgets: tuple[float, ...] = BUDGETS
    choosing: tuple[Choosing, ...] = CHOOSING


def sequences_of(page: Ledger, setting: Setting, seed: int) -> Iterator[tuple[str, Told]]:
    """Both kinds of sequences over one document."""
    few = type(page)(**{name: getattr(page, name) if name == "tokens" else
                        getattr(page, name)[: setting.sequences]
                        for name in page.__slots__})  # fmt: skip
    yield "fillers, then a question", told(lengthened(few, setting.steps, seed))
    yield "questions and answers", retold(page, setting.sequences, setting.steps, seed)


def keep_of(name: str, trace: Trace) -> tuple[Keep, np.ndarray]:
    """A way of keeping, and the scores it is to see."""
    if name == "belady":
        return KEEP["lookahead"], -next_choice(trace.ids, trace.scores.shape[-1])
    if name == "lookahead of 1.25":
        return lookahead_within(int(np.ceil(1.25 * trace.ids.shape[-1]))), trace.scores
    return KEEP[name], trace.scores


def next_choice(ids: np.ndarray, chunks: int) -> np.ndarray:
    """float32 [T, S, R, M]: the step after each at which a chunk is chosen next, inf for none."""
    after = np.full((*ids.shape[:3], chunks), np.inf, np.float32)
    later = np.full(after.shape[1:], np.inf, np.float32)
    for step in range(len(ids) - 1, -1, -1):
        after[step] = later
        np.put_along_axis(later, ids[step], np.float32(step), axis=-1)
    return after


def missed(trace: Trace, slots: np.ndarray, keep: str) -> np.ndarray:
    """Fetched chunks int [T, S, R] with windows of so many `slots` [R]."""
    steps, sequences, rows, count = trace.ids.shape
    how, scores = keep_of(keep, trace)
    limits = np.full(sequences * rows, count)
    window = empty_window(np.tile(slots, sequences), limits)
    ids = trace.ids.reshape(steps, -1, count)
    found = replay(window, ids, scores.reshape(steps, sequences * rows, -1), how)
    return np.asarray(found).reshape(steps, sequences, rows)


def fetched(traces: Sequence[Trace], keep: str, times: float) -> np.ndarray:
    """Share of its chosen chunks that each sequence fetched at each step, [T, S of all]."""
    shares = []
    for trace in traces:
        rows, count = trace.ids.shape[2:]
        found = missed(trace, np.full(rows, round(times * count)), keep)
        shares.append(found.mean(2) / count)
    return np.concatenate(shares, axis=1)


def interval(values: Sequence[np.ndarray], statistic: Callable[..., Any]) -> list[float]:
    """95% bootstrap interval of a statistic of per-sequence values, resampled together."""
    found = stats.bootstrap(
        tuple(values), statistic, paired=True, vectorized=True, n_resamples=2000,
        method="percentile", rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return [float(found.low), float(found.high)]


def mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Of one sample."""
    return np.asarray(values.mean(axis))


def difference(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
    """Of two means."""
    return np.asarray(a.mean(axis) - b.mean(axis))


def ratio(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
    """Of two means."""
    return np.asarray(a.mean(axis) / b.mean(axis))


def compare(traces: Sequence[Trace], choosing: Choosing, config: ModelConfig) -> Json:
    """Hits and bytes of every way of keeping at every window, and lookahead's leads at x2."""
    count = traces[0].ids.shape[3]
    chosen = choosing.rows(config) * count * choosing.pack_bytes(config)
    rows: list[Json] = [{"keep": "none", "times": 0, "hits": 0.0, "bytes_per_token": chosen}]
    shares: dict[tuple[str, int], np.ndarray] = {}
    for times in WINDOWS:
        for keep in KEEPS if times > 1 else ("lru",):  # at x1 all are the same
            steps = fetched(traces, keep, times)
            shares[keep, times] = share = steps[FIRST:].mean(0)
            low, high = interval([share], mean)
            rows.append({
                "keep": keep if times > 1 else "any", "times": times,
                "hits": float(1 - share.mean()), "ci95": [1 - high, 1 - low],
                "first_hits": float(1 - steps[:FIRST].mean()),
                "bytes_per_token": float(share.mean() * chosen),
            })  # fmt: skip
    leads = []
    for other in KEEPS:
        if other != "lookahead":
            pair = [shares[other, 2], shares["lookahead", 2]]
            leads.append({
                "keep": "lookahead", "over": other, "times": 2,
                "points": float(difference(*pair)), "ci95": interval(pair, difference),
            })  # fmt: skip
    return {"rows": rows, "leads": leads}


def by_width(traces: Sequence[Trace], choosing: Choosing, config: ModelConfig) -> Json:
    """2D widths from the first half of the documents against even ones on the other half."""
    half = len(traces) // 2
    count = traces[0].ids.shape[3]
    widths = np.unique(np.round(np.array(TIMES) * count).astype(np.int32))
    profile = sum(
        misses_by_width(t.ids, t.scores, widths, KEEP["lookahead"], skip=FIRST)
        for t in traces[:half]
    )
    cost = np.tile(widths, (len(profile), 1))
    limit = round(MEAN_TIMES * count) * len(profile)
    slots = widths[spread(-profile, cost, limit)]
    even = np.full(len(profile), round(MEAN_TIMES * count))
    pair = []
    for chosen in (slots, even):
        found = [missed(t, chosen, "lookahead")[FIRST:].mean((0, 2)) for t in traces[half:]]
        pair.append(np.concatenate(found) * len(profile) * choosing.pack_bytes(config))
    return {
        "mean_times": MEAN_TIMES,
        "options": [float(w / count) for w in widths],
        "times": (slots / count).reshape(-1, choosing.heads_apart(config)).tolist(),
        "slots": [int(slots.sum()), int(even.sum())],
        "bytes_per_token": [float(p.mean()) for p in pair],
        "ratio": float(ratio(*pair)),
        "ci95": interval(pair, ratio),
    }


def bars(found: Sequence[Json]) -> list[Json]:
    """What was to be shown, whether it was, and what somebody who knows the future would show."""
    out: list[Json] = []
    for part in found:
        rows = {(row["keep"], row["times"]): row for row in part["rows"]}
        about = {name: part[name] for name in ("trace", "choosing", "budget")}

        def show(
            claim: str, name: str, value: float, ci95: Sequence[float], belady: float | None,
            met: bool, about: Json = about,
        ) -> None:  # fmt: skip
            out.append(about | {"claim": claim, "value": value, "ci95": list(ci95),
                                "belady": belady, "bar": BARS[name], "met": met})  # fmt: skip

        hits, best = rows["lookahead", 2], rows["belady", 2]["hits"]
        (lead,) = [lead for lead in part["leads"] if lead["over"] == "lru"]
        met = lead["points"] >= BARS["lead"] and lead["ci95"][0] > 0
        show("lookahead's hits less LRU's at x2", "lead", lead["points"], lead["ci95"],
             best - rows["lru", 2]["hits"], met)  # fmt: skip
        show("lookahead's hits at x2", "hits", hits["hits"], hits["ci95"], best,
             hits["hits"] >= BARS["hits"])  # fmt: skip
        if part["budget"] == BUDGETS[-1]:
            wide = rows["lookahead", 3]
            fewer = _times_fewer(wide["hits"])
            show("bytes at x0 over bytes at x3", "fewer_bytes", fewer,
                 [_times_fewer(x) for x in wide["ci95"]],
                 _times_fewer(rows["belady", 3]["hits"]), fewer >= BARS["fewer_bytes"])  # fmt: skip
        widths = part["widths"]
        show("bytes of 2D widths over even ones", "widths", widths["ratio"], widths["ci95"], None,
             widths["ratio"] <= BARS["widths"])  # fmt: skip
    return out


def _times_fewer(hits: float) -> float:
    """Bytes without a window over bytes at this share of hits."""
    return 1 / max(1e-9, 1 - hits)


def run(model: Any, setting: Setting) -> Json:
    """Everything: traces, replays, widths, bars."""
    pages = [demo_ledger(seed, setting.tokens, asked=LEARNED) for seed in range(setting.documents)]
    tracers = [Tracer(model, page.tokens) for page in pages]
    told_by_page = [dict(sequences_of(page, setting, seed)) for seed, page in enumerate(pages)]
    found = []
    for name, choosing, budget in product(told_by_page[0], setting.choosing, setting.budgets):
        began = time.monotonic()
        traces = [
            tracer.record(choosing, sequences[name], budget)
            for tracer, sequences in zip(tracers, told_by_page, strict=True)
        ]
        found.append({
            "trace": name, "choosing": choosing.name, "budget": budget,
            "chunks": traces[0].ids.shape[3], "rows_of_windows": choosing.rows(model.config),
            "right": float(np.mean([trace.right for trace in traces])),
            **compare(traces, choosing, model.config),
            "widths": by_width(traces, choosing, model.config),
        })  # fmt: skip
        took = time.monotonic() - began
        print(f"{name}; {choosing.name}; {budget:.2%}: {took:.0f} s", flush=True)
    return {"parts": found, "bars": bars(found)}


def show(result: Mapping[str, Any]) -> str:
    """Hits in percent, then the bars."""
    lines = []
    for part in result["parts"]:
        label = f"{part['trace']}; {part['choosing']}; {part['budget']:.2%}"
        label += f" ({100 * part['right']:.0f}% right)"
        cells = {(row["keep"], row["times"]): f"{100 * row['hits']:.1f}" for row in part["rows"]}
        for keep in KEEPS:
            hits = [cells["any", 1], *(cells[keep, times] for times in WINDOWS[1:])]
            lines.append([label, keep, *hits])
            label = ""
    head = table(lines, ("hits, %", "keep", *(f"x{times}" for times in WINDOWS)))
    told_bars = [
        [bar["claim"], bar["trace"], bar["choosing"], f"{bar['budget']:.2%}",
         f"{bar['value']:.3f}", f"{bar['ci95'][0]:.3f} to {bar['ci95'][1]:.3f}",
         "" if bar["belady"] is None else f"{bar['belady']:.3f}", f"{bar['bar']:g}",
         "met" if bar["met"] else "MISSED"]
        for bar in result["bars"]
    ]  # fmt: skip
    columns = ("claim", "trace", "choosing", "budget", "value", "95%", "Belady", "bar", "")
    return head + "\n\n" + table(told_bars, columns)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=result_file, required=True, help="write the report here")
    parser.add_argument("--plot", type=result_file, help="draw hits against windows here (PNG)")
    parser.add_argument("--quick", action="store_true", help="two documents, one budget")
    parser.add_argument("--documents", type=positive, help="ledgers, at least 2")
    parser.add_argument("--sequences", type=positive, help="of each kind and document")
    args = parser.parse_args()
    small = {"documents": 2, "sequences": 4, "budgets": BUDGETS[-1:]} if args.quick else {}
    said = {name: getattr(args, name) for name in ("documents", "sequences") if getattr(args, name)}
    if args.documents == 1:
        parser.error("got --documents 1, expected 2 at least: intervals are of how they differ")
    setting = Setting(**small | said)
    folder: Path = reference_folder()
    result = run(load_pretrained(folder, dtype="float32"), setting)
    print(show(result))
    about = {
        "checkpoint": folder.name, "documents": setting.documents,
        "sequences": setting.sequences, "steps": setting.steps, "first_steps": FIRST,
        "prefix_tokens": setting.tokens, "chunk_tokens": CHUNK, "steady_tokens": STEADY,
        "budgets": setting.budgets,
    }  # fmt: skip
    save("decode_cache", finish(args, None, about | result), args.plot)


if __name__ == "__main__":
    main()
