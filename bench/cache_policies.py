"""Hit rates of the cache policies over the same selections, replayed without a model.

    python -m bench.cache_policies --json OUT [--structured | --traces FILE.npz] [--plot PNG]

Requests are drawn normally over 24 prefixes and evenly over a prefix's questions; the same draw
goes through `cache.Tiers` once for each policy, the first third to warm up, and there are several
draws. Caches hold 15% and 36% of the data set, as in the paper. Selections come from a seeded
generator; with `--structured` from requests to the structured model of all benchmarks; or from a
file of `bench.accuracy --traces`.

`lead` is, for each policy that attention guides, its hit rate less another's, with a 95% interval
over the draws.
`ever_used` is the share of all packs that any request of a draw wants: where that fits into memory,
every policy keeps everything and only the split between device and host can differ. Requests are
independent of each other here, as the paper draws them; then a pack's true frequency is all there
is to know about its future, and what attention adds is a better guess of it from few requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from zipfile import BadZipFile

import numpy as np
from scipy import stats

from bench.cache_traces import SEED, Selections, recorded, structured, synthetic
from bench.common import Setting as LabSetting
from bench.common import budget_share, existing_path, finish, positive, result_file, share, table
from bench.figures import save
from ckv_jax.cache import POLICIES, Tiers

__all__ = ["Selections", "Setting", "main", "recorded", "replay", "synthetic", "workload"]

STRUCTURED = LabSetting(prefixes=24, prefix_tokens=2000)
QUESTIONS = 24
"""Of each prefix, with `--structured`."""
TIERS = ("device", "host", "memory")
GUIDED = ("attention", "frequency-attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A workload and the sizes of the tiers, as shares of all packs."""

    requests: int = 900
    device: float = 0.15
    host: float = 0.36
    spread: float = 6.0
    """Prefixes are drawn with a standard deviation of their number divided by this."""
    draws: int = 5
    """Workloads, each of so many requests; from how they differ come the intervals."""

    def __post_init__(self) -> None:
        if (
            self.requests < 3
            or not 0 <= self.device + self.host <= 1
            or self.spread <= 0
            or min(self.device, self.host) < 0
            or self.draws < 2
        ):
            raise ValueError(
                f"got {self}, expected 3 or more requests, shares within 1, spread > 0, 2 draws or "
                "more: one has no interval"
            )


def workload(selections: Selections, setting: Setting, draw: int = 0) -> list[tuple[int, int]]:
    """(prefix, question) of every request: prefixes drawn normally, questions evenly."""
    rng = np.random.default_rng((SEED, draw))
    prefixes, questions = selections.chunks.shape[:2]
    drawn: list[int] = []
    while len(drawn) < setting.requests:
        prefix = round(rng.normal((prefixes - 1) / 2, prefixes / setting.spread))
        if 0 <= prefix < prefixes:
            drawn.append(prefix)
    return list(zip(drawn, rng.integers(questions, size=len(drawn)).tolist(), strict=True))


def replay(selections: Selections, policy: str, setting: Setting, draw: int = 0) -> dict[str, Any]:
    """One policy over one whole workload; a row of the report."""
    prefixes, _, groups, count = selections.chunks.shape
    each = groups * selections.num_chunks
    pages = prefixes * each
    tiers = Tiers(
        int(setting.device * pages), int(setting.host * pages), groups * count, POLICIES[policy]
    )
    bases = [tiers.register(each) for _ in range(prefixes)]
    first = selections.num_chunks * np.arange(groups, dtype=np.int64)[:, None]
    observed = selections.important if policy == "importance-ratio" else selections.attention
    before: dict[str, int] | None = None
    spent: list[float] = []
    requests = workload(selections, setting, draw)
    used: set[int] = set()
    for number, (prefix, question) in enumerate(requests):
        if number == len(requests) // 3:
            before, spent = asdict(tiers.stats), []
        wanted = (bases[prefix] + first + selections.chunks[prefix, question]).reshape(-1)
        masses = observed[prefix, question].reshape(-1)
        used.update(wanted.tolist())
        start = time.perf_counter()
        request(tiers, wanted, masses)
        if tiers.observes:
            every = bases[prefix] + np.arange(each)
            others = np.setdiff1d(every, wanted, assume_unique=True)
            everywhere = selections.everywhere[prefix, question].reshape(-1)
            tiers.observe(others, everywhere[others - bases[prefix]])
        spent.append(1e3 * (time.perf_counter() - start))
    assert before is not None
    now = {name: value - before[name] for name, value in asdict(tiers.stats).items()}
    uses = now["device_hits"] + now["host_hits"] + now["misses"]
    return {
        "selections": selections.name,
        "policy": policy,
        "ever_used": len(used) / pages,
        "hit_rate": {
            "device": now["device_hits"] / uses,
            "host": now["host_hits"] / uses,
            "memory": 1 - now["misses"] / uses,
        },
        "demotions_per_request": now["demotions"] / len(spent),
        "bookkeeping_ms": {
            "mean": float(np.mean(spent)),
            "p50": float(np.median(spent)),
            "p95": float(np.percentile(spent, 95)),
        },
    }


def request(tiers: Tiers, pages: np.ndarray, masses: np.ndarray) -> None:
    """All bookkeeping of one request."""
    device, host = tiers.lookup(pages)
    missing = device < 0
    cached = pages[~missing | (host >= 0)]
    tiers.pin(cached)
    slots = device.copy()
    slots[missing] = tiers.take(int(missing.sum()))
    tiers.record(pages, masses)
    tiers.unpin(cached)
    tiers.admit(pages, slots)


def compare(selections: Selections, setting: Setting) -> list[dict[str, Any]]:
    """A row for each policy: means over the draws, and the leads of those guided by attention."""
    draws = {
        policy: [replay(selections, policy, setting, draw) for draw in range(setting.draws)]
        for policy in POLICIES
    }
    rates = {
        policy: {tier: np.array([row["hit_rate"][tier] for row in rows]) for tier in TIERS}
        for policy, rows in draws.items()
    }
    compared = []
    for policy, rows in draws.items():
        row = dict(rows[0])
        row["hit_rate"] = {tier: float(rates[policy][tier].mean()) for tier in TIERS}
        row["ever_used"] = float(np.mean([one["ever_used"] for one in rows]))
        row["demotions_per_request"] = float(np.mean([r["demotions_per_request"] for r in rows]))
        row["lead"] = {
            ours: {tier: interval(rates[ours][tier] - rates[policy][tier]) for tier in TIERS}
            for ours in GUIDED
        }
        compared.append(row)
    return compared


def interval(values: np.ndarray) -> dict[str, float]:
    """Mean of paired differences and the half width of its 95% interval (Student's t)."""
    error = float(values.std(ddof=1)) / len(values) ** 0.5
    return {
        "mean": float(values.mean()),
        "half_width": float(stats.t.ppf(0.975, len(values) - 1)) * error,
    }


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Whether the policies that attention guides lead LFU and LRU, in a line each."""
    name, used = rows[0]["selections"], rows[0]["ever_used"]
    lines = [f"{name}, {used:.0%} of packs ever used"]
    for ours in GUIDED:
        said = []
        for row in rows:
            if row["policy"] in ("lfu", "lru"):
                for tier in ("device", "memory"):
                    lead = row["lead"][ours][tier]
                    mean, half = 100 * lead["mean"], 100 * lead["half_width"]
                    word = "no telling" if abs(mean) <= half else "ahead" if mean > 0 else "behind"
                    said.append(f"{row['policy']} {tier} {mean:+.2f} ± {half:.2f} ({word})")
        lines.append(f"  {ours} against " + ", ".join(said))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=result_file, required=True, help="write the report here")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--traces", type=existing_path, help="recorded selections (npz)")
    source.add_argument("--structured", action="store_true", help="ask the structured model")
    parser.add_argument("--quick", action="store_true", help="smaller prefixes with --structured")
    parser.add_argument("--plot", type=result_file, help="draw the differences here (PNG)")
    parser.add_argument("--requests", type=positive, default=900, help="of each draw")
    parser.add_argument("--draws", type=positive, default=5)
    parser.add_argument("--device", type=share, default=0.15, help="share of the packs")
    parser.add_argument("--host", type=share, default=0.36, help="share of the packs")
    parser.add_argument("--budgets", nargs="+", type=budget_share, default=[0.05, 0.25])
    args = parser.parse_args()
    try:
        setting = Setting(
            requests=args.requests, device=args.device, host=args.host, draws=args.draws
        )
    except ValueError as error:
        parser.error(str(error))
    sources: Sequence[Selections]
    if args.traces:
        try:
            sources = list(recorded(args.traces))
        except (OSError, EOFError, TypeError, ValueError, BadZipFile) as error:
            parser.error(f"{args.traces} is no file of recorded selections: {error}")
    elif args.structured:
        tokens = 1008 if args.quick else STRUCTURED.prefix_tokens
        lab = dataclasses.replace(STRUCTURED, prefix_tokens=tokens)
        sources = structured(lab, args.budgets, QUESTIONS)
    else:
        sources = [synthetic(budget) for budget in args.budgets]
    rows: list[dict[str, Any]] = []
    for selections in sources:
        mine = compare(selections, setting)
        print(verdict(mine))
        rows += mine
    cells = [
        [row["selections"], row["policy"], *(f"{row['hit_rate'][tier]:.2%}" for tier in TIERS),
         row["bookkeeping_ms"]["p50"]]
        for row in rows
    ]  # fmt: skip
    print(table(cells, ["selections", "policy", *TIERS, "bookkeeping ms"]))
    report = finish(args, None, {"settings": asdict(setting) | {"seed": SEED}, "rows": rows})
    save("cache_policies", report, args.plot)


if __name__ == "__main__":
    main()
