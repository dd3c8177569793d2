"""A conversation in the terminal: turns that are remembered and stored, commands, Ctrl-C."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import QUESTION, TEXT, Here

from ckv_jax import ContextOverflow, Engine
from ckv_jax.cli.output import Terminal
from ckv_jax.conversation import Conversation


def test_turns_are_remembered_and_stored(home: Path, tmp_path: Path) -> None:
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
            assert talk.latest is not None
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


def test_an_answer_may_be_given_up(home: Path, tmp_path: Path) -> None:
    with (
        Engine.from_pretrained(home / "checkpoint", store=tmp_path / "kv") as engine,
        Conversation(engine, TEXT) as talk,
    ):
        pieces = talk.ask(QUESTION, max_tokens=200)
        begun = next(pieces)
        pieces.close()
        assert talk.latest is not None and talk.latest.finish_reason == "cancelled"
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

    def interrupted(terminal: Terminal, waiting: object = None) -> Callable[[str], None]:
        show = stream(terminal)

        def once(text: str) -> None:
            show(text)
            if next(interrupts, False):
                raise KeyboardInterrupt

        return once

    monkeypatch.setattr(Terminal, "stream", interrupted)
    command = ("chat", home / "checkpoint", home / "text.txt", "--store", tmp_path / "kv")
    typed(f"/sources\n{QUESTION}\n\n/budget 2\n/budget 1\nWhy?\n/sources\n/help\n/quit\nnever\n")
    code, out, err = here(*command, "--max-tokens", 9)
    assert code == 0
    assert out.count("first token ") == 2
    for words in ("budget 1.0", "% “", "Ctrl-C ends an answer", "100.0% of the attention"):
        assert words in " ".join(out.split())
    assert "there is no answer yet" in err and "expected a share" in err
    (tmp_path / "more.txt").write_text("The keeper is Ada.")
    typed("Who?\n")
    code, out, _ = here(*command[:3], tmp_path / "more.txt", *command[3:], "--max-tokens", 2)
    assert code == 0 and "first token " in out


def test_what_cannot_be_talked_about(home: Path, tmp_path: Path, here: Here) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    store = ("--store", tmp_path / "kv")
    for file, more, says in (
        (tmp_path / "empty.txt", (), "is empty"),
        (tmp_path / "none.txt", (), "no such file"),
        (home / "text.txt", ("--system", "impress"), "first tokens only"),
        (home / "text.txt", ("--budget", "auto"), "`ckv ask` and `ckv serve` take"),
    ):
        code, out, err = here("chat", home / "checkpoint", file, *store, *more)
        assert (code, out) == (1, "") and says in err and len(err.splitlines()) == 1
    assert not (tmp_path / "kv").exists()
