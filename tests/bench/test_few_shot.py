"""Few-shot accuracy: answers are those of another implementation; bad files are told and left."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.accuracy import main, summary
from bench.few_shot import Size, ask, measure, read_task
from ckv_jax import Engine, EngineConfig
from ckv_jax.data.reference import random_checkpoint
from ckv_jax.model.tokenizer import load_tokenizer
from ckv_jax.systems import SYSTEMS

SIZE = Size(shots=4, prefixes=2, questions=9)
LABELS = ("acute", "benign", "chronic")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few") / "model"
    return random_checkpoint(folder, num_layers=2, hidden_size=64, num_heads=2, num_kv_heads=1)


def written(path: Path, lines: int = 24) -> Path:
    texts = [{"text": f"the patient of room {i}", "label": LABELS[i % 3]} for i in range(lines)]
    path.write_text("\n".join(map(json.dumps, texts)))
    return path


def test_answers_are_the_likeliest_labels_of_a_dense_pass(checkpoint: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = written(tmp_path / "trec.jsonl")
    task = read_task(path, load_tokenizer(checkpoint), SIZE)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    right = []
    with torch.inference_mode():
        for prefix, suffix, label in task.asked:
            ids = np.concatenate([task.prefixes[prefix], suffix]).astype(np.int64)
            logits = theirs(torch.from_numpy(ids)[None]).logits[0, -1].numpy()
            right.append(logits[task.first_tokens].argmax() == label)
    config = EngineConfig(system="ckv", dtype="float32")
    systems = {name: SYSTEMS[name] for name in ("as-lru", "ckv")}
    with Engine.from_pretrained(checkpoint, store=tmp_path / "s", config=config) as engine:
        rows = list(measure(engine, [path], systems, (0.5, 1.0), SIZE))
        assert ask(engine, task, 1.0).tolist() == right
    found = {(row["system"], row["budget"], row["task"]): row for row in rows}
    assert set(found) == {
        (name, budget, task)
        for name, budget in (("as-lru", 1.0), ("ckv", 0.5), ("ckv", 1.0))
        for task in ("trec", "all")
    }
    assert found["ckv", 1.0, "trec"]["questions"] == 9 == len(right)
    assert found["ckv", 1.0, "trec"]["accuracy"] == np.mean(right)
    assert 0 < np.mean(right) < 1
    assert found["as-lru", 1.0, "all"]["accuracy"] == np.mean(right)
    assert found["ckv", 1.0, "all"]["chance"] == pytest.approx(1 / 3)
    assert "full KV" in summary(rows)


def test_files_that_cannot_be_asked_are_told_and_the_rest_runs(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good, out = written(tmp_path / "rte.jsonl"), tmp_path / "a.json"
    bad = {
        "sst2.jsonl": "{",
        "subj.jsonl": '{"text": "one", "label": "a"}\n{"text": "two", "label": "a"}',
        "mnli.jsonl": '{"text": "one", "label": "a"}',
        "trec.jsonl": "\n".join(
            json.dumps({"text": f"t{i}", "label": ("same a", "same b")[i % 2]}) for i in range(9)
        ),
    }
    for name, text in bad.items():
        (tmp_path / name).write_text(text)
    files = [tmp_path / name for name in bad] + [tmp_path / "trec2.jsonl", tmp_path, good]
    sizes = "--shots 4 --prefixes 1 --questions 3 --systems ckv --budgets 0.5 --period-share 0.5"
    command = ["accuracy", "--model", str(checkpoint), *sizes.split(), "--json", str(out)]
    monkeypatch.setattr(sys, "argv", [*command, "--dataset", *map(str, files)])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 3
    rows = json.loads(out.read_text())["rows"]
    reasons = {row["dataset"]: row["why_skipped"] for row in rows if "why_skipped" in row}
    for name, said in {
        "sst2.jsonl": "sst2.jsonl:1",
        "subj.jsonl": "expected two labels",
        "mnli.jsonl": "begins with one of sst2, subj, trec, rte",
        "trec.jsonl": "two begin with one token",
        "trec2.jsonl": "No such file",
        tmp_path.name: "expected a name",
    }.items():
        assert said in reasons[name]
    assert [row["task"] for row in rows if "task" in row] == ["rte", "all"]
    assert f"skipped: {reasons['trec2.jsonl']}" in capsys.readouterr().out
