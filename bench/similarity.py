"""How much selections have in common: layers, periods, heads, requests (ContiguousKV Figure 7).

    python -m bench.similarity --quick --json OUT --plot PNG

Every layer of `contiguous-kv` selects for itself here (period and pack of one layer), so that all
pairs of layers can be compared. `coverage` of period p: the share of a period's chunks that the
period before it had chosen, at its first layer. Heads are compared as IMPRESS does (Figure 8), and
its reordering is measured by the chunks it saves (Figure 20): the structured model behind all
benchmarks is set by these numbers, which the papers report for trained models.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from typing import Any

import numpy as np

from bench.common import Json, Setting, finish, parser, save_plot, setting_of, table
from bench.lab import WARM_UP, Lab
from bench.measure import measured
from ckv_jax.systems import SYSTEMS

QUICK = Setting(prefixes=1, repeats=3, budgets=(0.05, 0.25))
FULL = Setting(prefixes=2, repeats=12, budgets=(0.05, 0.10, 0.25, 0.50))
PERIODS = (2, 4, 8)
PUBLISHED = {
    "coverage_of_periods_of_8": [0.52, 0.64],
    "impress_fallback_share_below": 0.2,
    "impress_chunks_saved_by_reordering": 1.2,
}


def selections(lab: Lab, budget: float) -> list[list[np.ndarray]]:
    """Each request's chunks, layer by layer."""
    system = dataclasses.replace(
        SYSTEMS["contiguous-kv"], period=1, subperiod=1, pack_layers=1, prefetch="none"
    )
    found = []
    with lab.engine(system) as engine:
        for question in range(lab.setting.repeats):
            index = question % lab.setting.prefixes
            lab.ask(engine, index, question, budget)
            found.append(engine.last_selection(lab.prefix(index, engine)))
    return found


def share(chosen: np.ndarray, before: np.ndarray) -> float:
    """The share of `chosen` that is in `before`."""
    return len(np.intersect1d(chosen, before)) / max(1, len(chosen))


def layer_matrix(found: list[list[np.ndarray]]) -> np.ndarray:
    """Mean share [L, L] that each pair of layers has in common."""
    layers = len(found[0])
    matrix = np.zeros((layers, layers))
    for request in found:
        for a, b in itertools.product(range(layers), repeat=2):
            matrix[a, b] += share(request[a], request[b]) / len(found)
    return matrix


def period_coverage(matrix: np.ndarray, period: int) -> float:
    """Mean over adjacent periods, at their first layers."""
    firsts = range(0, len(matrix), period)
    return statistics.fmean(float(matrix[b, a]) for a, b in itertools.pairwise(firsts))


def of_requests(lab: Lab, found: list[list[np.ndarray]]) -> float:
    """Mean share that consecutive questions over one prefix have in common, over all layers."""
    pairs = [
        share(b, a)
        for index in range(lab.setting.prefixes)
        for first, second in itertools.pairwise(found[index :: lab.setting.prefixes])
        for a, b in zip(first, second, strict=True)
    ]
    return statistics.fmean(pairs) if pairs else 1.0


def impress(lab: Lab, budget: float) -> Json:
    """IMPRESS's fallbacks and what its reordering saves."""
    layers = lab.config.num_layers
    with lab.engine("impress") as engine:
        before = [measured(lab, engine, 0, 10_000 + i, budget) for i in range(WARM_UP)]
        engine.settle()
        after = [measured(lab, engine, 0, i, budget) for i in range(lab.setting.repeats)]
    with lab.engine(dataclasses.replace(SYSTEMS["impress"], reorder=False)) as engine:
        plain = [measured(lab, engine, 0, i, budget) for i in range(lab.setting.repeats)]
    fell = statistics.fmean(s.fell_back for s in [*before, *after]) / layers
    saved = sum(s.demanded_bytes for s in plain) / max(1, sum(s.demanded_bytes for s in after))
    return {
        "fallback_share": fell,
        "chunks_saved_by_reordering": saved,
        "amplification_in_order": statistics.fmean(s.read_amplification for s in plain),
        "amplification_reordered": statistics.fmean(s.read_amplification for s in after),
        "attention_mass": statistics.fmean(s.attention_mass for s in after),
    }


def draw(figure: Any, rows: list[Json]) -> None:
    """The layers' matrix of the smallest budget, and coverage by period length."""
    left, right = figure.subplots(1, 2)
    image = left.imshow(rows[0]["layers"], vmin=0, vmax=1, origin="lower")
    left.set(title=f"layers, budget {rows[0]['budget']:.0%}", xlabel="layer", ylabel="layer")
    figure.colorbar(image, ax=left)
    for row in rows:
        values = [row["coverage"][str(period)] for period in PERIODS]
        right.plot(PERIODS, values, "o-", label=f"{row['budget']:.0%}")
    right.axhspan(0.52, 0.64, alpha=0.2, label="paper, periods of 8")
    right.set(title="coverage between periods", xlabel="layers a period", ylim=(0, 1))
    right.legend()


def main() -> None:
    """The command."""
    args = parser(__doc__, quick=QUICK, full=FULL).parse_args()
    setting = setting_of(args)
    rows = []
    with Lab(setting) as lab:
        for budget in setting.budgets:
            found = selections(lab, budget)
            matrix = layer_matrix(found)
            rows.append(
                {
                    "budget": budget,
                    "coverage": {str(p): period_coverage(matrix, p) for p in PERIODS},
                    "requests": of_requests(lab, found),
                    "layers": matrix.round(4).tolist(),
                    "impress": impress(lab, budget),
                }
            )
    print(
        table(
            [
                [r["budget"], *r["coverage"].values(), r["requests"], *r["impress"].values()]
                for r in rows
            ],
            ["budget", *(f"cover {p}" for p in PERIODS), "requests", *rows[0]["impress"]],
        )
    )
    finish(args, setting, {"rows": rows, "published": PUBLISHED})
    save_plot(args.plot, lambda figure: draw(figure, rows), size=(10, 4.5))


if __name__ == "__main__":
    main()
