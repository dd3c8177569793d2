"""Paper scale on paper: a simulated pipeline, first held against measured runs, then extrapolated.

    python -m bench.simulate --quick --json OUT --plot PNG

`validation`: each system is measured here, cold; the model of `bench.simulation` gets the disk,
link and cores of this machine, each system's calls replayed by themselves, what its engine adds
when nothing is read, what its thread does for a read, and what its recorded requests read, used
and had read ahead, and predicts the time to first token (`bench.calibrate`). `predictions`: the
same model with a preset's data sheet (the paper's A800 with a 990 Pro) and what each system was
seen to load here, for published models and prefixes of 4k to 128k tokens. Predictions are not
measurements.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench import costs
from bench.calibrate import Calls, Reads, calls_of, script_of, timed, with_engine
from bench.common import OURS, Json, Setting, finish, parser, setting_of, table
from bench.figures import save
from bench.floor import record
from bench.lab import Lab
from bench.measure import Sample, measured, row_of
from bench.simulation import Hardware, Simulation
from bench.turns import budgets_of
from ckv_jax import Engine
from ckv_jax.model.config import PUBLISHED
from ckv_jax.pipeline.plan import Plan
from ckv_jax.systems import system_named

SIMULATED = (*OURS, "impress", "as-h2o-lfu", "as-lru")
QUICK = Setting(prefixes=1, repeats=7, systems=SIMULATED)
FULL = Setting(prefixes=1, repeats=9, systems=SIMULATED)
MODELS = ("7B", "14B", "32B")
PREFIXES = (4096, 8192, 16384, 32768, 65536, 131072)
GOAL = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One system at one budget, in turns so that all had the same machine."""

    cold: list[Sample]
    resident: list[Sample]
    """A question with all KV on the device."""
    calls: Calls
    hardware: Hardware


def measure(lab: Lab, cold: Engine, warm: Engine, guessing: Engine, budget: float) -> Measured:
    """Requests of `cold`, which reads everything, and of `warm`, which reads nothing.

    `guessing` is as `warm`, and looks ahead even so.
    """
    lab.ask(cold, 0, 11_001, budget)  # what speculation starts from
    recording = record(lab, guessing, budget)
    recording.replay()
    read, resident, replays = [], [], []
    with lab.store.reader(lab.prefix(0, warm)) as reader:
        reads = Reads(reader, warm)
        for turn in range(lab.setting.repeats):
            read.append(measured(lab, cold, 0, turn, budget))
            resident.append(measured(lab, warm, 0, 0, budget))
            replays.append(timed(recording.replay))
            reads.sample(cold)
        hardware = reads.hardware(warm, recording)
    calls = calls_of(warm, recording, statistics.median(replays))
    return Measured(cold=read, resident=resident, calls=calls, hardware=hardware)


def validate(lab: Lab, names: Sequence[str]) -> list[Json]:
    """Simulated against measured median time to first token, of prefix 0."""
    rows = []
    room = 2 * lab.kv_bytes + (64 << 20)
    for name in names:
        system = system_named(name)
        always = dataclasses.replace(system, speculate_always=True)
        budgets = budgets_of(system, lab.setting.budgets)
        lab.ingest(0, [system])
        with (
            lab.engine(system) as cold,
            lab.engine(system, device_bytes=room) as warm,
            lab.engine(always, device_bytes=room) as guessing,
        ):
            lab.warm(cold, 0, budgets)
            for budget in budgets:
                rows.append(_row(lab, measure(lab, cold, warm, guessing, budget), cold, budget))
                print(f"{name} at {budget:.0%}: {rows[-1]['error']:+.0%}", flush=True)
    return rows


def _row(lab: Lab, found: Measured, cold: Engine, budget: float) -> Json:
    system = cold.system
    read, resident = (
        row_of(system.name, budget, kind, samples, cold.layout)
        | {"tokens_in_prefix": lab.work.prefix_tokens}
        for kind, samples in (("cold", found.cold), ("resident", found.resident))
    )
    guessing = read["guesses"] / max(1, Plan.of(cold.layout.num_layers, system).periods - 1)
    script = script_of(cold, read, found.calls, guessing=guessing)
    unread = script_of(cold, resident, found.calls)
    here = with_engine(found.hardware, unread, resident["ttft_ms"]["p50"] / 1e3)
    outcome = Simulation(script, here).run()
    median = read["ttft_ms"]["p50"]
    return {
        "system": system.name,
        "budget": budget,
        "measured_ms": median,
        "simulated_ms": outcome.ttft_s * 1e3,
        "error": outcome.ttft_s * 1e3 / median - 1,
        "calls_ms": found.calls.total_s * 1e3,
        "resident_ms": resident["ttft_ms"]["p50"],
        "waits_ms": {kind: s * 1e3 for kind, s in outcome.waits.items()},
        "hardware": dataclasses.asdict(here),
        "profile": dataclasses.asdict(costs.Profile.of(read)),
    }


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


def main() -> None:
    """The command."""
    p = parser(__doc__, quick=QUICK, full=FULL)
    p.add_argument("--preset", choices=sorted(costs.PRESETS), default="a800-990pro")
    args = p.parse_args()
    setting = setting_of(args)
    if "recompute" in setting.systems:
        raise SystemExit("got system recompute, which reads nothing and needs no simulation")
    if setting.prefixes != 1:
        raise SystemExit(
            f"got {setting.prefixes} prefixes, expected 1, which all requests are about"
        )
    with Lab(setting) as lab:
        rows = validate(lab, setting.systems)
    predictions = predict(rows, args.preset, setting.suffix_tokens)
    worst = max(abs(row["error"]) for row in rows)
    names = ["system", "budget", "measured_ms", "simulated_ms", "error", "calls_ms", "resident_ms"]
    print(table([[row[name] for name in names] for row in rows], names))
    verdict = "within" if worst <= GOAL else "outside"
    print(f"largest error {worst:.0%}: {verdict} the goal of {GOAL:.0%}")
    names = ["model", "prefix_tokens", "system", "budget", "ttft_ms"]
    print(table([[row[name] for name in names] for row in predictions], names))
    body = {"validation": rows, "largest_error": worst, "goal": GOAL, "predictions": predictions}
    result = finish(args, setting, body)
    save("simulate", result, args.plot)


if __name__ == "__main__":
    main()
