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


def test_asking_for_people_shows_answer_and_breakdown(home: Path, prefix: dict, here: Here) -> None:
    code, out, _ = here(
        "ask", home / "checkpoint", "What is it?", "--store", home / "kv",
        "--prefix", str(prefix["prefix"])[:6], "--max-tokens", 4,
    )  # fmt: skip
    assert code == 0
    for word in ("critical_io_wait", "compute", "ttft", "attended to", "needed", "not used"):
        assert word in out


def test_asking_over_texts_put_together(home: Path, prefix: dict, here: Here) -> None:
    code, out, _ = here(
        "ask", home / "checkpoint", "What is it?", "--store", home / "kv", "--json",
        "--prefix", "handbook", "--prefix", str(prefix["prefix"])[:6], "--recompute", "0.3",
        "--no-warm-up",
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
