"""Faults of processes: rival writers, evictors, and folders that vanish."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from ckv_jax.storage import ChunkStore, prune_store
from tests.faults import farm
from tests.faults.tally import (
    CONFIG,
    HANG_S,
    LAYOUT,
    Served,
    Tally,
    copy_of,
    prompts,
    read_prefix,
    serve,
)
from tests.support.truth import FINGERPRINT, ingest


def prune_for_ever(folder: Path, stop: object) -> None:
    """Remove whatever may be removed, over and over."""
    with ChunkStore.open(folder, config=CONFIG) as store:
        while not stop.is_set():  # type: ignore[attr-defined]
            prune_store(store, 0)
            store.refresh()
            time.sleep(0.002)


def evictions(folder: Path, count: int) -> Tally:
    """Another process evicts everything it may while prefixes are looked up and read."""
    tally = Tally()
    processes = farm.context()
    stop = processes.Event()
    evictor = processes.Process(target=prune_for_ever, args=(folder, stop), daemon=True)
    with ChunkStore.open(folder, config=CONFIG) as store:
        evictor.start()
        try:
            for number in range(count):
                with tally.fault(f"eviction {number}"):
                    for tokens in prompts():
                        ingest(store, tokens, layout=LAYOUT)
                    tally.judge(serve(store), f"eviction {number}")
        finally:
            stop.set()
            evictor.join(HANG_S)
    return tally


def vanished_folders(pristine: Path, count: int) -> Tally:
    """The folder is deleted under a running engine, which then stores everything again."""
    tally = Tally()
    for number in range(count):
        with copy_of(pristine) as folder, ChunkStore.open(folder, config=CONFIG) as store:
            tokens = prompts()[0]
            found = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=LAYOUT)
            with store.reader(found), tally.fault(f"vanished {number}"):
                shutil.rmtree(folder)
                tally.judge(serve(store) + read_prefix(store, found), f"vanished {number}")
                for again in prompts():
                    ingest(store, again, layout=LAYOUT)
                if serve(store) != Served(True, 0):
                    raise RuntimeError("not served after it was stored again")
    return tally
