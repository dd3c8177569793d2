"""Many requests at once: throughput, time to first token and bytes read, by batch size.

    python -m bench.batch --quick --json OUT

`same-prefix`: questions of one topic over one prefix, computed together; `overlap` is the mean
share of a question's selection that another one of the batch has too. `mixed`: questions of all
topics and of different lengths over all prefixes, with all budgets. Every load is asked for in one
`Engine.reprefill` call, again and again; nothing is cached from one call to the next but the
digest. Times are from the call to each answer.

Bars, for eight questions on one prefix against one: three times the requests per second; and, where
selections overlap by half or more, at most 1.5 times the bytes, and never more than the union.

`ssd_bytes` is what one call reads in all; `ssd_kv_bytes` leaves out what was read ahead and not
used.
`union_bytes` is what the selections of the same questions, asked alone, come to without repeats.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence

import numpy as np

from bench.common import Json, Setting, finish, parser, positive, setting_of, summary, table
from bench.lab import Lab
from bench.structured import TOPICS
from ckv_jax import Engine, Request, Result

BATCHES = (1, 2, 4, 8, 16, 32)
QUICK = Setting(repeats=3, prefixes=2, systems=("ckv",))
FULL = Setting(repeats=5, prefixes=2, systems=("ckv", "contiguous-kv"))

FASTER = 3.0
"""The bar for requests/s of eight on one prefix, times those of one."""
BYTES = 1.5
"""The bar for their SSD bytes, where their selections overlap by half or more."""


def same_prefix(lab: Lab, engine: Engine, batch: int) -> list[Request]:
    """Questions of one topic over prefix 0, all with the first budget."""
    topic = lab.work.suffix(0)[0] % TOPICS
    alike = (
        question for question in itertools.count() if lab.work.suffix(question)[0] % TOPICS == topic
    )
    budget = lab.setting.budgets[0]
    return [lab.request(engine, 0, question, budget) for question in itertools.islice(alike, batch)]


def mixed(lab: Lab, engine: Engine, batch: int) -> list[Request]:
    """Questions of any topic, in halves and wholes, over all prefixes with all budgets."""
    requests = []
    for question in range(batch):
        prefix = lab.prefix(question % lab.setting.prefixes, engine)
        suffix = lab.work.suffix(question)[: lab.setting.suffix_tokens >> question % 2]
        budget = lab.setting.budgets[question // 2 % len(lab.setting.budgets)]
        requests.append(Request(prefix=prefix, suffix=suffix.tolist(), budget=budget))
    return requests


LOADS = {"same-prefix": same_prefix, "mixed": mixed}


def measure(engine: Engine, requests: Sequence[Request], repeats: int) -> Json:
    """Figures of one call with all `requests`, over `repeats` calls."""
    engine.reprefill(requests)  # compiles, and loads the digests
    seconds, ttft_ms, read, unused = [], [], [], []
    for _ in range(repeats):
        start = time.perf_counter()
        results = engine.reprefill(requests)
        seconds.append(time.perf_counter() - start)
        for result in results:
            result.raise_for_error()
        ttft_ms += [result.queued_ms + result.trace.ttft_ms for result in results]
        read.append(_of_batches(results, "ssd"))
        unused.append(_of_batches(results, "unused"))
    return {
        "batch": len(requests),
        "requests_s": len(requests) / statistics.median(seconds),
        "ttft_ms": summary(ttft_ms),
        "ssd_bytes": statistics.fmean(read),
        "ssd_kv_bytes": statistics.fmean(read) - statistics.fmean(unused),
    }


def _of_batches(results: Sequence[Result], source: str) -> int:
    """Bytes over the batches that a call was cut into; those of one batch share the counter."""
    batches = {id(result.trace.bytes): result.trace.bytes for result in results}
    return sum(counted[source] for counted in batches.values())


def shared(engine: Engine, requests: Sequence[Request]) -> Json:
    """How much the selections of requests over one prefix, each asked alone, have in common."""
    alone = []
    for request in requests:
        (result,) = engine.reprefill([request])
        result.raise_for_error()
        selected = engine.last_selection(engine.store.prefix(request.prefix.id))  # type: ignore[union-attr]
        alone.append([set(ids.tolist()) for ids in selected])
    plan = engine.worker.plan
    union = sum(
        len(set().union(*(one[period] for one in alone))) * len(plan.groups(period))
        for period in range(plan.selections)
    )
    pairs = [
        len(mine & other) / len(mine)
        for a, b in itertools.permutations(alone, 2)
        for mine, other in zip(a, b, strict=True)
    ]
    return {
        "union_bytes": union * engine.layout.pack_bytes,
        "overlap": float(np.mean(pairs)) if pairs else 1.0,
    }


def run(lab: Lab, system: str, batches: Sequence[int]) -> list[Json]:
    """The rows of one system."""
    rows = []
    with lab.engine(system) as engine:
        for load, make in LOADS.items():
            for batch in batches:
                requests = make(lab, engine, batch)
                row = {"system": system, "load": load}
                row |= measure(engine, requests, lab.setting.repeats)
                if load == "same-prefix":
                    row |= shared(engine, requests)
                rows.append(row)
                print(f"{system} {load} {batch}: {row['requests_s']:.1f} requests/s", flush=True)
    return rows


def bars(rows: Sequence[Json]) -> Json:
    """What batch 8 on one prefix is held to, by system; none where there are no such rows."""
    found: Json = {}
    for system in dict.fromkeys(row["system"] for row in rows):
        mine = {
            row["batch"]: row
            for row in rows
            if row["system"] == system and row["load"] == "same-prefix"
        }
        if {1, 8} <= mine.keys():
            one, eight = mine[1], mine[8]
            faster = eight["requests_s"] / one["requests_s"]
            more = eight["ssd_bytes"] / one["ssd_bytes"]
            within = all(row["ssd_kv_bytes"] <= row["union_bytes"] for row in mine.values())
            found[system] = {
                "requests_s_ratio": faster,
                "ssd_bytes_ratio": more,
                "overlap": eight["overlap"],
                "never_more_than_the_union": within,
                "met": {
                    "requests_s": faster >= FASTER,
                    "ssd_bytes": within and (more <= BYTES or eight["overlap"] < 0.5),
                },
            }
    return found


def verdict(system: str, found: Json) -> str:
    """One line: the bars and whether they are met."""
    said = {True: "met", False: "missed"}
    return (
        f"{system}, batch 8 on one prefix: {found['requests_s_ratio']:.2f} times the requests/s "
        f"(bar {FASTER}: {said[found['met']['requests_s']]}), {found['ssd_bytes_ratio']:.2f} times "
        f"the SSD bytes at an overlap of {found['overlap']:.2f} "
        f"(bar {BYTES}: {said[found['met']['ssd_bytes']]})"
    )


def show(rows: Sequence[Json]) -> str:
    """The rows as a table."""
    header = ("system", "load", "batch", "req/s", "TTFT mean", "p95", "SSD MB", "union", "overlap")
    cells = [
        [
            row["system"], row["load"], row["batch"], row["requests_s"], row["ttft_ms"]["mean"],
            row["ttft_ms"]["p95"], row["ssd_bytes"] / 1e6,
            row["union_bytes"] / 1e6 if "union_bytes" in row else "", row.get("overlap", ""),
        ]
        for row in rows
    ]  # fmt: skip
    return table(cells, header)


def main() -> None:
    """The command."""
    p = parser(__doc__, quick=QUICK, full=FULL)
    p.add_argument("--batches", type=positive, nargs="+", help="batch sizes (default: 1 to 32)")
    args = p.parse_args()
    setting = setting_of(args)
    with Lab(setting) as lab:
        for index in range(setting.prefixes):
            lab.ingest(index, setting.systems)
        rows = [
            row for system in setting.systems for row in run(lab, system, args.batches or BATCHES)
        ]
    print(show(rows))
    held = bars(rows)
    for system, found in held.items():
        print(verdict(system, found))
    finish(args, {"setting": setting.to_json(), "rows": rows, "bars": held})


if __name__ == "__main__":
    main()
