"""`bench.accuracy` end to end, small: the report's schema, the plots, the traces."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bench.accuracy import first, main, rule_of, summary
from bench.cache_policies import recorded
from bench.oracle import Oracle, Rule
from bench.selection_study import interval, quick_rules
from ckv_jax.data.reference import LEARNED, demo_ledger, reference_folder
from ckv_jax.model.weights import load_pretrained
from ckv_jax.systems import SYSTEMS, preset


def test_rules_follow_the_systems() -> None:
    ours, paper = rule_of(SYSTEMS["ckv"], 0.1), rule_of(SYSTEMS["contiguous-kv"], 0.1)
    chooses = SYSTEMS["ckv"].choose
    assert (ours.every, ours.window) == (SYSTEMS["ckv"].period, chooses.queries)
    assert (paper.every, paper.probe, paper.window, paper.layers) == (8, "keys", None, 1)
    assert (ours.probe, ours.layers) == (SYSTEMS["ckv"].digest, chooses.score_layers)
    left = [rule_of(SYSTEMS["ckv"], budget).survivors for budget in (0.1, 0.05, 1 / 64)]
    assert ours.survivors == 0 and left == [0, 5, 8]
    few = rule_of(preset("ckv", heads=((1, 0), (2, 1))), 0.05)
    assert (few.only, few.layers, few.survivors) == (((1, 0), (2, 1)), few.every, 0)
    assert rule_of(SYSTEMS["as-h2o-lfu"], 0.1).heads == "pooled"
    assert rule_of(SYSTEMS["impress"], 0.1).probe == "heads3"
    assert rule_of(SYSTEMS["recompute"], 1.0).budget == 1


def test_a_coarse_pass_that_leaves_everything_changes_nothing() -> None:
    page = first(demo_ledger(0, 512, asked=LEARNED), 8)
    oracle = Oracle(load_pretrained(reference_folder(), dtype="float32"), page)
    rule = Rule(budget=1 / 16, every=4, probe="int4", window=4, layers=3)
    plain, coarse, narrow = (oracle.ask(replace(rule, survivors=n)) for n in (0, 16, 2))
    assert (plain.chosen == coarse.chosen).all() and (plain.chosen != narrow.chosen).any()
    assert (narrow.chosen.sum(-1) == rule.count(512)).all()


def test_one_head_chooses_for_all() -> None:
    page = first(demo_ledger(0, 512, asked=LEARNED), 8)
    oracle = Oracle(load_pretrained(reference_folder(), dtype="float32"), page)
    every = Rule(budget=1 / 8, every=4, layers=4)
    ours = tuple((layer, head) for layer in range(16) for head in range(4))
    found = {
        name: oracle.ask(rule).chosen
        for name, rule in {
            "all": every,
            "named": replace(every, only=ours),
            "one": replace(every, only=tuple((layer, 1) for layer in range(16))),
        }.items()
    }
    assert (found["all"] == found["named"]).all()
    assert (found["all"] != found["one"]).any()


def test_a_summary_compares_with_full_kv() -> None:
    names = ("system", "budget", "task", "accuracy", "questions")
    rows = [
        ("recompute", 1.0, "all", 0.5, 4),  # of a few questions alone
        ("as-lru", 1.0, "all", 0.96, 100),
        ("ckv", 0.05, "all", 0.95, 100),
        ("ckv", 0.05, "recall", 0.1, 25),
    ]
    text = summary([dict(zip(names, row, strict=True)) for row in rows])
    assert "full KV: 96.0% right" in text and "5%:  1.00" in text and "5.62" in text


@pytest.mark.slow
def test_the_whole_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, plot, traces = tmp_path / "a.json", tmp_path / "a.png", tmp_path / "traces.npz"
    command = (
        "accuracy --quick --tokens 256 --documents 1 --budgets 0.25 --systems as-lru impress ckv "
        f"--suffix-tokens 12 --json {out} --plot {plot} --traces {traces}"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    few = dict(list(quick_rules().items())[4:7])  # every rule is compiled for seconds
    monkeypatch.setattr("bench.accuracy.quick_rules", lambda: few)
    # Programs over tokens of all questions of a batch grow with it.
    monkeypatch.setattr("bench.accuracy.demo_ledger", partial(demo_ledger, questions=8))
    main()
    report = json.loads(out.read_text())
    rows = report["rows"]
    assert {(row["system"], row["budget"]) for row in rows} == {
        ("as-lru", 1.0), ("impress", 0.25), ("ckv", 0.25),
    }  # fmt: skip
    for row in rows:
        assert row["task"] in (*LEARNED, "all")
        right = row["accuracy"] * row["questions"]
        assert right == pytest.approx(round(right))
        assert row["ci95"] == pytest.approx(interval(round(right), row["questions"]))
    asked = 8
    for system in ("as-lru", "impress", "ckv"):
        *families, total = [row for row in rows if row["system"] == system]
        assert total["task"] == "all" and total["questions"] == asked
        assert sum(row["questions"] for row in families) == asked
        right = sum(row["questions"] * row["accuracy"] for row in families)
        assert total["accuracy"] == pytest.approx(right / asked)
        assert len({(row["chunk_recall"], row["needle"]) for row in (*families, total)}) == 1
        full = system == "as-lru"  # everything takes part, and the checkpoint has learned to look
        assert (total["chunk_recall"], total["needle"]) == (1, 1) or not full
        assert total["accuracy"] > 0.8 or not full
    assert {row["distance"] for row in report["coverage"]} == {1, 2, 4, 8}
    assert {row["name"] for row in report["study"]} == {"full", *few}
    assert plot.stat().st_size > 1000 and (tmp_path / "a_coverage.png").stat().st_size > 1000
    assert {found.name for found in recorded(traces)} == {"ckv", "contiguous-kv"}
