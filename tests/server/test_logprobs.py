"""Log probabilities as clients read them: every byte, every token, prompts and their scores."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from server.applications import TEXT, WAY, chat
from server.serving import MODEL, post

from ckv_jax import Engine
from ckv_jax.model.sampling import Logprobs
from ckv_jax.request import Request
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.formats import ChatFormat, CompletionFormat, TokenLogprob, _by_text
from ckv_jax.server.parser import RequestParser
from ckv_jax.server.schema import ChatRequest, CompletionRequest
from ckv_jax.server.tenants import DEFAULT_TENANT


def events(text: str) -> list[dict]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a \U0001f600 b", "Gr\u00fc\u00dfe, \u4f60\u597d", "\u1e9e"])
def test_the_bytes_of_split_characters_are_their_own(engine: Engine, text: str) -> None:
    parser = RequestParser(engine, ServerConfig(model=MODEL))
    body = ChatRequest(**chat("Hello"), logprobs=True)
    form = ChatFormat(parser.parse(body, DEFAULT_TENANT), engine)
    tokens = engine.encode(text).tolist()
    assert len(tokens) > len(text) / 2
    for token in tokens:
        form.token(0, token, Logprobs(token=-1.0, top=((token, -1.0), (5, -2.0))))
    piece = form.piece(0, text)
    rows = piece["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(row["bytes"]) for row in rows).decode() == text
    assert len(rows) == len(tokens)
    for row in rows:
        assert row["top_logprobs"][0]["bytes"] == row["bytes"]
        assert "\ufffd" not in row["token"]


def test_no_token_loses_its_place_to_another(engine: Engine) -> None:
    same = tuple(TokenLogprob(id_, "a", b"a", -1.0 * id_) for id_ in (1, 2, 3))
    assert _by_text(TokenLogprob(9, "b", b"b", -9.0, same)) == {
        "a": -1.0, "token_id:2": -2.0, "token_id:3": -3.0, "b": -9.0,
    }  # fmt: skip
    assert _by_text(TokenLogprob(2, "a", b"a", -2.0, same[:2])) == {"a": -1.0, "token_id:2": -2.0}
    parser = RequestParser(engine, ServerConfig(model=MODEL))
    body = CompletionRequest(**WAY | {"prompt": "Hello"}, logprobs=5)
    form = CompletionFormat(parser.parse(body, DEFAULT_TENANT), engine)
    (emoji, *_) = engine.encode("\U0001f600").tolist()
    (other, *_) = engine.encode("\u4f60").tolist()
    form.token(0, emoji, Logprobs(token=-1.0, top=((emoji, -1.0), (other, -2.0))))
    piece = form.piece(0, "\ufffd")
    (top,) = piece["choices"][0]["logprobs"]["top_logprobs"]
    assert sorted(top.values()) == [-2.0, -1.0]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_drawn_token_is_among_the_top(url: str, count: int) -> None:
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 12, "temperature": 2, "seed": 3}
    found = post(url, "completions", body | {"logprobs": count}).json()["choices"][0]["logprobs"]
    for token, value, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert value in top.values()
        assert top.get(token) == value or f"token_id:{token}" not in top
        assert count <= len(top) <= count + 1


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_reported_past_a_stop_string(url: str, stream: bool) -> None:
    body = chat(TEXT, max_tokens=24, logprobs=True)
    whole = post(url, "chat/completions", body).json()["choices"][0]
    said = whole["message"]["content"]
    stop = next(said[at : at + 3] for at in range(8, len(said)) if said[at : at + 3].isascii())
    cut = said[: said.index(stop)]
    told = post(url, "chat/completions", body | {"stop": stop, "stream": stream})
    if stream:
        parts = [event["choices"][0] for event in events(told.text)]
        rows = [row for part in parts if part["logprobs"] for row in part["logprobs"]["content"]]
        text = "".join(part["delta"].get("content", "") for part in parts)
        shown = ""
        for part in parts:  # never before its text
            shown += part["delta"].get("content", "")
            assert cut.startswith(shown)
    else:
        (choice,) = told.json()["choices"]
        rows, text = choice["logprobs"]["content"], choice["message"]["content"]
    assert text == cut
    before = b"".join(bytes(row["bytes"]) for row in rows[:-1])
    assert len(before) < len(cut.encode()) + 2 * cut.count("\ufffd")
    assert len(rows) <= len(whole["logprobs"]["content"])


@pytest.mark.parametrize("stop", [None, "never said"])
def test_tokens_without_text_have_their_rows(engine: Engine, stop: str | None) -> None:
    """A row comes with its token; where a stop string may cut it off, at the latest at the end."""
    parser = RequestParser(engine, ServerConfig(model=MODEL))
    body = CompletionRequest(**WAY | {"prompt": "Hello"}, logprobs=0, stop=stop)
    form = CompletionFormat(parser.parse(body, DEFAULT_TENANT), engine)
    found = []
    for token in engine.encode("\U0001f600").tolist()[:-1]:  # no character comes of them
        form.token(0, token, Logprobs(token=-1.0, top=()))
        found.append(form.piece(0, ""))
    assert len(found) > 1 and all((piece is None) == (stop is not None) for piece in found)
    answer = SimpleNamespace(finish_reason="length")
    found.append(form.piece(0, "", SimpleNamespace(completion=lambda: answer)))
    rows = [row for piece in found if piece for row in piece["choices"][0]["logprobs"]["tokens"]]
    assert len(rows) == len(found) - 1


# -- prompts ---------------------------------------------------------------------------------------


def oracle(engine: Engine, tokens: list[int], at: int) -> np.ndarray:
    """Log probabilities [V] of what follows the first `at` tokens, by a dense prefill."""
    request = Request(prefix=tokens[: at - 1], suffix=tokens[at - 1 : at])
    logits = np.asarray(engine.recompute(request).logits, np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def test_an_engine_scores_a_text(engine: Engine) -> None:
    tokens = engine.encode(TEXT * 4).tolist()
    found = engine.score(tokens, top=3).result()
    assert len(found) == len(tokens) - 1 > 512  # more than one block
    for at in (1, 2, 17, 255, 256, 257, len(tokens) - 1):
        expected = oracle(engine, tokens, at)
        assert found[at - 1].token == pytest.approx(expected[tokens[at]], abs=1e-3)
        best = np.argsort(-expected)[:3]
        assert [id_ for id_, _ in found[at - 1].top] == best.tolist()
        assert [value for _, value in found[at - 1].top] == pytest.approx(
            expected[best].tolist(), abs=1e-3
        )
    assert engine.score(tokens[:1]).result() == []
    for wrong in ([], [0] * 9000, [10**6]):
        with pytest.raises(Exception, match="got"):
            engine.score(wrong)


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_prompts_come_back_with_their_scores(url: str, engine: Engine, max_tokens: int) -> None:
    prompts = [engine.encode(text).tolist() for text in ("The lamp is lit", "An owl")]
    body = WAY | {"prompt": prompts, "max_tokens": max_tokens, "logprobs": 1, "echo": True}
    told = post(url, "completions", body).json()
    assert told["usage"]["completion_tokens"] == 2 * max_tokens
    for tokens, choice in zip(prompts, told["choices"], strict=True):
        found = choice["logprobs"]
        text = engine.tokenizer.decode(tokens)
        assert choice["text"].startswith(text)
        assert "".join(found["tokens"]).startswith(text)
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        for at in range(1, len(tokens)):
            expected = oracle(engine, tokens, at)
            assert found["token_logprobs"][at] == pytest.approx(expected[tokens[at]], abs=1e-3)
            assert max(found["top_logprobs"][at].values()) == pytest.approx(
                expected.max(), abs=1e-3
            )
        starts = [len("".join(found["tokens"][:at])) for at in range(len(tokens))]
        assert found["text_offset"][: len(tokens)] == starts
        if max_tokens == 0:
            assert choice["text"] == text
            assert choice["finish_reason"] == "length"


def test_a_stream_begins_with_the_prompt(url: str) -> None:
    body = WAY | {"prompt": "The lamp", "echo": True, "logprobs": 0}
    whole = post(url, "completions", body).json()["choices"][0]
    parts = [
        e["choices"][0] for e in events(post(url, "completions", body | {"stream": True}).text)
    ]
    assert parts[0]["text"] == "The lamp"
    assert "".join(part["text"] for part in parts) == whole["text"]
    values = [
        value for part in parts if part["logprobs"] for value in part["logprobs"]["token_logprobs"]
    ]
    assert values[0] is None and len(values) == len(whole["logprobs"]["tokens"])
    plain = post(url, "completions", WAY | {"prompt": "The lamp", "echo": True}).json()
    assert plain["choices"][0]["text"] == whole["text"]
    assert plain["choices"][0]["logprobs"] is None
    none = post(url, "completions", WAY | {"prompt": "The lamp", "max_tokens": 0}).json()
    assert (none["choices"][0]["text"], none["usage"]["completion_tokens"]) == ("", 0)
