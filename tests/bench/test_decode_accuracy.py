"""Right answers of decode through the engine: what is compared, and the report."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from bench.decode_accuracy import Setting, ask, bars, measure, questions_in_turn, right, show
from bench.kept import Kept
from ckv_jax.config import EngineConfig
from ckv_jax.data.reference import demo_ledger, reference_folder
from ckv_jax.engine import Engine
from ckv_jax.systems import SYSTEMS

SETTING = Setting(documents=1, sequences=3, steps=16, tokens=512, budgets=(1 / 16, 1.0))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder, config = reference_folder(), EngineConfig(system="ckv")
    store = tmp_path_factory.mktemp("store")
    with Engine.from_pretrained(folder, store=store, config=config) as made:
        yield made


def test_every_token_is_given_and_the_likeliest_next_one_compared(engine: Engine) -> None:
    page = demo_ledger(3, 512)
    given = questions_in_turn(page, 3, 16)
    texts = ask(engine, page.tokens, given, 1.0)
    for row, text in zip(given.tokens, texts, strict=True):
        assert text.token_ids[:-1].tolist() == row[1:].tolist()
        assert len(text.completion().logprobs) == 16
        assert text.token_ids[-1] == text.completion().logprobs[-1].top[0][0]
    found = right(texts, given)
    assert found.shape == ((given.wanted >= 0).sum(),) and found.mean() > 0.8
    wrong = np.where(given.wanted >= 0, 1, -1)
    assert not right(texts, type(given)(tokens=given.tokens, wanted=wrong)).any()


def test_rows_of_a_run(engine: Engine) -> None:
    rows = list(measure(engine, {"ckv": SYSTEMS["ckv"]}, SETTING, Kept(None, {})))
    assert len(rows) == 2 * 2
    for row in rows:
        assert row["ci95"][0] <= row["accuracy"] <= row["ci95"][1]
        if row["budget"] == 1.0:
            assert row["accuracy"] > 0.8
        else:
            assert 0 < row["attention_mass"] < 1 and 0 < row["device_hits"] <= 1
    assert "ckv" in show(rows) and "100.00%" in show(rows)


def test_bars_hold_systems_to_full_attention_and_to_each_other() -> None:
    right = {
        "ckv": (0.9, 0.92),
        "kvdrive": (0.7, 0.91),
        "quest": (0.75, 0.9),
        "pqcache": (0.8, 0.9),
    }
    rows = [
        {"system": name, "budget": budget, "answers": 100, "accuracy": share}
        for name, shares in right.items()
        for budget, share in zip((1 / 64, 1.0), shares, strict=True)
    ]
    found = {bar["claim"]: bar for bar in bars(rows)}
    lost = found["ckv: answers lost"]
    assert lost["value"] == pytest.approx(0.02) and lost["met"]
    rival = found["kvdrive: answers lost to quest, shadowkv, retroinfer"]
    assert rival["value"] == pytest.approx(0.05) and not rival["met"] and len(found) == 2
