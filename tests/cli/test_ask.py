"""Asking as a user does: of a store that another process made, of texts put together."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_line import QUESTION, TEXT, Here
from engine_tiny import tiny_engine
from rich.status import Status
from small_checkpoint import small_checkpoint

from ckv_jax import ContextOverflow, Engine
from ckv_jax.answer import MAX_TOKENS
from ckv_jax.cli.options import find_prefix, find_prefixes
from ckv_jax.cli.output import Terminal
from ckv_jax.conversation import Conversation
from ckv_jax.storage import ChunkStore, PrefixRecord
from ckv_jax.storage.errors import PrefixNotFound
from ckv_jax.trace import STAGES


def test_a_second_process_asks_the_store_of_the_first(
    home: Path, prefix: dict, answer: dict
) -> None:
    assert {
        "system", "model", "budget", "prefix_tokens", "suffix_tokens", "token_id", "text",
        "ttft_ms", "breakdown_ms", "bytes", "chunks", "attention_mass",
    } <= answer.keys()  # fmt: skip
    assert answer["breakdown_ms"].keys() == {*STAGES, "other"}
    assert answer["bytes"].keys() == {"ssd", "host", "device"}
    assert answer["prefix_tokens"] == prefix["tokens"]
    assert answer["bytes"]["ssd"] > 0
    assert 0.2 < answer["chunks"]["selected"] / answer["chunks"]["total"] < 0.6  # its ends, too
    assert sum(answer["breakdown_ms"].values()) == pytest.approx(answer["ttft_ms"], abs=0.5)
    assert json.loads((home / "trace.json").read_text())["traceEvents"]


def test_asking_for_people_shows_the_answer_and_a_line_of_figures(
    home: Path, prefix: dict, here: Here
) -> None:
    question = ("ask", home / "checkpoint", "What is it?", "--store", home / "kv")
    some = ("--prefix", str(prefix["prefix"])[:6], "--max-tokens", 4)
    code, out, _ = here(*question, *some)
    assert code == 0
    figures = " ".join(out[out.index("first token") :].split())
    for words in ("s in all", "of the attention", f"of {prefix['tokens']} tokens", "KiB from"):
        assert words in figures
    assert "critical_io_wait" not in out
    code, out, _ = here(*question, *some, "--timing")
    assert code == 0 and "compiled" not in out
    for word in ("critical_io_wait", "compute", "ttft", "and used", "not used", "device memory"):
        assert word in " ".join(out.split())


def test_sources_are_shown_and_low_coverage_is_said(home: Path, prefix: dict, here: Here) -> None:
    """Random weights attend to everything alike: a quarter covers about a quarter."""
    question = ("ask", home / "checkpoint", "What is it?", "--store", home / "kv")
    some = ("--prefix", "handbook", "--max-tokens", 9, "--sources")
    code, out, err = here(*question, *some, "--budget", 0.25)
    assert code == 0 and "%  “" in out
    assert "of the question's attention; ask again with --budget 0.5" in err
    code, out, err = here(*question, *some, "--budget", 1, "--json")
    answer = json.loads(out)
    assert (code, err, answer["low_coverage"]) == (0, "", False)
    assert answer["citations"] and set(answer["citations"][0]) == {"text", "share", "tokens"}


def test_an_answer_has_256_tokens_at_most(
    home: Path, prefix: dict, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are random: no answer ends by itself."""
    assert MAX_TOKENS == 256
    monkeypatch.setattr("ckv_jax.answer.MAX_TOKENS", 12)
    question = ("ask", home / "checkpoint", "What is it?", "--store", home / "kv", "--json")
    code, out, _ = here(*question, "--prefix", "handbook")
    found = json.loads(out)
    assert (code, found["finish_reason"], found["generated_tokens"]) == (0, "length", 12)
    assert found["whole_s"] > found["ttft_ms"] / 1e3


def test_asking_over_texts_put_together(home: Path, prefix: dict, here: Here) -> None:
    code, out, _ = here(
        "ask", home / "checkpoint", "What is it?", "--store", home / "kv", "--json",
        "--prefix", "handbook", "--prefix", str(prefix["prefix"])[:6], "--recompute", "0.3",
        "--max-tokens", 1,
    )  # fmt: skip
    answer = json.loads(out)
    assert code == 0 and answer["prefix_tokens"] == 2 * prefix["tokens"]
    again = answer["recomputed_tokens"] / (0.25 * answer["prefix_tokens"])
    assert answer["blended_tokens"] > 0 and 0.2 < again <= 0.3


def test_a_converted_checkpoint_answers_the_same(
    home: Path, answer: dict, tmp_path: Path, here: Here
) -> None:
    folder = tmp_path / "orbax"
    code, out, _ = here("convert", home / "checkpoint", folder, "--json")
    made = json.loads(out)
    assert (code, made["checkpoint"], made["format"]) == (0, str(folder), "orbax")
    assert not list(folder.glob("*.safetensors"))
    assert here("ingest", folder, home / "text.txt", "--store", tmp_path / "kv")[0] == 0
    code, out, _ = here(
        "ask", folder, QUESTION, "--store", tmp_path / "kv", "--budget", "0.25",
        "--max-tokens", "16", "--json",
    )  # fmt: skip
    assert code == 0
    again = json.loads(out)
    same = ("token_id", "text", "prefix_tokens", "chunks", "attention_mass")
    assert [again[name] for name in same] == [answer[name] for name in same]

    code, _, err = here("convert", folder, folder)
    assert code == 1 and "there already" in err
    code, _, err = here("convert", folder, tmp_path / "x", "--to", "onnx")
    assert code == 1 and "expected one of orbax, hf" in err


# -- conversations ---------------------------------------------------------------------------------


def test_turns_are_remembered_and_stored_and_an_answer_may_be_given_up(
    home: Path, tmp_path: Path
) -> None:
    with Engine.from_pretrained(home / "checkpoint", store=tmp_path / "kv") as engine:
        document = engine.ingest(TEXT)
        with Conversation(engine, f"{TEXT}\n") as talk:
            assert talk.prefix == document
            said = "".join(talk.ask(QUESTION, max_tokens=6))
            first = talk.latest
            assert first is not None and first.text == said
            assert first.completion().prefix == document
            talk.wait()
            list(talk.ask("And of room 8?", max_tokens=6))
            before = talk.latest.completion().prefix.num_tokens
            assert before > document.num_tokens + len(first.completion().suffix)
            turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": said}]
            chat = engine.chat(
                [{"role": "system", "content": TEXT}, *turns,
                 {"role": "user", "content": "And of room 8?"}]
            )  # fmt: skip
            assert before + len(talk.latest.completion().suffix) == len(chat)
            talk.forget()
            assert "".join(talk.ask("Why?", max_tokens=2))
            assert talk.latest.completion().prefix.num_tokens < before
            pieces = talk.ask(QUESTION, max_tokens=200)
            begun = next(pieces)
            pieces.close()
            assert talk.latest.finish_reason == "cancelled"
            assert talk.latest.text.startswith(begun)
            assert "".join(talk.ask("And of room 8?", max_tokens=3))
            with pytest.raises(ContextOverflow):
                list(talk.ask("lamp " * 5000))
            assert "".join(talk.ask("And of room 9?", max_tokens=3))


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What comes from the pipe."""
    return lambda lines: monkeypatch.setattr(sys, "stdin", io.StringIO(lines))


def test_a_session(
    home: Path, tmp_path: Path, here: Here, typed: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    stream, interrupts = Terminal.stream, iter([True, False, False])

    def interrupted(terminal: Terminal, waiting: Status) -> Callable[[str], None]:
        show = stream(terminal, waiting)

        def once(text: str) -> None:
            show(text)
            if next(interrupts, False):
                raise KeyboardInterrupt

        return once

    monkeypatch.setattr(Terminal, "stream", interrupted)
    command = ("chat", home / "checkpoint", home / "text.txt", "--store", tmp_path / "kv")
    lines = "/budget 2\n/budget 1\nWhy?\n/sources\n/help\n/bogus\n/quit\nnever\n"
    typed(f"/sources\n{QUESTION}\n\n{lines}")
    code, out, err = here(*command, "--max-tokens", 9)
    assert code == 0
    assert out.count("first token ") == 2
    for words in ("budget 1.0", "% “", "Ctrl-C ends an answer", "100.0% of the attention"):
        assert words in " ".join(out.split())
    assert err.count("there is no command") == 1 and "there is no command /bogus" in err
    assert "there is no answer yet" in err and "expected a share" in err
    (tmp_path / "more.txt").write_text("The keeper is Ada.")
    typed("Who?\n")
    code, out, _ = here(*command[:3], tmp_path / "more.txt", *command[3:], "--max-tokens", 2)
    assert code == 0 and "first token " in out


def test_asking_after_a_chat_needs_no_prefix(
    home: Path, tmp_path: Path, here: Here, typed: Callable[[str], None]
) -> None:
    """Neither the turns of the chat nor another model's prefixes are documents to choose from."""
    model, store = home / "checkpoint", ("--store", tmp_path / "kv")
    typed(f"{QUESTION}\nAnd of room 8?\n")
    assert here("chat", model, home / "text.txt", *store, "--max-tokens", 9)[0] == 0
    code, out, _ = here("inspect", tmp_path / "kv")
    assert code == 0 and "text.txt" in out and "The lamp of room 0" in out
    other = small_checkpoint(tmp_path / "other")
    for n in range(2):
        (tmp_path / f"{n}.txt").write_text(f"{n} lamps are lit.")
        assert here("ingest", other, tmp_path / f"{n}.txt", *store)[0] == 0
    code, out, err = here("ask", model, QUESTION, *store, "--max-tokens", 1, "--json")
    assert code == 0, err
    with ChunkStore.open(tmp_path / "kv", readonly=True) as opened:
        stored = {prefix.id: prefix.num_tokens for prefix in opened.prefixes(salt="")}
    assert len(stored) > 3 and json.loads(out)["prefix_tokens"] in stored.values()
    code, _, err = here("ask", other, QUESTION, *store, "--max-tokens", 1)
    assert code == 1 and "2 prefixes are stored; name one with --prefix: " in err
    assert "lamps are lit" in err and "The lamp" not in err


def test_a_document_that_ends_on_a_chunk_is_found_after_its_turns(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        size = engine.layout.chunk_tokens
        ids = np.arange(1, 6 * size, dtype=np.int32) % engine.model_config.vocab_size
        document = engine.ingest(ids[: 2 * size])
        engine.store.set_record(document.id, PrefixRecord(source="a.txt"))
        for tokens in (3 * size, 4 * size + 1, 5 * size):
            engine.ingest(ids[:tokens])
        found = find_prefixes(engine.store, None, salt="", model=lambda: engine.fingerprint)
        assert found == [document]


def test_what_cannot_be_talked_about(home: Path, tmp_path: Path, here: Here) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    store = ("--store", tmp_path / "kv")
    for file, more, says in (
        (tmp_path / "empty.txt", (), "is empty"),
        (tmp_path / "none.txt", (), "no such file"),
        (tmp_path, (), "is a directory; name a text file"),
        (home / "text.txt", ("--system", "impress"), "first tokens only"),
        (home / "text.txt", ("--budget", "auto"), "`ckv ask` and `ckv serve` accept"),
    ):
        code, out, err = here("chat", home / "checkpoint", file, *store, *more)
        assert (code, out) == (1, "") and says in err and len(err.splitlines()) == 1
    assert not (tmp_path / "kv").exists()


# -- names of stored prefixes ----------------------------------------------------------------------


def test_a_whole_id_comes_before_a_name_and_a_name_before_the_start_of_an_id(
    tmp_path: Path,
) -> None:
    with tiny_engine(tmp_path) as engine:
        texts = np.random.default_rng(0).integers(0, engine.model_config.vocab_size, (7, 16))
        stored = [engine.ingest(text) for text in texts.astype(np.int32)]
        digest = "0123456789abcdef" * 2  # of the length of an id, and none
        for index, name in ((2, "alone"), (4, stored[5].id), (6, digest)):
            engine.store.set_record(stored[index].id, PrefixRecord(name=name))
        assert find_prefix(engine.store, "alone", salt="") == stored[2]
        assert find_prefix(engine.store, stored[3].id[:16], salt="") == stored[3]
        assert find_prefix(engine.store, stored[5].id, salt="") == stored[5]
        assert find_prefix(engine.store, digest, salt="") == stored[6]
        with pytest.raises(PrefixNotFound, match=r"no stored prefix with id 'alone'$"):
            find_prefix(engine.store, "alone", salt="somebody else")


def test_a_wish_of_before_names_is_read_as_it_was() -> None:
    old = b'{"pinned": false, "retain_s": 5.0, "priority": 2}'
    assert PrefixRecord.decode(old) == PrefixRecord(retain_s=5.0, priority=2)
    with pytest.raises(ValueError, match="name: got"):
        PrefixRecord(name="two\nlines")
