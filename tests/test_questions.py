"""Documents in the chat template, and questions about them, in an engine and after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command_line import QUESTION, TEXT
from small_checkpoint import small_checkpoint

from ckv_jax import ContextOverflow, Engine, PrefixNotFound, Request, SamplingParams
from ckv_jax.storage import PrefixRecord

FEW = SamplingParams(max_tokens=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("questions") / "model")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(model, store=model.parent / "kv") as engine:
        yield engine


def test_a_question_goes_on_as_the_chat_does_after_a_restart(model: Path, tmp_path: Path) -> None:
    with Engine.from_pretrained(model, store=tmp_path / "kv") as engine:
        prefix = engine.ingest(TEXT)
        asked = engine.ask(prefix, QUESTION, sampling=FEW)
        noted = PrefixRecord(name="lamps", before="?")  # replaced by an ingest
        engine.store.set_record(prefix.id, noted)
        assert engine.ingest(TEXT) == prefix
        wish = engine.store.records()[prefix.id]
        assert wish.name == "lamps" and wish.after.endswith("<|im_start|>assistant\n")
    messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": QUESTION}]
    with Engine.from_pretrained(model, store=tmp_path / "kv") as engine:
        assert engine.is_document(prefix)
        question = engine.question(prefix, f" {QUESTION}\n")
        chat = engine.chat(messages)
        np.testing.assert_array_equal(chat, [*prefix.tokens, *question])
        for which in (prefix, prefix.id, prefix.id[:8], "lamps"):
            again = engine.ask(which, QUESTION, sampling=FEW)
            assert again.generation.token_ids.tolist() == asked.generation.token_ids.tolist()
        request = Request(prefix=chat[:-1].tolist(), suffix=chat[-1:])
        (whole,) = engine.generate(request, FEW).results()
        assert whole.completion().prefix.num_tokens == prefix.num_tokens
        assert whole.token_ids.tolist() == asked.generation.token_ids.tolist()
        assert set(asked.timings) == {"queued", "first_token", "decode"}
        assert 0 < asked.coverage < 1
        with pytest.raises(PrefixNotFound, match="lamps"):
            engine.ask("lamp", QUESTION)


def test_bare_text_goes_on_as_it_is(engine: Engine) -> None:
    bare = engine.ingest(TEXT, raw=True)
    assert engine.ingest(engine.encode(TEXT)) == bare != engine.ingest(TEXT)
    assert not engine.is_document(bare)
    np.testing.assert_array_equal(engine.question(bare, QUESTION), engine.encode(QUESTION))
    with pytest.raises(ValueError, match="with raw text"):
        engine.ingest(TEXT, raw=True, turn="user")
    with pytest.raises(ValueError, match="empty question"):
        engine.question(bare, " ")


def test_citations_are_passages_and_their_shares(engine: Engine) -> None:
    prefix = engine.ingest(TEXT)
    answer = engine.ask(prefix, QUESTION, sampling=SamplingParams(max_tokens=20))
    passages = engine.citations(answer.generation, most=5)
    assert passages[:1] == engine.citations(answer.generation, most=1)
    assert 1 <= len(passages) <= 5 and len(answer.citations) <= 3
    shares = [passage.share for passage in passages]
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1 + 1e-6
    size = prefix.layout.chunk_tokens
    for passage in passages:
        assert passage.tokens.start >= size and passage.tokens.start % size == 0
        assert passage.tokens.stop <= prefix.num_tokens
        assert passage.text and passage.text in " ".join(TEXT.split())
    assert engine.citations(answer.generation, most=0) == ()
    (alone,) = engine.generate(Request(prefix=[], suffix=TEXT), FEW).results()
    assert engine.citations(alone) == ()
    (joined,) = engine.generate(Request(documents=[prefix, prefix], suffix=QUESTION), FEW).results()
    assert engine.citations(joined) == ()


def test_a_citation_has_all_passages_side_by_side(engine: Engine) -> None:
    prefix, shares = engine.ingest(TEXT), np.zeros(20)
    shares[[11, 9, 10]] = 0.5, 0.3, 0.2
    [passage] = engine._citations._passages(prefix, shares, 3)
    size = prefix.layout.chunk_tokens
    assert passage.tokens == range(9 * size, 12 * size)
    assert passage.share == pytest.approx(1)


def test_a_text_that_fills_the_context_has_no_citations(engine: Engine) -> None:
    limit = engine.model_config.max_position_embeddings
    prefix = engine.ingest(np.resize(engine.encode(TEXT), limit - 4))
    asked = Request(prefix=prefix, suffix=[5, 6])
    (generation,) = engine.generate(asked, SamplingParams(max_tokens=2)).results()
    assert engine.citations(generation) == ()


def test_a_result_has_the_attention_of_its_chunks(engine: Engine) -> None:
    texts = [engine.ingest(TEXT), engine.ingest(TEXT[: len(TEXT) // 3], raw=True)]
    requests = [
        Request(prefix=prefix, suffix=QUESTION, budget=budget, attention=True)
        for prefix in texts
        for budget in (0.25, 1.0)
    ]
    together = engine.reprefill(requests)
    for request, result in zip(requests, together, strict=True):
        (alone,) = engine.reprefill([request])
        assert result.attention is not None and alone.attention is not None
        assert result.attention.shape == (request.prefix.num_chunks,)  # type: ignore[union-attr]
        assert result.attention.sum() == pytest.approx(1, abs=1e-4)
        np.testing.assert_allclose(result.attention, alone.attention, atol=2e-3)
    (plain,) = engine.reprefill([Request(prefix=texts[0], suffix=QUESTION)])
    assert plain.attention is None


def test_what_does_not_fit_says_how_much_would(engine: Engine) -> None:
    limit = engine.model_config.max_position_embeddings
    prefix = engine.ingest(TEXT)
    before = engine.store.prefixes()
    with pytest.raises(ContextOverflow, match=f"expected at most {limit}"):
        engine.ingest("lamp " * limit)
    assert engine.store.prefixes() == before
    left = limit - prefix.num_tokens - 1
    with pytest.raises(ContextOverflow, match=f"expected at most {left}: "):
        engine.ask(prefix, "lamp " * limit)
