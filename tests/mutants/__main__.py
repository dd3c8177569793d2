"""Small wrong changes, drawn at random, and whether the tests near them notice.

    python -m tests.mutants [--count 200] [--seed 0] [--only storage ckv_jax/prefix] [--json OUT]
                            [--resume]

Changes are cosmic-ray's. Each is made in a copy of the checkout, whose tests for that folder
(`near.py`) then run until the first fails, those before others that reach the change
(`reach.py`); the checkout itself is never touched. Survivors are listed with their diff.
A run that takes twice as long as without a change has hung: killed too. What `--json` names is
written after every change, and `--resume` keeps of its outcomes those that were killed and whose
change is drawn again, of a line with the same text. What changes nothing (`equivalent.py`) is not
tried and not counted.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.mutants.draw import Mutant, drawn
from tests.mutants.equivalent import reason
from tests.mutants.near import NEAR, tests_of
from tests.mutants.trial import Trial, changed, copied

ROOT = Path(__file__).parents[2]
LONGEST_S = 300
"""What a run of tests may take with a change."""


def main() -> None:
    """Draw, try, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many mutants (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--only", nargs="+", choices=sorted(NEAR), help="folders (all)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where the outcomes go")
    parser.add_argument("--resume", action="store_true", help="keep the outcomes in --json")
    options = parser.parse_args()
    if options.resume and options.json is None:
        parser.error("--resume needs --json OUT, the file to go on from")
    folders = options.only or sorted(NEAR)
    mutants = drawn(ROOT, folders, count=options.count, seed=options.seed)
    same = [mutant for mutant in mutants if reason(mutant)]
    mutants = [mutant for mutant in mutants if not reason(mutant)]
    trials = _kept(options.json, mutants) if options.resume else []
    done = {trial.mutant for trial in trials}
    mutants = [mutant for mutant in mutants if mutant not in done]
    with tempfile.TemporaryDirectory(prefix="ckv-mutants-") as work:
        tree = copied(ROOT, Path(work))
        for folder in sorted({mutant.folder for mutant in mutants}):
            near = tests_of(ROOT, folder)
            unchanged, reach = tree.observed(folder, near, timeout=2 * LONGEST_S)
            if unchanged.outcome != "survived":
                print(unchanged.output)
                parser.error(f"the tests near {folder} fail, or run over time, as they are")
            print(f"{folder}: its tests pass in {unchanged.seconds:.0f} s", flush=True)
            limit = min(LONGEST_S, 30 + round(2 * unchanged.seconds))
            for mutant in (m for m in mutants if m.folder == folder):
                trials.append(tree.tried(mutant, near, reach, limit))
                print(_line(trials[-1]), flush=True)
                if options.json:
                    _write(options.json, trials)
    for mutant in same:
        print(f"the same: {mutant.file}:{mutant.line} {mutant.operator}: {reason(mutant)}")
    _report(trials)


def _write(path: Path, trials: list[Trial]) -> None:
    found = [_plain(trial) for trial in trials]
    path.write_text(json.dumps({"killed": _killed(trials), "mutants": found}, indent=1))


def _plain(trial: Trial) -> dict[str, Any]:
    return dataclasses.asdict(trial.mutant) | {
        "outcome": trial.outcome, "seconds": trial.seconds, "diff": trial.diff
    }  # fmt: skip


def _kept(path: Path, mutants: list[Mutant]) -> list[Trial]:
    """What an earlier run killed of those that are drawn now, in lines with the same text."""
    if not path.exists():
        return []
    now = {(mutant.file, mutant.operator, mutant.place): mutant for mutant in mutants}
    trials = []
    for found in json.loads(path.read_text())["mutants"]:
        mutant = now.get((found["file"], found["operator"], found["place"]))
        if mutant is not None and found["outcome"] != "survived":
            diff = changed(ROOT, mutant)[1]
            trials.append(Trial(mutant, found["outcome"], found["seconds"], diff))
    return trials


def _killed(trials: list[Trial]) -> float:
    """Of a hundred."""
    killed = sum(trial.outcome != "survived" for trial in trials)
    return 100 * killed / max(1, len(trials))


def _line(trial: Trial) -> str:
    mutant = trial.mutant
    return (
        f"{trial.outcome:9} {trial.seconds:5.1f} s  {mutant.file}:{mutant.line} {mutant.operator}"
    )


def _report(trials: list[Trial]) -> None:
    """Prints survivors and shares."""
    by_folder: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for trial in trials:
        by_folder[trial.mutant.folder][trial.outcome] += 1
        if trial.outcome == "survived":
            print(f"\nsurvived: {trial.mutant.file}:{trial.mutant.line}\n{trial.diff}")
    print()
    for folder, counts in sorted(by_folder.items()):
        print(f"{folder:20} {counts.total() - counts['survived']} of {counts.total()} killed")
    killed = sum(trial.outcome != "survived" for trial in trials)
    share = _killed(trials)
    seconds = sum(trial.seconds for trial in trials) / max(1, len(trials))
    print(f"{'all':20} {killed} of {len(trials)} killed ({share:.1f}%), {seconds:.1f} s a mutant")


if __name__ == "__main__":
    main()
