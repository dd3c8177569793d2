"""Trying mutants: a copy of the checkout, a change in it, and a run of some tests."""

from __future__ import annotations

import difflib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

from tests.mutants.draw import Mutant
from tests.mutants.reach import FAILED, FIRST, Reach

Outcome = Literal["killed", "timeout", "survived"]
_FAILED = (1, 2)  # pytest's: tests failed, or could not even be collected


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one run of tests."""

    outcome: Outcome
    seconds: float
    output: str


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a mutant."""

    mutant: Mutant
    outcome: Outcome
    seconds: float
    diff: str


def changed(root: Path, mutant: Mutant) -> tuple[str, str]:
    """A file's text with the mutant in it, and the diff that makes it."""
    before = (root / mutant.file).read_text()
    after = mutate_code(before, get_operator(mutant.operator)(), mutant.index)
    if after is None or after == before:
        raise ValueError(f"got no change for {mutant}, expected one")
    lines = (text.splitlines(keepends=True) for text in (before, after))
    return after, "".join(difflib.unified_diff(*lines, "as it is", "mutant", n=1))


def with_slow(tests: list[str]) -> bool:
    """Whether slow tests run too: most of the baselines' are slow."""
    return all(test.startswith("tests/baselines") for test in tests)


def copied(root: Path, work: Path) -> Tree:
    """A copy of what the tests need, in which the package is one folder.

    An installed checkout maps `ckv_jax.storage` to its own `storage/`; a link in the copy's
    package is found before that.
    """
    tree = work / "tree"
    names = ("ckv_jax", "storage", "kernels_pallas", "bench", "tests", "docs", "pyproject.toml")
    unwanted = shutil.ignore_patterns("__pycache__", "results")
    for name in names:
        if (root / name).is_dir():
            shutil.copytree(root / name, tree / name, ignore=unwanted)
        else:
            shutil.copy(root / name, tree / name)
    for name in ("storage", "kernels_pallas"):
        (tree / "ckv_jax" / name).symlink_to(tree / name)
    return Tree(tree, work / "compiled")


class Tree:
    """The copy. Runs of its tests share what XLA has compiled."""

    def __init__(self, root: Path, compiled: Path) -> None:
        self._root = root
        self._compiled = compiled

    def observed(self, folder: str, tests: list[str], timeout: int) -> tuple[Run, Reach]:
        """Runs the tests near a folder as they are; what came of it, and what each of them ran.

        Being watched makes system calls of its own and takes time. Tests that fail of that, and
        only those, are run once more without.
        """
        name = folder.replace("/", "-")
        recorded, failed = (
            self._compiled.parent / f"{kind}-{name}" for kind in ("lines", "failed")
        )
        sources = [f"--cov={self._root / name}" for name in ("ckv_jax", "storage")]
        options = ["--maxfail=10", *sources, "--cov-context=test", "--cov-report="]
        extra = {"COVERAGE_FILE": str(recorded), FAILED: str(failed)}
        slow = with_slow(tests)
        found = self.run(tests + options, slow=slow, timeout=timeout, extra=extra)
        if found.outcome == "killed" and failed.exists():
            again = self.run(failed.read_text().splitlines(), slow=slow, timeout=timeout, extra={})
            found = replace(again, seconds=found.seconds + again.seconds)
        return found, Reach(recorded, self._root)

    def tried(self, mutant: Mutant, tests: list[str], reach: Reach, timeout: int) -> Trial:
        """Runs `tests`, those first that reach the mutant, then puts the file back."""
        path = self._root / mutant.file
        before = path.read_text()
        after, diff = changed(self._root, mutant)
        first = self._compiled.parent / "first"
        first.write_text("\n".join(reach.tests_of(mutant.file, mutant.line)))
        path.write_text(after)
        try:
            extra = {FIRST: str(first)}
            found = self.run(tests, slow=with_slow(tests), timeout=timeout, extra=extra)
        finally:
            path.write_text(before)
        return Trial(mutant, found.outcome, found.seconds, diff)

    def run(self, tests: list[str], *, slow: bool, timeout: int, extra: dict[str, str]) -> Run:
        """Runs tests, `slow` ones too, until the first that fails; in a session, ended whole if
        late."""
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", *([] if slow else ["-m", "not slow"]),
            "-p", "no:cacheprovider", "-p", "tests.mutants.reach", f"--timeout={timeout}", *tests,
        ]  # fmt: skip
        environment = os.environ | {
            "CKV_TESTS_COMPILED": str(self._compiled),
            "PYTHONDONTWRITEBYTECODE": "1",
            **extra,
        }
        begun = time.monotonic()
        with subprocess.Popen(
            command,
            cwd=self._root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                return Run("timeout", time.monotonic() - begun, output)
        seconds = time.monotonic() - begun
        if process.returncode == 0:
            return Run("survived", seconds, output)
        unloadable = "ImportError while loading conftest" in output
        if process.returncode in _FAILED or process.returncode < 0 or unloadable:  # < 0: it died
            return Run("killed", seconds, output)
        raise RuntimeError(f"got status {process.returncode} from pytest:\n{output[-2000:]}")
