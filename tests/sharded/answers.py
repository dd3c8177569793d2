"""What an engine answers over one text: the same on any number of devices."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np

from ckv_jax import Engine, Prefix, Request, SamplingParams
from ckv_jax.decode import selection


def texts() -> tuple[np.ndarray, np.ndarray]:
    """A prefix and a suffix."""
    rng = np.random.default_rng(0)
    text, suffix = (rng.integers(0, 512, n).astype(np.int32) for n in (250, 12))
    return text, suffix


def answers(engine: Engine, prefix: Prefix, suffix: np.ndarray) -> dict[str, Any]:
    """Logits and choices at a small budget; of `ckv` also with everything, and a text."""
    found: dict[str, Any] = {}
    ours = engine.system.name == "ckv"
    for budget in (0.2, 1.0) if ours else (0.2,):
        request = Request(prefix=prefix, suffix=suffix, budget=budget)
        cold, found_all, warm = (engine.reprefill([request])[0] for _ in range(3))
        for result in (cold, found_all, warm):
            if result.error is not None:
                raise result.error
        found[str(budget)] = {
            "logits": cold.logits.tolist(),
            "warm": bool(np.array_equal(cold.logits, warm.logits)),
            "selected": [ids.tolist() for ids in engine.last_selection(prefix)],
        }
        if ours and budget < 1:
            with patch.object(selection, "_TOKENS_BEFORE_COMPILING", 1):  # tokens of few calls each
                for _ in range(2):
                    text = engine.generate(request, SamplingParams(max_tokens=4)).results()[0]
                    text.raise_for_error()
                    engine.settle()
            found[str(budget)]["tokens"] = text.token_ids.tolist()
    return found
