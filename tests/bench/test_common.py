"""What all benchmarks share of their command line: wrong usage is one clear message."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.common import (
    NotWhole,
    Setting,
    finish,
    parser,
    read_json,
    read_rows,
    setting_of,
    write_text,
)


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


def test_a_result_says_where_it_comes_from(tmp_path: Path) -> None:
    out = tmp_path / "new" / "x.json"
    found = finish(argparse.Namespace(json=out), None, {"rows": [1]})
    assert json.loads(out.read_text()) == found
    assert list(found) == ["command", "machine", "rows"]
    assert {"cpu", "cores", "packages", "commit", "python"} <= found["machine"].keys()


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
    option = re.compile(r'add_argument\(\s*"--json"|= (parser|command)\(__doc__(?!.*result=False)')
    benches = [path for path, text in sources.items() if option.search(text)]
    assert len(benches) > 10
    missing = {path.name for path in benches if "finish(" not in sources[path]}
    assert missing <= {"common.py"}
