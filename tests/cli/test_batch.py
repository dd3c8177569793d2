"""Files of requests: what they share, and going on after a kill."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import TEXT, Here

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
    assert code == 3 and "got a prompt and a question" in complaint, complaint
    assert "line 5" in complaint and "4096" in complaint
    told = json.loads(said)
    assert (told["answered"], told["failed"]) == (3, 2)
    [(stored, count)] = told["beginnings"].items()
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


def test_a_batch_goes_on_after_a_kill(home: Path, prefix: dict, here: Here) -> None:
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
