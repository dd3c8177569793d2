"""The errno sweep: every call that an operation makes fails once, or is where the process dies."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults import farm
from tests.faults.calls import CODES, Calls, Plan
from tests.faults.scene import OPERATIONS, Done, Verdict, judge, lay_out, open_files, perform
from tests.faults.tally import HANG_S, Tally

LASTING = ("EIO", "EMFILE")
"""Errors that all later calls of the same name have, too, in states of their own."""
MAX_FREE = 24
"""Descriptors that are free at most where they run out."""
_BATCH = 40
_NOTHING = Plan()


@dataclass(frozen=True, slots=True)
class State:
    """One fault of one operation: of a call that Python makes, or too few free descriptors."""

    operation: str
    plan: Plan = _NOTHING
    free: int | None = None

    @property
    def kind(self) -> str:
        """The kind of fault."""
        if self.free is not None:
            return "out of descriptors"
        if self.plan.code is None:
            return "death at a call"
        return f"{self.plan.code} {'from a call on' if self.plan.lasting else 'at a call'}"


@dataclass(slots=True)
class Result:
    """What came of a state; `calls` is how many calls the operation made."""

    done: Done
    verdict: Verdict
    calls: int = 0
    failed: str = ""


def states(calls: dict[str, int], step: int = 1) -> Iterator[State]:
    """All states of operations that make so many calls; every `step`-th of them."""
    number = 0
    for operation, count in calls.items():
        plans = [Plan(at, code) for at in range(1, count + 1) for code in (*CODES, None)]
        plans += [Plan(at, code, True) for at in range(1, count + 1) for code in LASTING]
        for plan in plans:
            number += 1
            if number % step == number // step % step:  # of every code, whatever the step
                yield State(operation, plan)
        for free in range(0, MAX_FREE + 1, 1 + step // 12):
            yield State(operation, free=free)


def sweep(
    pristine: Path, *, jobs: int, step: int = 1, operations: tuple[str, ...] = tuple(OPERATIONS)
) -> dict[tuple[str, str], Tally]:
    """Run the states of all operations; a tally for each (kind, operation)."""
    run = partial(run_states, pristine)
    clean = [[State(name)] for name in operations]
    calls = {}
    for state, result in farm.run(run, clean, jobs=jobs, timeout_s=HANG_S):
        if not isinstance(result, Result) or tally_of(state, result).bad:
            raise RuntimeError(f"{state.operation} fails without a fault: {result}")
        calls[state.operation] = result.calls
    todo = list(states({name: calls[name] for name in operations}, step))
    died = [s for s in todo if s.kind == "death at a call"]
    other = [s for s in todo if s.kind != "death at a call"]
    tallies: dict[tuple[str, str], Tally] = {}
    batches = farm.cut(died, _BATCH) + farm.cut(other, _BATCH)
    for state, result in farm.run(run, batches, jobs=jobs, timeout_s=HANG_S):
        key = (state.kind, state.operation)
        tallies[key] = tallies.get(key, Tally()) + tally_of(state, result)
    return tallies


def tally_of(state: Any, result: Any) -> Tally:
    """The tally of one state."""
    tally = Tally(states=1)
    where = f"{state.operation}: {state.kind}"
    if not isinstance(result, Result):
        tally.hangs += result == "hang"
        tally.crashes += result != "hang"
        tally.notes.append(f"{where} {getattr(state, 'plan', '')}: {result}")
        return tally
    done, verdict = result.done, result.verdict
    tally.wrong_tokens = done.wrong + verdict.wrong
    held = [x for x in done.leaks if x.startswith("held")]
    leaks = [x for x in done.leaks if x not in held] + verdict.leaks
    tally.lost_healthy = len(verdict.lost) + len(held)
    tally.evicted_pins = len(verdict.pins)
    tally.leaks = bool(leaks)
    crashes = [done.crash, *verdict.crashes] if done.crash else verdict.crashes
    tally.crashes = bool(crashes)
    if tally.bad:
        found = (*held, *verdict.lost, *verdict.pins, *leaks, *crashes)
        if done.wrong or verdict.wrong:
            found = (f"{done.wrong + verdict.wrong} wrong tokens", *found)
        at = f" {result.failed}" if result.failed else ""
        number = f" (call {state.plan.at})" if getattr(state, "plan", None) else ""
        tally.notes.append(f"{where}{at}{number}: {'; '.join(found)}")
    elif done.refused or done.less:
        tally.caught = 1
    else:
        tally.harmless = 1
    return tally


# -- in a process of its own -------------------------------------------------------------------


def run_states(pristine: Path, todo: list[State], report: Callable[[int, Any], None]) -> None:
    """Work through states; those that die do so in a process forked from this one."""
    logging.disable(logging.WARNING)  # an index that is lost on purpose need not be reported
    folders = [pristine / f"{os.getpid()}-{i}" for i in range(len(todo))]
    for state, folder in zip(todo, folders, strict=True):  # before this process has any thread
        if state.plan.at and state.plan.code is None:
            lay_out(pristine, OPERATIONS[state.operation], folder)
            _die(state, folder)
    with Calls() as calls:
        for i, (state, folder) in enumerate(zip(todo, folders, strict=True)):
            report(i, None)
            if state.plan.at and state.plan.code is None:
                result = Result(
                    Done(refused="died"), judge(pristine, folder, state.operation, Done())
                )
            else:
                result = _fail(pristine, state, folder, calls)
            shutil.rmtree(folder, ignore_errors=True)
            report(i, result)


def _fail(pristine: Path, state: State, folder: Path, calls: Calls) -> Result:
    operation = OPERATIONS[state.operation]
    lay_out(pristine, operation, folder)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def arm() -> None:
        if state.free is None:
            calls.arm(state.plan)
        else:
            resource.setrlimit(resource.RLIMIT_NOFILE, (_limit(state.free), limits[1]))

    def disarm() -> None:
        calls.disarm()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    start = time.monotonic()
    done = perform(state.operation, folder, arm, disarm)
    if time.monotonic() - start > HANG_S / 2:
        done.crash = done.crash or f"took {time.monotonic() - start:.1f} s"
    done.leaks += open_files(folder)
    failed = calls.failed if state.free is None else f"{state.free} free"
    return Result(done, judge(pristine, folder, state.operation, done), calls.count, failed)


def _limit(free: int) -> int:
    """The limit of descriptors that leaves so many free."""
    used = {int(fd) for fd in os.listdir("/proc/self/fd")}
    number = 0
    while free or number in used:
        free -= number not in used
        number += 1
    return number


def _die(state: State, folder: Path) -> None:
    """Do the operation in a fork that dies at its call."""
    pid = os.fork()
    if not pid:
        status = 0
        with contextlib.suppress(BaseException), Calls() as calls:
            perform(state.operation, folder, partial(calls.arm, state.plan), calls.disarm)
            status = 1
        os._exit(status)
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return
        time.sleep(0.001)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
