"""The page shows what ran, what it said, and what failed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from bench.report import main, page
from bench.ttft import speedups

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def test_page_of_one_success_and_one_failure(tmp_path: Path) -> None:
    ran = {"command": "python -m bench.ttft --quick", "seconds": 12.5, "status": 0}
    (tmp_path / "ttft.run.json").write_text(json.dumps(ran | {"output": "a < b", "error": ""}))
    time = {
        "system": "ckv", "budget": 0.05, "variant": "default", "ratio_to_floor": 1.5,
        "ttft_ms": {"mean": 80.0},
    }  # fmt: skip
    found = {
        "rows": [time],
        "speedup": {"ckv": {"0.05": {"impress": 7.25, "as-lru": 10.5}}},
    }
    (tmp_path / "ttft.json").write_text(json.dumps(found))
    (tmp_path / "ttft.png").write_bytes(b"PNG")
    failed = {"command": "python -m bench.accuracy", "seconds": 1, "status": 1}
    (tmp_path / "accuracy.run.json").write_text(
        json.dumps(failed | {"output": "", "error": "ValueError: no checkpoint"})
    )
    text = page(tmp_path)
    assert "a &lt; b" in text
    assert "7.25×" in text and "10.50×" in text
    assert "data:image/png;base64,UE5H" in text
    assert "ValueError: no checkpoint" in text
    assert "Means at 5%, ms: ckv 80." in text and "did not record its machine" in text
    assert "href='#ttft'" in text and "href='#accuracy'" in text
    assert "id='ablation'" not in text  # it did not run


def test_redrawing_measures_nothing_and_draws_what_is_there(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "breakdown.json", tmp_path)
    main(["--out", str(tmp_path), "--redraw"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "breakdown.json", "breakdown.png", "report.html",
    ]  # fmt: skip
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "waits for the disk: impress at 5%: 50%" in text and "AMD EPYC, 2 cores" in text


def row(system: str, budget: float, mean: float, variant: str = "default") -> dict[str, object]:
    return {"system": system, "budget": budget, "variant": variant, "ttft_ms": {"mean": mean}}


def test_speedups_divide_means_of_the_same_budget_and_variant() -> None:
    rows = [
        row("ckv", 0.05, 10.0),
        row("ckv", 0.05, 99.0, "no-prefetch"),
        row("ckv", 0.25, 20.0),
        row("impress", 0.05, 70.0),
        row("impress", 0.25, 80.0),
        row("as-lru", 0.05, 100.0),
    ]
    assert speedups(rows) == {
        "ckv": {"0.05": {"impress": 7.0, "as-lru": 10.0}, "0.25": {"impress": 4.0}}
    }
