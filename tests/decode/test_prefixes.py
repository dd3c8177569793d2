"""Texts over several prefixes at once: which of them select in one call, and what each selects."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from compilations import compilations
from engine_sharp import COLD, Sharp
from engine_support import TIGHT, check_alone, kept_kv, scale_error, tokens
from engine_tiny import tiny_engine

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.config import OwnParts
from ckv_jax.decode.selection import DecodeSelections
from ckv_jax.decode.window import RowSelector, Window
from ckv_jax.pipeline.layers import Layers
from ckv_jax.prefix.digest import Digest
from ckv_jax.storage.prefix import Prefix

LENGTHS = (250, 230, 210, 1300)
"""Tokens of each prefix: the last needs other programs."""


@pytest.fixture(scope="module")
def engine(sharp: Sharp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with sharp.fresh(tmp_path_factory.mktemp("store"), max_batch=8) as made:
        yield made


@pytest.fixture(scope="module")
def prefixes(engine: Engine) -> list[Prefix]:
    return [engine.ingest(tokens(length, i)) for i, length in enumerate(LENGTHS)]


def asked(prefixes: list[Prefix], which: tuple[int, ...]) -> list[Request]:
    return [
        Request(prefix=prefixes[i], suffix=tokens(7, 40 + row).tolist(), budget=0.2)
        for row, i in enumerate(which)
    ]


computed = partial(kept_kv, max_tokens=12)


@pytest.mark.parametrize("which", [(0, 1, 2), (0, 0, 1, 2, 0, 3)])
def test_generations_select_what_they_would_alone(
    engine: Engine, prefixes: list[Prefix], which: tuple[int, ...]
) -> None:
    check_alone(engine, asked(prefixes, which), max_tokens=12)


@pytest.mark.parametrize("which", [(0, 1, 2), (0, 0, 1)])
def test_a_row_that_selects_nothing_changes_no_other(
    engine: Engine, prefixes: list[Prefix], which: tuple[int, ...]
) -> None:
    made = itertools.count()

    class SecondSelectsNothing(DecodeSelections):
        def row(self, limit: int, digest: Digest, window: Window) -> RowSelector:
            return super().row(0 if next(made) == 1 else limit, digest, window)

    system = dataclasses.replace(engine.system, own=OwnParts(decoding=SecondSelectsNothing))
    requests = asked(prefixes, which)
    with engine.variant(dataclasses.replace(engine.config, system=system)) as other:
        found = computed(other, requests)
    for row in (0, 2):
        [alone] = computed(engine, [requests[row]])
        assert scale_error(found[row], alone) < TIGHT


def test_generations_of_a_larger_batch_of_first_tokens_go_on_as_alone(
    engine: Engine, prefixes: list[Prefix]
) -> None:
    """Three of five end with their first token, and the others sample in ways of their own."""
    requests = asked(prefixes, (0, 1, 0, 1, 0))
    ways = [{"temperature": 1.5, "seed": 7}, {"temperature": 0.9, "top_p": 0.8, "seed": 3}]
    sampling = [
        SamplingParams(max_tokens=n, **ways[row % 4 // 2])  # type: ignore[arg-type]
        for row, n in enumerate((1, 6, 1, 9, 1))
    ]
    together = engine.generate(requests, sampling).results()
    for request, params, got in zip(requests, sampling, together, strict=True):
        (alone,) = engine.generate(request, params).results()
        assert got.token_ids.tolist() == alone.token_ids.tolist()


@pytest.mark.slow
def test_nothing_is_compiled_whoever_shares_a_prefix(tmp_path: Path) -> None:
    with tiny_engine(
        tmp_path, system="ckv", nothing_compiled=True, max_batch=4, device_cache_bytes=2**15
    ) as engine:
        prefixes = [engine.ingest(tokens(140 + i, i)) for i in range(4)]
        engine.warmup(prefixes[0], max_batch=4, max_suffix=7, budgets=[0.2], max_tokens=12)
        warm = compilations()
        for which in ((0, 1, 2, 3), (0, 0, 1, 2), (0, 1, 1, 1), (2, 2, 3, 3), (0, 1), (0, 1, 1)):
            computed(engine, asked(prefixes, which))
        assert compilations() == warm


def test_after_a_call_that_fails_generations_are_what_they_were(
    sharp: Sharp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sharp.fresh(tmp_path, max_batch=8, **COLD) as engine:
        requests = asked(
            [engine.ingest(tokens(length, i)) for i, length in enumerate((250, 230))], (0, 1)
        )
        expected = computed(engine, requests)
        extend, calls = Layers.extend, itertools.count()

        def fails(self: Layers, *args: Any, **named: Any) -> Any:
            if next(calls) == 20:  # in the midst of a token
                raise RuntimeError("no device")
            return extend(self, *args, **named)

        with monkeypatch.context() as patched:
            patched.setattr(Layers, "extend", fails)
            with pytest.raises(RuntimeError, match="no device"):
                computed(engine, requests)
        for mine, wanted in zip(computed(engine, requests), expected, strict=True):
            assert scale_error(mine, wanted) < TIGHT
