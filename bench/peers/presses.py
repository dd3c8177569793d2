"""kvpress: most of the KV is given up before any question is known, the rest stays in memory.

SnapKV keeps what the prefix's own last 64 tokens attend to, ChunkKV the same by runs of tokens,
KVzip what the model attends to while it repeats the text, which takes two or three more passes.
kvpress does KVzip by masks over the whole cache, so its time is that of a pass over everything.
Its runs for ChunkKV are 20 tokens; where they do not divide a prefix, layers keep different numbers
and the next pass fails, so they are 16 here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.peers.base import Case, Held, Holder, NotForThis, Page, Way
from bench.peers.hugging_face import Transformers, asked

KEPT = 0.05
RUN = 16
"""Tokens that ChunkKV keeps or gives up together."""


class Presses:
    """Three of its methods, with `KEPT` of the keys and values."""

    packages = ("torch", "kvpress")
    install = "pip install kvpress"

    @contextmanager
    def open(self, case: Case, work: Path) -> Iterator[Holder]:
        """A model for each method, as KVzip leaves its masks in the model."""
        if all(page.answers is None for page in case.pages):
            raise NotForThis("what it gives up costs answers, of which random weights have none")
        import kvpress

        lost = 1 - KEPT
        makers: dict[str, Callable[[], Any]] = {
            "SnapKV": lambda: kvpress.SnapKVPress(compression_ratio=lost),
            "ChunkKV": lambda: kvpress.ChunkKVPress(
                press=kvpress.SnapKVPress(compression_ratio=lost), chunk_length=RUN
            ),
            "KVzip": lambda: kvpress.KVzipPress(compression_ratio=lost),
        }
        models = {name: Transformers(case.folder, dtype="bfloat16") for name in makers}

        def hold(page: Page) -> Held:
            ways: dict[str, Way | str] = {}
            for name, make in makers.items():
                what = f"{name}, {KEPT:.0%} kept in memory, bfloat16"
                try:
                    models[name].hold(page.tokens, press=make())
                except Exception as error:  # of one method; the others do not depend on it
                    ways[what] = f"{type(error).__name__}: {error}"
                else:
                    ways[what] = Way(ask=asked(models[name].suffix), kept=models[name].kept)
            return ways

        yield hold
