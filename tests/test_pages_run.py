"""What the pages tell a newcomer to type runs as it is written, names of files and ids apart."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import TEXT, Here
from small_checkpoint import transformers_checkpoint

from ckv_jax import ChunkStore, Engine, Request
from tests.support.pages import DOCS, blocks

ROOT = DOCS.parent
NOT_OURS = ("make ", "pip ", "hf ")
"""Beginnings of lines that need a network or a whole environment; `test_docs` checks targets."""

SMALLER = {
    "max_batch=8": "max_batch=1",
    "max_suffix=64": "max_suffix=8",
    "max_tokens=256": "max_tokens=3",
    "max_tokens=200": "max_tokens=3",
    "questions=200": "questions=8",
}
"""What takes minutes to compile, and what compiles in seconds."""
RUN = ("README.md", "docs/quickstart.md", "docs/requests.md", "docs/storage.md", "docs/kernels.md")
"""Pages whose Python is run below."""
INNER = {"closed", "layers", "pages", "periods", "settle", "worker"}
"""Of `Engine`: for measurements, servers and other processes."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint as transformers writes it, of Qwen2.5's kind, and a text."""
    home = tmp_path_factory.mktemp("home")
    transformers_checkpoint(home / "model")
    (home / "handbook.txt").write_text(TEXT)
    return home


def as_here(code: str, home: Path, prefix: str = "") -> str:
    """The page's paths and ids as they are in this test."""
    for said, meant in (
        ("~/models/Qwen2.5-0.5B-Instruct", str(home / "model")),
        ("file:///data/kv", str(home / "python-kv")),
        ('"/tmp/python"', f'"{home / "python-kv"}"'),
        ("handbook.chapters()", repr(TEXT)),
        ('"/data/kv"', f'"{home / "python-kv"}"'),
        ("smollm2.fetch()", repr(str(home / "model"))),
        ('"/tmp/kv"', f'"{home / "python-kv"}"'),
        ("~/kv", str(home / "kv")),
        ("3f9a", prefix),
        *((name, str(home / name)) for name in
          ("handbook.txt", "questions.jsonl", "answers.jsonl", "map.png")),
    ):  # fmt: skip
        code = code.replace(said, meant)
    return code


def test_commands_work_as_written(home: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckv_jax.answer.MAX_TOKENS", 8)
    pages = ("quickstart", "many_questions", "move_a_store")
    text = "".join("".join(blocks(DOCS / f"{page}.md", "console")) for page in pages)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    ours = [line for line in lines if not line.startswith(NOT_OURS)]
    assert len(ours) >= 9
    prefix = ""
    for line in ours:
        arguments = shlex.split(as_here(line, home, prefix[:8]), comments=True)
        assert arguments[0] == "ckv", line
        code, out, err = here(*arguments[1:])
        assert code == 0, (line, out, err)
        if arguments[1] == "ingest":
            prefix = re.findall(r"\b[0-9a-f]{32}\b", out)[0]
            asked = {"prefix": "handbook", "question": "Which lamp?", "max_tokens": 2}
            (home / "questions.jsonl").write_text(json.dumps(asked) + "\n")
        if "--plot" in arguments:
            assert f"wrote {home / 'map.png'}" in out
            assert (home / "map.png").read_bytes().startswith(b"\x89PNG")
    assert len((home / "answers.jsonl").read_text().splitlines()) == 1


@pytest.mark.timeout(900)
def test_a_transcript_shows_what_is_printed(
    tmp_path: Path, smollm2: Path, here: Here, monkeypatch: pytest.MonkeyPatch, optimised: None
) -> None:
    """Lines after a `$ command`: as printed, but for times, bytes read and shares."""
    shown = "".join(blocks(DOCS / "quickstart.md", "text"))
    runs = [run.split("\n", 1) for run in re.split(r"^\$ ", shown, flags=re.M)[1:]]
    monkeypatch.chdir(tmp_path)
    store = str(tmp_path / "kv")
    fetch, write, *ours = runs
    assert fetch == ["model=$(python -m ckv_jax.data.smollm2)", ""]
    command, _, file = write[0].partition(" > ")
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], capture_output=True, check=True
    )
    Path(file).write_bytes(done.stdout)
    assert [command.split()[1] for command, _ in ours] == ["ingest", "ask", "ask", "ask"]
    for command, output in ours:
        words = shlex.split(command.replace("/tmp/kv", store).replace("$model", str(smollm2)))
        code, out, err = here(*words[1:])
        assert (code, err) == (0, "")
        printed = out.replace(store, "/tmp/kv").replace(str(smollm2.parent), "MODELS")
        assert _steady(printed) == _steady(output.replace("~/.cache/ckv_jax/models", "MODELS"))


def _steady(printed: str) -> str:
    """The words without what differs from run to run or from machine to machine."""
    printed = re.sub(r"[\d,.]+ m?s\b", "TIME", " ".join(printed.split()))
    printed = re.sub(r"TIME more to compile for .* this length ", "", printed)  # with a full cache
    printed = re.sub(r"[\d.]+ tokens/s", "SPEED", printed)
    printed = re.sub(r"with \d+ programs", "with programs", printed)
    printed = re.sub(r"[\d.]+% of the attention", "SHARE of the attention", printed)
    return re.sub(r"[\d.]+ [KMG]iB from (SSD|the store)", "BYTES read", printed)


@pytest.mark.timeout(900)
def test_the_notebook_runs(
    smollm2: Path, capsys: pytest.CaptureFixture[str], optimised: None
) -> None:
    """Its answers are those that it shows, citations included, but for what 5% makes up."""
    notebook = json.loads((DOCS / "notebook" / "your_document.ipynb").read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    exec(compile(code, "notebook", "exec"), {})
    shown = [text for cell in cells for out in cell["outputs"] for text in out.get("text", ())]
    covered = re.compile(r"^  5%  covered.*|covered +\d+%.*SSD|\d+%", re.M)
    assert covered.sub("", capsys.readouterr().out) == covered.sub("", "".join(shown))


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_first_snippet_of_python_runs(page: str, home: Path) -> None:
    (code,) = blocks(ROOT / page, "python")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(as_here(code, home), page, "exec"), {})
    assert "'first_token': " in said.getvalue()


@pytest.fixture(scope="module")
def engine(home: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))  # where profiles are kept
        with Engine.from_pretrained(home / "model", store=home / "requests-kv") as engine:
            yield engine


def test_snippets_about_requests_run(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = engine.ingest(TEXT)
    request = Request(prefix=prefix, suffix="Which lamp?")
    names = {"engine": engine, "request": request, "requests": [request], "prefix": prefix}
    names |= {"history": prefix, "document": TEXT}
    names["documents"] = [f"Document {n}. {TEXT}" for n in range(3)]  # type: ignore[assignment]
    names["question"] = "Which lamp?"  # type: ignore[assignment]
    for code in blocks(DOCS / "requests.md", "python"):
        for said, meant in SMALLER.items():
            code = code.replace(said, meant)
        exec(compile(code, "requests.md", "exec"), names)
    (first,) = engine.reprefill([names["request"]])  # type: ignore[list-item]
    joined = names["result"].trace  # type: ignore[attr-defined]
    answer = names["answer"]
    passages = [f"{one.share:.0%} {one.text}\n" for one in answer.citations]  # type: ignore[attr-defined]
    told = (
        f"{answer} {answer.coverage}\n", *passages,  # type: ignore[attr-defined]
        names["generation"].text, names["talk"].latest.text,  # type: ignore[attr-defined]
        f"{joined.blended_tokens} {joined.recomputed_tokens}\n",  # type: ignore[attr-defined]
        first.text, names["said"].text,  # type: ignore[attr-defined]
    )  # fmt: skip
    assert capsys.readouterr().out == "".join(told)
    assert 0 < joined.recomputed_tokens < joined.blended_tokens
    assert names["whole"].token_id == names["dense"].token_id  # type: ignore[attr-defined]
    assert len(names["selected"]) == engine.worker.plan.periods  # type: ignore[arg-type]
    assert names["compiled"] > 0  # type: ignore[operator]
    assert names["history"].num_tokens > prefix.num_tokens  # type: ignore[attr-defined]


def test_the_snippet_about_kernels_runs(engine: Engine) -> None:
    import jax
    import jax.numpy as jnp

    from ckv_jax.kernels_pallas import target
    from ckv_jax.kernels_pallas.gather import gather
    from ckv_jax.kernels_pallas.target import Target

    pool, ids = jnp.zeros((4, 2, 8, 64)), jnp.array([[1, 2]], jnp.int32)
    names = {"jax": jax, "target": target, "engine": engine, "args": (pool, ids)}
    names["f"] = partial(gather, target=Target.of(jax.devices()[0]))
    (code,) = blocks(DOCS / "kernels.md", "python")
    exec(compile(code, "kernels.md", "exec"), names)
    assert [one.implementation for one in names["made"]] == ["reference"]  # type: ignore[attr-defined]


def test_the_snippets_about_the_store_run(home: Path) -> None:
    # The last one: the bytes of a codec.
    written, by_zarr, mended, wishes, _ = blocks(DOCS / "storage.md", "python")
    names: dict[str, Any] = {}

    def run(code: str) -> None:
        smaller = re.sub(r"\b28\b", "4", as_here(code, home, names["prefix"].id if names else ""))
        exec(compile(smaller, "storage.md", "exec"), names)

    run(written)
    assert names["good"].all()
    [span] = names["prefix"].spans
    folder = home / "python-kv" / "segments" / span.segment_id[:2] / span.segment_id
    kv = names["kv"]
    run(re.sub(r"segments/[0-9a-f/]+", str(folder), by_zarr))
    assert names["kv"].shape[-3:] == (16, 4, 128)
    names["kv"] = kv
    with ChunkStore.open(home / "python-kv") as names["store"]:
        run(mended)
    assert names["whole"].num_tokens == 5000
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run(wishes)
    assert said.getvalue() == "None\n"  # nothing was evicted


def test_every_method_of_an_engine_has_an_example() -> None:
    code = "".join("".join(blocks(ROOT / page, "python")) for page in RUN)
    public = {name for name in vars(Engine) if not name.startswith("_")} - INNER
    entered = {"close"}  # by `with`
    missing = {name for name in public - entered if f".{name}(" not in code}
    assert not missing
