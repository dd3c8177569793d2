"""What all benchmarks share of their command line: wrong usage is one clear message."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import common
from bench.common import Setting, code_state, finish, median_interval, parser, setting_of
from bench.json_file import NotWhole, read_json, read_rows, write_text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--systems", "magic"], "contiguous-kv"),
        (["--budgets", "2"], "(0, 1]"),
        (["--budgets", "half"], "half"),
        (["--model", "8B"], "kv7b-thin"),
        (["--checkpoint", "/nowhere"], "there is no /nowhere"),
        (["--task", "magic"], "sst2"),
        (["--prefixes", "0"], "got 0, expected 1 or more"),
        (["--repeats", "some"], "some"),
        (["--seed", "-1"], "got -1, expected 0 or more"),
        (["--json", "/"], "/ is a folder"),
        (["--json", f"{__file__}/x.json"], "test_common.py is a file"),
    ],
)
def test_a_wrong_argument_says_what_is_expected(
    given: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        parser("", quick=Setting(), full=Setting()).parse_args(given)
    assert error.value.code == 2
    assert says in capsys.readouterr().err


def test_a_task_needs_all_that_belongs_to_it() -> None:
    args = parser("", quick=Setting(), full=Setting()).parse_args(["--task", "sst2"])
    with pytest.raises(SystemExit, match="got no checkpoint, train, test"):
        setting_of(args)


def test_the_interval_of_a_median_is_that_of_its_order_statistics() -> None:
    values = list(range(1, 102))
    low, high = median_interval(values)
    # the 40th and the 62nd of 101: binomial, n 101, p 0.5, 95%
    assert (low, high) == (pytest.approx(41, abs=2), pytest.approx(61, abs=2))
    assert median_interval(values) == [low, high]
    assert median_interval([7.0] * 6) == [7.0, 7.0]
    assert median_interval([7.0]) is None
    assert (
        median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    )  # their range holds it in 94% of cases


def test_a_result_says_where_it_comes_from(tmp_path: Path) -> None:
    out = tmp_path / "new" / "x.json"
    found = finish(argparse.Namespace(json=out), None, {"rows": [1]})
    assert json.loads(out.read_text()) == found
    assert list(found) == ["command", "machine", "rows"]
    assert {"cpu", "cores", "packages", "commit", "python"} <= found["machine"].keys()


def test_a_result_is_of_the_code_that_lay_there_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, check=True)

    monkeypatch.setattr(common, "__file__", str(tmp_path / "bench" / "common.py"))
    assert code_state() == {"commit": "unknown", "dirty": None}
    (tmp_path / "bench" / "results").mkdir(parents=True)
    code = tmp_path / "bench" / "common.py"
    code.write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "code")
    first = code_state()
    assert first["commit"] not in ("", "unknown") and first["dirty"] is False
    (tmp_path / "bench" / "results" / "x.json").write_text("{}")
    (tmp_path / "README.md").write_text("words")
    assert code_state() == first
    (tmp_path / "new.py").write_text("2")
    assert code_state() == first | {"dirty": True}
    git("add", ".")
    git("commit", "-qm", "while something runs")
    assert code_state()["commit"] != first["commit"]
    started = dict(common.STARTED_AS)
    assert {name: common.machine()[name] for name in ("commit", "dirty")} == started


@pytest.mark.parametrize("text", ["", '{"rows": [', "[1]", "\0"])
def test_a_result_that_is_not_whole_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "half.json"
    path.write_text(text)
    for read in (read_json, read_rows):
        with pytest.raises(NotWhole, match=re.escape(str(path))):
            read(path)
    path.write_text("{}")
    with pytest.raises(NotWhole, match="no rows"):
        read_rows(path)


def test_a_write_that_is_cut_short_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "x.json"
    write_text(path, "before")
    whole = Path.write_text

    def cut(self: Path, text: str, **how: Any) -> int:
        whole(self, text[:3], **how)
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "after that")
    assert path.read_text() == "before"
    monkeypatch.undo()
    write_text(path, "after that")
    assert [one.name for one in path.parent.iterdir()] == ["x.json"]
    assert path.read_text() == "after that"


def test_every_bench_writes_its_result_by_the_one_way() -> None:
    folder = Path(__file__).parents[2] / "bench"
    sources = {path: path.read_text("utf-8") for path in folder.rglob("*.py")}
    option = re.compile(r'add_argument\(\s*"--json"|= parser\(__doc__')
    benches = [path for path, text in sources.items() if option.search(text)]
    assert len(benches) > 10
    missing = {path.name for path in benches if "finish(" not in sources[path]}
    assert missing <= {"common.py"}
