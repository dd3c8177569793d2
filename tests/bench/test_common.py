"""What all benchmarks share of their command line: wrong usage is one clear message."""

from __future__ import annotations

import sys

import pytest

from bench.common import Setting, parser, setting_of


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
