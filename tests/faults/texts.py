"""The texts that the model's two stores are given."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.support.truth import some_tokens

TEXTS = 4
"""How many there are."""
_LENGTHS = (16, 24, 32, 48)

Name = tuple[int, int]
"""A text and how many of its tokens."""
TEXT = st.tuples(st.integers(0, TEXTS - 1), st.sampled_from(_LENGTHS))


def text(name: Name) -> np.ndarray:
    """Its tokens."""
    return some_tokens(max(name[1], 1024), 100 + name[0])[: name[1]]
