"""Files of requests: what they share, and going on after a kill."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from command_line import TEXT, Here
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckv_jax.cli.lines import (
    MOST_IN_ROW,
    BadLine,
    RequestLine,
    Results,
    batches,
    read_lines,
    shared_prefixes,
)
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.model.tokenizer import load_tokenizer
from ckv_jax.storage import ChunkStore


def test_what_prompts_begin_with_alike_is_stored_once(home: Path, here: Here) -> None:
    manual = TEXT + "\nThis is the manual of the lamps."
    lines = [
        {"id": "one", "prompt": f"{manual} Which lamp is in room 3?", "max_tokens": 3},
        {"id": "apart", "prompt": "Which lamp is in room 4?"},
        {"id": "two", "prompt": f"{manual} Which lamp is in room 5?", "max_tokens": 3},
        {"id": "both", "prompt": "Which?", "question": "Which?"},
        {"id": "long", "prompt": list(range(1, 60)) * 100},
    ]
    requests, out, kv = home / "prompts.jsonl", home / "prompted.jsonl", home / "prompted"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("batch", home / "checkpoint", requests, "--store", kv, "--out", out)
    code, said, complaint = here(*command, "--json")
    assert code == 3 and "got both prompt and question" in complaint, complaint
    assert "line 5" in complaint and "4096" in complaint
    told = json.loads(said)
    assert (told["answered"], told["failed"]) == (3, 2)
    [(stored, count)] = told["shared_prefixes"].items()
    found = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert count > 256 and stored in {prefix.id for prefix in ChunkStore.open(kv).prefixes()}
    assert found["one"]["prefix_tokens"] == found["two"]["prefix_tokens"] == count
    assert found["one"]["bytes"]["ssd"] > 0 and found["apart"]["prefix_tokens"] == 0
    # Stored by its id and asked in the usual way, the answer is the same.
    rest = home / "rest.jsonl"
    tokens = found["one"]["suffix_tokens"]
    whole = load_tokenizer(home / "checkpoint").encode(lines[0]["prompt"]).tolist()
    assert len(whole) == count + tokens
    asked = {"prefix": stored, "question": whole[count:], "max_tokens": 3}
    rest.write_text(json.dumps(asked) + "\n")
    assert here("batch", home / "checkpoint", rest, "--store", kv, "--out", home / "r")[0] == 0
    assert json.loads((home / "r").read_text())["text"] == found["one"]["text"]
    # A second run has nothing left to do but the two that failed.
    code, said, _ = here(*command, "--json")
    assert code == 3 and json.loads(said)["kept"] == 3 and json.loads(said)["answered"] == 0


def test_a_batch_goes_on_after_a_kill(
    home: Path, prefix: dict, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckv_jax.answer.MAX_TOKENS", 8)
    stored = prefix["prefix"]
    lines = [
        {"id": "a", "prefix": stored, "question": "What is the lamp of room 1?"},
        {"id": "b", "question": "What is the lamp of room 2?", "budget": 0.5, "max_tokens": 3},
        {"id": "b", "question": "twice"},
        {"id": "c", "question": "why?", "budget": -1},
        {"id": "d", "prefix": "0" * 64, "question": "why?"},
        {"id": "e", "question": "why?", "colour": "red"},
    ]
    requests, out = home / "requests.jsonl", home / "results.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{not json\n\n")
    command = (
        "batch", home / "checkpoint", requests, "--store", home / "kv", "--out", out,
        "--prefix", stored, "--json",
    )  # fmt: skip
    code, said, complaint = here(*command)
    assert code == 3
    assert json.loads(said) | {"seconds": 0} == {
        "answered": 2, "kept": 0, "failed": 5, "seconds": 0
    }  # fmt: skip
    assert complaint.count("requests.jsonl, line ") == 5
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert {result["id"] for result in results if "error" not in result} == {"a", "b"}

    torn = out.read_bytes().splitlines(keepends=True)[0]
    out.write_bytes(torn + torn[: len(torn) // 2])  # killed in the middle of its second line
    code, said, _ = here(*command)
    second = json.loads(said)
    assert (code, second["kept"], second["answered"]) == (3, 1, 1)
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(result["token_id"] for result in again if "error" not in result) == sorted(
        result["token_id"] for result in results if "error" not in result
    )


# -- request lines, their order, and result files --------------------------------------------------


def parse(tmp_path: Path, *lines: object, prefix: str | None = "ab") -> list[RequestLine | BadLine]:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(
        b"".join(
            (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
            for line in lines
        )
    )
    return list(read_lines(path, prefix=prefix))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "expected a JSON object"),
        (b"\xff", "expected a JSON object"),
        (b"[" * 100_000, "nested"),
        (b"[]", "expected an object"),
        ({"question": ""}, "question"),
        ({"question": []}, "question"),
        ({"question": [True]}, "question"),
        ({"question": "q", "budget": 0}, "(0, 1]"),
        ({"question": "q", "budget": "half"}, "expected a share of the prefix"),
        ({"question": "q", "temperature": "hot"}, "temperature"),
        ({"question": "q", "max_tokens": 0}, "max_tokens"),
        ({"question": "q", "stop": [1]}, "stop"),
        ({"question": "q", "beams": 4}, "unknown field beams"),
        ({"question": "q", "id": [1]}, "id"),
        ({"question": "q", "prefix": 3}, "prefix"),
        ({"question": "q", "stop_token_ids": 3}, "stop_token_ids"),
        (b'{"question": "half \\ud800"}', "half of one"),
        (b'{"question": "q", "id": "\\udfff"}', "half of one"),
    ],
)
def test_a_bad_line_says_why_and_the_next_is_read(tmp_path: Path, line: object, says: str) -> None:
    bad, good = parse(tmp_path, line, {"question": "why?"})
    assert says in bad.error
    assert isinstance(good, RequestLine)
    assert good.line == 2


def test_no_two_lines_have_one_id(tmp_path: Path) -> None:
    lines = parse(tmp_path, {"id": "a", "question": "q"}, b"", {"id": "a", "question": "r"})
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


def test_results_may_go_to_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    with Results(tmp_path / "pipe") as results:
        results.write({"line": 1})
        assert json.loads(os.read(pipe, 100)) == {"line": 1}
    os.close(pipe)


@pytest.mark.parametrize("text", ["Dear Walter,\n", "Dear Walter,", '{"question": "why?"}'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "letter.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"letter\.txt"):
        Results(path)
    assert path.read_text() == text


def ordered(texts: str, size: int) -> list[list[int]]:
    """Lines in batches; each letter is a line, and its prefix."""
    lines = [
        RequestLine(line=line, digest="", id=str(line), prefix=text, question="?", budget=None,
                    sampling=SamplingParams())
        for line, text in enumerate(texts)
    ]  # fmt: skip
    found = batches(lines, size, prefix_of=lambda line: line.prefix)
    return [[line.line for line in batch] for batch in found]


def test_a_long_run_gives_way_to_lines_that_have_waited_longer() -> None:
    found = ordered("ab" + "a" * 40, 2)
    assert found[:MOST_IN_ROW] == [[0, 2], *([n, n + 1] for n in range(3, 2 * MOST_IN_ROW + 1, 2))]
    assert found[MOST_IN_ROW][0] == 1  # the only line over b, of eight batches before


@settings(deadline=None)
@given(st.text("abc", max_size=60), st.integers(1, 5))
@example("ab" + "a" * 40, 2)
def test_every_line_once_and_none_behind_more_than_its_due(texts: str, size: int) -> None:
    found = ordered(texts, size)
    assert all(len(batch) == size for batch in found[:-1])
    flat = [*itertools.chain(*found)]
    assert sorted(flat) == list(range(len(texts)))
    for place, line in enumerate(flat):
        others = set(texts[:line]) - {texts[line]}
        assert place <= line + MOST_IN_ROW * size * (len(others) + 1)


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=8), max_size=8))
def test_shared_prefixes_equal_a_comparison_of_all_with_all(prompts: list[list[int]]) -> None:
    expected = [
        min(
            len(one) - 1,
            max((_common(one, two) for two in prompts[:i] + prompts[i + 1 :]), default=0),
        )
        for i, one in enumerate(prompts)
    ]
    assert shared_prefixes([np.array(x, np.int32) for x in prompts], least=1) == expected


def _common(one: list[int], two: list[int]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))
    return sum(1 for _ in pairs)
