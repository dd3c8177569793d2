"""What is not as it should be: one clear line, and the exit code that says so."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
import typer
from command_line import Here, ckv

from ckv_jax.cli.app import app
from ckv_jax.kernels_pallas.native.library import Native

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_help_is_there_for_every_command(here: Here) -> None:
    code, overview, _ = here("--help")
    assert code == 0
    for command in (
        "demo", "ingest", "ask", "batch", "convert", "inspect", "verify", "prune", "pin"
    ):  # fmt: skip
        assert command in overview
        code, out, _ = here(command, "--help")
        assert code == 0 and "--json" in out
    code, out, _ = here("--version")
    assert code == 0 and out.startswith("ckv ")
    code, out, err = here()
    assert code == 2 and "Usage: ckv" in out and not err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_80_columns_cuts_no_option(
    here: Here, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = here(command, "--help")
    names = {name for one in COMMANDS[command].params for name in (*one.opts, *one.secondary_opts)}
    assert code == 0 and {name for name in names if name.startswith("--")} <= set(out.split())
    assert not re.search(r"<(bool|str|path|int range|list.*)>", out)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (Native(Path("/lib/ckv.so"), 0, ""), "portable, /lib/ckv.so"),
        (Native(Path("/lib/ckv.so"), 3, ""), "AVX-512 with BF16, /lib/ckv.so"),
        (Native(None, 0, "got no compiler"), "none, JAX's own are used (got no compiler)"),
    ],
)
def test_the_version_says_which_kernels_this_processor_runs(
    here: Here, monkeypatch: pytest.MonkeyPatch, found: Native, says: str
) -> None:
    monkeypatch.setattr("ckv_jax.kernels_pallas.native.library.native", lambda: found)
    for words in (("--version", "-v"), ("-v", "--version")):
        code, out, _ = here(*words)
        assert code == 0 and out.splitlines()[2:] == [f"native CPU kernels: {says}"]
        assert re.search(r"^ckv .*\njax \d.*, jaxlib \d", out)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ingest a b", "missing option '--store'; see ckv ingest --help"),
        (
            "ingest b --store c",  # as the shell has it without a value of $model
            "missing argument 'TEXTFILE' (is a shell variable such as $model empty?); see ckv",
        ),
        ("ingst", "no such command 'ingst'. Did you mean 'ingest'"),
        ("ask a b --bugdet 1", "no such option: --bugdet"),
        ("ask a b --budget", "option '--budget' requires an argument; see ckv --help"),
        ("serve a --store b --port x", "invalid value for '--port'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(here: Here, words: str, says: str) -> None:
    code, out, err = here(*words.split())
    assert code == 2 and not out and err.startswith(f"ckv: {says}")
    assert err.endswith(" --help\n") and err.count("\n") == 1


def test_a_process_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    done = ckv("ask", tmp_path, "why?", "--store", tmp_path / "kv", cache=tmp_path, code=1)
    assert "there is no store" in done.stderr


@pytest.fixture(scope="session")
def broken(home: Path) -> None:
    """Folders and files that are not what they should be."""
    checkpoint = home / "checkpoint"
    (home / "empty").mkdir()
    shutil.copytree(checkpoint, home / "no-tokenizer")
    for file in (home / "no-tokenizer").glob("tokenizer*"):
        file.unlink()
    shutil.copytree(checkpoint, home / "misfit")
    config = json.loads((checkpoint / "config.json").read_text())
    (home / "misfit" / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    torch.manual_seed(1)
    other = transformers.Qwen2ForCausalLM(transformers.Qwen2Config.from_pretrained(checkpoint))
    other.save_pretrained(home / "other")
    for file in checkpoint.glob("tokenizer*"):
        shutil.copy(file, home / "other")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["ingest", "{home}/empty", "{home}/text.txt"], "not a checkpoint"),
        (["ingest", "{home}/no-tokenizer", "{home}/text.txt"], "tokenizer missing"),
        (["ingest", "{home}/misfit", "{home}/text.txt"], "do not fit"),
        (["ask", "{home}/checkpoint", "why?", "--recompute", "0.3"], "with one text"),
        (["ask", "{home}/checkpoint", "why?", "--prefix", "{wrong}"], "{prefix}"),
        (
            ["ask", "{home}/other", "why?"],
            "another model; these differ: tokenizer, weights. Ask with that",
        ),
        (["ingest", "{home}/checkpoint", "{home}/text.txt", "--max-bytes", "much"], "a size"),
        (["ask", "{home}/checkpoint", "why?", "--eviction", "oldest"], "'lru'"),
        (["ask", "{home}/checkpoint", "why?", "--io-concurrency", "0"], "1 to 1024"),
        (["demo", "--question", " "], "empty"),
        (
            ["ingest", "{home}/checkpoint", "{home}/text.txt", "--system", "recompute"],
            "stores nothing",
        ),
    ],
)
def test_bad_input_is_one_clear_line(
    home: Path, broken: None, prefix: dict, here: Here, args: list[str], says: str
) -> None:
    stored = str(prefix["prefix"])
    names = {"home": home, "wrong": stored[:-1] + ("0" if stored[-1] != "0" else "1")}
    names["prefix"] = stored[:12]
    before = sorted((home / "kv").rglob("*"))
    more = () if args[0] == "demo" else ("--store", home / "kv")
    code, out, err = here(*(arg.format(**names) for arg in args), *more)
    assert (code, out) == (1, "")
    assert err.startswith("ckv: ") and len(err.strip().splitlines()) == 1
    assert says.format(**names) in err
    assert [path for path in (home / "kv").rglob("*") if path not in before and path.is_dir()] == []


@pytest.mark.parametrize("option", ["--max-bytes", "--tenant-bytes"])
def test_a_text_larger_than_a_limit_makes_no_store(
    home: Path, tmp_path: Path, here: Here, option: str
) -> None:
    ingest = ("ingest", home / "checkpoint", home / "text.txt", "--store", tmp_path / "kv")
    more = ("--no-direct-io", "--eviction", "lru", "--io-concurrency", 4)
    code, out, err = here(*ingest, option, "10kB", *more)
    assert (code, out) == (1, "") and not (tmp_path / "kv").exists()
    assert re.fullmatch(
        rf"ckv: the text needs at least [\d.]+ KiB, {option} allows 10kB; give a larger size\n", err
    )
