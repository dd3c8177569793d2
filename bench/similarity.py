"""How much selections have in common: layers, periods, heads, requests (ContiguousKV Figure 7).

    python -m bench.similarity --quick --json OUT --plot PNG

Every layer of `contiguous-kv` selects for itself here (period and pack of one layer), so that all
pairs of layers can be compared. `coverage` of period p: the share of a period's chunks that the
period before it had chosen, at its first layer. `scatter` is IMPRESS's choice of tokens, `loaded`
what systems then read (`bench.scatter`). The structured model behind all benchmarks is set by
these numbers; ours are printed beside those that the papers report for trained models. Coverage
grows with the budget, as does what two random choices share, and the papers do not say at which
budget theirs was measured. That structured weights agree with what they were set by is no finding
(`set_by` in the result). What a model has too few layers for, or a run too few questions, is null.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.common import Json, Setting, finish, parser, setting_of, table
from bench.figures import save
from bench.lab import Lab
from bench.scatter import loaded, scatter
from ckv_jax.systems import SYSTEMS

QUICK = Setting(prefixes=1, repeats=3, budgets=(0.05, 0.10, 0.25))
FULL = Setting(prefixes=1, repeats=8, budgets=(0.05, 0.10, 0.25, 0.40, 0.50))
PERIODS = (2, 4, 8)
DISTANCES = (1, 4, 8, 16, 24)
PUBLISHED: dict[str, tuple[float, float, str]] = {
    "coverage between periods of 8": (0.52, 0.64, "ContiguousKV Figure 7b, budget not given"),
    "share of IMPRESS's tokens": (0.0571, 0.0664, "ContiguousKV Table 2, budget not given"),
    "chunks saved by reordering": (1.2, 1.2, "IMPRESS Figure 20"),
    "Jaccard index of heads at 10%": (0.48, 0.48, "IMPRESS §4.2, OPT-30B; smaller models less"),
    "Jaccard index of heads at 40%": (0.68, 0.68, "IMPRESS §4.2, OPT-30B; smaller models less"),
    "amplification at 50%": (2.2, 2.2, "IMPRESS Figure 5a, before reordering"),
}
"""Lowest and highest published value, and where."""
SET_BY = (
    "The structured weights were set by the published figures beside which ours stand: that they "
    "agree is no finding."
)


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


def period_coverage(matrix: np.ndarray, period: int) -> float | None:
    """Mean over adjacent periods, at their first layers; None where there are no two."""
    pairs = itertools.pairwise(range(0, len(matrix), period))
    shares = [float(matrix[b, a]) for a, b in pairs]
    return statistics.fmean(shares) if shares else None


def by_distance(matrix: np.ndarray, distance: int) -> float | None:
    """Mean share that layers so far apart have in common; None where none are."""
    return float(np.diagonal(matrix, distance).mean()) if distance < len(matrix) else None


def of_requests(lab: Lab, found: list[list[np.ndarray]]) -> float | None:
    """Mean share that consecutive questions over one prefix have in common, over all layers; None
    where no prefix had two."""
    pairs = [
        share(b, a)
        for index in range(lab.setting.prefixes)
        for first, second in itertools.pairwise(found[index :: lab.setting.prefixes])
        for a, b in zip(first, second, strict=True)
    ]
    return statistics.fmean(pairs) if pairs else None


def beside(rows: Sequence[Json]) -> list[list[Any]]:
    """(statistic, budget, ours, published low, high, source), wherever both are there."""
    found = {
        "coverage between periods of 8": lambda row: row["coverage"]["8"],
        "share of IMPRESS's tokens": lambda row: row["loaded"]["share_of_impress"],
        "chunks saved by reordering": lambda row: row["scatter"]["saved"],
        "Jaccard index of heads": lambda row: row["scatter"]["jaccard"],
        "amplification": lambda row: row["scatter"]["amplification"],
    }
    lines = []
    for row in rows:
        for name, of in found.items():
            published = PUBLISHED.get(name) or PUBLISHED.get(f"{name} at {row['budget']:.0%}")
            if published is not None and of(row) is not None:
                lines.append([name, f"{row['budget']:.0%}", of(row), *published])
    return sorted(lines, key=lambda line: list(found).index(line[0]))


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
                    "distance": {str(d): by_distance(matrix, d) for d in DISTANCES},
                    "requests": of_requests(lab, found),
                    "layers": matrix.round(4).tolist(),
                    "scatter": scatter(lab, budget),
                    "loaded": loaded(lab, budget),
                }
            )
    for part in ("coverage", "distance", "scatter", "loaded"):
        print(f"{part}:")
        print(table([[r["budget"], *r[part].values()] for r in rows], ["budget", *rows[0][part]]))
    lines = beside(rows)
    print(table(lines, ["statistic", "budget", "ours", "published", "to", "source"]))
    about = {"set_by": SET_BY} if setting.checkpoint is None else {}
    print(about.get("set_by", ""))
    body = {"rows": rows, "published": PUBLISHED, "beside": lines}
    result = finish(args, setting, about | body)
    save("similarity", result, args.plot)


if __name__ == "__main__":
    main()
