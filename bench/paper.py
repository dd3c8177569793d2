"""The pipeline's model on the ContiguousKV paper's testbed, beside every number the paper reports.

    python -m bench.paper --json OUT

One A800 and one 990 Pro (§5.1), 7B, 14B and 32B, prefixes of 3.8k to 6k tokens, caches of 10 and
24 GB that 400 requests have warmed (`bench.paper_traffic`), systems as the paper describes them:
64-token chunks with keys and values apart, or 16-token chunks of one layer; 58% of a period's
chunks known from the one before (§4.3, 52 to 64%), 80% of a question's tokens important to every
question (`over_stability` has none to 80%), everything else from data sheets and bytes.

One constant is fitted to one published number: the seconds that the software takes for each object
it reads, to the 0.89 s of the 14B model. All other figures are predictions. `hardware`
is the model without that constant, and `allowed` whether the stated hardware could give
the published number by any caching: for a gap, whether reading all of the longest prefix takes so
long; for a speed-up, whether a rival that reads all of every prefix, over the time to read the
weights once, is so much slower.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench import costs
from bench.common import Json, finish, result_file, share, table
from bench.paper_traffic import Case, Seen, replay, token_bytes
from bench.prediction import parameters, seconds_of
from bench.published import CLAIMS, FIGURES, Figure
from bench.simulation import Script, Simulation
from ckv_jax.config import SystemConfig
from ckv_jax.model.config import PUBLISHED
from ckv_jax.pipeline.plan import Plan
from ckv_jax.systems import SYSTEMS

TESTBED = costs.PRESETS["a800-990pro"]
SSD_BANDWIDTH = 7.45e9
"""Bytes a second, "measured peak" (§5.1)."""
RIVALS = ("as-lru", "as-h2o-lfu", "impress")
OURS = dataclasses.replace(SYSTEMS["contiguous-kv"], pack_layers=1)
"""The paper's own: a chunk's keys and values of one layer are one read."""
BETWEEN_PERIODS = 0.58
"""Of a period's chunks, those of the period before (Figure 7b: 52 to 64% on average)."""
STABLE = 0.8
"""Of a question's important tokens, those that are its prefix's own ("recall ratios above 80%",
IMPRESS §3.2)."""
STABILITIES = (0.0, 0.4, 0.8)
"""Over which the numbers are shown as well, each with a fit of its own."""
SUFFIX = 64
"""Tokens of one few-shot question."""
QUANTILES = 20
"""Requests that stand for all: as many steps of the distribution of missed bytes."""
FITTED = next(figure for figure in FIGURES if figure.kind == "gap" and figure.models == ("14B",))
BAR = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is assumed."""

    stable: float = STABLE
    between_periods: float = BETWEEN_PERIODS
    suffix_tokens: int = SUFFIX
    quantiles: int = QUANTILES

    def to_json(self) -> Json:
        """Plain JSON values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """The model of the paper's experiments at one cost of the software."""

    setting: Setting
    io_s: float
    """The software's seconds for each object that is read."""

    def times(self, system: SystemConfig, case: Case, budget: float) -> list[float]:
        """Seconds to first token of requests in equal steps of what they miss."""
        hardware = dataclasses.replace(TESTBED.hardware, io_overhead=self.io_s)
        return [
            seconds_of(self.script(system, case, budget, seen), hardware)
            for seen in _quantiles(system, case, budget, self.setting)
        ]

    def script(self, system: SystemConfig, case: Case, budget: float, seen: Seen) -> Script:
        """One request."""
        model = PUBLISHED[case.model]
        periods = Plan.of(model.num_layers, system).periods if system.chunked else 1
        known = self.setting.between_periods
        unused = (1 - known) * (periods - 1) / periods  # for each byte that is needed
        reads_ahead = system.chunked and system.prefetch == "inter"
        profile = costs.Profile(
            loaded_share=seen.needed,
            coverage=known * (periods - 1) / periods,
            unused=unused / (1 + unused) if reads_ahead else 0.0,
            device_hits=seen.device,
            host_hits=seen.host,
        )
        script = costs.script(
            model, system, profile, TESTBED,
            prefix=case.tokens, suffix=self.setting.suffix_tokens, budget=budget,
        )  # fmt: skip
        return _by_layers(script, system, model.num_layers) if _unprefetched(system) else script

    def mean(self, system: SystemConfig, case: Case, budget: float) -> float:
        """Mean seconds to first token."""
        return statistics.fmean(self.times(system, case, budget))

    def speedup(self, system: SystemConfig, case: Case, budget: float) -> float:
        """How much longer `system` takes than the paper's, on average."""
        return self.mean(system, case, budget) / self.mean(OURS, case, budget)

    def figure(self, figure: Figure) -> float:
        """What the model says where the paper has a number."""
        cases = cases_of(figure)
        if figure.kind == "speedup":
            system = SYSTEMS[figure.rival]
            return statistics.fmean(self.speedup(system, case, figure.budget) for case in cases)
        if figure.kind == "gap":
            return statistics.fmean(
                self._p95(SYSTEMS[name], case, figure.budget) - self._p95(OURS, case, figure.budget)
                for case in cases
                for name in RIVALS
            )
        [case] = cases
        missed = [
            statistics.fmean(
                seen.missed for seen in _quantiles(system, case, figure.budget, self.setting)
            )
            for system in (OURS, SYSTEMS["impress"])
        ]
        return missed[0] / missed[1]

    def waiting(self, case: Case, budget: float) -> float:
        """Share of IMPRESS's time that goes in waiting for reads."""
        hardware = dataclasses.replace(TESTBED.hardware, io_overhead=self.io_s)
        shares = []
        for seen in _quantiles(SYSTEMS["impress"], case, budget, self.setting):
            script = self.script(SYSTEMS["impress"], case, budget, seen)
            outcome = Simulation(script, hardware).run()
            shares.append(sum(outcome.waits.values()) / outcome.ttft_s)
        return statistics.fmean(shares)

    def _p95(self, system: SystemConfig, case: Case, budget: float) -> float:
        return float(np.percentile(self.times(system, case, budget), 95))


def cases_of(figure: Figure) -> list[Case]:
    """The models and prefixes that a number is of."""
    cases = [Case.of(data, model) for data in figure.datasets for model in figure.models]
    if figure.tokens is None:
        return cases
    return [dataclasses.replace(case, tokens=figure.tokens) for case in cases]


@functools.lru_cache(maxsize=512)
def _quantiles(
    system: SystemConfig, case: Case, budget: float, setting: Setting
) -> tuple[Seen, ...]:
    """Requests in equal steps of what they miss."""
    seen = replay(system, case, budget=budget, stable=setting.stable)
    order = sorted(seen, key=lambda one: one.missed)
    steps = (np.arange(setting.quantiles) + 0.5) / setting.quantiles
    return tuple(order[int(step * len(order))] for step in steps)


def _unprefetched(system: SystemConfig) -> bool:
    return system.chunked and system.prefetch == "none"


def _by_layers(script: Script, system: SystemConfig, layers: int) -> Script:
    """Ours without reading ahead: a layer's reads begin when the layer does."""
    stages = []
    for step, stage in zip(Plan.of(layers, system).steps, script.stages, strict=True):
        count = len(step.layers)
        for index in range(count):
            first = index == 0
            stages.append(
                dataclasses.replace(
                    stage,
                    select_s=stage.select_s if first else 0.0,
                    probe_bytes=stage.probe_bytes if first else 0,
                    compute_s=stage.compute_s / count,
                    speculated_bytes=0,
                    unused_bytes=0,
                    demanded_bytes=stage.demanded_bytes // count,
                    host_bytes=stage.host_bytes // count,
                )
            )
    return dataclasses.replace(script, kind="tokens", stages=tuple(stages), read_ahead=0)


def fitted(setting: Setting) -> float:
    """Seconds of software for each read with which the model gives the one number."""
    low, high = 0.0, 1e-3
    for _ in range(12):
        middle = (low + high) / 2
        if Paper(setting=setting, io_s=middle).figure(FITTED) < FITTED.value:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def arithmetic(figure: Figure) -> tuple[bool, str]:
    """Whether the stated hardware allows a number, and the sum that says so."""
    if figure.kind == "gap":
        [model] = figure.models
        longest = max(cases_of(figure), key=lambda case: case.tokens)
        size = longest.tokens * token_bytes(model)
        seconds = size / SSD_BANDWIDTH
        return seconds >= figure.value, (
            f"{longest.tokens:,} tokens of {model} are {size / 1e6:,.0f} MB; at 7.45 GB/s all of "
            f"them take {seconds * 1e3:.0f} ms, {figure.value / seconds:.1f} times less than "
            f"{figure.value * 1e3:.0f} ms"
        )
    if figure.kind == "speedup":
        most, texts = [], []
        for case in cases_of(figure):
            size = case.tokens * token_bytes(case.model)
            weights = 2 * parameters(PUBLISHED[case.model]) / TESTBED.memory_bandwidth
            most.append((size / SSD_BANDWIDTH + weights) / weights)
            texts.append((size, weights, case))
        size, weights, case = max(texts, key=lambda text: text[0] / text[1])
        mean = statistics.fmean(most)
        return mean >= figure.value, (
            f"at most: all of a prefix from the SSD beside the weights from HBM once, over the "
            f"weights alone: {mean:.1f} on average; e.g. {case.model} with {case.tokens:,} tokens "
            f"{size / 1e6:,.0f} MB in {size / SSD_BANDWIDTH * 1e3:.0f} ms, weights in "
            f"{weights * 1e3:.1f} ms"
        )
    return True, "a count of bytes, no time"


def _ablation(paper: Paper, dataset: str, model: str) -> dict[str, float]:
    """Seconds of the paper's Figure 12, at 25%."""
    case, slow = Case.of(dataset, model), dataclasses.replace
    systems = {
        "impress": SYSTEMS["impress"],
        "w/o P and AC": slow(OURS, prefetch="none", policy="lfu"),
        "w/o AC": slow(OURS, policy="lfu"),
        "w/o P": slow(OURS, prefetch="none"),
        "whole": OURS,
    }
    return {name: paper.mean(system, case, 0.25) for name, system in systems.items()}


def claims(paper: Paper) -> list[Json]:
    """Each claim of the text with what the model says of it."""
    bars = {
        (data, model): _ablation(paper, data, model)
        for data in ("SST-2", "RTE")
        for model in ("14B", "32B")
    }

    def gain(without: str, data: Sequence[str], models: Sequence[str]) -> float:
        return statistics.fmean(
            bars[d, m][without] / bars[d, m]["whole"] - 1 for d in data for m in models
        )

    both, sizes = ("SST-2", "RTE"), ("14B", "32B")
    speeds = {
        name: {
            budget: statistics.fmean(
                paper.speedup(SYSTEMS[name], case, budget) for case in cases_of(FIGURES[0])
            )
            for budget in (0.05, 0.25)
        }
        for name in RIVALS
    }
    chunks = [bar["impress"] - bar["w/o P and AC"] for bar in bars.values()]
    rest = [bar["w/o P and AC"] - bar["whole"] for bar in bars.values()]
    rte = Case.of("RTE", "7B")
    waiting = {budget: paper.waiting(rte, budget) for budget in (0.05, 0.10, 0.25, 0.50)}
    prefixes = {
        tokens: paper.speedup(
            SYSTEMS["impress"], dataclasses.replace(rte, tokens=tokens), 0.25
        )
        for tokens in (4000, 6000, 8000, 10_000)
    }  # fmt: skip
    periods = _over(paper, lambda n: dataclasses.replace(OURS, period=n, subperiod=4), (4, 8, 16))
    subs = _over(paper, lambda n: dataclasses.replace(OURS, subperiod=n), (1, 2, 4, 8))
    said: dict[str, tuple[bool, object]] = {
        "less at 25%": (all(s[0.25] < s[0.05] for s in speeds.values()), speeds),
        "chunks matter most": (
            sum(chunks) > sum(rest),
            {"chunks_s": statistics.fmean(chunks), "rest_s": statistics.fmean(rest),
             "bars_s": {f"{d} {m}": bar for (d, m), bar in bars.items()}},
        ),
        "prefetching and size": (
            gain("w/o P", both, ("32B",)) > gain("w/o P", both, ("14B",)),
            {m: gain("w/o P", both, (m,)) for m in sizes},
        ),
        "policy and data": (
            gain("w/o AC", ("RTE",), sizes) > gain("w/o AC", ("SST-2",), sizes),
            {d: gain("w/o AC", (d,), sizes) for d in both},
        ),
        "I/O of IMPRESS": (min(waiting.values()) > 0.65, waiting),
        "longer prefixes": (_rises(list(prefixes.values())), prefixes),
        "longer periods": (
            all(_rises([-seconds for seconds in x.values()]) for x in periods.values()), periods
        ),
        "subperiods": (all(x[4] < min(x[1], x[8]) for x in subs.values()), subs),
    }  # fmt: skip
    return [
        {"claim": claim.says, "where": claim.where, "holds": said[claim.name][0],
         "model": said[claim.name][1]}
        for claim in CLAIMS
    ]  # fmt: skip


def _over(
    paper: Paper, system: Callable[[int], SystemConfig], values: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Seconds at 25% of a budget on RTE for each value, by model."""
    return {
        model: {n: paper.mean(system(n), Case.of("RTE", model), 0.25) for n in values}
        for model in ("7B", "14B")
    }


def _rises(values: Sequence[float]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))


def rows_of(setting: Setting, io_s: float) -> list[Json]:
    """Every published number with the model's."""
    soft, bare = Paper(setting=setting, io_s=io_s), Paper(setting=setting, io_s=0.0)
    rows = []
    for figure in FIGURES:
        allowed, why = arithmetic(figure)
        found = soft.figure(figure)
        rows.append(
            {"what": figure.says, "where": figure.where, "kind": figure.kind,
             "published": figure.value, "model": found, "error": found / figure.value - 1,
             "fitted": figure is FITTED, "hardware": bare.figure(figure), "allowed": allowed,
             "arithmetic": why, "over_stability": {}}
        )  # fmt: skip
    return rows


def over_stability(rows: Sequence[Json]) -> tuple[list[list[object]], list[str]]:
    """A table of what each number is if questions share more or less of their tokens."""
    cells = [
        [row["where"], row["published"], *row["over_stability"].values(), row["what"]]
        for row in rows
    ]
    return cells, ["where", "published", *(f"{share:.0%} stable" for share in STABILITIES), "what"]


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--json", type=result_file, help="write the result to this file")
    p.add_argument("--stable", type=share, default=STABLE, help="share of tokens, 0 to 1")
    args = p.parse_args(argv)
    setting = Setting(stable=args.stable, quantiles=QUANTILES)
    io_s = fitted(setting)
    rows = rows_of(setting, io_s)
    for other in STABILITIES:
        changed = dataclasses.replace(setting, stable=other)
        paper = Paper(setting=changed, io_s=fitted(changed))
        for row, figure in zip(rows, FIGURES, strict=True):
            row["over_stability"][f"{other:g}"] = paper.figure(figure)
    names = ["where", "published", "model", "error", "hardware", "allowed", "what"]
    print(table([[row[name] for name in names] for row in rows], names))
    print(table(*over_stability(rows)))
    print(f"fitted to {FITTED.value} s ({FITTED.says}): {io_s * 1e6:.0f} us of software a read")
    for row in rows:
        if not row["allowed"]:
            print(f"{row['published']}: the stated hardware cannot give it. {row['arithmetic']}")
    said = claims(Paper(setting=setting, io_s=io_s))
    for claim in said:
        print(f"{'holds' if claim['holds'] else 'does not hold'}: {claim['claim']}")
    predicted = [abs(row["error"]) for row in rows if not row["fitted"]]
    within = sum(error <= BAR for error in predicted)
    print(f"{within} of {len(predicted)} predictions within {BAR:.0%}")
    body = {"rows": rows, "claims": said, "software_s_per_read": io_s, "bar": BAR, "within": within}
    finish(args, setting, body)


if __name__ == "__main__":
    main()
