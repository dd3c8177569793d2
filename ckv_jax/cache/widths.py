"""How wide each layer's and head's decode window is: profiled once for a model, then kept (KVDrive
§5.2).

Which chunks come back differs by layer and head, so that the same device memory saves more bytes
where it is not spread evenly. The choice among widths is a multiple-choice knapsack, solved
greedily.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckv_jax.folders import cache_folder
from ckv_jax.storage.fingerprint import Fingerprint

__all__ = ["TIMES", "Widths", "load_widths", "plain_name", "save_widths", "spread"]

TIMES = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Widths to profile, in multiples of one choice."""

_log = logging.getLogger(__name__)
_MOST_TIMES = 1024.0
_MOST_ROWS = 1 << 16
_LARGEST_FILE = 1 << 20
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Widths of the windows of one sequence.

    Attributes:
      times: [G][J], for each layer group and each row (all heads, or one KV head), in multiples of
        one choice; from 1 to 1,024.
    """

    times: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        sizes = {len(group) for group in self.times}
        if len(sizes) != 1 or not 0 < len(self.times) * max(sizes) <= _MOST_ROWS:
            raise ValueError(f"got widths of {len(self.times)} groups of {sorted(sizes)} rows")
        for value in (value for group in self.times for value in group):
            if type(value) not in (int, float) or not 1.0 <= value <= _MOST_TIMES:
                raise ValueError(f"got width {value!r}, expected 1 to {_MOST_TIMES:g} choices")

    @classmethod
    def even(cls, times: float, *, groups: int, rows: int) -> Widths:
        """The same width everywhere."""
        return cls(times=((times,) * rows,) * groups)

    def slots(self, limit: int, times: float, packs: np.ndarray) -> np.ndarray:
        """Slots int32 [G, J] of each row's window, where a choice has `limit` chunks.

        Together they hold no more packs than even windows of `times` choices (at least 1), however
        wide these widths are themselves: what they say is how to share that.

        Args:
          packs: int [G], packs of one chunk in each layer group.
        """
        more = np.array(self.times) - 1.0
        mean = float((more * packs[:, None]).sum() / (more.shape[1] * packs.sum()))
        share = more / mean if mean > 0 else np.ones_like(more)
        slots: np.ndarray = np.floor(limit * (1.0 + share * (times - 1.0)) + 1e-6).astype(np.int32)
        return slots


def spread(benefit: np.ndarray, cost: np.ndarray, limit: int) -> np.ndarray:
    """The option int64 [R] that each row takes, within a cost of `limit` altogether.

    Starts from every row's first option and goes on to where the gain per cost is greatest, as
    long as something fits; among equals to the row that has spent least. What one single row could
    gain with all of the rest is tried, too: with it the gain is at least half of the best there is.

    Args:
      benefit: [R, O], such as bytes not fetched.
      cost: int [R, O], such as slots; ascending along each row.
      limit: what all rows may cost together.

    Raises:
      ValueError: shapes, costs that do not ascend, or a limit below the first options.
    """
    if benefit.shape != cost.shape or benefit.ndim != 2 or (np.diff(cost, axis=1) <= 0).any():
        raise ValueError(
            f"got benefits {benefit.shape} and costs {cost.shape}, expected [R, O], ascending costs"
        )
    least = int(cost[:, 0].sum())
    if least > limit:
        raise ValueError(
            f"got room for {limit} slots, expected at least the {least} of one choice a row"
        )
    rows = np.arange(len(cost))
    option = np.zeros(len(cost), np.int64)
    while True:
        spent = cost[rows, option]
        more = cost - spent[:, None]
        gain = benefit - benefit[rows, option][:, None]
        open_ = (more > 0) & (more <= limit - spent.sum()) & (gain > 0)
        if not open_.any():
            break
        ratio = np.where(open_, gain / np.maximum(more, 1), -np.inf)
        best = np.argwhere(ratio == ratio.max())
        row, taken = best[np.argmin(spent[best[:, 0]])]
        option[row] = taken
    alone = np.where(cost - cost[:, :1] <= limit - least, benefit - benefit[:, :1], -np.inf)
    if alone.max() > (benefit[rows, option] - benefit[:, 0]).sum():
        row, taken = np.unravel_index(int(alone.argmax()), alone.shape)
        option[:] = 0
        option[row] = taken
    return option


def plain_name(name: str) -> str:
    """A system's name as `save_widths` takes it."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:64] or "unnamed"


def save_widths(widths: Widths, fingerprint: Fingerprint, name: str) -> Path:
    """Keeps a model's widths under a name, such as a system's and its budget's, and says where.

    Raises ValueError for a name that is not plain, OSError where nothing can be written.
    """
    path = _path(fingerprint, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, fresh = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump({"times": widths.times}, file)
        os.replace(fresh, path)
    except OSError:
        Path(fresh).unlink(missing_ok=True)
        raise
    return path


def load_widths(fingerprint: Fingerprint, name: str, *, groups: int, rows: int) -> Widths | None:
    """The widths that were kept for a model of so many layer groups and rows; None if none were.

    A file that holds anything else is left alone and logged as a warning.
    """
    path = _path(fingerprint, name)
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE)  # what goes on is not whole
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("cannot read widths in %s: %s", path, error)
        return None
    try:
        return _decode(data, groups, rows)
    except (ValueError, RecursionError) as error:
        _log.warning("no widths in %s: %s", path, error)
        return None


def _decode(data: bytes, groups: int, rows: int) -> Widths:
    value: Any = json.loads(data)
    times = value.get("times") if isinstance(value, dict) else None
    if not isinstance(times, list) or len(times) != groups:
        raise ValueError(f"expected widths of {groups} layer groups")
    if any(not isinstance(group, list) or len(group) != rows for group in times):
        raise ValueError(f"expected widths of {rows} rows of each layer group")
    return Widths(times=tuple(tuple(group) for group in times))


def _path(fingerprint: Fingerprint, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ValueError(f"got name {name!r}, expected small letters, digits, dots and hyphens")
    return cache_folder() / "widths" / f"{fingerprint.hex}-{name}.json"
