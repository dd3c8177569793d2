"""Hit rates of the cache policies over the same selections, replayed without a model.

    python -m bench.cache_policies --json OUT [--traces FILE.npz] [--plot PNG]

Requests are drawn normally over the prefixes and evenly over a prefix's questions; the same draw
goes through `cache.Tiers` once for each policy, the first third to warm up. Selections come from a
file of `bench.accuracy --traces`, or else from a seeded generator. JSON: `{"settings", "rows":
[{"selections", "policy", "hit_rate": {"device", "host", "memory"}, "demotions_per_request",
"bookkeeping_ms": {"mean", "p50", "p95"}}]}`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckv_jax.cache import POLICIES, Tiers

SEED = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A workload and the sizes of the tiers, as shares of all packs."""

    requests: int = 600
    device: float = 0.15
    host: float = 0.36
    spread: float = 6.0
    """Prefixes are drawn with a standard deviation of their number divided by this."""

    def __post_init__(self) -> None:
        if self.requests < 3 or not 0 <= self.device + self.host <= 1 or self.spread <= 0:
            raise ValueError(
                f"got {self}, expected 3 or more requests, shares within 1, spread > 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Selections:
    """What each question on each prefix selects."""

    name: str
    num_chunks: int
    """M."""
    chunks: np.ndarray
    """int [P, Q, G, N]: distinct chunk ids for each selection group; G packs a chunk."""
    attention: np.ndarray
    """float [P, Q, G, N]: Equation 1's A of each."""
    important: np.ndarray
    """float [P, Q, G, N]: share of the chunk's tokens among the question's important tokens."""

    def __post_init__(self) -> None:
        if not self.chunks.shape == self.attention.shape == self.important.shape:
            raise ValueError(f"got arrays of different shapes for selections {self.name!r}")


def synthetic(
    budget: float, *, prefixes: int = 24, questions: int = 64, groups: int = 4, chunks: int = 313
) -> Selections:
    """Seeded selections: Zipf importance of a prefix's chunks, changed by each question.

    A prefix has one order of importance that its groups share in part; a question moves every
    chunk by a log-normal factor of its own, and every token within it by an exponential one. The
    most important tokens of a question are as many as the chosen chunks hold.
    """
    rng = np.random.default_rng(SEED)
    tokens = 16
    count = max(1, round(budget * chunks))
    shape = (prefixes, questions, groups, count)
    chosen = np.zeros(shape, np.int32)
    attention, important = np.zeros(shape), np.zeros(shape)
    zipf = 1.0 / np.arange(1, chunks + 1)
    for prefix in range(prefixes):
        common = rng.normal(size=chunks)
        for group in range(groups):
            taste = common + 0.5 * rng.normal(size=chunks)
            weight = np.empty(chunks)
            weight[np.argsort(taste)] = zipf
            mass = weight * np.exp(rng.normal(size=(questions, chunks)))
            spread = rng.exponential(size=(questions, chunks, tokens))
            per_token = mass[..., None] * spread
            per_token /= per_token.sum((1, 2), keepdims=True)
            score = per_token.sum(-1)  # [Q, M]
            ids = np.argpartition(-score, count - 1, axis=1)[:, :count]
            flat = per_token.reshape(questions, -1)
            limit = -np.partition(-flat, count * tokens - 1, axis=1)[:, count * tokens - 1]
            share = (per_token >= limit[:, None, None]).mean(-1)
            chosen[prefix, :, group] = ids
            attention[prefix, :, group] = np.take_along_axis(score, ids, 1)
            important[prefix, :, group] = np.take_along_axis(share, ids, 1)
    return Selections(
        name=f"synthetic at {budget:.0%}",
        num_chunks=chunks,
        chunks=chosen,
        attention=attention,
        important=important,
    )


def recorded(path: Path) -> Iterator[Selections]:
    """Selections of a file: `RULE` int [P, Q, G, N] beside `RULE attention` float of that shape.

    `RULE important` may give the shares of important tokens. Without it every token of a chosen
    chunk counts as important, as in ContiguousKV, where the chunk is what is selected.
    """
    with np.load(path, allow_pickle=False) as arrays:
        rules = [name for name in arrays if arrays[name].dtype.kind in "iu"]
        for rule in rules:
            if f"{rule} attention" not in arrays:
                raise ValueError(f"got no array '{rule} attention' in {path}, expected one")
            chunks = arrays[rule].astype(np.int32)
            shares = f"{rule} important"
            yield Selections(
                name=rule,
                num_chunks=int(chunks.max()) + 1,
                chunks=chunks,
                attention=arrays[f"{rule} attention"].astype(np.float64),
                important=arrays[shares] if shares in arrays else np.ones(chunks.shape),
            )


def workload(selections: Selections, setting: Setting) -> list[tuple[int, int]]:
    """(prefix, question) of every request: prefixes drawn normally, questions evenly."""
    rng = np.random.default_rng(SEED)
    prefixes, questions = selections.chunks.shape[:2]
    drawn: list[int] = []
    while len(drawn) < setting.requests:
        prefix = round(rng.normal((prefixes - 1) / 2, prefixes / setting.spread))
        if 0 <= prefix < prefixes:
            drawn.append(prefix)
    return list(zip(drawn, rng.integers(questions, size=len(drawn)).tolist(), strict=True))


def replay(selections: Selections, policy: str, setting: Setting) -> dict[str, Any]:
    """One policy over the whole workload; a row of the report."""
    prefixes, _, groups, count = selections.chunks.shape
    each = groups * selections.num_chunks
    pages = prefixes * each
    tiers = Tiers(
        int(setting.device * pages), int(setting.host * pages), groups * count, POLICIES[policy]()
    )
    bases = [tiers.register(each) for _ in range(prefixes)]
    first = selections.num_chunks * np.arange(groups, dtype=np.int64)[:, None]
    observed = selections.important if policy == "importance-ratio" else selections.attention
    before: dict[str, int] | None = None
    spent: list[float] = []
    requests = workload(selections, setting)
    for number, (prefix, question) in enumerate(requests):
        if number == len(requests) // 3:
            before, spent = asdict(tiers.stats), []
        wanted = (bases[prefix] + first + selections.chunks[prefix, question]).reshape(-1)
        masses = observed[prefix, question].reshape(-1)
        start = time.perf_counter()
        request(tiers, wanted, masses)
        spent.append(1e3 * (time.perf_counter() - start))
    assert before is not None
    now = {name: value - before[name] for name, value in asdict(tiers.stats).items()}
    uses = now["device_hits"] + now["host_hits"] + now["misses"]
    return {
        "selections": selections.name,
        "policy": policy,
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


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Stacked bars, device below host, one panel for each set of selections."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["selections"] for row in rows))
    figure = Figure(figsize=(4 * len(names), 3.6), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        mine = [row for row in rows if row["selections"] == name]
        labels = [row["policy"] for row in mine]
        device = [row["hit_rate"]["device"] for row in mine]
        host = [row["hit_rate"]["host"] for row in mine]
        panel.bar(labels, device, label="device", color="#1f6f8b")
        panel.bar(labels, host, bottom=device, label="host", color="#99a8b2")
        panel.set_title(name)
        panel.tick_params(axis="x", rotation=20)
    panels[0].set_ylabel("hit rate")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="write the report here")
    parser.add_argument("--traces", type=Path, help="recorded selections (npz)")
    parser.add_argument("--plot", type=Path, help="write a bar chart here (PNG)")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--device", type=float, default=0.15, help="share of the packs")
    parser.add_argument("--host", type=float, default=0.36, help="share of the packs")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.05, 0.25])
    args = parser.parse_args()
    setting = Setting(requests=args.requests, device=args.device, host=args.host)
    if args.traces:
        sources = list(recorded(args.traces))
    else:
        sources = [synthetic(budget) for budget in args.budgets]
    rows = [replay(source, policy, setting) for source in sources for policy in POLICIES]
    for row in rows:
        rate = row["hit_rate"]
        print(
            f"{row['selections']:>20} {row['policy']:>17}  device {rate['device']:6.1%}  "
            f"host {rate['host']:6.1%}  memory {rate['memory']:6.1%}  "
            f"bookkeeping {row['bookkeeping_ms']['p50']:.2f} ms"
        )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    report = {"settings": asdict(setting) | {"seed": SEED}, "rows": rows}
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
