"""Figures in the README and on the server's page are those of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench.fidelity import summary_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"


def test_the_table_of_systems_is_what_was_measured() -> None:
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \| ([\d,]+) \| ([\d.]+) \|", (ROOT / "README.md").read_text(), re.M
    )
    times = {
        row["system"]: row["ttft_ms"]["mean"]
        for row in json.loads((RESULTS / "ttft.json").read_text())["rows"]
        if row["variant"] == "default" and row["budget"] == 0.05
    }
    accuracy = {
        (row["system"], row["budget"]): row["accuracy"]
        for row in json.loads((RESULTS / "accuracy.json").read_text())["rows"]
        if row["task"] == "all"
    }
    full = accuracy["as-lru", 1.0]
    assert {name for name, _, _ in rows} == set(times) - {"as-h2o-lru", "recompute"}
    for name, ms, right in rows:
        assert ms == f"{times[name]:,.0f}", name
        assert float(right) == round(100 * accuracy.get((name, 0.05), full), 1), name


def test_the_table_of_a_real_model_is_what_was_measured() -> None:
    found = summary_rows(json.loads((RESULTS / "fidelity.json").read_text())["rows"])
    by_task = {(row[0], row[1], row[2]): row for row in found}
    system, rows = "", 0
    cold = _result("fidelity_times")["rows"]
    times = {(row["system"], row["budget"]): row["ttft_ms"] for row in cold}
    table = (
        r"^\| (?:`([a-z0-9-]+)`)? ?\| (\d+)% \| ([\d.]+) \| (\d+) \| (\d+) \| (\d+) \| ([\d,]+) "
        r"\| (\d+) \|$"
    )
    for name, percent, kl, agree, kept, mib, reads, ms in re.findall(
        table, (ROOT / "README.md").read_text(), re.M
    ):
        system, rows, budget = name or system, rows + 1, f"{percent}%"
        assert ms == f"{times[system, int(percent) / 100]:.0f}", (system, budget)
        goes_on, again = by_task["continuation", budget, system], by_task["recall", budget, system]
        assert kl == f"{goes_on[4]:.3f}" and agree == f"{goes_on[5]:.0f}", (system, budget)
        assert kept == f"{again[6]:.0f}", (system, budget)
        assert mib == f"{goes_on[9]:.0f}" and reads == f"{goes_on[10]:,.0f}", (system, budget)
    assert rows == 9


def _result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_the_page_on_the_server_has_what_was_measured() -> None:
    page = " ".join((ROOT / "docs" / "server.md").read_text().split())
    times = {row["budget"]: row["ttft_ms"]["mean"] for row in _result("ttft")["rows"]
             if (row["system"], row["variant"]) == ("ckv", "default")}  # fmt: skip
    right = {row["budget"]: row["accuracy"] for row in _result("accuracy")["rows"]
             if (row["system"], row["task"]) == ("ckv", "all")}  # fmt: skip
    for budget in (0.05, 0.25):
        line = f"| {budget:.0%} | {times[budget]:.0f} ms | {right[budget]:.1%} |"
        assert line in page, line
    server = _result("server")
    ways = {row["way"]: row for row in server["rows"]}
    share = ways["http"]["tokens_s"] / ways["engine"]["tokens_s"]
    whole, damaged = (ways[way]["p50_ttft_ms"] / 1e3 for way in ("plain disk", "damaged disk"))
    for said in (
        f"{server['overhead_ms']:.1f} ms longer for its first token over HTTP",
        f"({server['http_ttft_ms']:.1f} against {server['engine_ttft_ms']:.1f} ms)",
        f"{share:.2f} of the tokens per second",
        "{:.0f} ms instead of {:.0f}.".format(
            *(ways[way]["p50_ttft_ms"] for way in ("http", "engine"))
        ),
        f"first token takes {damaged:.0f} s instead of {whole:.1f}",
    ):
        assert said in page, said
