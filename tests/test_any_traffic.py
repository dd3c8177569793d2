"""Random traffic on a warm engine with tiny pools: what a cold engine gives, and nobody fails."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_support import TIGHT, kept_kv, scale_error, small_engine, tokens
from engine_tiny import TINY, tiny_engine
from pipeline_support import UnsteadyStore

from ckv_jax import Engine, Request, Result, SamplingParams
from ckv_jax.storage.prefix import Prefix

PREFIXES = 20
POOL = 240
"""Slots of the cold engine: one that has as many shares its programs."""
TALL = dataclasses.replace(TINY, num_layers=5)
"""Two packs of the presets, of four layers and of one."""
BUDGETS = (0.05, 0.3, 0.6, 0.9, 1.0)


class Cold:
    """One engine a question: no cache, pools that hold everything, nothing else going on."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.prefixes = [engine.ingest(tokens(40 + 4 * i, i)) for i in range(PREFIXES)]
        self._known: dict[tuple[int, int, float, int], object] = {}

    def request(self, which: int, seed: int, budget: float) -> Request:
        suffix = tokens(1 + seed % 9, 500 + seed).tolist()
        return Request(prefix=self.prefixes[which], suffix=suffix, budget=budget)

    def answer(self, which: int, seed: int, budget: float, new: int) -> np.ndarray:
        key = (which, seed, budget, new)
        if key not in self._known:
            request = self.request(which, seed, budget)
            if new:
                sampling = SamplingParams(max_tokens=new)
                (text,) = self.engine.generate(request, sampling).results()
                self._known[key] = text.token_ids
            else:
                self._known[key] = self.engine.reprefill([request])[0].logits
        found = self._known[key]
        assert isinstance(found, np.ndarray)
        return found


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cold]:
    with tiny_engine(
        tmp_path_factory.mktemp("cold"), max_batch=2, device_cache_bytes=0, host_cache_bytes=0
    ) as small:
        pool = POOL * small.layout.pack_bytes
        config = dataclasses.replace(small.config, prefetch_device_bytes=pool)
        with small.variant(config) as engine:
            yield Cold(engine)


@pytest.mark.parametrize(
    ("work_packs", "cache_packs", "failing"),
    [(3, 0, 0.0), (9, 6, 0.2), (40, POOL - 40, 0.05)],
)
def test_a_warm_engine_answers_whatever_a_cold_one_answers(
    cold: Cold, work_packs: int, cache_packs: int, failing: float
) -> None:
    rng = random.Random(work_packs + cache_packs + int(100 * failing))
    pack = cold.engine.layout.pack_bytes
    config = dataclasses.replace(
        cold.engine.config,
        device_cache_bytes=cache_packs * pack,
        host_cache_bytes=cache_packs * pack,
        prefetch_device_bytes=work_packs * pack,
    )
    with cold.engine.variant(config, store=UnsteadyStore(cold.engine.store, failing)) as warm:
        for _ in range(6):
            asked = [
                (
                    rng.randrange(PREFIXES),
                    rng.randrange(4),
                    rng.choice(BUDGETS),
                    rng.choice([0, 0, 5]),
                )
                for _ in range(5)
            ]
            handles = [
                warm.submit(
                    cold.request(which, seed, budget),
                    SamplingParams(max_tokens=new) if new else None,
                )
                for which, seed, budget, new in asked
            ]
            for one, handle in zip(asked, handles, strict=True):
                outcome, expected = handle.settled_result(), cold.answer(*one)
                if isinstance(outcome, Result):
                    assert scale_error(outcome.logits, expected) < TIGHT, one
                else:
                    assert outcome.token_ids.tolist() == expected.tolist(), one
        stats = warm.stats()
        assert stats.pinned_packs == stats.queue == stats.running == stats.jobs == 0
        assert warm.stats().device_packs <= cache_packs


@pytest.mark.parametrize("system", ["ckv", pytest.param("contiguous-kv", marks=pytest.mark.slow)])
def test_everything_of_a_prefix_four_times_the_pools(tmp_path: Path, system: str) -> None:
    with small_engine(tmp_path, system=system, model=TALL, device_cache_bytes=0) as large:
        prefix = large.ingest(tokens(256))
        requests = [Request(prefix=prefix, suffix=tokens(7, i), budget=1.0) for i in range(2)]
        expected = [result.logits for result in large.reprefill(requests)]
        (text,) = large.generate(requests[0], SamplingParams(max_tokens=4)).results()
        pools = prefix.num_chunks * large.layout.groups * large.layout.pack_bytes // 4
        config = dataclasses.replace(
            large.config, prefetch_device_bytes=pools // 8, device_cache_bytes=pools - pools // 8
        )
        with large.variant(config) as small:
            for _ in range(2):  # cold, then warm
                for request, logits in zip(requests, expected, strict=True):
                    (result,) = small.reprefill([request])
                    assert scale_error(result.logits, logits) < 1e-5
            (again,) = small.generate(requests[0], SamplingParams(max_tokens=4)).results()
            assert again.token_ids.tolist() == text.token_ids.tolist()


@pytest.mark.parametrize("slots", [20, 4])
def test_a_generation_over_few_slots_is_that_over_many(tmp_path: Path, slots: int) -> None:
    """Two of a step fit; a step does not fit."""
    with tiny_engine(tmp_path, device_cache_bytes=0, host_cache_bytes=0) as large:
        request = Request(prefix=large.ingest(tokens(100)), suffix=[3, 1], budget=1.0)
        (expected,) = kept_kv(large, [request], max_tokens=4)
        room = slots * large.layout.pack_bytes
        with large.variant(dataclasses.replace(large.config, prefetch_device_bytes=room)) as small:
            (found,) = kept_kv(small, [request], max_tokens=4)
    assert scale_error(found, expected) < TIGHT


def test_one_slot_is_enough(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as plain:
        prefix: Prefix = plain.ingest(tokens(100))
        request = Request(prefix=prefix, suffix=[1, 2], budget=1.0)
        expected = plain.recompute(request).logits
        one = plain.layout.pack_bytes
        config = dataclasses.replace(
            plain.config, prefetch_device_bytes=one, device_cache_bytes=0, host_cache_bytes=0
        )
        with plain.variant(config) as narrow:
            (result,) = narrow.reprefill([request])
            assert scale_error(result.logits, expected) < 1e-5
        with pytest.raises(ValueError, match="one chunk of one layer group"):
            plain.variant(dataclasses.replace(config, prefetch_device_bytes=one - 1))
