"""What each point of mending the rivals moved: one put back at a time, by turns with all mended.

    python -m bench.mended --quick --json OUT

Every row has one system as it is (`after`) and with one point as it was (`before`); a point that
several systems have has a row of each. All sides of one group answer each question in turn, in
alternating order, each with caches and, where it reorders, a store of its own. `ratio` is the mean
time to first token before over that after, its interval a bootstrap over the questions, which both
answered; beside it the bytes from SSD and where a request's bytes were found (`found`: shares of
what it used, probes and packs alike).

The points are: 1, the heads that IMPRESS's probe has; 2, probe keys in the caches; 3, reordering,
against none, and against times to first token with the wait for what was rewritten after them
(above 1 by what it is; a prefix's first rewriting comes before what is counted, see `settle_ms`);
4, rows of a batch that fall back alone, at the budget where most do; 5, H2O's keys as what is sure
to be read; 6, buffers and digests paid from the caches' memory. What there is no option for is put
back by `bench.put_back`. `not_put_back` says of what is not in rows why.

Prefixes are written without a prefill (`bench.long_kv`). Cold: nothing is cached, the first
questions only have IMPRESS reorder. Warm: prefixes are drawn normally, the first half of the
questions fills the caches of 15 and 36% of the data set, and is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.stats import bootstrap

from bench.common import Json, Setting, finish, parser, positive, setting_of, summary, table
from bench.figures import save
from bench.lab import WARM_UP, Lab
from bench.long_kv import stored
from bench.measure import Sample, row_of
from bench.mended_points import GROUPS, NOT_PUT_BACK, POINTS, Group, Side, memory_of, sides
from bench.turns import budgets_of
from bench.workload import normal_choice
from ckv_jax import Engine
from ckv_jax.config import SystemConfig
from ckv_jax.storage.layout import Layout

SYSTEMS_MENDED = ("impress", "contiguous-kv", "as-h2o-lfu", "as-h2o-lru", "as-lru", "ckv")
QUICK = Setting(
    prefix_tokens=1008, prefixes=1, repeats=3, budgets=(0.05,),
    systems=("impress", "contiguous-kv", "as-h2o-lfu"),
)  # fmt: skip
FULL = Setting(prefixes=2, repeats=16, budgets=(0.05,), systems=SYSTEMS_MENDED)
CHARGED = "charged to requests"
"""Not a side: what is mended, with the wait for what it rewrites added to each request's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, or batch, and the wait for what was done in the background after it."""

    sample: Sample
    settle_ms: float
    compiled: int
    logits: np.ndarray
    """[rows, V]."""


def written(lab: Lab, system: SystemConfig) -> None:
    """Stores a lab's prefixes in the layout of a system, without a prefill."""
    with lab.engine(system) as engine:
        for index in range(lab.setting.prefixes):
            lab.put(index, stored(engine, lab.work.prefix(index)))


def ask(lab: Lab, engine: Engine, index: int, questions: Sequence[int], budget: float) -> Asked:
    """One call with these questions over one prefix; what is in the background ends after it."""
    requests = [lab.request(engine, index, question, budget) for question in questions]
    start = time.perf_counter()
    results = engine.reprefill(requests)
    answered = time.perf_counter()
    engine.settle()
    settle_ms = (time.perf_counter() - answered) * 1e3
    for result in results:
        result.raise_for_error()
    elapsed, chunked = (answered - start) * 1e3, engine.system.chunked
    return Asked(
        sample=Sample.of(elapsed, results[0], engine.layout, chunked=chunked),
        settle_ms=settle_ms,
        compiled=results[0].trace.compiled,
        logits=np.stack([result.logits for result in results]),
    )


def order(group: Group, setting: Setting) -> tuple[list[int], int]:
    """Which prefix each call asks, and how many of the first calls are not counted."""
    if group.temperature == "cold":
        first = WARM_UP * setting.prefixes
        return [n % setting.prefixes for n in range(first + setting.repeats)], first
    rng = np.random.default_rng((setting.seed, 3))
    drawn = normal_choice(rng, setting.prefixes, 2 * setting.repeats)
    return drawn.tolist(), setting.repeats


def by_turns(names: Sequence[int], number: int) -> Sequence[int]:
    """The order of sides for one question: forwards and backwards in turn."""
    return names if number % 2 == 0 else names[::-1]


def labs(base: Lab, setting: Setting, ways: Mapping[int, Side], stack: ExitStack) -> dict[int, Lab]:
    """A lab for each side, with its prefixes: one of its own where it rewrites them."""
    found: dict[int, Lab] = {}
    shared = None
    for point, side in ways.items():
        if side.system.reorder_every:
            found[point] = stack.enter_context(Lab(setting, like=base))
        else:
            shared = shared or stack.enter_context(Lab(setting, like=base))
            found[point] = shared
        written(found[point], side.system)
    return found


def run(base: Lab, setting: Setting, group: Group) -> Iterator[Json]:
    """The rows of one group."""
    ways, budget = sides(group), group.budget or setting.budgets[0]
    start = time.monotonic()
    with ExitStack() as stack:
        stores = labs(base, setting, ways, stack)
        seconds = time.monotonic() - start
        print(f"{group.system} {group.temperature}: stored in {seconds:.0f} s", flush=True)
        engines = {}
        for point, side in ways.items():
            memory = memory_of(stores[point], side, group.temperature)
            engines[point] = stack.enter_context(side.open(stores[point], side.system, memory))
            if group.temperature == "cold":
                chosen = budgets_of(side.system, [budget])
                suffix, lab = setting.suffix_tokens, stores[point]
                engines[point].warmup(
                    lab.prefix(0, engines[point]),
                    max_batch=group.at_once, max_suffix=suffix, budgets=chosen,
                )  # fmt: skip
        prefixes, first = order(group, setting)
        asked: dict[int, list[Asked]] = {point: [] for point in ways}
        for number, index in enumerate(prefixes):
            questions = [number * group.at_once + i for i in range(group.at_once)]
            for point in by_turns(list(ways), number):
                asked[point].append(ask(stores[point], engines[point], index, questions, budget))
        said = partial(side_row, group=group, budget=budget, first=first)
        rows = {p: said(asked[p], layout=engines[p].layout) for p in ways}
        alone: dict[int, Json] = {}
        if group.at_once > 1:
            alone = answers(stores[0], engines[0], asked, prefixes, first, budget)
        for point in group.points:
            times = [[one.sample.ttft_ms for one in asked[p][first:]] for p in (point, 0)]
            variant = "never" if point == 3 else ""
            before, after = (rows[p] | alone.get(p, {}) for p in (point, 0))
            yield compared(group, point, variant, budget, before, after, times)
            if point == 3:
                charged = [one.sample.ttft_ms + one.settle_ms for one in asked[0][first:]]
                paid = rows[0] | {"ttft_ms": summary(charged)}
                yield compared(group, 3, CHARGED, budget, paid, rows[0], [charged, times[1]])


def answers(
    lab: Lab, engine: Engine, asked: Mapping[int, Sequence[Asked]], prefixes: Sequence[int],
    first: int, budget: float,
) -> dict[int, Json]:  # fmt: skip
    """By side, how far the logits of questions of a batch are from those of the same asked alone,
    as a share of their length: the mean, and the largest."""
    far: dict[int, list[float]] = {point: [] for point in asked}
    for number in range(first, len(prefixes)):
        rows = len(asked[0][number].logits)
        for i in range(rows):
            single = ask(lab, engine, prefixes[number], [number * rows + i], budget).logits[0]
            for point, calls in asked.items():
                found = calls[number].logits[i].astype(np.float64)
                far[point].append(float(np.linalg.norm(found - single) / np.linalg.norm(single)))
    return {p: {"from_alone": {"mean": float(np.mean(x)), "max": max(x)}} for p, x in far.items()}


def side_row(
    asked: Sequence[Asked], *, group: Group, budget: float, first: int, layout: Layout
) -> Json:
    """One side's numbers: those of `bench.ttft`, where bytes were found, what settling took."""
    counted = asked[first:]
    samples = [one.sample for one in counted]
    row = row_of(group.system, budget, group.temperature, samples, layout)
    for name in ("system", "budget", "variant"):
        del row[name]
    return row | {
        "found": found_shares(samples),
        "compiled": sum(one.compiled for one in counted),
        "settle_ms": {
            "counted": float(np.mean([one.settle_ms for one in counted])),
            "from_the_first": float(np.mean([one.settle_ms for one in asked])),
        },
    }


def found_shares(samples: Sequence[Sample]) -> dict[str, float]:
    """Where the bytes were that requests used, of packs and probes together, as shares."""
    total = {
        "device": sum(sample.device_bytes for sample in samples),
        "host": sum(sample.host_bytes for sample in samples),
        "ssd": sum(sample.demanded_bytes + sample.probe_bytes for sample in samples),
    }
    every = max(1, sum(total.values()))
    return {name: size / every for name, size in total.items()}


def compared(
    group: Group, point: int, variant: str, budget: float, before: Json, after: Json,
    times: Sequence[Sequence[float]],
) -> Json:  # fmt: skip
    """A row of the result. `times`: ms before and after of the same questions."""
    ratio, interval = mean_ratio(*times)
    return {
        "point": point,
        "what": POINTS[point],
        "variant": variant,
        "system": group.system,
        "temperature": group.temperature,
        "budget": budget,
        "at_once": group.at_once,
        "before": before,
        "after": after,
        "ratio": ratio,
        "ratio_interval": interval,
    }


def mean_ratio(before: Sequence[float], after: Sequence[float]) -> tuple[float, list[float]]:
    """The mean of `before` over that of `after`, and the 95% interval by a bootstrap over pairs."""

    def ratio(b: np.ndarray, a: np.ndarray, axis: int = -1) -> np.ndarray:
        found: np.ndarray = np.mean(b, axis=axis) / np.mean(a, axis=axis)
        return found

    pair = np.asarray(before, np.float64), np.asarray(after, np.float64)
    value = float(ratio(*pair))
    if len(before) < 2:
        return value, [value, value]
    around = bootstrap(
        pair, ratio, paired=True, n_resamples=2_000, method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return value, [float(around.low), float(around.high)]


def show(rows: Sequence[Json]) -> str:
    """The rows as a table."""
    header = ("point", "system", "", "before ms", "after ms", "ratio", "95%", "SSD MB before",
              "after", "from memory before", "after")  # fmt: skip
    cells = []
    for r in rows:
        sides = r["before"], r["after"]
        low, high = r["ratio_interval"]
        cells.append([
            f"{r['point']} {r['variant']}".strip(), r["system"], r["temperature"],
            *(side["ttft_ms"]["mean"] for side in sides), f"{r['ratio']:.3f}",
            f"{low:.3f}-{high:.3f}", *(side["ssd_bytes"] / 1e6 for side in sides),
            *(1 - side["found"]["ssd"] for side in sides),
        ])  # fmt: skip
    return table(cells, header)


def warm_setting(setting: Setting, args: argparse.Namespace) -> Setting:
    """Of many small prefixes."""
    repeats = args.warm_repeats or (4 if args.quick else 40)
    prefixes, tokens = (3, 1008) if args.quick else (16, 2000)
    return dataclasses.replace(setting, prefixes=prefixes, prefix_tokens=tokens, repeats=repeats)


def main() -> None:
    """The command."""
    p = parser(__doc__, quick=QUICK, full=FULL)
    p.add_argument("--warm-repeats", type=positive, help="measured requests of a warm side")
    p.add_argument("--points", type=int, nargs="+", choices=POINTS, help="these points alone")
    args = p.parse_args()
    setting = setting_of(args)
    if setting.checkpoint is not None:
        p.error("--checkpoint: prefixes are written for structured weights")
    if len(setting.budgets) > 1:
        p.error(f"points are put back at one budget, got {len(setting.budgets)}")
    groups = [
        dataclasses.replace(group, points=points)
        for group in GROUPS
        if group.system in setting.systems
        and (points := tuple(n for n in group.points if not args.points or n in args.points))
    ]
    if not groups:
        p.error("none of these points is one of these systems")
    warm, rows = warm_setting(setting, args), []
    with Lab(setting) as base:
        for group in groups:
            start = time.monotonic()
            chosen = setting if group.temperature == "cold" else warm
            rows += run(base, chosen, group)
            print(f"{group.system} {group.temperature}: {time.monotonic() - start:.0f} s",
                  flush=True)  # fmt: skip
    rows.sort(key=lambda row: row["point"])
    print(show(rows))
    for one in NOT_PUT_BACK:
        print(f"{one['point']}, {one['what']}: not put back: {one['why']}")
    body = {"warm_setting": warm.to_json(), "rows": rows, "not_put_back": list(NOT_PUT_BACK)}
    save("mended", finish(args, setting, body), args.plot)


if __name__ == "__main__":
    main()
