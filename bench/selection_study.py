"""Which chunks, chosen how: accuracy and recall of selection rules on the reference checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from bench.oracle import Answers, Oracle, Rule, best
from ckv_jax.data.ledger import FAMILIES, Ledger
from ckv_jax.model.decoder import Transformer

__all__ = [
    "coverage",
    "half_widths",
    "interval",
    "paired_interval",
    "quick_rules",
    "rules",
    "study",
    "tally",
    "traces",
]

Say = Callable[[str], None]


def quick_rules() -> dict[str, Rule]:
    """Periods, digests, windows and scoring layers at 5%: what decides the presets."""
    named = {f"period {every}": Rule(budget=0.05, every=every) for every in (1, 2, 4, 8, 16)}
    for kind in ("keys", "int8", "int4", "int3", "pq8", "pq16", "mean"):
        named[f"period 4, {kind}, last 4 queries"] = Rule(
            budget=0.05, every=4, probe=kind, window=4
        )
    for every in (2, 4, 8):
        ours = Rule(budget=0.05, every=every, probe="int8", window=4)
        for layers in (1, 2, 3, 4) if every > 2 else (1, 2):
            name = f"period {every}, int8, last 4 queries, {layers} layers score"
            named[name] = replace(ours, layers=layers)
    ours = Rule(budget=0.05, every=4, probe="int8")
    for window in (1, 2, 8):
        named[f"period 4, int8, last {window} queries"] = replace(ours, window=window)
    named["period 4, int8, last 4 queries, first chunk kept"] = replace(
        ours, window=4, keep_first=1
    )
    named["period 4, int8, last 4 queries, each KV head its own"] = replace(
        ours, window=4, heads="each"
    )
    named["period 4, int8, last 4 queries, largest share"] = replace(ours, window=4, over="max")
    two = Rule(budget=0.05, every=4, probe="int4", window=4, layers=3)
    named["period 4, int4, last 4 queries, 3 layers score"] = two
    for kind, times in (("int4", 4), ("int4", 8), ("mean", 8)):
        name = f"period 4, one query of a layer's {kind} leaves {times} x, then int4"
        named[name] = replace(two, coarse=kind, survivors=times)
    for size in (4, 8, 32):
        named[f"period 4, chunks of {size}"] = Rule(budget=0.05, every=4, chunk_tokens=size)
    return named


def rules() -> dict[str, Rule]:
    """Every rule of the study, by name; each varies one thing."""
    named: dict[str, Rule] = {}
    for budget in (0.05, 0.10, 0.25, 0.50):
        percent = f"{budget:.0%}"
        for every in (1, 2, 4, 8, 16):
            named[f"period {every} at {percent}"] = Rule(budget=budget, every=every)
        named[f"period 4, int8 at {percent}"] = Rule(budget=budget, every=4, probe="int8")
    base = Rule(budget=0.05)
    for tokens in (4, 8, 32):
        for every in (4, 8):
            name = f"chunks of {tokens}, period {every}"
            named[name] = replace(base, every=every, chunk_tokens=tokens)
    for kind in ("int4", "int3", "pq8", "pq16", "mean", "heads3"):
        named[f"period 4, {kind}"] = replace(base, every=4, probe=kind)
    for kind in ("int8", "int4", "int3", "pq8", "pq16", "mean"):
        named[f"every layer, {kind}"] = replace(base, every=1, probe=kind)
    for every in (2, 4, 8):
        ours = replace(base, every=every, probe="int8")
        start = f"period {every}, int8"
        for window in (1, 2, 4, 8):
            late = replace(ours, window=window)
            for layers in (1, 2, 3, every) if every > 2 else (1, 2):
                name = f"{start}, last {window} queries, {layers} layers score"
                named[name] = replace(late, layers=layers)
        ours = replace(ours, window=4)
        named[f"{start}, last 4 queries, each KV head its own"] = replace(ours, heads="each")
        named[f"{start}, last 4 queries, largest share"] = replace(ours, over="max")
        named[f"{start}, last 4 queries, first chunk kept"] = replace(ours, keep_first=1)
        named[f"{start}, last 4 queries, first and last kept"] = replace(
            ours, keep_first=1, keep_last=1
        )
    return named


def interval(right: int, asked: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    low, high = binomtest(right, asked).proportion_ci(method="wilson")
    return float(low), float(high)


def paired_interval(right: Sequence[bool], others: Sequence[bool]) -> dict[str, Any]:
    """How much larger one share of right answers is than another over the same questions, and the
    95% interval of that: Wilson's of both shares, put together by how far their answers agree.

    Newcombe, "Improved confidence intervals for the difference between binomial proportions based
    on paired data", Statistics in Medicine 17 (1998), method 10. Unlike a bootstrap's it is not
    empty where no answer differs.
    """
    mine, theirs = np.asarray(right, bool), np.asarray(others, bool)
    asked, count, other = len(mine), int(mine.sum()), int(theirs.sum())
    both = int((mine & theirs).sum())
    agree = float(both * asked - count * other)  # right alike x wrong alike - the other two
    spread = (count * (asked - count) * other * (asked - other)) ** 0.5
    if agree > 0:
        agree = max(0.0, agree - asked / 2)  # his correction for continuity
    phi = agree / spread if spread else 0.0
    p, q = count / asked, other / asked
    (p_low, p_high), (q_low, q_high) = interval(count, asked), interval(other, asked)

    def reach(own: float, its: float) -> float:
        return float(max(0.0, own**2 - 2 * phi * own * its + its**2) ** 0.5)

    low, high = reach(p - p_low, q_high - q), reach(p_high - p, q - q_low)
    return {"difference": p - q, "ci95": [p - q - low, p - q + high]}


def half_widths(asked: int) -> dict[str, float]:
    """Half of Wilson's 95% interval where 70, 90 and 98% of so many answers are right: what number
    of documents is enough to tell."""
    found = {}
    for share in (0.70, 0.90, 0.98):
        low, high = interval(round(share * asked), asked)
        found[f"{share:.0%}"] = round((high - low) / 2, 4)
    return found


def study(
    model: Transformer, named: dict[str, Rule], pages: Sequence[Ledger], *, say: Say = print
) -> list[dict[str, Any]]:
    """One row a rule and task ("all" is their mean over questions).

    `chunk_recall` is the share of the chunks that a layer would have chosen after full attention
    that it was given, over layers and questions; `needle` the share of layers that were given the
    chunk with the deciding token.
    """
    tallies: dict[str, list[np.ndarray]] = {name: [] for name in ("full", *named)}
    for number, page in enumerate(pages):
        oracle = Oracle(model, page)
        full = {16: oracle.full()}
        tallies["full"].append(tally(oracle, Rule(), full[16], full[16]))
        for name, rule in named.items():
            size = rule.chunk_tokens
            if size not in full:
                full[size] = oracle.full(size)
            tallies[name].append(tally(oracle, rule, oracle.ask(rule), full[size]))
        say(f"document {number}: {len(named)} rules")
    return [
        row
        for name, parts in tallies.items()
        for row in _rows(name, named.get(name, Rule()), np.concatenate(parts))
    ]


def tally(oracle: Oracle, rule: Rule, got: Answers, full: Answers) -> np.ndarray:
    """float [Q, 4]: family, right, recall, needle."""
    page = oracle.page
    right = got.logits.argmax(-1) == page.answers
    count = rule.count(len(page.tokens))
    wanted = best(full.scores, count)
    recall = (got.chosen & wanted).sum((0, 2)) / (len(wanted) * count)
    needle = np.take_along_axis(
        got.chosen, (page.needles // rule.chunk_tokens)[None, :, None], axis=2
    ).mean((0, 2))
    return np.stack([page.families, right, recall, needle], axis=1)


def _rows(name: str, rule: Rule, tally: np.ndarray) -> Iterable[dict[str, Any]]:
    for index, family in enumerate((*FAMILIES, "all")):
        mine = tally if family == "all" else tally[tally[:, 0] == index]
        if not len(mine):
            continue
        right, asked = int(mine[:, 1].sum()), len(mine)
        yield {
            "name": name,
            "rule": asdict(rule),
            "task": family,
            "accuracy": right / asked,
            "ci95": interval(right, asked),
            "questions": asked,
            "chunk_recall": float(mine[:, 2].mean()),
            "needle": float(mine[:, 3].mean()),
        }


def coverage(model: Transformer, pages: Sequence[Ledger], *, budget: float) -> list[dict[str, Any]]:
    """How much of a layer's true choice an earlier layer knew, `distance` layers before.

    `previous`: by the choice it made itself (the paper's Figure 7b); `lookahead`: by the later
    layer's query weights applied to its own hidden state.
    """
    rows = []
    oracles = [Oracle(model, page) for page in pages]
    count = Rule(budget=budget).count(len(pages[0].tokens))
    for distance in (1, 2, 4, 8):
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for oracle in oracles:
            full = oracle.ask(Rule(every=distance), watch=True)
            true = best(full.scores, count)[distance:]
            before = best(full.scores, count)[:-distance]
            guess = best(full.ahead, count)[:-distance]
            found.append(((true & before).sum(2) / count, (true & guess).sum(2) / count))
        previous, ahead = (np.concatenate(part, axis=1) for part in zip(*found, strict=True))
        rows.append(
            {
                "distance": distance,
                "budget": budget,
                "previous": float(previous.mean()),
                "lookahead": float(ahead.mean()),
                "previous_by_layer": previous.mean(1).tolist(),
                "lookahead_by_layer": ahead.mean(1).tolist(),
            }
        )
    return rows


def traces(model: Transformer, named: dict[str, Rule], pages: Sequence[Ledger], path: Path) -> None:
    """Chosen chunks of many questions, for `bench.cache_policies --traces`.

    For each rule an int16 array `[documents, questions, groups, n]` of chunk ids under its name,
    and under `NAME attention` float32 `[documents, questions, groups, chunks]`: Equation 1's A of
    every chunk, by the true keys of the layer that chose. Group g leads layers `g * every` to
    `(g + 1) * every - 1`.
    """
    arrays: dict[str, list[np.ndarray]] = {}
    for page in pages:
        oracle = Oracle(model, page)
        for name, rule in named.items():
            answers = oracle.ask(rule, watch=True)
            mask, scores = (x[:: rule.every] for x in (answers.chosen, answers.scores))  # [G, Q, M]
            ids = np.nonzero(mask)[2].reshape(*mask.shape[:2], rule.count(len(page.tokens)))
            shares = scores / scores.sum(-1, keepdims=True)  # over all queries and heads
            arrays.setdefault(name, []).append(ids.swapaxes(0, 1).astype(np.int16))
            arrays.setdefault(f"{name} attention", []).append(shares.swapaxes(0, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path, allow_pickle=False, **{name: np.stack(parts) for name, parts in arrays.items()}
    )
