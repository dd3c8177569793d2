"""Peers: one that is missing or fails is reported, and the others go on."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from bench.peers import PEERS
from bench.peers.__main__ import main
from bench.peers.base import Answer, Case, Held, Holder, NotForThis, Page, Way, compare
from bench.peers.gguf_file import Kind, write_gguf
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.gguf import GgufFile
from ckv_jax.model.tensor_map import open_tensors
from ckv_jax.model.weights import random_model, save_pretrained
from tests.engine_support import SMALL

MODEL = dataclasses.replace(
    SMALL, hidden_size=32, intermediate_size=32, num_layers=3, tie_word_embeddings=False
)
TOKENS = np.random.default_rng(1).integers(0, MODEL.vocab_size, 60).astype(np.int32)
SUFFIXES = tuple(np.random.default_rng(2).integers(0, MODEL.vocab_size, (4, 5)).astype(np.int32))


def case(folder: Path, answers: np.ndarray | None = None, pages: int = 1) -> Case:
    page = Page(tokens=TOKENS, suffixes=SUFFIXES, answers=answers)
    return Case(name="small", folder=folder, pages=(page,) * pages, recomputes=1)


class Fake:
    """A peer whose one way gives each question's number, and that fails where it is told to."""

    packages: tuple[str, ...] = ()
    install = "pip install fake"

    def __init__(self, fails: str = "", error: Exception | None = None) -> None:
        self._fails, self._error = fails, error or RuntimeError("no luck\nand a long trace")
        self._pages = 0

    @contextlib.contextmanager
    def open(self, case: Case, work: Path) -> Iterator[Holder]:
        def hold(page: Page) -> Held:
            self._pages += 1
            if self._fails == "second page" and self._pages == 2:
                raise self._error
            return {"way": Way(ask=ask, kept=0.25, most=3), "other": "not built for this"}

        def ask(suffix: np.ndarray) -> Answer:
            if self._fails == "question":
                raise self._error
            return Answer(token=int(suffix[0]), ms=2.0, parts_ms={"part": 0.5}, token_ms=0.25)

        if self._fails == "open":
            raise self._error
        yield hold


class Missing(Fake):
    packages = ("a_package_that_nobody_has",)


def test_one_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    answers = np.array([suffix[0] for suffix in SUFFIXES])
    answers[1] += 1
    rows = compare(
        case(tmp_path, answers, pages=2),
        {
            "good": Fake(), "open": Fake("open"), "page": Fake("second page"),
            "question": Fake("question"), "missing": Missing(),
            "apart": Fake("open", NotForThis("has no part in this")),
        },
        tmp_path,
    )  # fmt: skip
    reasons = {(row["peer"], row["what"]): row["why_skipped"] for row in rows}
    assert reasons == {
        ("good", "way"): None,
        ("good", "other"): "not built for this",
        ("page", "way"): "RuntimeError: no luck",
        ("page", "other"): "not built for this",
        ("question", "way"): "RuntimeError: no luck",
        ("question", "other"): "not built for this",
        ("open", None): "RuntimeError: no luck",
        ("missing", None): "a_package_that_nobody_has is not installed: pip install fake",
        ("apart", None): "has no part in this",
    }
    good = rows[0]
    assert (good["right"], good["questions"], good["ttft_ms"]["n"]) == (4, 6, 6)  # 3 of each page
    assert (good["token_ms"]["mean"], good["token_ms"]["n"]) == (0.25, 6)
    assert (good["kept"], good["parts_ms"], good["tokens"]) == (0.25, {"part": 0.5}, len(TOKENS))
    assert all("ttft_ms" not in row for row in rows if row["why_skipped"])


def test_without_any_peer_installed_ours_is_measured_and_the_rest_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = {package for peer in PEERS.values() for package in peer.packages}
    there = importlib.import_module

    def without(name: str, package: str | None = None) -> types.ModuleType:
        if name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return there(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    out = tmp_path / "peers.json"
    command = "--model tiny --prefix-tokens 64 --suffix-tokens 8 --repeats 2 --documents 0"
    command += " --text-tokens 4"
    main([*command.split(), "--budgets", "1", "--folder", str(tmp_path), "--json", str(out)])
    found = json.loads(out.read_text())
    ours, rest = found["rows"][:4], found["rows"][4:]
    places = ("from the SSD", "in memory")
    assert [(row["peer"], row["what"]) for row in ours] == [
        (peer, f"100% of the KV {place}") for peer in ("ckv", "ckv-int8") for place in places
    ]
    for row in ours:
        assert row["ttft_ms"]["p50"] > 0 and row["ttft_ms"]["n"] == 2
        assert row["token_ms"]["p50"] > 0 and row["token_ms"]["n"] == 2
        assert row["prefill_ms"]["p50"] > 0 and row["prefill_ms"]["n"] == 1
    assert {row["peer"] for row in rest} == set(PEERS)
    printed = capsys.readouterr().out
    for row in rest:
        assert "pip install" in row["why_skipped"] and row["why_skipped"] in printed
    assert [path.name for path in tmp_path.iterdir()] == ["peers.json"]  # nothing is left behind


@pytest.mark.parametrize("kind", get_args(Kind))
def test_llama_cpp_gets_the_same_weights(kind: Kind, tmp_path: Path) -> None:
    """Read back by this package: Q8_0 is off by half a step of 32 numbers' largest at most, and by
    what float16 makes of the step."""
    folder, path = tmp_path / "model", tmp_path / "model.gguf"
    save_pretrained(random_model(MODEL), folder)
    write_gguf(folder, path, kind)
    assert ModelConfig.from_hf(path) == dataclasses.replace(MODEL, eos_token_ids=())
    assert set(GgufFile(path).types.values()) == {"F32", kind}
    (_, ours), (_, theirs) = open_tensors(folder), open_tensors(path)
    assert ours.keys() == theirs.keys()
    for name in ours:
        wanted, found = (one[name].read(name).astype(np.float32) for one in (ours, theirs))
        step = np.abs(wanted.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
        steps = 0.5 + 127 / 2**11 if kind == "Q8_0" and wanted.ndim > 1 else 0
        assert (np.abs(found - wanted).reshape(-1, 32) <= 1.001 * steps * step).all()


@pytest.mark.parametrize("given", ["vllm", "transformers,vllm", ","])
def test_an_unknown_peer_names_those_there_are(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--peers", given])
    assert error.value.code == 2
    assert (
        "expected some of transformers, llama.cpp, llama.cpp-Q8_0, kvpress"
        in capsys.readouterr().err
    )
