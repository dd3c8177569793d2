"""transformers on PyTorch: everything computed again, the suffix over KV in memory, and kvpress."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import seconds
from bench.peers.base import Answer, Case, Held, Holder, NotForThis, Page, Way

DTYPES = ("bfloat16", "float32")
KEPT = 0.05
"""Of keys and values, by kvpress."""
RUN = 16
"""Tokens that ChunkKV keeps or gives up together."""
Press = Callable[[Any], AbstractContextManager[Any]]


class Transformers:
    """`Qwen2ForCausalLM` with a prefix's KV in memory."""

    def __init__(self, folder: Path, *, dtype: str) -> None:
        import torch
        from transformers import Qwen2ForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(os.cpu_count() or 1)
        self._torch = torch
        self._model = Qwen2ForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    def hold(self, prefix: np.ndarray, *, press: Press = nullcontext) -> None:
        """Computes a prefix int32 [T], whose KV then stays in memory.

        `press`: takes the model and is entered around the pass; it may make the cache shorter.
        """
        from transformers import DynamicCache

        self._prefix = self._torch.from_numpy(prefix).long()[None]
        self._cache = DynamicCache(config=self._model.config)
        with self._torch.inference_mode(), press(self._model):
            self._pass(self._prefix, None)

    def _pass(self, tokens: Any, positions: Any) -> Any:
        """Logits of the last of `tokens` [1, n], behind and into the cache: transformers 5.24 has
        another name for it, at the same place."""
        return self._model(tokens, None, positions, self._cache, logits_to_keep=1).logits

    @property
    def kept(self) -> float:
        """Share of the prefix's keys and values that a later pass sees."""
        heads = seen = 0
        for layer, cached in zip(self._model.model.layers, self._cache.layers, strict=True):
            masked = getattr(layer.self_attn, "masked_key_indices", None)  # kvpress leaves them
            heads += cached.keys.shape[1]
            seen += cached.keys.shape[1] * cached.keys.shape[2]
            seen -= 0 if masked is None else len(masked[0])
        return seen / (heads * self._prefix.shape[1])

    def recompute(self, suffix: np.ndarray) -> Answer:
        """A prefill of everything."""
        torch = self._torch
        with torch.inference_mode():
            tokens = torch.cat([self._prefix, torch.from_numpy(suffix).long()[None]], dim=1)
            return _timed(
                lambda: self._model(tokens, use_cache=False, logits_to_keep=1).logits.argmax()
            )

    def suffix(self, suffix: np.ndarray) -> Answer:
        """A pass of the suffix over the cache, which is cut back to the prefix afterwards."""
        torch = self._torch
        with torch.inference_mode():
            tokens = torch.from_numpy(suffix).long()[None]
            end = self._prefix.shape[1]  # where the suffix stands, however short the cache is
            positions = torch.arange(end, end + len(suffix))[None]
            answer = _timed(lambda: self._pass(tokens, positions).argmax())
            self._cache.crop(-len(suffix))
            return answer

    def further(self, suffix: np.ndarray, text: np.ndarray) -> float:
        """ms of each token of `text` int32 [N] after the first, behind a suffix; mean of N - 1."""
        torch, end = self._torch, self._prefix.shape[1]
        tokens = torch.from_numpy(np.concatenate([suffix, text])).long()[None]
        times = []
        with torch.inference_mode():
            for first, stop in pairwise([0, *range(len(suffix), tokens.shape[1])]):
                places = torch.arange(end + first, end + stop)[None]
                likeliest = self._pass(tokens[:, first:stop], places).argmax()
                int(likeliest)  # as if it were the next one
                times.append(time.perf_counter())
            self._cache.crop(-(tokens.shape[1] - 1))
        return (times[-1] - times[0]) * 1e3 / (len(times) - 1)


def _timed(run: Callable[[], Any]) -> Answer:
    start = time.perf_counter()
    token = int(run())
    return Answer(token=token, ms=(time.perf_counter() - start) * 1e3)


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
                prefill_ms = 1e3 * seconds(partial(model.hold, page.tokens))
                ways[f"recompute, {dtype}"] = Way(ask=model.recompute, most=case.recomputes)
                ask = model.suffix if page.text is None else going_on(model, page.text)
                what = f"suffix over KV in memory, {dtype}"
                ways[what] = Way(ask=ask, prefill_ms=prefill_ms)
            return ways

        yield hold


def going_on(model: Transformers, text: np.ndarray) -> Callable[[np.ndarray], Answer]:
    """With the time of each token of `text` int32 [N] after its first one."""

    def further(suffix: np.ndarray) -> Answer:
        return dataclasses.replace(model.suffix(suffix), token_ms=model.further(suffix, text))

    return further


class Presses:
    """kvpress: most of the KV is given up before any question is known, the rest stays in memory.

    SnapKV keeps what the prefix's own last 64 tokens attend to, ChunkKV the same by runs of tokens,
    KVzip what the model attends to while it repeats the text, which takes two or three more passes.
    kvpress does KVzip by masks over the whole cache, so its time is that of a pass over everything.
    Its runs for ChunkKV are 20 tokens; where they do not divide a prefix, layers keep different
    numbers and the next pass fails, so they are 16 here.
    """

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
                    ways[what] = Way(ask=models[name].suffix, kept=models[name].kept)
            return ways

        yield hold
