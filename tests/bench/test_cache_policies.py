"""The cache replay: same requests for every policy, honest hit rates, both sources."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.cache_policies import GUIDED, Setting, interval, main, replay, verdict, workload
from bench.cache_traces import Selections, recorded, structured, synthetic
from bench.common import Setting as LabSetting
from ckv_jax.cache import POLICIES

SMALL = {"prefixes": 4, "questions": 6, "groups": 2, "chunks": 40}


def test_the_generator_is_seeded_and_well_formed() -> None:
    first, again = synthetic(0.25, **SMALL), synthetic(0.25, **SMALL)
    np.testing.assert_array_equal(first.chunks, again.chunks)
    assert first.chunks.shape == (4, 6, 2, 10)
    assert first.chunks.min() >= 0 and first.chunks.max() < 40
    assert all(len(set(row)) == 10 for row in first.chunks.reshape(-1, 10).tolist())
    assert (first.attention > 0).all() and (first.attention.sum(-1) <= 1).all()
    assert (first.important >= 0).all() and (first.important <= 1).all()


def test_prefixes_are_drawn_normally() -> None:
    selections = synthetic(0.1, **{**SMALL, "prefixes": 24})
    drawn = np.array([p for p, _ in workload(selections, Setting(requests=2000))])
    assert drawn.min() >= 0 and drawn.max() <= 23
    assert drawn.mean() == pytest.approx(11.5, abs=0.4)
    assert drawn.std() == pytest.approx(4.0, abs=0.4)


@pytest.mark.parametrize("policy", POLICIES)
def test_hit_rates_are_shares_of_all_uses(policy: str) -> None:
    row = replay(synthetic(0.25, **SMALL), policy, Setting(requests=60))
    rate = row["hit_rate"]
    assert 0 < rate["device"] < rate["memory"] < 1
    assert rate["device"] + rate["host"] == pytest.approx(rate["memory"])


def test_a_cache_for_everything_hits_once_warm_and_none_never_hits() -> None:
    one = np.zeros((1, 1, 1, 4), np.int32) + np.arange(4)
    ones = np.ones(one.shape)
    selections = Selections(
        name="x", num_chunks=4, chunks=one, attention=ones, important=ones, everywhere=ones
    )
    full = replay(selections, "attention", Setting(requests=9, device=1.0, host=0.0))
    assert full["hit_rate"] == {"device": 1.0, "host": 0.0, "memory": 1.0}
    host = replay(selections, "attention", Setting(requests=9, device=0.0, host=1.0))
    assert host["hit_rate"] == {"device": 0.0, "host": 1.0, "memory": 1.0}
    none = replay(selections, "attention", Setting(requests=9, device=0.0, host=0.0))
    assert none["hit_rate"] == {"device": 0.0, "host": 0.0, "memory": 0.0}


def test_recorded_selections_and_the_report(tmp_path: Path, monkeypatch) -> None:
    source = synthetic(0.25, **SMALL)
    file = tmp_path / "traces.npz"
    np.savez(file, ckv=source.chunks.astype(np.int16), **{"ckv attention": source.everywhere})
    (loaded,) = recorded(file)
    np.testing.assert_array_equal(loaded.chunks, source.chunks)
    np.testing.assert_allclose(loaded.attention, source.attention, rtol=1e-6)
    assert (loaded.important == 1).all()
    report, chart = tmp_path / "out.json", tmp_path / "out.png"
    monkeypatch.setattr(
        sys,
        "argv",
        ["x", "--json", str(report), "--traces", str(file), "--plot", str(chart),
         "--requests", "30", "--draws", "3"],
    )  # fmt: skip
    main()
    rows = json.loads(report.read_text())["rows"]
    assert [row["policy"] for row in rows] == list(POLICIES)
    by_policy = {row["policy"]: row for row in rows}
    assert by_policy["attention"]["lead"]["attention"]["memory"] == {"mean": 0.0, "half_width": 0.0}
    lead = by_policy["lru"]["lead"]["attention"]["device"]["mean"]
    ours, theirs = (by_policy[name]["hit_rate"]["device"] for name in ("attention", "lru"))
    assert lead == pytest.approx(ours - theirs)
    assert chart.stat().st_size > 1000


def test_recorded_selections_without_attention_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "bare.npz", ckv=np.zeros((1, 1, 1, 1), np.int16))
    with pytest.raises(ValueError, match="ckv attention"):
        list(recorded(tmp_path / "bare.npz"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--draws", "1"], "one has no interval"),
        (["--host", "0.9"], "shares within 1"),
        (["--traces", __file__], "no file of recorded selections"),
    ],
)
def test_what_gives_no_interval_or_selections_is_refused(
    given: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["x", "--json", str(tmp_path / "out.json"), *given])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2 and says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_lead_within_its_interval_says_nothing() -> None:
    even = interval(np.array([-0.01, 0.01, 0.0]))
    clear = interval(np.array([0.02, 0.021, 0.019]))
    assert abs(even["mean"]) <= even["half_width"] and clear["mean"] > clear["half_width"] > 0
    rows = [
        {"selections": "x", "policy": name, "ever_used": 0.4, "lead": dict.fromkeys(
            GUIDED, dict.fromkeys(("device", "memory"), lead))}
        for name, lead in (("lfu", even), ("lru", clear))
    ]  # fmt: skip
    for said in verdict(rows).splitlines()[1:]:
        assert said.count("no telling") == 2 and said.count("ahead") == 2 and "behind" not in said


def test_selections_of_the_structured_model() -> None:
    setting = LabSetting(model="tiny", prefix_tokens=512, prefixes=2)
    (found,) = structured(setting, (0.2,), questions=2)  # 7 chunks, in a bucket of 8
    assert found.chunks.shape == (2, 2, 1, 7)  # of 32 chunks, one period of four layers
    assert all(len(set(row)) == 7 for row in found.chunks.reshape(-1, 7).tolist())
    assert found.chunks.min() >= 0 and found.chunks.max() < found.num_chunks == 32
    assert (found.attention > 0).all()
