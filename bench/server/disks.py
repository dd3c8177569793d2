"""The server over disks that are slow, or damage what they hold: answers stay right.

A slow disk takes `LATENCY_S` and a second for each `BYTES_S` before a read of packs or of a probe
begins. On a damaged one, a file of packs is hurt every `EVERY_S` while clients ask: bytes flipped,
its end cut off, or the file gone. Both in float32 on the reference checkpoint, whose answers to
questions about its documents are compared with those of dense prefills.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from bench.common import Json
from bench.server.asking import Clients, Known, Load, Prompt, serving
from ckv_jax import Engine, EngineConfig, Request
from ckv_jax.data.reference import demo_ledger, reference_folder
from ckv_jax.storage.prefix import ProbePages
from ckv_jax.storage.segment.reader import PrefixReader

LATENCY_S = 0.02
BYTES_S = 50e6
EVERY_S = 0.25
QUESTIONS = 4
"""About each document."""
_MIB = 2**20


def over_disks(load: Load, clients: Clients, folder: Path) -> list[Json]:
    """A row for each disk; `recomputed_chunks` are those that the store could not give."""
    rows = []
    config = EngineConfig(
        dtype="float32", budget=1.0, max_batch=load.clients, device_cache_bytes=_MIB,
        host_cache_bytes=0, prefetch_device_bytes=256 * _MIB, prefetch_host_bytes=256 * _MIB,
        warm_batch=0,
    )  # fmt: skip
    store = folder / "kv"
    with Engine.from_pretrained(reference_folder(), store=store, config=config) as engine:
        prompts = Known(_prompts(engine, load))
        with serving(engine, load) as url:
            for _ in range(2):  # warmed: what the first round asks for is compiled behind it
                clients.ask(url, prompts, load, load.seconds / 4)
                engine.settle()
            for way, disk in (
                ("plain disk", nullcontext()),
                ("slow disk", slow()),
                ("damaged disk", damaging(store, load.seed)),
            ):
                before = _recomputed(url)
                with disk:
                    seen = clients.ask(url, prompts, load, load.seconds / 3)
                rows.append(seen.row(way) | {"recomputed_chunks": _recomputed(url) - before})
    return rows


def _prompts(engine: Engine, load: Load) -> list[Prompt]:
    """Documents, ingested, with questions, and what a dense prefill answers."""
    found = []
    assert engine.tokenizer is not None
    for seed in range(load.documents):
        page = demo_ledger(seed, load.document_tokens, questions=QUESTIONS)
        prefix = engine.ingest(page.tokens)
        for question, length in zip(page.questions, page.lengths, strict=True):
            answer = engine.recompute(Request(prefix=prefix, suffix=question[:length].tolist()))
            tokens = [*page.tokens.tolist(), *question[:length].tolist()]
            before = len(engine.tokenizer.decode(tokens))  # which a first word's space hangs on
            text = engine.tokenizer.decode([*tokens, answer.token_id])[before:]
            found.append(Prompt(tokens=tokens, expected=text))
    return found


def _recomputed(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
    return sum(s.value for s in samples if s.name == "ckv_recomputed_chunks_total")


@contextmanager
def slow() -> Iterator[None]:
    """Reads of this process wait for a slow disk."""
    packs, probe = PrefixReader.read_packs, PrefixReader.read_probe_pages

    def slow_packs(
        self: PrefixReader, group: int, chunks: np.ndarray, *more: Any, **named: Any
    ) -> Any:
        time.sleep(LATENCY_S + len(chunks) * self.prefix.layout.stored_bytes / BYTES_S)
        return packs(self, group, chunks, *more, **named)

    def slow_probe(
        self: PrefixReader, layer: int, pages: ProbePages, ids: np.ndarray, *more: Any, **named: Any
    ) -> Any:
        time.sleep(LATENCY_S + int(pages.tokens[ids].sum()) * pages.token_bytes / BYTES_S)
        return probe(self, layer, pages, ids, *more, **named)

    PrefixReader.read_packs, PrefixReader.read_probe_pages = slow_packs, slow_probe  # type: ignore[method-assign]
    try:
        yield
    finally:
        PrefixReader.read_packs, PrefixReader.read_probe_pages = packs, probe  # type: ignore[method-assign]


@contextmanager
def damaging(store: Path, seed: int) -> Iterator[None]:
    """Files of packs in a store are hurt, one after another."""
    over = threading.Event()
    rng = np.random.default_rng(seed)

    def work() -> None:
        while not over.wait(EVERY_S):
            files = sorted(store.glob("segments/*/*/packs/c.*"))
            if files:
                hurt(files[rng.integers(len(files))], rng)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def hurt(file: Path, rng: np.random.Generator) -> None:
    """One file is not as it was: some bytes differ, its end is missing, or it is."""
    kind, size = rng.integers(3), file.stat().st_size
    at = int(rng.integers(max(1, size)))
    if kind == 0:
        with file.open("r+b") as f:
            f.seek(at)
            old = f.read(64)
            f.seek(at)
            f.write(bytes(byte ^ 0xFF for byte in old))
    elif kind == 1:
        with file.open("r+b") as f:
            f.truncate(at)
    else:
        file.unlink()
