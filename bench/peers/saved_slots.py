"""llama.cpp's saved slots: a sequence's KV in a file, restored before the suffix is computed.

As its server does with `/slots?action=save` and `restore`: weights bfloat16 or Q8_0, KV float16,
flash attention where it likes, a thread for each core. The file is read twice over: with the page
cache emptied of it, as ours reads past the page cache, and as the page cache has it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import seconds
from bench.peers.base import Answer, Case, Held, Holder, Page, Way
from bench.peers.gguf_file import Kind, write_gguf

SEQUENCE = 0


class SavedSlots:
    """llama.cpp through its Python bindings."""

    packages = ("llama_cpp",)
    install = "pip install llama-cpp-python"

    def __init__(self, kind: Kind = "BF16") -> None:
        """`kind`: of the weights."""
        self._kind = kind

    @contextmanager
    def open(self, case: Case, work: Path) -> Iterator[Holder]:
        """The checkpoint as a GGUF file in `work`, and one context over it."""
        name = f"{case.name}-{self._kind}"
        model, slot = work / f"{name}.gguf", work / f"{name}.slot"
        write_gguf(case.folder, model, self._kind)
        longest = max(len(page.tokens) for page in case.pages) + case.longest + case.text
        with _context(model, longest) as session:

            def hold(page: Page) -> Held:
                prefill_ms = 1e3 * seconds(lambda: session.save(page.tokens, slot))

                def warm(suffix: np.ndarray) -> Answer:
                    return session.restored(suffix, slot, page.text)

                def cold(suffix: np.ndarray) -> Answer:
                    _forget(slot)
                    return warm(suffix)

                asks = {"the SSD": cold, "the page cache": warm}
                return {
                    f"slot from {place}, then the suffix": Way(ask=ask, prefill_ms=prefill_ms)
                    for place, ask in asks.items()
                }

            yield hold


class _Session:
    """One context; everything happens in its first sequence."""

    def __init__(self, api: Any, context: Any, size: int, vocabulary: int) -> None:
        self._api, self._context, self._vocabulary = api, context, vocabulary
        self._memory = api.llama_get_memory(context)
        self._batch = int(api.llama_n_batch(context))
        self._tokens = (api.llama_token * size)()

    def save(self, tokens: np.ndarray, path: Path) -> None:
        """Computes a prefix int32 [T] and writes its KV to `path`."""
        self._forget()
        for start in range(0, len(tokens), self._batch):
            self._decode(tokens[start : start + self._batch])
        ids = (self._api.llama_token * len(tokens))(*tokens.tolist())
        written = self._api.llama_state_seq_save_file(
            self._context, os.fsencode(path), SEQUENCE, ids, len(tokens)
        )
        if not written:
            raise OSError(f"llama.cpp did not save its slot to {path}")

    def restored(self, suffix: np.ndarray, path: Path, text: np.ndarray | None) -> Answer:
        """The token after what `path` holds and `suffix`, and how fast `text` goes on."""
        start = time.perf_counter()
        self._forget()
        count = ctypes.c_size_t()
        read = self._api.llama_state_seq_load_file(
            self._context, os.fsencode(path), SEQUENCE, self._tokens, len(self._tokens),
            ctypes.byref(count),
        )  # fmt: skip
        if not read:
            raise OSError(f"llama.cpp did not restore its slot from {path}")
        middle = time.perf_counter()
        self._decode(suffix)
        token = self._likeliest()
        end = time.perf_counter()
        further = None
        if text is not None:
            for i in range(len(text) - 1):
                self._decode(text[i : i + 1])
                self._likeliest()
            further = (time.perf_counter() - end) * 1e3 / (len(text) - 1)
        return Answer(
            token=token,
            ms=(end - start) * 1e3,
            parts_ms={"restore": (middle - start) * 1e3, "suffix": (end - middle) * 1e3},
            token_ms=further,
        )

    def _likeliest(self) -> int:
        logits = self._api.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())

    def _decode(self, tokens: np.ndarray) -> None:
        ids = (self._api.llama_token * len(tokens))(*tokens.tolist())
        failed = self._api.llama_decode(
            self._context, self._api.llama_batch_get_one(ids, len(tokens))
        )
        if failed:
            raise RuntimeError(f"llama.cpp's decode gave {failed}")

    def _forget(self) -> None:
        self._api.llama_memory_seq_rm(self._memory, SEQUENCE, -1, -1)


@cache
def _no_log(api: Any) -> Any:
    """Kept: llama.cpp calls it as long as any context is there."""
    return api.llama_log_callback(lambda *_: None)


@contextmanager
def _context(path: Path, tokens: int) -> Iterator[_Session]:
    """A model and a context for one sequence of so many tokens."""
    import llama_cpp as api

    api.llama_log_set(_no_log(api), None)  # a line for every restore otherwise
    api.llama_backend_init()
    with _freed(
        api.llama_model_load_from_file(os.fsencode(path), api.llama_model_default_params()),
        api.llama_model_free,
    ) as model:
        params = api.llama_context_default_params()
        params.n_ctx = tokens
        params.n_threads = params.n_threads_batch = os.cpu_count() or 1
        context = api.llama_init_from_model(model, params)
        with _freed(context, api.llama_free) as context:
            vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
            yield _Session(api, context, tokens, vocabulary)


@contextmanager
def _freed(made: Any, free: Callable[[Any], None]) -> Iterator[Any]:
    if not made:
        raise RuntimeError("llama.cpp did not load the model, or has no memory for it")
    try:
        yield made
    finally:
        free(made)


def _forget(path: Path) -> None:
    """Empties the page cache of a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
