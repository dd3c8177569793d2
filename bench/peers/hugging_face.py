"""transformers on PyTorch: everything computed again, and the suffix over KV in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.peers.base import Answer, Case, Held, Holder, Way
from bench.versus_transformers import DTYPES, Transformers


class HuggingFace:
    """Both ways in bfloat16 and in float32: which is faster depends on the processor."""

    packages = ("torch", "transformers")
    install = "pip install torch"

    @contextmanager
    def open(self, case: Case, work: Path) -> Iterator[Holder]:
        """The checkpoint once for each dtype."""
        models = {dtype: Transformers(case.folder, dtype=dtype) for dtype in DTYPES}

        def hold(tokens: np.ndarray) -> Held:
            ways: dict[str, Way | str] = {}
            for dtype, model in models.items():
                model.hold(tokens)
                ways[f"recompute, {dtype}"] = Way(ask=asked(model.recompute), most=case.recomputes)
                ways[f"suffix over KV in memory, {dtype}"] = Way(ask=asked(model.suffix))
            return ways

        yield hold


def asked(timed: Callable[[np.ndarray], tuple[float, int]]) -> Callable[[np.ndarray], Answer]:
    """A pass that gives ms and token, as a peer's."""

    def ask(suffix: np.ndarray) -> Answer:
        ms, token = timed(suffix)
        return Answer(token=token, ms=ms)

    return ask
