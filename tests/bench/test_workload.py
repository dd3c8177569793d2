"""Workloads: the papers' templates, and clear errors for bad files."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.workload import (
    TEMPLATES,
    Example,
    few_shot,
    question,
    questions,
    read_examples,
)


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
