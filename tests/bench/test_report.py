"""The page shows what ran, what it said, and what failed."""

from __future__ import annotations

import argparse
import html
import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import pytest
from matplotlib.figure import Figure

from bench.common import (
    PUBLISHED,
    NotWhole,
    Setting,
    finish,
    parser,
    read_json,
    read_rows,
    setting_of,
    stamped,
    write_text,
)
from bench.figures import FIGURES, result_of
from bench.figures.style import RC
from bench.report import SCRIPTS, main, page
from ckv_jax.kernels_pallas.native.library import Native
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.tensor_map import count_parameters
from ckv_jax.systems import system_named

RESULTS = Path(__file__).parents[2] / "bench" / "results"
TIME = {
    "system": "ckv", "budget": 0.05, "variant": "default", "ratio_to_floor": 1.5,
    "ttft_ms": {"mean": 80.0},
}  # fmt: skip


def test_page_of_one_success_and_one_failure(tmp_path: Path) -> None:
    ran = {"command": "python -m bench.ttft --quick", "seconds": 12.5, "status": 0}
    (tmp_path / "ttft.run.json").write_text(json.dumps(ran | {"output": "a < b", "error": ""}))
    found = {"rows": [TIME], "speedup": {"ckv": {"0.05": {"impress": 7.25, "as-lru": 10.5}}}}
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
    shutil.copy(RESULTS / "decode.json", tmp_path)
    main(["--out", str(tmp_path), "--redraw"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "decode.json", "decode.png", "report.html",
    ]  # fmt: skip
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert FIGURES["decode"].title in text and "AMD EPYC" in text


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


DRAWN = [name for name in FIGURES if result_of(name, RESULTS) is not None]


@pytest.mark.parametrize("name", DRAWN)
def test_a_committed_result_can_be_drawn_again(name: str) -> None:
    result = result_of(name, RESULTS)
    assert result is not None
    with matplotlib.rc_context(RC):
        canvas = Figure(figsize=FIGURES[name].size, layout="constrained")
        FIGURES[name].draw(canvas, result)
        canvas.draw_without_rendering()
    labels = [axis.get_xlabel() or axis.get_ylabel() for axis in canvas.axes if axis.get_visible()]
    assert any(labels), "no axis says what it shows"
    assert FIGURES[name].conclude(result).endswith(".")
    assert (RESULTS / f"{name}.png").is_file()


def test_every_committed_picture_has_a_figure() -> None:
    assert {path.stem for path in RESULTS.glob("*.png")} == set(DRAWN)


# -- command lines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--systems", "magic"], "contiguous-kv"),
        (["--budgets", "2"], "(0, 1]"),
        (["--model", "8B"], "kv7b-thin"),
        (["--checkpoint", "/nowhere"], "got /nowhere, expected an existing"),
        (["--task", "magic"], "sst2"),
        (["--prefixes", "0"], "got 0, expected 1 or more"),
        (["--seed", "-1"], "got -1, expected 0 or more"),
        (["--json", "/"], "/ is a folder"),
        (["--json", f"{__file__}/x.json"], "test_report.py is a file"),
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
    found = finish(argparse.Namespace(json=out), {"rows": [1]})
    assert json.loads(out.read_text()) == found
    assert list(found) == ["command", "machine", "rows"]
    assert {"cpu", "cores", "packages", "commit", "python"} <= found["machine"].keys()


@pytest.mark.parametrize(
    ("platform", "found", "said"),
    [
        ("cpu", Native(Path("/lib/ckv.so"), 1, ""), "AVX2"),
        ("cpu", Native(Path("/lib/ckv.so"), 3, ""), "AVX-512 with BF16"),
        ("cpu", Native(None, 0, "got no C++ compiler"), "none: got no C++ compiler"),
        ("gpu", None, "none: got a gpu, expected a CPU"),
    ],
)
def test_no_result_hides_that_its_kernels_were_not_native(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, found: Native | None, said: str
) -> None:
    device = SimpleNamespace(platform=platform, device_kind="a kind")
    monkeypatch.setattr("jax.devices", lambda: [device])
    monkeypatch.setattr("bench.common.native", lambda: found)
    result = stamped({"rows": [TIME], "speedup": {}})
    assert result["machine"]["native_kernels"] == said
    (tmp_path / "ttft.json").write_text(json.dumps(result))
    (tmp_path / "ttft.png").write_bytes(b"PNG")
    assert f"native kernels: {html.escape(said)};" in page(tmp_path)


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
    path, whole = tmp_path / "x.json", Path.write_text
    write_text(path, "before")

    def cut(self: Path, text: str, **how: Any) -> int:
        whole(self, text[:3], **how)
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "after that")
    assert path.read_text() == "before"


# -- shapes ----------------------------------------------------------------------------------------


PARAMETERS = {
    "0.5B": 0.494, "1.5B": 1.544, "3B": 3.086, "7B": 7.616, "14B": 14.770, "32B": 32.764,
    "72B": 72.706,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_sizes_have_the_published_parameters(name: str) -> None:
    config = PUBLISHED[name]
    assert count_parameters(config) / 1e9 == pytest.approx(PARAMETERS[name], abs=1e-3)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


# -- systems ---------------------------------------------------------------------------------------


ROOT = RESULTS.parents[1]
OPTION = re.compile(r'add_argument\(\s*"(--systems?)"|[^.\w](?:add_systems\(|parser\(__doc__)')
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
@pytest.mark.parametrize("name", ["ckv", "impress", "recompute", "ckv_jax.baselines.quest:QUEST"])
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
