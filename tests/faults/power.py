"""Power loss: an operation is recorded, and every state that the disk may be left in is judged."""

from __future__ import annotations

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
_SPLIT = 8  # processes among which the states of one operation are divided


@dataclass(frozen=True, slots=True)
class Share:
    """Every `of`-th state of an operation, from number `first` on; then every `step`-th of them."""

    operation: str
    first: int
    of: int
    step: int

    @property
    def kind(self) -> str:
        """The kind of fault."""
        return "power loss"


def power_losses(
    pristine: Path, *, jobs: int, step: int = 1, operations: tuple[str, ...] = WRITING
) -> dict[tuple[str, str], Tally]:
    """Judge the states of all operations; a tally for each (kind, operation)."""
    split = 1 if step > 1 else _SPLIT
    shares = [[Share(name, i, split, step)] for name in operations for i in range(split)]
    tallies: dict[tuple[str, str], Tally] = {}
    limit = HANG_S * 10  # for a share, which has reports of its own in between
    for share, result in farm.run(
        partial(judge_share, pristine), shares, jobs=jobs, timeout_s=limit
    ):
        tally = result if isinstance(result, Tally) else tally_of(share, result)
        key = (share.kind, share.operation)
        tallies[key] = tallies.get(key, Tally()) + tally
    return tallies


def judge_share(pristine: Path, shares: list[Share], report: Callable[[int, Any], None]) -> None:
    """Record the operation of each share, make its states, and judge them."""
    logging.disable(logging.WARNING)
    for i, share in enumerate(shares):
        report(i, None)
        folder = pristine / f"{os.getpid()}-power"
        events, done, states = record(pristine, share.operation, folder)
        tally = Tally()
        for number, (end, what, tree) in enumerate(states):
            if number % share.of != share.first or number // share.of % share.step:
                continue
            report(i, None)
            tally += judge_state(
                pristine, folder, share, tree, done if end == events else Done(), what
            )
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
                shutil.copytree(folder / "recorded", folder / "before", copy_function=_keep)
            recorder.begin()
            calls.note = recorder.note
            calls.arm(Plan())

        done = scene.perform(operation, folder / "recorded", arm, calls.disarm)
    _resource(recorder.root, folder / "before")
    if done.refused or done.crash:
        raise RuntimeError(f"{operation} fails without a fault: {done}")
    return len(recorder.events), done, crash_states.crash_states(recorder)


def _keep(path: str, to: str) -> None:
    os.link(path, to)


def _resource(node: crash_states.Node, folder: Path) -> None:
    """Let the files of a tree have their bytes from `folder`."""
    for name, below in node.entries.items():
        if below.folder:
            _resource(below, folder / name)
        else:
            below.source = folder / name


def judge_state(
    pristine: Path, folder: Path, share: Share, tree: Tree, done: Done, what: str
) -> Tally:
    """The tally of one state."""
    state = folder / "state"
    crash_states.lay_out(tree, state)
    verdict = scene.judge(pristine, state, share.operation, done)
    shutil.rmtree(state)
    tally = tally_of(share, Result(Done(refused="power loss"), verdict, failed=what))
    return tally
