"""What all benchmarks share of their command line: wrong usage is one clear message."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import pytest

from bench.common import Setting, finish, median_interval, parser, setting_of, summary


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--systems", "magic"], "contiguous-kv"),
        (["--budgets", "2"], "(0, 1]"),
        (["--budgets", "half"], "half"),
        (["--model", "8B"], "kv7b-thin"),
        (["--checkpoint", "/nowhere"], "there is no /nowhere"),
        (["--task", "magic"], "sst2"),
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


def test_what_is_said_replaces_the_setting() -> None:
    here = sys.executable
    given = ["--quick", "--budgets", "0.5", "1", "--task", "rte", "--checkpoint", "/"]
    given += ["--train", here, "--test", here]
    args = parser("", quick=Setting(repeats=2), full=Setting(repeats=9)).parse_args(given)
    setting = setting_of(args)
    assert (setting.repeats, setting.budgets, setting.task) == (2, (0.5, 1.0), "rte")


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


def test_a_summary_tells_range_and_spread() -> None:
    found = summary([1.0, 2.0, 3.0, 6.0])
    assert (found["min"], found["max"], found["n"]) == (1.0, 6.0, 4)
    assert found["std"] == pytest.approx((14 / 3) ** 0.5)
    assert summary([5.0])["std"] == 0.0


def test_a_result_says_where_it_comes_from(tmp_path: Path) -> None:
    out = tmp_path / "new" / "x.json"
    found = finish(argparse.Namespace(json=out), None, {"rows": [1]})
    assert json.loads(out.read_text()) == found
    assert list(found) == ["command", "machine", "rows"]
    assert {"cpu", "cores", "packages", "commit", "python"} <= found["machine"].keys()


def test_every_bench_writes_its_result_by_the_one_way() -> None:
    folder = Path(__file__).parents[2] / "bench"
    sources = {path: path.read_text("utf-8") for path in folder.rglob("*.py")}
    option = re.compile(r'add_argument\(\s*"--json"|= parser\(__doc__')
    benches = [path for path, text in sources.items() if option.search(text)]
    assert len(benches) > 20
    missing = {path.name for path in benches if "finish(" not in sources[path]}
    assert missing <= {"common.py"}
