"""Paper scale on paper: a simulated pipeline, first held against measured runs, then extrapolated.

    python -m bench.simulate --quick --json OUT --plot PNG

`validation`: each system is measured here, cold; the model of `bench.simulation` gets the disk,
link and contention of this machine, each system's calls replayed by themselves, what its engine
adds when nothing is read, and the bytes, coverage and waste of its recorded requests, and predicts
the time to first token (`bench.calibrate`). `predictions`:
the same model with a preset's data sheet (the paper's A800 with a 990 Pro) and what each system was
seen to load here, for published models and prefixes of 4k to 128k tokens. Predictions are not
measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bench import costs
from bench.calibrate import calls_of, hardware, script, with_engine
from bench.common import COLORS, OURS, Json, Setting, finish, parser, save_plot, setting_of, table
from bench.floor import Recording, record
from bench.lab import Lab
from bench.measure import measured, row_of
from bench.simulation import Simulation
from bench.turns import Taken, take_turns
from ckv_jax import Engine
from ckv_jax.model.config import PUBLISHED
from ckv_jax.systems import system_named

SIMULATED = (*OURS, "impress", "as-h2o-lfu", "as-lru")
QUICK = Setting(prefixes=1, repeats=5, systems=SIMULATED)
FULL = Setting(prefixes=2, repeats=20, systems=SIMULATED)
MODELS = ("7B", "14B", "32B")
PREFIXES = (4096, 8192, 16384, 32768, 65536, 131072)
GOAL = 0.15


def resident(lab: Lab, engine: Engine, budget: float) -> tuple[Json, Recording]:
    """A row of requests whose KV is all on the device, and the calls of one."""
    found = record(lab, engine, budget)
    samples = [measured(lab, engine, 0, 0, budget) for _ in range(max(5, lab.setting.repeats))]
    return row_of(engine.system.name, budget, "resident", samples, engine.layout), found


def validate(lab: Lab, taken: Sequence[Taken]) -> list[Json]:
    """Simulated against measured time to first token."""
    rows: list[Json] = []
    for part in taken:
        if part.system.selector == "all" and any(r["system"] == part.system.name for r in rows):
            continue  # the same requests at every budget
        cold = part.row() | {"tokens_in_prefix": lab.work.prefix_tokens}
        name = part.system.name
        with lab.engine(part.system, device_bytes=2 * lab.kv_bytes + (64 << 20)) as engine:
            warm, found = resident(lab, engine, part.budget)
            calls = calls_of(engine, found)
            here = with_engine(hardware(lab, engine, found, cold), engine, calls, warm)
            recorded = script(engine, cold, calls)
        outcome = Simulation(recorded, here).run()
        median = cold["ttft_ms"]["p50"]
        rows.append(
            {
                "system": name,
                "budget": part.budget,
                "measured_ms": median,
                "simulated_ms": outcome.ttft_s * 1e3,
                "error": outcome.ttft_s * 1e3 / median - 1,
                "calls_ms": calls.total_s * 1e3,
                "resident_ms": warm["ttft_ms"]["p50"],
                "waits_ms": {kind: s * 1e3 for kind, s in outcome.waits.items()},
                "hardware": dataclasses.asdict(here),
                "profile": dataclasses.asdict(costs.Profile.of(cold)),
            }
        )
    return rows


def predict(rows: Sequence[Json], preset: str, suffix: int) -> list[Json]:
    """Every system, model and prefix on a preset."""
    accelerator = costs.PRESETS[preset]
    found = []
    for model_name in MODELS:
        model = PUBLISHED[model_name]
        for prefix in PREFIXES:
            dense = costs.recompute_s(model, accelerator, prefix + suffix) * 1e3
            common = {"model": model_name, "prefix_tokens": prefix, "preset": preset}
            found.append(common | {"system": "recompute", "budget": 1.0, "ttft_ms": dense})
            for row in rows:
                request = costs.script(
                    model, system_named(row["system"]), costs.Profile(**row["profile"]),
                    accelerator, prefix=prefix, suffix=suffix, budget=row["budget"],
                )  # fmt: skip
                outcome = Simulation(request, accelerator.hardware).run()
                chosen = {"system": row["system"], "budget": row["budget"]}
                found.append(common | chosen | {"ttft_ms": outcome.ttft_s * 1e3})
    return found


def draw(figure: Any, rows: Sequence[Json], predictions: Sequence[Json]) -> None:
    """Simulated over measured, and predictions for 7B at the smallest budget."""
    left, right = figure.subplots(1, 2)
    for row in rows:
        label = f"{row['system']}, {row['budget']:.0%}"
        marker = "o" if row["budget"] == rows[0]["budget"] else "s"
        point = (row["measured_ms"], row["simulated_ms"])
        left.loglog(*point, marker, color=COLORS[row["system"]], label=label)
    low, high = (f(row["measured_ms"] for row in rows) for f in (min, max))
    ends = [low / 1.3, high * 1.3]
    left.plot(ends, ends, "k-", lw=0.5)
    left.fill_between(
        ends, [x * (1 - GOAL) for x in ends], [x * (1 + GOAL) for x in ends], color="k", alpha=0.1
    )
    left.set(xlabel="measured, ms", ylabel="simulated, ms", title=f"this machine, ±{GOAL:.0%}")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_formatter("{x:.0f}")
        axis.set_minor_formatter("{x:.0f}")
    left.tick_params(which="both", labelsize=7)
    left.legend(fontsize=7)
    budget = min(row["budget"] for row in rows)
    for name in dict.fromkeys(row["system"] for row in predictions):
        mine = [
            row
            for row in predictions
            if row["system"] == name and row["model"] == "7B" and row["budget"] in (budget, 1.0)
        ]
        xs, ys = [row["prefix_tokens"] for row in mine], [row["ttft_ms"] for row in mine]
        right.loglog(xs, ys, "o-", color=COLORS[name], label=name)
    right.set(xlabel="prefix tokens", ylabel="TTFT, ms (predicted)", title=f"7B, {budget:.0%}")
    right.set_xticks(PREFIXES, labels=[f"{n // 1024}k" for n in PREFIXES])
    right.minorticks_off()
    right.legend()


def main() -> None:
    """The command."""
    p = parser(__doc__, quick=QUICK, full=FULL)
    p.add_argument("--preset", choices=sorted(costs.PRESETS), default="a800-990pro")
    args = p.parse_args()
    setting = setting_of(args)
    if "recompute" in setting.systems:
        raise SystemExit("got system recompute, which reads nothing and needs no simulation")
    with Lab(setting) as lab:
        systems = {(name, "default"): system_named(name) for name in setting.systems}
        rows = validate(lab, take_turns(lab, systems))
    predictions = predict(rows, args.preset, setting.suffix_tokens)
    worst = max(abs(row["error"]) for row in rows)
    names = ["system", "budget", "measured_ms", "simulated_ms", "error", "calls_ms", "resident_ms"]
    print(table([[row[name] for name in names] for row in rows], names))
    verdict = "within" if worst <= GOAL else "outside"
    print(f"largest error {worst:.0%}: {verdict} the goal of {GOAL:.0%}")
    names = ["model", "prefix_tokens", "system", "budget", "ttft_ms"]
    print(table([[row[name] for name in names] for row in predictions], names))
    body = {"validation": rows, "largest_error": worst, "goal": GOAL, "predictions": predictions}
    finish(args, setting, body)
    save_plot(args.plot, lambda figure: draw(figure, rows, predictions), size=(10, 4.5))


if __name__ == "__main__":
    main()
