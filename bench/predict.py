"""Time to first token on accelerators that are not here: predicted, not measured.

    python -m bench.predict --aot bench/results/aot.json --json OUT

The pipeline's model (`bench.simulation`, which predicts this machine's measured times to within
15%) with what is published of a device, its bus and a disk, and what the compilers say. Of a TPU,
`reach` is the share of its peak at which XLA's own estimate has a call of four layers; of a GPU,
whose compiler says no time, it is assumed. What systems read and guess is what they were seen to
read on the structured model (`--profiles`, a file of `bench.ttft`). What a call and a selection
cost the host is assumed, and each row tells what half and twice of that would make of it (`low_ms`,
`high_ms`). `bound` is what would help most if it cost nothing: the device's memory (weights), its
arithmetic, the disk, the bus, or the host's work. Models whose weights leave no room are left out:
nothing here spans devices.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.aot.chips import CHIPS
from bench.aot.shapes import MODELS, PREFIX
from bench.common import Json, budget_share, existing_path, finish, positive, result_file, table
from bench.json_file import read_rows
from bench.prediction import (
    ASSUMED_REACH,
    Host,
    Machine,
    Question,
    Rates,
    fits,
    predicted,
    profiles_of,
    reach_of,
)
from ckv_jax.systems import SYSTEMS

PREFIXES = (5008, 32768, 131072)
BUDGETS = (0.05, 0.25, 1.0)
COLD = tuple(name for name in SYSTEMS if name != "as-h2o-lru")
"""Systems that differ without a cache: H2O's two policies do not."""
COLUMNS = (
    "target", "model", "prefix_tokens", "budget", "system", "ms", "low_ms", "high_ms", "bound",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is predicted."""

    targets: tuple[str, ...]
    models: tuple[str, ...]
    systems: tuple[str, ...]
    prefixes: tuple[int, ...]
    budgets: tuple[float, ...]

    def to_json(self) -> Json:
        """Plain JSON values, and what is assumed."""
        asked = {name: list(getattr(self, name)) for name in self.__slots__}
        rates = {name: dataclasses.asdict(Rates.of(CHIPS[name])) for name in self.targets}
        host = dataclasses.asdict(Host())
        return asked | {"host_s": host, "rates": rates, "assumed_reach": ASSUMED_REACH}


def rows_of(asked: Asked, compiled: Sequence[Json], seen: Sequence[Json]) -> list[Json]:
    """Every prediction; systems that select nothing have one budget, all of it."""
    rows: list[Json] = []
    systems = [
        name
        for name in asked.systems
        if SYSTEMS[name].selector == "none" or profiles_of(seen, name, 1.0)
    ]
    for name in sorted({*asked.systems} - {*systems}):
        print(f"{name}: not predicted, nobody has seen what it reads", flush=True)
    for target in asked.targets:
        chip = CHIPS[target]
        for name in asked.models:
            if not fits(chip, name):
                print(f"{target}: {name} does not fit", flush=True)
                continue
            machines = {
                dense: (Machine(chip=chip, reach=reach, rates=Rates.of(chip)), source)
                for dense in (False, True)
                for reach, source in (reach_of(chip, name, compiled, dense=dense),)
            }
            for prefix in asked.prefixes:
                for system in systems:
                    selects = SYSTEMS[system].selector not in ("none", "all")
                    machine, source = machines[SYSTEMS[system].selector == "none"]
                    for budget in asked.budgets if selects else (1.0,):
                        profiles = profiles_of(seen, system, budget)
                        question = Question(
                            model=MODELS[name], system=system, profiles=profiles, prefix=prefix,
                            budget=budget,
                        )  # fmt: skip
                        rows.append(
                            {"target": target, "model": name, "prefix_tokens": prefix,
                             "budget": budget, "system": system, "reach": machine.reach,
                             "reach_by": source} | predicted(machine, question)
                        )  # fmt: skip
            print(f"{target}: {name}", flush=True)
    return rows


def first_to_confirm(rows: Sequence[Json]) -> str:
    """What predictions of ours hang on most: the one line for whoever gets a device first."""
    ours = [row for row in rows if SYSTEMS[row["system"]].chunked]
    bounds = Counter(row["bound"] for row in ours)
    widest = max(ours, key=lambda row: row["high_ms"] / row["low_ms"])
    shares = ", ".join(f"{name} {n}" for name, n in bounds.most_common())
    return (
        f"To confirm first: the host's seconds for a call, a selection and a read. Half and twice "
        f"of what is assumed move {widest['system']} on {widest['target']} ({widest['model']}, "
        f"{widest['prefix_tokens']} tokens, {widest['budget']:.0%}) from {widest['low_ms']:.1f} to "
        f"{widest['high_ms']:.1f} ms; rows of ours are bound by {shares}."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--aot", type=existing_path, required=True, help="a file of `bench.aot`")
    p.add_argument("--profiles", type=existing_path, default=Path("bench/results/ttft.json"))
    p.add_argument("--target", nargs="+", choices=CHIPS, default=list(CHIPS))
    p.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    p.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(COLD))
    p.add_argument("--prefix-tokens", nargs="+", type=positive, default=list(PREFIXES))
    p.add_argument("--budgets", nargs="+", type=budget_share, default=list(BUDGETS))
    p.add_argument("--json", type=result_file, help="write the result to this file")
    args = p.parse_args(argv)
    compiled = read_rows(args.aot)
    seen = [row | {"tokens_in_prefix": PREFIX} for row in read_rows(args.profiles)]
    asked = Asked(
        targets=tuple(args.target),
        models=tuple(args.model),
        systems=tuple(args.systems),
        prefixes=tuple(args.prefix_tokens),
        budgets=tuple(args.budgets),
    )
    rows = rows_of(asked, compiled, seen)
    print(table([[row[name] for name in COLUMNS] for row in rows], COLUMNS))
    line = first_to_confirm(rows)
    print("predicted, not measured")
    print(line)
    finish(args, asked, {"note": "predicted, not measured", "confirm_first": line, "rows": rows})


if __name__ == "__main__":
    main()
