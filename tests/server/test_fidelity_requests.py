"""A fidelity in place of a budget: settled for each prompt, reported, and never waited for long."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import httpx
import pytest
from server.applications import WAY, serving
from server.serving import post

from ckv_jax import Engine
from ckv_jax.fidelity import BUDGETS, Calibration, _save, budget_for
from ckv_jax.storage.prefix import Prefix

TEXT = " ".join(f"Lamp {n} hangs at stair {7 * n % 101}." for n in range(60))
TABLE = Calibration(  # a gap of 1 settles it
    budgets=BUDGETS,
    gaps=((1.0,) * 4,) * 60,
    errors=((0.1,) * 4,) * 60,
    moves=((0.0,) * 4,) * 60,
    same=((True,) * 4,) * 60,
)
QUESTIONS = (" Lamp 41 hangs", " The keeper walks up")


@pytest.fixture
def calibrated(
    fresh: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Engine, Prefix]:
    """An engine with a calibration, and the prefix that it has stored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prefix = fresh.ingest(TEXT, raw=True)
    _save(fresh, TABLE)
    return fresh, prefix


def test_the_settled_budget_is_that_of_python(calibrated: tuple[Engine, Prefix]) -> None:
    engine, prefix = calibrated
    prompts = [TEXT + question for question in QUESTIONS]
    tokens = [engine.encode(prompt, begins=True) for prompt in prompts]
    suffixes = [one[prefix.num_tokens :].tolist() for one in tokens]
    found = [budget_for(engine, prefix, suffix, 0.9).budget for suffix in suffixes]
    assert min(found) < 1
    with serving(engine, store_tokens=100_000) as url:
        body = WAY | {"prompt": prompts, "ckv": {"fidelity": 0.9}}
        answer = post(url, "completions", body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ckv-budget"] == ", ".join(map(str, dict.fromkeys(found)))
        assert answer.json()["ckv"]["budget"] == found[0]
        for prompt, budget in zip(prompts, found, strict=True):
            for ckv in ({"budget": "fidelity:0.9"}, {"fidelity": 0.9}):
                alone = post(url, "completions", WAY | {"prompt": prompt, "ckv": ckv})
                said = alone.json()["ckv"]
                assert (said["budget"], said["fidelity"]) == (budget, 0.9)
                assert said["settling_ms"] > 0 and said["settling_ssd_bytes"] >= 0
                assert alone.headers["x-ckv-budget"] == str(budget)
            exact = post(url, "completions", WAY | {"prompt": prompt, "ckv": {"budget": budget}})
            assert exact.json()["choices"] == alone.json()["choices"]
            assert "fidelity" not in exact.json()["ckv"]
        new = post(url, "completions", WAY | {"prompt": "Not stored.", "ckv": {"fidelity": 0.9}})
        assert new.json()["ckv"]["budget"] == 1.0
        stored = [prefix.id]
        refused = post(
            url, "completions", WAY | {"prompt": "?", "ckv": {"fidelity": 0.9, "documents": stored}}
        )
        assert refused.json()["error"]["param"] == "ckv.fidelity"
        both = post(
            url, "completions", WAY | {"prompt": "?", "ckv": {"fidelity": 0.9, "budget": 0.5}}
        )
        assert both.status_code == 400


def test_the_sparse_model_may_have_one_and_streams_report_it(
    calibrated: tuple[Engine, Prefix],
) -> None:
    engine, prefix = calibrated
    with serving(engine, store_tokens=100_000, sparse_budget="auto") as url:
        body = WAY | {"prompt": TEXT + QUESTIONS[0], "model": f"{WAY['model']}:sparse"}
        body["stream"] = True
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            assert float(answer.headers["x-ckv-budget"]) in (*BUDGETS, 1.0)
            assert '"fidelity":0.98' in answer.read().decode()
        exact = post(
            url,
            "completions",
            body | {"prompt": "?", "stream": False, "ckv": {"documents": [prefix.id]}},
        )
        assert exact.json()["ckv"]["budget"] == 1.0, exact.text


def test_without_a_calibration_it_is_refused(
    fresh: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serving(fresh) as url:
        refused = post(url, "completions", WAY | {"prompt": TEXT, "ckv": {"budget": "auto"}})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "unsupported_value"
        bad = post(url, "completions", WAY | {"prompt": TEXT, "ckv": {"fidelity": 1.5}})
        assert bad.json()["error"]["param"] == "ckv.fidelity"
    with pytest.raises(ValueError, match="calibrat"), serving(fresh, budget="auto"):
        pass


def test_settling_ends_with_the_deadline_and_with_the_client(
    calibrated: tuple[Engine, Prefix], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = calibrated
    cancelled = threading.Event()

    async def never(*_: object) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    monkeypatch.setattr(engine, "areprefill", never)
    body = WAY | {"prompt": TEXT + QUESTIONS[0], "ckv": {"fidelity": 0.9}}
    with serving(engine, request_s=0.3) as url:
        late = post(url, "completions", body)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "deadline_exceeded")
        assert cancelled.is_set()
    cancelled.clear()
    with serving(engine) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=body, timeout=0.5)
        assert cancelled.wait(10)
