"""Workloads: the papers' draws and templates, and clear errors for bad files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.structured import TOPICS
from bench.workload import (
    TEMPLATES,
    Example,
    FewShot,
    Synthetic,
    few_shot,
    question,
    questions,
    read_examples,
)


def test_synthetic_tokens_depend_on_seed_and_index_alone() -> None:
    work = Synthetic(vocab_size=512, prefix_tokens=100, suffix_tokens=32)
    np.testing.assert_array_equal(work.prefix(3), work.prefix(3))
    assert (work.prefix(3) != work.prefix(4)).any()
    suffix = work.suffix(5)
    assert suffix.dtype == np.int32 and len(suffix) == 32
    assert len({int(token) % TOPICS for token in suffix}) == 1  # one topic a question


@pytest.mark.parametrize("line", ["[]", "{", '{"text": "no label"}', "3"])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"text": "a", "label": "b"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:2"):
        read_examples(path)


@pytest.mark.parametrize("task", sorted(TEMPLATES))
def test_few_shot_prefixes_hold_every_label(task: str) -> None:
    train = [Example(text=f"text {i}", label="ab"[i % 2]) for i in range(20)]
    one, two = few_shot(task, train, shots=6, prefixes=2)
    assert one != two
    assert one.count("\n\n") == 6
    assert one == few_shot(task, train, shots=6, prefixes=2)[0]
    asked = question(task, Example(text="what?", label="a"))
    assert "what?" in asked and asked.endswith(":")
    found = list(questions(task, train, [one, two], seed=42))
    assert len(found) == 20 and {prefix for prefix, _, _ in found} <= {one, two}


def test_a_task_from_files_has_the_interface_of_synthetic_tokens(tmp_path: Path) -> None:
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    lines = [f'{{"text": "text {i}", "label": "{"ab"[i % 2]}"}}' for i in range(8)]
    train.write_text("\n".join(lines))
    test.write_text("\n".join(lines[:3]))

    def encode(text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    work = FewShot(encode, task="trec", train=train, test=test, shots=4, prefixes=3)
    assert work.prefix_tokens == max(len(work.prefix(i)) for i in range(3))
    np.testing.assert_array_equal(work.suffix(0), work.suffix(3))
    assert bytes(work.suffix(1).astype(np.uint8)).decode() == "Question: text 1\nType:"
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ValueError, match=r"no examples in .*empty\.jsonl"):
        FewShot(encode, task="trec", train=empty, test=test, shots=4, prefixes=3)
    with pytest.raises(ValueError, match="no examples to make prefixes of"):
        few_shot("trec", [], shots=1, prefixes=1)
    test.write_text("")
    with pytest.raises(ValueError, match="no examples"):
        FewShot(encode, task="trec", train=train, test=test, shots=4, prefixes=3)
