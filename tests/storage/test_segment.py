"""One segment, held open: what is read from where, and which of it is as it was written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckv_jax.storage.errors import SegmentDamaged, SegmentForeign, StoreUnavailable
from ckv_jax.storage.place.disk_timeout import DiskTimeout
from ckv_jax.storage.segment.deadline import Deadline, Gate
from ckv_jax.storage.segment.reads import Proof


class Piece:
    """A segment whose piece at row 3, column 7 is these bytes, or raises."""

    def __init__(self, found: bytes | Exception | None) -> None:
        self._found = found

    def reread(self, kind: str, row: int, column: int) -> bytes | None:
        assert (kind, row, column) == ("packs", 3, 7)
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


@pytest.mark.parametrize(
    ("found", "good", "told"),
    [
        (b"abcd", True, []),
        (None, False, [("group 3: not as it was written", True)]),
        (StoreUnavailable("no answer"), False, [("group 3: no answer", False)]),
    ],
)
def test_only_bytes_that_are_there_and_wrong_prove_a_piece_bad(
    found: bytes | Exception | None, good: bool, told: list[tuple[str, bool]]
) -> None:
    heard: list[Any] = []
    segment: Any = Piece(found)
    out = np.zeros(4, np.uint8)
    proof = Proof(lambda *what: heard.append(what), DiskTimeout(5))
    where = segment, "packs", 3, 7, 11, "group 3", Deadline(5, Gate())
    assert proof.prove(*where, out) is good
    assert heard == [(segment, 11, *one) for one in told]
    assert out.tobytes() == (found if good else bytes(4))
    assert proof.prove(*where) is good


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (SegmentDamaged("segment x: gone"), True),
        (SegmentForeign("another's"), True),
        (StoreUnavailable("no answer"), False),
    ],
)
def test_a_segment_that_is_out_of_reach_is_not_gone(error: Any, gone: bool) -> None:
    heard: list[Any] = []
    proof = Proof(lambda *what: heard.append(what), DiskTimeout(5))
    assert proof.prove(error, "packs", 0, 0, 5, "group 0", Deadline(5, Gate())) is False
    assert heard == [(None, 5, f"group 0: {error}", gone)]
