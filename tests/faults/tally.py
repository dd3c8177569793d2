"""Judging a store after a fault: served right, served less, or wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ckv_jax.storage import ChunkStore, Prefix, StoreConfig
from ckv_jax.storage.layout import LANDMARKS
from tests.support.truth import (
    FINGERPRINT,
    SMALL,
    digest_keys,
    ingest,
    kv_of,
    read_all,
    read_probe,
    some_tokens,
)

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A folder in memory where there is one: most faults are after logic, not after disks."""
HANG_S = 20.0
"""What takes longer counts as a hang; deadlines of reads are far below."""

LAYOUT = dataclasses.replace(SMALL, head_dim=16, digest="int4")
"""Packs of a page: small, and yet read directly, as large ones are."""
CONFIG = StoreConfig(deadline_s=5.0)
BAD = ("wrong_tokens", "lost_healthy", "evicted_pins", "crashes", "hangs", "leaks")
"""Counts of a tally that must be 0."""


@dataclass
class Tally:
    """What became of a kind of fault.

    Attributes:
      states: faults made; each is one state of the store, or of what it reads.
      caught: less was served than was stored, or a typed error raised, and nothing wrong.
      harmless: everything was served, and right.
      wrong_tokens: tokens whose KV, probe or digest was served wrong. Must be 0.
      lost_healthy: healthy or held segments that are gone, or not served any more. Must be 0.
      evicted_pins: pinned prefixes that are gone, pins that are not what was said. Must be 0.
      crashes: errors of no type of ours, and processes that ended. Must be 0.
      hangs: faults that took longer than HANG_S. Must be 0.
      leaks: states that left descriptors, entries in tmp/, reservations or rows. Must be 0.
      notes: the first few faults that were not handled.
    """

    states: int = 0
    caught: int = 0
    harmless: int = 0
    wrong_tokens: int = 0
    lost_healthy: int = 0
    evicted_pins: int = 0
    crashes: int = 0
    hangs: int = 0
    leaks: int = 0
    notes: list[str] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        pairs = [(getattr(self, n), getattr(other, n)) for n in self.__dataclass_fields__]
        return Tally(*(a + b for a, b in pairs))

    @property
    def counts(self) -> dict[str, int]:
        """Everything but the notes."""
        return {n: getattr(self, n) for n in self.__dataclass_fields__ if n != "notes"}

    @property
    def bad(self) -> int:
        """All outcomes that must not be."""
        return sum(getattr(self, name) for name in BAD)

    @property
    def ok(self) -> bool:
        """Whether no fault got through, and every one is accounted for."""
        return not self.bad and self.caught + self.harmless == self.states

    @contextlib.contextmanager
    def fault(self, what: str) -> Iterator[None]:
        """Count one fault; errors that leave the block are crashes."""
        self.states += 1
        start = time.monotonic()
        try:
            yield
        except Exception as e:
            self.crashes += 1
            self.notes.append(f"{what}: {type(e).__name__}: {e}"[:300])
        if time.monotonic() - start > HANG_S:
            self.hangs += 1
            self.notes.append(f"{what}: took {time.monotonic() - start:.1f} s")

    def judge(self, served: Served, what: str) -> None:
        """Count what was served after a fault."""
        if served.wrong:
            self.wrong_tokens += served.wrong
            self.notes.append(f"{what}: {served.wrong} wrong tokens")
        elif served.whole:
            self.harmless += 1
        else:
            self.caught += 1


@dataclass(frozen=True, slots=True)
class Served:
    """Whether everything was served, and how many tokens were served wrong."""

    whole: bool
    wrong: int

    def __add__(self, other: Served) -> Served:
        return Served(self.whole and other.whole, self.wrong + other.wrong)


def prompts() -> list[np.ndarray]:
    """A document, and two that continue its first part."""
    document = some_tokens(150)
    return [document, *(np.append(document[:96], some_tokens(60, seed)) for seed in (1, 2))]


def make_store(folder: Path) -> None:
    """A small store of `prompts`."""
    with ChunkStore.open(folder, config=CONFIG) as store:
        for tokens in prompts():
            ingest(store, tokens, layout=LAYOUT)


@contextlib.contextmanager
def copy_of(pristine: Path) -> Iterator[Path]:
    """A copy of a store to hurt."""
    hurt = pristine.with_name(f"{pristine.name}-hurt")
    shutil.rmtree(hurt, ignore_errors=True)
    shutil.copytree(pristine, hurt)
    try:
        yield hurt
    finally:
        shutil.rmtree(hurt, ignore_errors=True)


def serve(store: ChunkStore) -> Served:
    """Look up and read all prompts, as an engine would, and compare."""
    total = Served(True, 0)
    for tokens in prompts():
        found = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=LAYOUT)
        if not np.array_equal(found.tokens, tokens[: found.num_tokens]):
            return Served(False, found.num_tokens)
        total += Served(found.num_tokens == len(tokens), 0) + read_prefix(store, found)
    return total


def read_prefix(store: ChunkStore, prefix: Prefix) -> Served:
    """Read packs, probes and digest of a prefix, and compare all but landmarks."""
    outcome = read_all(store, prefix)
    total = Served(outcome.refused == 0, outcome.wrong * prefix.layout.chunk_tokens)
    layout, tokens = prefix.layout, prefix.num_tokens
    if not tokens:
        return total
    keys = kv_of(layout, prefix.tokens)[:, 0]
    with store.reader(prefix) as reader:
        for layer in layout.probe_layers:
            out = np.empty((tokens, layout.probe_heads, layout.head_dim), layout.numpy_dtype)
            good = read_probe(reader, layer, out)
            wrong = (out[:good] != keys[layer, :good, : layout.probe_heads]).any((1, 2)).sum()
            total += Served(good == tokens, int(wrong))
        digest = reader.read_digest()
        if digest is not None and digest.kind not in LANDMARKS:
            # What the digest lost is the same shift for all keys, and half a step of rounding.
            lost = keys[list(layout.digest_layers)].astype(np.float32) - digest_keys(digest)
            lost -= lost.mean(1, keepdims=True)
            step = digest.arrays["scale"].max(1)[:, None, :, None]
            total += Served(True, int((np.abs(lost) > 1.5 * step + 1e-6).any((0, 2, 3)).sum()))
        return total + Served(digest is not None, 0)


def sweep_over(
    pristine: Path, count: int, hurt: Callable[[Path, np.random.Generator], str]
) -> Tally:
    """`count` times: copy the store, hurt it, open it, serve it."""
    tally = Tally()
    rng = np.random.default_rng(0)
    for _ in range(count):
        with copy_of(pristine) as folder:
            what = hurt(folder, rng)
            with tally.fault(what), ChunkStore.open(folder, config=CONFIG) as store:
                tally.judge(serve(store), what)
    return tally
