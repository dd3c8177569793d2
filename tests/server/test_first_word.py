"""A SentencePiece model's completion goes on from its prompt, the space between them included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from server.applications import serving
from server.serving import MODEL, post

from ckv_jax import Engine, EngineConfig, Request, SamplingParams
from tests.model.spm_checkpoint import SENTENCE, write_spm_checkpoint

PROMPT, WORDS = "The capital of France is", [" the", " quick", " brown", " fox"]


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("spm")
    write_spm_checkpoint(folder / "model")
    config = EngineConfig(dtype="float32", compilation_cache=False)
    with Engine.from_pretrained(folder / "model", store=folder / "kv", config=config) as engine:
        yield engine


def test_in_python(spm: Engine) -> None:
    assert SENTENCE.startswith(PROMPT)
    ids = spm.tokenizer.encode(PROMPT + WORDS[0], begins=True).tolist()
    request = Request(prefix=ids[:-1], suffix=ids[-1:])
    (result,) = spm.reprefill([request])
    assert result.text == WORDS[1]
    (generation,) = spm.generate(request, SamplingParams(max_tokens=2)).results()
    assert generation.text == "".join(WORDS[1:3])


def test_completions(spm: Engine) -> None:
    with serving(spm) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        asked = {
            "model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": 2,
        }  # fmt: skip
        [choice] = client.completions.create(**asked).choices
        assert choice.text == "".join(WORDS)
        assert choice.logprobs.tokens == WORDS
        assert choice.logprobs.text_offset == [0, 4, 10, 16]
        for text, likeliest in zip(WORDS, choice.logprobs.top_logprobs or [], strict=True):
            assert text in likeliest
        pieces = [part.choices[0] for part in client.completions.create(**asked, stream=True)]
        assert "".join(piece.text for piece in pieces) == choice.text
        told = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        assert [token for one in told for token in one.tokens or []] == WORDS
        assert [at for one in told for at in one.text_offset or []] == [0, 4, 10, 16]
        [stopped] = client.completions.create(**asked, stop=[" quick"]).choices
        assert stopped.text == WORDS[0]
        [at_once] = client.completions.create(**asked, stop=[" the"]).choices
        assert at_once.text == ""


@pytest.mark.parametrize("as_ids", [False, True])
def test_tokens_of_an_echoed_prompt_are_its_text(spm: Engine, as_ids: bool) -> None:
    """The begin-of-text is none of it, unless the prompt has it."""
    ids = spm.encode(PROMPT, begins=True).tolist()
    body = {
        "model": MODEL, "prompt": ids if as_ids else PROMPT, "max_tokens": 1, "temperature": 0,
        "logprobs": 0, "echo": True,
    }  # fmt: skip
    with serving(spm) as url:
        choice = post(url, "completions", body).json()["choices"][0]
    found = choice["logprobs"]
    tokens = found["tokens"]
    assert choice["text"] == "".join(tokens) == f"{'<s> ' if as_ids else ''}{PROMPT}{WORDS[0]}"
    assert len(tokens) == len(ids) + 1
    assert found["text_offset"] == [len("".join(tokens[:at])) for at in range(len(tokens))]
    assert [value is None for value in found["token_logprobs"]] == [True] + [False] * len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_messages_name_the_stop_sequence(spm: Engine, stream: bool) -> None:
    with serving(spm) as url, anthropic.Anthropic(base_url=url, api_key="none") as claude:
        ask: Any = {
            "model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4,
            "stop_sequences": ["never", " quick"], "extra_body": {"temperature": 0},
        }  # fmt: skip
        if stream:
            with claude.messages.stream(**ask) as events:
                message = events.get_final_message()
        else:
            message = claude.messages.create(**ask)
    assert message.content[0].text == WORDS[0]  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " quick")
