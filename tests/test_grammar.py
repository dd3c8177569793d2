"""A generation under a grammar is what the grammar says, whatever the model makes of it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("llguidance")

from small_checkpoint import small_checkpoint

from ckv_jax import Engine, EngineConfig, Request, SamplingParams
from ckv_jax.model import grammar
from ckv_jax.model.tokenizer import load_tokenizer
from tests.model.spm_checkpoint import write_spm_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = small_checkpoint(tmp_path_factory.mktemp("grammar") / "model", dtype="float32")
    store = tmp_path_factory.mktemp("kv")
    config = EngineConfig(dtype="float32", compilation_cache=False)
    with Engine.from_pretrained(folder, store=store, config=config) as engine:
        yield engine


def generated(engine: Engine, *params: SamplingParams) -> list[str]:
    ids = engine.encode("Where to, and for how long?").tolist()
    requests = [Request(prefix=ids[:-1], suffix=ids[-1:])] * len(params)
    generations = engine.generate(requests, params).results()
    for one in generations:
        one.raise_for_error()
    return [f"{one.finish_reason} {one.text}" for one in generations]


def test_each_kind(engine: Engine) -> None:
    """Together in one batch, beside one without a grammar."""
    kinds = {
        "json_schema": SCHEMA, "regex": "[a-c]{3}-[0-9]{2}", "choice": ["yes, of course", "no"],
        "grammar": 'root ::= "left" | "right"',
    }  # fmt: skip
    params = [
        SamplingParams(max_tokens=200, temperature=1.0, seed=3, grammar=engine.grammar(kind, value))
        for kind, value in kinds.items()
    ]
    found = generated(engine, *params, SamplingParams(max_tokens=4))
    reason, _, text = found[0].partition(" ")
    assert reason == "stop"
    assert json.loads(text).keys() == {"city", "days"}
    assert re.fullmatch("stop [a-c]{3}-[0-9]{2}", found[1])
    assert found[2] in ("stop yes, of course", "stop no")
    assert found[3] in ("stop left", "stop right")
    assert found[4].startswith("length")


def test_a_bound_on_tokens_ends_within_the_object(engine: Engine) -> None:
    grammar = engine.grammar("json_schema", SCHEMA)
    (found,) = generated(engine, SamplingParams(max_tokens=2, grammar=grammar))
    assert found.startswith("length {")


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("json_schema", {"type": "objekt"}, "Invalid type"),
        ("json_schema", "{", "expected JSON"),
        ("json_schema", {"$ref": "#/nowhere"}, "does not exist"),
        ("json_schema", {"description": "x" * 70_000}, "expected at most 65536 characters"),
        ("choice", [], "expected a list of texts"),
        ("regex", "(", "."),
        ("grammar", "start: nothing", "."),
        ("poem", "x", "expected one of json_schema"),
    ],
)
def test_what_is_refused(engine: Engine, kind: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        engine.grammar(kind, value)  # type: ignore[arg-type]


def test_nesting_is_bounded(engine: Engine) -> None:
    schema: dict = {"type": "string"}
    for _ in range(20):
        schema = {"type": "array", "items": schema}
    engine.grammar("json_schema", schema)
    for _ in range(20):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ValueError, match="nested at most 32 deep"):
        engine.grammar("json_schema", schema)


CHAIN = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(3500)) + 'r3500 ::= "a"'
REFERENCES = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1000)}


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("grammar", CHAIN, "it is too complex"),
        ("json_schema", {"$defs": REFERENCES | {"d1000": {}}, "$ref": "#/$defs/d0"}, "too complex"),
        ("json_schema", {"type": "integer", "multipleOf": 9_999_991}, "it is not compiled within"),
        ("json_schema", {"$ref": "#"}, "expected a grammar that allows a text that is not empty"),
    ],
)
def test_none_can_stop_the_process(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: str, value: object, expected: str
) -> None:
    """What overflows the library's stack, occupies it for minutes, or leaves no token to sample."""
    monkeypatch.setattr("ckv_jax.model.grammar._COMPILE_S", 3.0)
    with pytest.raises(ValueError, match=expected):
        engine.grammar(kind, value)  # type: ignore[arg-type]
    engine.grammar("choice", ["yes", "no"])


def test_an_answer_says_that_it_is_cut_where_its_grammar_becomes_too_complex(
    engine: Engine,
) -> None:
    grammar = engine.grammar("grammar", "start: e\ne: e e | A | B\nA: /[a-z]/\nB: /[a-y]/")
    params = SamplingParams(max_tokens=100, grammar=grammar)
    endless = SamplingParams(max_tokens=100, grammar=grammar, ignore_eos=True)
    for found in generated(engine, params, endless):
        assert re.fullmatch("length [a-z]{5,}", found)


def test_the_same_is_compiled_once(engine: Engine) -> None:
    assert engine.grammar("regex", "x+") is engine.grammar("regex", "x+")


def test_a_slow_grammar_holds_up_no_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, try_out = threading.Event(), threading.Event(), grammar._try_out

    def slow(kind: grammar.GrammarKind, text: str, size: int) -> None:
        if text == "slow":
            begun.set()
            assert go.wait(60)
        try_out(kind, text, size)

    monkeypatch.setattr(grammar, "_try_out", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(engine.grammar, "regex", "slow")
        try:
            assert begun.wait(60)
            engine.grammar("regex", "quick")
            assert not first.done()
        finally:
            go.set()
        first.result(60)


def test_the_bytes_of_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    write_spm_checkpoint(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    known = tokenizer.token_bytes()
    text = "the quick brown fox"
    ids = tokenizer.encode(text).tolist()
    assert b"".join(known[id_] for id_ in ids).decode().strip() == text
