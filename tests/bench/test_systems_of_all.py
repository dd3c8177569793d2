"""Every benchmark takes every system that there is, or refuses it in one line."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

import pytest

from bench import accuracy
from ckv_jax.systems import SYSTEMS, system_named

ROOT = Path(__file__).resolve().parent.parent.parent
OPTION = re.compile(r'add_argument\(\s*"(--systems?)"|[^.\w]parser\(__doc__')
BENCHES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): found.group(1) or "--systems"
    for path in sorted((ROOT / "bench").rglob("*.py"))
    if path.name != "common.py" and (found := OPTION.search(path.read_text("utf-8")))
}
GENERATE = {"bench.decode", "bench.decode_accuracy"}


class Parsed(Exception):
    """What the command line came to; nothing runs."""


def parsed(bench: str, given: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *_: object) -> None:
        raise Parsed(real(self, given))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [bench, *given])
    with pytest.raises(Parsed) as stopped:
        importlib.import_module(bench).main()
    found: argparse.Namespace = stopped.value.args[0]
    return found


def test_all_benchmarks_with_systems_are_met() -> None:
    assert {"bench.accuracy", "bench.ttft", "bench.warm", "bench.batch"} | GENERATE < {*BENCHES}


@pytest.mark.parametrize("bench", BENCHES)
@pytest.mark.parametrize("name", [*SYSTEMS, "ckv_jax.baselines.quest:QUEST"])
def test_every_system_is_taken_or_refused_in_one_line(
    bench: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    option = BENCHES[bench]
    given = [option, name, *(["--out", "there"] if bench == "bench.gpu_qualify" else [])]
    first_tokens = not system_named(name).own.generates or name == "recompute"
    if first_tokens and bench in GENERATE:
        with pytest.raises(SystemExit) as refused:
            parsed(bench, given, monkeypatch)
        assert refused.value.code == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert f"'{name}'" in said and "expected one" in said
        return
    found = vars(parsed(bench, given, monkeypatch))[option[2:]]
    assert found == (name if option == "--system" else [name])


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("share", [0.01, 0.2, 1.0])
def test_a_period_as_a_share_of_layers_suits_every_system(name: str, share: float) -> None:
    system = accuracy.of_depth(system_named(name), share, 16)
    assert system.period % system.subperiod == 0
