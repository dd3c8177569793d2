"""Prompts that are stored first: a fault is the request's own, or raised where somebody waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckv_jax import Prefix, Request
from ckv_jax.serving.prompts import Prompts
from ckv_jax.serving.sequence import Sequence
from ckv_jax.storage.errors import StoreUnavailable
from tests.support.truth import FINGERPRINT
from tests.support.truth import SMALL as LAYOUT


class Faulty:
    """Stores nothing."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def store(self, *_: object, **__: object) -> Prefix:
        raise self.error


@pytest.mark.parametrize(
    "error", [StoreUnavailable("no disk"), ValueError("too long"), MemoryError("no room")]
)
def test_a_prompt_that_cannot_be_stored_ends_its_request(error: BaseException) -> None:
    sequence, faulty = Sequence(Request(prefix=[], suffix=[1, 2])), Faulty(error)
    sequence.place(Prefix.empty(FINGERPRINT, LAYOUT, ""), np.array([1, 2], np.int32), 1.0)
    nobody: Any = None
    prompts = Prompts(faulty, nobody)  # type: ignore[arg-type]
    prompts.store(sequence)
    if isinstance(error, MemoryError):  # not its own fault
        with pytest.raises(MemoryError, match="no room"):
            sequence.settled_result()
    else:
        assert sequence.settled_result().error is error
    prompts.close()
