"""transformers on PyTorch: everything computed again, and the suffix over KV in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.peers.base import Answer, Case, Held, Holder, Page, Way
from bench.versus_transformers import DTYPES, Transformers


class HuggingFace:
    """Both ways in bfloat16 and in float32: which is faster depends on the processor."""

    packages = ("torch", "transformers")
    install = "pip install torch"

    @contextmanager
    def open(self, case: Case, work: Path) -> Iterator[Holder]:
        """The checkpoint once for each dtype."""
        models = {dtype: Transformers(case.folder, dtype=dtype) for dtype in DTYPES}

        def hold(page: Page) -> Held:
            ways: dict[str, Way | str] = {}
            for dtype, model in models.items():
                model.hold(page.tokens)
                ways[f"recompute, {dtype}"] = Way(ask=asked(model.recompute), most=case.recomputes)
                ask = asked(model.suffix)
                if page.text is not None:
                    ask = going_on(ask, model, page.text)
                ways[f"suffix over KV in memory, {dtype}"] = Way(ask=ask)
            return ways

        yield hold


def asked(timed: Callable[[np.ndarray], tuple[float, int]]) -> Callable[[np.ndarray], Answer]:
    """A pass that gives ms and token, as a peer's."""

    def ask(suffix: np.ndarray) -> Answer:
        ms, token = timed(suffix)
        return Answer(token=token, ms=ms)

    return ask


def going_on(
    ask: Callable[[np.ndarray], Answer], model: Transformers, text: np.ndarray
) -> Callable[[np.ndarray], Answer]:
    """With the time of each token of `text` int32 [N] after its first one."""

    def further(suffix: np.ndarray) -> Answer:
        return dataclasses.replace(ask(suffix), token_ms=model.further(suffix, text))

    return further
