"""The page shows what ran, what it said, and what failed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from bench.figures import FIGURES
from bench.report import SCRIPTS, main, page

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def test_page_of_one_success_and_one_failure(tmp_path: Path) -> None:
    ran = {"command": "python -m bench.ttft --quick", "seconds": 12.5, "status": 0}
    (tmp_path / "ttft.run.json").write_text(json.dumps(ran | {"output": "a < b", "error": ""}))
    time = {
        "system": "ckv", "budget": 0.05, "variant": "default", "ratio_to_floor": 1.5,
        "ttft_ms": {"mean": 80.0},
    }  # fmt: skip
    found = {"rows": [time], "speedup": {"ckv": {"0.05": {"impress": 7.25, "as-lru": 10.5}}}}
    (tmp_path / "ttft.json").write_text(json.dumps(found))
    (tmp_path / "ttft.png").write_bytes(b"PNG")
    failed = {"command": "python -m bench.accuracy", "seconds": 1, "status": 1}
    (tmp_path / "accuracy.run.json").write_text(
        json.dumps(failed | {"output": "", "error": "ValueError: no checkpoint"})
    )
    unseen = {"command": "python -m bench.peers", "seconds": 1, "status": 1, "output": "6.16 < 11"}
    (tmp_path / "peers.run.json").write_text(json.dumps(unseen | {"error": "KeyError: 'rows'"}))
    text = page(tmp_path)
    assert "a &lt; b" in text
    assert "<section id='peers'>" in text and "6.16 &lt; 11" in text and "KeyError" in text
    assert "7.25×" in text and "10.50×" in text
    assert "data:image/png;base64,UE5H" in text
    assert "ValueError: no checkpoint" in text
    assert "Means at 5%, ms: ckv 80." in text and "did not record its machine" in text
    assert "href='#ttft'" in text and "href='#accuracy'" in text
    assert "id='batch'" not in text  # it did not run


def test_redrawing_measures_nothing_and_draws_what_is_there(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "batch.json", tmp_path)
    main(["--out", str(tmp_path), "--redraw"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "batch.json", "batch.png", "report.html",
    ]  # fmt: skip
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert FIGURES["batch"].title in text and "AMD EPYC" in text


def test_every_benchmark_of_make_bench_knows_its_options() -> None:
    folder = RESULTS.parent
    shared = (folder / "common.py").read_text("utf-8")
    assert len({script.stem for script in SCRIPTS}) == len(SCRIPTS)
    for script in SCRIPTS:
        path = folder / script.module
        file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        source = file.read_text("utf-8")
        source += shared if re.search(r"= (parser|command)\(__doc__", source) else ""
        words = script.command(Path("out"), quick=True)
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in source, (script.stem, option)
