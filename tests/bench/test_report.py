"""The page shows what ran, what it said, and what failed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench.figures import FIGURES
from bench.report import SCRIPTS, Script, main, page
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


def finished(folder: Path, script: Script, *, commit: str, quick: bool = False) -> None:
    """A result of a script, as a run leaves it."""
    command = " ".join(["python", *script.command(folder, quick=quick)])
    ran = {"command": command, "seconds": 1800.0, "status": 0, "output": "", "error": ""}
    (folder / f"{script.stem}.run.json").write_text(json.dumps(ran))
    (folder / f"{script.stem}.json").write_text(json.dumps({"machine": {"commit": commit}}))


def test_what_has_a_result_of_this_code_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    same, other, quick, failed = SCRIPTS[2:6]
    monkeypatch.setattr("bench.report.same_code", lambda commit: commit == "abc1234")
    finished(tmp_path, same, commit="abc1234")
    finished(tmp_path, other, commit="0000000")
    finished(tmp_path, quick, commit="abc1234", quick=True)
    finished(tmp_path, failed, commit="abc1234")
    path = tmp_path / f"{failed.stem}.run.json"
    path.write_text(path.read_text().replace('"status": 0', '"status": 1'))
    ran: list[str] = []
    monkeypatch.setattr("bench.report.run", lambda script, *_, **__: ran.append(script.stem))
    names = [script.stem for script in (same, other, quick, failed)]
    with pytest.raises(SystemExit, match=f"failed, as the page says: {failed.stem}$"):
        main(["--out", str(tmp_path), "--resume", "--only", *names])
    assert ran == names[1:]
    expected = 0.5 + (quick.minutes + failed.minutes) / 60  # the other's own half an hour
    assert f"3 of 4 benchmarks to run, about {expected:.1f} hours" in capsys.readouterr().out
    main(["--out", str(tmp_path), "--only", same.stem])
    assert ran[-1] == same.stem  # asked for without --resume


def test_what_is_cut_short_or_of_no_commit_is_made_anew_and_never_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    by_stem = {script.stem: script for script in SCRIPTS}
    four = ("storage", "ttft", "batch", "decode")
    whole, half, dirty, unran = (by_stem[stem] for stem in four)
    monkeypatch.setattr("bench.report.same_code", lambda commit: commit == "abc1234")
    for script in (whole, half, dirty, unran):
        finished(tmp_path, script, commit="abc1234")
    (tmp_path / f"{half.stem}.json").write_text('{"machine": {')
    machine = {"commit": "abc1234", "dirty": True}
    (tmp_path / f"{dirty.stem}.json").write_text(json.dumps({"machine": machine}))
    (tmp_path / f"{unran.stem}.run.json").write_text('{"command"')
    ran: list[str] = []

    def run(script: Script, folder: Path, **_: object) -> None:
        ran.append(script.stem)
        finished(folder, script, commit="abc1234")

    monkeypatch.setattr("bench.report.run", run)
    names = [script.stem for script in (whole, half, dirty, unran)]
    main(["--out", str(tmp_path), "--resume", "--only", *names])
    assert ran == names[1:]
    assert f"{half.stem}.json cannot be read" in capsys.readouterr().out
    (tmp_path / f"{half.stem}.json").write_text('{"machine": {')
    with pytest.raises(SystemExit, match=f"{half.stem}.json cannot be read"):
        main(["--out", str(tmp_path), "--redraw"])


def test_every_benchmark_of_make_bench_knows_its_options() -> None:
    folder = RESULTS.parent
    shared = (folder / "common.py").read_text("utf-8")
    assert len({script.stem for script in SCRIPTS}) == len(SCRIPTS)
    for script in SCRIPTS:
        path = folder / script.module
        file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        source = file.read_text("utf-8")
        source += shared if "parser(__doc__" in source else ""
        words = script.command(Path("out"), quick=True)
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in source, (script.stem, option)
