"""Power loss: an operation is recorded, and every state that the disk may be left in is judged."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults import crash_states, farm, scene
from tests.faults.calls import Calls, Plan
from tests.faults.crash_states import Recorder, Tree
from tests.faults.scene import OPERATIONS, Done
from tests.faults.sweep import Result, tally_of
from tests.faults.tally import HANG_S, Tally

WRITING = ("create", "write", "append", "evict", "pin", "repair", "replace", "prune")
"""Operations that change what is on the disk."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The power goes during an operation."""

    operation: str

    @property
    def kind(self) -> str:
        """The kind of fault."""
        return "power loss"


def power_losses(
    pristine: Path, *, jobs: int, step: int = 1, operations: tuple[str, ...] = WRITING
) -> dict[tuple[str, str], Tally]:
    """Judge every `step`-th state of all operations; a tally for each (kind, operation)."""
    tallies: dict[tuple[str, str], Tally] = {}
    limit = HANG_S * 10  # for an operation, which has reports of its own in between
    run, batches = partial(judge_losses, pristine, step), [[Loss(name)] for name in operations]
    for loss, result in farm.run(run, batches, jobs=jobs, timeout_s=limit):
        tally = result if isinstance(result, Tally) else tally_of(loss, result)
        tallies[loss.kind, loss.operation] = tally
    return tallies


def judge_losses(
    pristine: Path, step: int, losses: list[Loss], report: Callable[[int, Any], None]
) -> None:
    """Record the operation of each loss, make its states, and judge them."""
    logging.disable(logging.WARNING)
    for i, loss in enumerate(losses):
        report(i, None)
        folder = pristine / f"{os.getpid()}-power"
        events, done, states = record(pristine, loss.operation, folder)
        tally = Tally()
        for end, what, tree in itertools.islice(states, 0, None, step):
            report(i, None)
            known = done if end == events else Done()
            tally += judge_state(pristine, folder, loss, tree, known, what)
        shutil.rmtree(folder)
        report(i, tally)


def record(
    pristine: Path, operation: str, folder: Path
) -> tuple[int, Done, Iterator[tuple[int, str, Tree]]]:
    """Do an operation in `folder`/recorded: events, what it did, and what a crash may leave."""
    folder.mkdir()
    scene.lay_out(pristine, OPERATIONS[operation], folder / "recorded")
    recorder = Recorder(folder / "recorded")
    with Calls() as calls:

        def arm() -> None:
            # What is linked now must outlive the operation, which may remove it.
            if (folder / "recorded").exists():
                shutil.copytree(folder / "recorded", folder / "before", copy_function=os.link)
            recorder.begin()
            calls.note = recorder.note
            calls.arm(Plan())

        done = scene.perform(operation, folder / "recorded", arm, calls.disarm)
    _resource(recorder.root, folder / "before")
    if done.refused or done.crash:
        raise RuntimeError(f"{operation} fails without a fault: {done}")
    return len(recorder.events), done, crash_states.crash_states(recorder)


def _resource(node: crash_states.Node, folder: Path) -> None:
    """Let the files of a tree have their bytes from `folder`."""
    for name, below in node.entries.items():
        if below.folder:
            _resource(below, folder / name)
        else:
            below.source = folder / name


def judge_state(
    pristine: Path, folder: Path, loss: Loss, tree: Tree, done: Done, what: str
) -> Tally:
    """The tally of one state."""
    state = folder / "state"
    crash_states.lay_out(tree, state)
    verdict = scene.judge(pristine, state, loss.operation, done)
    shutil.rmtree(state)
    return tally_of(loss, Result(Done(refused="power loss"), verdict, failed=what))
