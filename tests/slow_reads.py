"""A disk whose every read takes a while, by rule rather than by a clock: for deadlines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckv_jax.storage.segment.reads import Deadline

READ_S = 0.01


def slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on reads are late for whoever waits for less than `READ_S` seconds."""

    def slow(wait: Callable[..., Any]) -> Callable[..., Any]:
        def waited(deadline: Deadline, *args: Any) -> Any:
            if deadline.left() < READ_S:
                raise deadline._late("a slow disk")
            return wait(deadline, *args)

        return waited

    for name in ("wait", "wait_some"):
        monkeypatch.setattr(Deadline, name, slow(getattr(Deadline, name)))
