"""Figures in the README and on the server's page are those of the committed results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.fidelity import summary_rows
from bench.figures.fidelity import mean

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


def test_the_prose_of_the_readme_has_what_was_measured() -> None:
    page = " ".join((ROOT / "README.md").read_text().split())
    missing = [said for said in _prose() if not re.search(said, page)]
    assert not missing


def _prose() -> Iterator[str]:
    """Expressions for what the README says outside of its tables of figures."""
    # Rows with a commit are over another text.
    longer = [row for row in _result("fidelity_510")["rows"] if "commit" not in row]
    budgets = [_of(longer, "ckv", budget) for budget in (0.05, 0.1, 0.25)]
    (asked,) = {sum(row["questions"] for row in rows) for rows in budgets}
    yield rf"\b{asked} continuations"
    yield r"\b{:.3f}, {:.3f} and {:.3f} nats".format(*(mean(rows, "kl") for rows in budgets))
    yield r"\b{:.0f}, {:.0f} and {:.0f}%".format(*(100 * mean(rows, "agree") for rows in budgets))

    found: Any = summary_rows(_result("fidelity")["rows"])
    table = {tuple(row[:3]): row for row in found}
    yield rf"continuation\*.{{,250}}\b{table['continuation', '5%', 'ckv'][3]}\b"
    recalls, right = (table["recall", "5%", "ckv"][n] for n in (3, 8))  # right: of 100
    yield f"Of {recalls} recalls, full attention gets {right * recalls / 100:.0f} right"
    more, most = (
        table["continuation", budget, "as-h2o-lfu"][9] / table["continuation", budget, "ckv"][9]
        for budget in ("25%", "5%")
    )
    yield rf"\b{more:.1f} to {most:.0f} times as many bytes"

    cold = _result("fidelity_times")["rows"]
    whole = {row["system"]: row["ttft_ms"] for row in cold if row["budget"] == 1}
    own = whole.pop("ckv")
    ends = f"{min(whole.values()):.0f} to {max(whole.values()):.0f} ms"
    yield f"`ckv` takes {own:.0f} ms, and the other systems {ends}"

    times = _result("ttft")
    yield f"document of {times['setting']['prefix_tokens']:,} tokens"
    yield f"mean of {times['setting']['repeats']} requests"
    yield f"over {_result('accuracy')['questions']} questions"
    rows = [row for row in times["rows"] if (row["variant"], row["budget"]) == ("default", 0.05)]
    ms = {row["system"]: row["ttft_ms"]["mean"] for row in rows}
    yield f"`ckv` takes {ms['ckv'] / ms['contiguous-kv']:.1f} times as long"
    shares = [ms["ckv"] / ms[system] for system in ("as-lru", "as-h2o-lfu", "impress")]
    yield rf"\b{min(shares):.2f} to {max(shares):.2f} of the time of the other three"

    eight = {row["system"]: row for row in _result("decode")["rows"] if row["sequences"] == 8}
    ours, theirs = eight["ckv"], eight["solidattention"]
    peaks = [row["peak_mb"] / 1000 for row in (theirs, ours)]
    yield r"\b{:.1f} GB at the peak where `ckv` takes {:.1f}\b".format(*peaks)
    yield rf"texts of {ours['tokens']:,} tokens from SSD, a budget of 1/{1 / ours['budget']:.0f}\b"
    yield rf"\b{theirs['tokens_s'] / ours['tokens_s']:.2f} times the tokens per second"
    answers = _result("fidelity_greedy")["rows"]
    small, larger = (
        mean(_of(answers, "ckv", budget), "kl_per_token")
        / mean(_of(answers, "solidattention", budget), "kl_per_token")
        for budget in (1 / 64, 0.05)
    )
    yield rf"\b{small:.2f} of its divergence from full attention at 1/64, and {larger:.2f} at 5%"

    faults = _result("faults")["total"]
    assert faults["wrong_tokens"] == 0
    yield f"In {faults['states']:,} tested faults and crashes of a store, no token was wrong"


def _of(rows: list[Any], system: str, budget: float) -> list[Any]:
    return [row for row in rows if (row["system"], row["budget"]) == (system, budget)]
