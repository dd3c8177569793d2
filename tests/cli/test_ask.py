"""Asking as a user does: of a store that another process made, of texts put together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import QUESTION, Here

from ckv_jax.trace import STAGES


def test_a_second_process_asks_the_store_of_the_first(
    home: Path, prefix: dict, answer: dict
) -> None:
    assert {
        "system", "model", "budget", "prefix_tokens", "suffix_tokens", "token_id", "text",
        "ttft_ms", "breakdown_ms", "bytes", "chunks", "attention_mass",
    } <= answer.keys()  # fmt: skip
    assert answer["breakdown_ms"].keys() == {
        *STAGES, "other"
    }  # fmt: skip
    assert answer["bytes"].keys() == {"ssd", "host", "device"}
    assert answer["prefix_tokens"] == prefix["tokens"]
    assert answer["bytes"]["ssd"] > 0
    assert 0.2 < answer["chunks"]["selected"] / answer["chunks"]["total"] < 0.6  # its ends, too
    assert sum(answer["breakdown_ms"].values()) == pytest.approx(answer["ttft_ms"], abs=0.5)
    assert json.loads((home / "trace.json").read_text())["traceEvents"]


def test_asking_for_people_shows_the_answer_and_a_line_of_figures(
    home: Path, prefix: dict, here: Here
) -> None:
    question = ("ask", home / "checkpoint", "What is it?", "--store", home / "kv")
    some = ("--prefix", str(prefix["prefix"])[:6], "--max-tokens", 4)
    code, out, _ = here(*question, *some)
    assert code == 0
    figures = " ".join(out[out.index("first token") :].split())
    for words in ("s in all", "of the attention", f"of {prefix['tokens']} tokens", "KiB from"):
        assert words in figures
    assert "critical_io_wait" not in out
    code, out, _ = here(*question, *some, "--timing")
    assert code == 0 and "compiled" not in out
    for word in ("critical_io_wait", "compute", "ttft", "needed", "not used", "on the device"):
        assert word in " ".join(out.split())


def test_sources_are_shown_and_low_coverage_is_said(home: Path, prefix: dict, here: Here) -> None:
    """Random weights attend to everything alike: a quarter covers about a quarter."""
    question = ("ask", home / "checkpoint", "What is it?", "--store", home / "kv")
    some = ("--prefix", "handbook", "--max-tokens", 9, "--sources")
    code, out, err = here(*question, *some, "--budget", 0.25)
    assert code == 0 and "%  “" in out
    assert "of the question's attention; ask with --budget 0.5 for more" in err
    code, out, err = here(*question, *some, "--budget", 1, "--json")
    answer = json.loads(out)
    assert (code, err, answer["low_coverage"]) == (0, "", False)
    assert answer["citations"] and set(answer["citations"][0]) == {"text", "share", "tokens"}


def test_an_answer_has_256_tokens_at_most(home: Path, prefix: dict, here: Here) -> None:
    """The weights are random: no answer ends by itself."""
    question = ("ask", home / "checkpoint", "What is it?", "--store", home / "kv", "--json")
    code, out, _ = here(*question, "--prefix", "handbook")
    answer = json.loads(out)
    assert code == 0 and answer["finish_reason"] in ("stop", "length")
    assert 1 < answer["generated_tokens"] <= 256
    assert answer["whole_s"] > answer["ttft_ms"] / 1e3


def test_asking_over_texts_put_together(home: Path, prefix: dict, here: Here) -> None:
    code, out, _ = here(
        "ask", home / "checkpoint", "What is it?", "--store", home / "kv", "--json",
        "--prefix", "handbook", "--prefix", str(prefix["prefix"])[:6], "--recompute", "0.3",
        "--max-tokens", 1,
    )  # fmt: skip
    answer = json.loads(out)
    assert code == 0 and answer["prefix_tokens"] == 2 * prefix["tokens"]
    again = answer["recomputed_tokens"] / (0.25 * answer["prefix_tokens"])
    assert answer["blended_tokens"] > 0 and 0.2 < again <= 0.3


def test_a_converted_checkpoint_answers_the_same(
    home: Path, answer: dict, tmp_path: Path, here: Here
) -> None:
    folder = tmp_path / "orbax"
    code, out, _ = here("convert", home / "checkpoint", folder, "--json")
    made = json.loads(out)
    assert (code, made["checkpoint"], made["format"]) == (0, str(folder), "orbax")
    assert not list(folder.glob("*.safetensors"))
    assert here("ingest", folder, home / "text.txt", "--store", tmp_path / "kv")[0] == 0
    code, out, _ = here(
        "ask", folder, QUESTION, "--store", tmp_path / "kv", "--budget", "0.25", "--json"
    )
    assert code == 0
    again = json.loads(out)
    same = ("token_id", "text", "prefix_tokens", "chunks", "attention_mass")
    assert [again[name] for name in same] == [answer[name] for name in same]

    code, _, err = here("convert", folder, folder)
    assert code == 1 and "there already" in err
    code, _, err = here("convert", folder, tmp_path / "x", "--to", "onnx")
    assert code == 1 and "expected one of orbax, hf" in err
