"""The example of docs/add_a_system.md runs, through the engine and the benchmarks' parsers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from engine_support import TIGHT, scale_error, small_engine, tokens
from engine_tiny import TINY

from bench.common import Setting, parser, setting_of, system_name
from ckv_jax import Request, SamplingParams
from ckv_jax.kernels_pallas.score.probe import Keys
from ckv_jax.systems import system_named

PAGE = Path(__file__).resolve().parent.parent / "docs" / "add_a_system.md"
PLACE = "largest:LARGEST"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's module, where Python finds it."""
    (source,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    assert len(source.splitlines()) <= 32
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "largest.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "largest", raising=False)


@pytest.mark.usefixtures("module")
def test_the_engine_runs_it(tmp_path: Path) -> None:
    with small_engine(tmp_path / "store", system=system_named(PLACE), model=TINY) as engine:
        prefix = engine.ingest(tokens(200))
        request = Request(prefix=prefix, suffix=[1, 2, 3], budget=0.25)
        (result,) = engine.reprefill([request])
        assert result.error is None and 0 < result.trace.attention_mass < 1
        # Of 25 chunks a quarter, the first 2 and the last 8.
        assert [len(ids) for ids in engine.last_selection(prefix)] == [17, 17]
        text = engine.generate(request, SamplingParams(max_tokens=3)).results()[0]
        assert text.error is None and len(text.token_ids) == 3
        (exact,) = engine.reprefill([Request(prefix=prefix, suffix=[1, 2, 3], budget=1.0)])
        assert scale_error(exact.logits, engine.recompute(exact.request).logits) < TIGHT


@pytest.mark.usefixtures("module")
def test_benchmarks_take_it() -> None:
    args = parser("", quick=Setting(), full=Setting()).parse_args(["--systems", PLACE, "ckv"])
    assert setting_of(args).systems == (PLACE, "ckv")  # bench.ttft and others
    assert system_name(PLACE) == PLACE  # bench.accuracy
    assert system_name(PLACE, generates=True) == PLACE  # bench.decode


@pytest.mark.usefixtures("module")
def test_the_score_is_of_real_queries_and_keys() -> None:
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 5, 4, 8)).astype(np.float32)
    keys = rng.normal(size=(32, 2, 8)).astype(np.float32)
    score = system_named(PLACE).reprefill.score
    assert score is not None
    found = jax.jit(score, static_argnames=("chunk_tokens", "target"))(
        q, Keys(keys), num_tokens=np.int32(19), q_lengths=np.array([5, 2], np.int32),
        chunk_tokens=8, target=None,
    )  # fmt: skip
    for row, queries in enumerate((5, 2)):
        grouped = q[row, :queries].reshape(queries, 2, 2, 8)
        best = np.einsum("skgd,tkd->tskg", grouped, keys[:19]).max(axis=(1, 2, 3))
        expected = [best[start : start + 8].max(initial=-np.inf) for start in (0, 8, 16, 24)]
        np.testing.assert_allclose(found[row], expected, rtol=1e-5)
