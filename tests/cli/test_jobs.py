"""Request lines and result files of `ckv batch`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckv_jax.cli.jobs import BadLine, Job, Results, read_jobs


def parse(tmp_path: Path, *lines: object, prefix: str | None = "ab") -> list[Job | BadLine]:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(
        b"".join(
            (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
            for line in lines
        )
    )
    return list(read_jobs(path, prefix=prefix))


def test_a_full_line_is_understood(tmp_path: Path) -> None:
    (job,) = parse(
        tmp_path,
        {"id": 7, "prefix": "cd", "question": [1, 2], "budget": 1, "max_tokens": 9, "stop": "."},
    )
    assert isinstance(job, Job)
    assert (job.id, job.prefix, job.question, job.budget) == ("7", "cd", (1, 2), 1.0)
    assert (job.sampling.max_tokens, job.sampling.stop) == (9, (".",))


def test_a_short_line_takes_the_defaults(tmp_path: Path) -> None:
    (job,) = parse(tmp_path, {"question": "why?"})
    assert isinstance(job, Job)
    assert (job.id, job.prefix, job.budget) == ("1", "ab", None)
    assert (job.sampling.max_tokens, job.sampling.temperature) == (1, 0)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "nested"),
        (b"[]", "expected an object"),
        ({"question": ""}, "question"),
        ({"question": []}, "question"),
        ({"question": [True]}, "question"),
        ({}, "question"),
        ({"question": "q", "budget": 0}, "(0, 1]"),
        ({"question": "q", "budget": "half"}, "expected a share of the prefix"),
        ({"question": "q", "budget": float("nan")}, "(0, 1]"),
        ({"question": "q", "temperature": -1}, "temperature"),
        ({"question": "q", "temperature": "hot"}, "temperature"),
        ({"question": "q", "max_tokens": 0}, "max_tokens"),
        ({"question": "q", "max_tokens": 1.5}, "max_tokens"),
        ({"question": "q", "stop": [1]}, "stop"),
        ({"question": "q", "stop": [""]}, "stop"),
        ({"question": "q", "beams": 4}, "unknown field beams"),
        ({"question": "q", "id": [1]}, "id"),
        ({"question": "q", "prefix": 3}, "prefix"),
        ({"question": "q", "seed": 2**70}, "seed"),
        ({"question": "q", "top_k": 2**40}, "top_k"),
        ({"question": "q", "temperature": 1e300}, "temperature"),
        ({"question": "q", "temperature": True}, "temperature"),
        ({"question": "q", "stop_token_ids": 3}, "stop_token_ids"),
        (b'{"question": "half \\ud800"}', "half of one"),
        (b'{"question": "q", "id": "\\udfff"}', "half of one"),
    ],
)
def test_a_bad_line_says_why_and_the_next_is_read(tmp_path: Path, line: object, says: str) -> None:
    bad, good = parse(tmp_path, line, {"question": "why?"})
    assert isinstance(bad, BadLine)
    assert says in bad.error
    assert isinstance(good, Job)
    assert good.line == 2


def test_no_two_lines_have_one_id(tmp_path: Path) -> None:
    lines = parse(tmp_path, {"id": "a", "question": "q"}, b"", {"id": "a", "question": "r"})
    assert isinstance(lines[1], BadLine)
    assert "line 1" in lines[1].error


def test_results_survive_a_kill_and_errors_are_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with Results(path) as results:
        results.write({"line": 1, "digest": "x", "text": "é", "attention_mass": float("nan")})
        results.write({"line": 2, "digest": "y", "error": "no such prefix"})
    with path.open("ab") as file:
        file.write(b'{"line": 3, "dig')
    with Results(path) as results:
        assert results.done == {(1, "x")}
        results.write({"line": 2, "digest": "y", "text": "now"})
    values = [json.loads(line) for line in path.read_text().splitlines()]
    assert [value["line"] for value in values] == [1, 2]
    assert values[0]["attention_mass"] is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.jsonl"]


@pytest.mark.parametrize("text", ["Dear Walter,\n", "Dear Walter,", '{"question": "why?"}'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "letter.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"letter\.txt"):
        Results(path)
    assert path.read_text() == text
