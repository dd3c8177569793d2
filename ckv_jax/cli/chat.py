"""`ckv chat`: a conversation about documents in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckv_jax.cli import options
from ckv_jax.cli.output import Terminal, one_line
from ckv_jax.errors import CkvError
from ckv_jax.storage.prefix import PrefixRecord

if TYPE_CHECKING:
    from ckv_jax.conversation import Conversation
    from ckv_jax.engine import Engine

_HELP = """/budget SHARE   set the share of the document that answers attend to; alone: show it
/sources        show the passages that the last answer attended to most
/new            start a new conversation about the same document
/quit           leave, like Ctrl-D. Ctrl-C ends an answer."""


def chat(
    checkpoint: options.Checkpoint,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="The documents as UTF-8 text, concatenated in this order."
        ),
    ],
    store: options.Store,
    budget: options.Budget = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", metavar="N", min=1, help="Maximum tokens of an answer. Without it: 256."
        ),
    ] = None,
    system: options.System = "ckv",
    dtype: options.Dtype = "bfloat16",
    weights: options.Weights = None,
    salt: options.Salt = "",
    encrypt_key_file: options.EncryptKeyFile = None,
) -> None:
    """Chat about one document or several.

    The documents are stored as by `ckv ingest`, and each turn is stored after its answer. Answers
    are streamed; Ctrl-C ends an answer but not the session. /help lists the commands. You can also
    pipe questions in, one per line.
    """
    terminal = Terminal(as_json=False)
    share = None if budget is None else options.parse_budget(budget)
    texts = [options.read_text(file) for file in files]
    if len(texts) > 1:
        names = [Path(file).name for file in files]
        texts = [f"{name}\n\n{text.strip()}" for name, text in zip(names, texts, strict=True)]
    document = "\n\n".join(texts)
    about = options.origin(files, texts[0], salt=salt)
    PrefixRecord(**about)  # refuses wrong values before the model is loaded
    with terminal.loading():
        from ckv_jax.conversation import Conversation, check_talk
        from ckv_jax.storage.config import StoreConfig
        from ckv_jax.systems import preset
        from ckv_jax.user_cache import count_compiled

        chosen = preset(system)
        if not options.generates(chosen):
            raise ValueError(
                f"got --system {system}, which computes first tokens only; expected one that "
                "generates, such as ckv"
            )
        engine = options.open_engine(
            checkpoint,
            store,
            budget=share,
            system=chosen,
            dtype=dtype,
            weights=weights,
            salt=salt,
            warm_batch=0,
            check=partial(check_talk, document=document),
            settings=StoreConfig(encrypt_key_file=encrypt_key_file),
        )
    with engine:
        with terminal.progress() as bar, count_compiled() as compiled:
            talk = Conversation(engine, document, progress=bar("tokens"))
        before = engine.store.record_of(talk.prefix)
        engine.store.set_record(talk.prefix.id, replace(before, **about))
        if compiled:
            options.compile_questions(terminal, engine, talk.prefix)
        with talk:
            if sys.stdin.isatty():
                terminal.say(f"{talk.prefix.num_tokens:,} tokens are stored; /help, Ctrl-D ends")
            for line in _lines():
                if line.startswith("/"):
                    if not _command(terminal, engine, talk, line):
                        break
                    continue
                _answer(terminal, engine, talk, line, max_tokens, model=checkpoint.name)


def _lines() -> Iterator[str]:
    """Yields the non-empty lines of the terminal or a pipe; Ctrl-C discards the current line."""
    typed = sys.stdin.isatty()
    if typed:
        import readline  # noqa: F401 - gives `input` a history
    while True:
        try:
            line = input("> ") if typed else sys.stdin.readline()
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if not typed and not line:
            return
        if line.strip():
            yield line.strip()


def _command(terminal: Terminal, engine: Engine, talk: Conversation, line: str) -> bool:
    """Runs a slash command; returns whether the session continues."""
    name, _, value = line.partition(" ")
    if name in ("/quit", "/exit"):
        return False
    if name == "/budget":
        try:
            if value:
                talk.budget = options.parse_budget(value)
            budget = engine.config.budget if talk.budget is None else talk.budget
            terminal.say(f"budget {budget}")
        except ValueError as error:
            terminal.warn(one_line(error))
    elif name == "/sources":
        if talk.latest is None:
            terminal.warn("there is no answer yet; ask a question first")
        else:
            from ckv_jax.answer import citations_json

            try:
                with terminal.status("looking for sources"):
                    found = citations_json(engine.citations(talk.latest))
            except KeyboardInterrupt:
                return True
            except (CkvError, ValueError) as error:
                terminal.warn(one_line(error))
                return True
            options.show_citations(terminal, found)
            if not found:
                terminal.say("no passage stands out against an unrelated question")
    elif name == "/new":
        talk.forget()
    else:
        if name != "/help":
            terminal.warn(f"there is no command {name}")
        terminal.say(_HELP)
    return True


def _answer(
    terminal: Terminal,
    engine: Engine,
    talk: Conversation,
    question: str,
    max_tokens: int | None,
    *,
    model: str,
) -> None:
    """Streams one answer, then prints a line of figures."""
    from ckv_jax.answer import answer_json

    began, before = time.perf_counter(), talk.latest
    pieces = talk.ask(question, max_tokens=max_tokens)
    try:
        with terminal.status("reading the document") as waiting:
            show = terminal.stream(waiting)
            for piece in pieces:
                show(piece)
    except KeyboardInterrupt:
        pieces.close()  # what there is of the answer stays
    except (CkvError, ValueError) as error:
        terminal.warn(one_line(error))
        return
    terminal.out.print()
    if talk.latest is None or talk.latest is before:
        return
    completion = talk.latest.completion()
    answer = answer_json(talk.latest, engine, completion.prefix, model=model)
    answer["whole_s"] = time.perf_counter() - began
    terminal.figures(options.figures(answer, direct=engine.store.reads_past_cache))
    if answer["low_coverage"]:
        terminal.warn(
            options.low_coverage_message(
                answer["attention_mass"], completion.budget, option="/budget"
            )
        )
