"""The ContiguousKV paper's numbers, and the model beside them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import paper as command
from bench import paper_traffic as traffic
from bench.paper import OURS, Paper, Setting, arithmetic, cases_of
from bench.paper_traffic import Case, replay, token_bytes
from bench.published import FIGURES
from ckv_jax.systems import SYSTEMS

QUICK = Setting(quantiles=4)
RTE = Case.of("RTE", "7B")


def test_sizes_of_table_1_are_whole_prefixes_of_the_published_models() -> None:
    assert token_bytes("7B") == 56 * 1024 and token_bytes("14B") == 192 * 1024
    counts = {Case.of("RTE", model).prefixes for model in ("7B", "14B", "32B")}
    assert max(counts) - min(counts) <= 2  # the table has the same prefixes for all three


def test_what_caches_hold() -> None:
    everything = replay(SYSTEMS["as-lru"], RTE, budget=1.0, stable=0.0)
    assert {seen.needed for seen in everything} == {1.0}
    held = sum(seen.device + seen.host for seen in everything) / len(everything)
    assert held > 0.5  # half of the data fits, and prefixes are not drawn alike
    small = replay(SYSTEMS["as-lru"], Case.of("RTE", "32B"), budget=1.0, stable=0.0)
    assert sum(seen.device + seen.host for seen in small) / len(small) < 0.3
    alike, other = (
        sum(seen.missed for seen in replay(OURS, RTE, budget=0.05, stable=stable))
        for stable in (0.9, 0.1)
    )
    assert alike < other


def test_gaps_are_beyond_the_stated_hardware() -> None:
    """0.42 s at 7.45 GB/s are 3.1 GB; a prefix of 6,000 tokens of 7B has 0.34."""
    gaps = [figure for figure in FIGURES if figure.kind == "gap"]
    assert [arithmetic(figure)[0] for figure in gaps] == [False, False, False]
    assert "46 ms" in arithmetic(gaps[0])[1]
    small = dataclasses.replace(gaps[0], value=0.03)
    assert arithmetic(small)[0]


def test_software_is_what_makes_the_gaps() -> None:
    gap = next(figure for figure in FIGURES if figure.kind == "gap")
    bare, slow = (Paper(setting=QUICK, io_s=io_s).figure(gap) for io_s in (0.0, 1e-4))
    assert bare < 0.1 < 0.3 < slow


def test_reading_ahead_saves_time() -> None:
    paper = Paper(setting=QUICK, io_s=1e-4)
    late = dataclasses.replace(OURS, prefetch="none")
    assert paper.mean(late, RTE, 0.25) > paper.mean(OURS, RTE, 0.25)


def test_the_long_prefix_is_of_its_own_length() -> None:
    [long] = [figure for figure in FIGURES if figure.tokens]
    assert [case.tokens for case in cases_of(long)] == [10_000]


@pytest.fixture
def little_traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Some of the requests, and one that stands for all; what is kept of others is let go."""
    monkeypatch.setattr(command, "QUANTILES", 1)
    monkeypatch.setattr(traffic, "WARM_UP", traffic.WARM_UP // 40)
    monkeypatch.setattr(traffic, "MEASURED", traffic.MEASURED // 40)
    command._quantiles.cache_clear()
    yield
    command._quantiles.cache_clear()


@pytest.mark.usefixtures("little_traffic")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--json", str(tmp_path / "paper.json")])
    found = json.loads((tmp_path / "paper.json").read_text())
    [fitted] = [row for row in found["rows"] if row["fitted"]]
    assert abs(fitted["error"]) < 0.01
    assert len(found["rows"]) == len(FIGURES) and len(found["claims"]) == 8
    assert "cannot give it" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--stable", "2"])
