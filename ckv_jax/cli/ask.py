"""`ckv ask`: one question over a stored text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckv_jax.cli.options import Budget, Checkpoint, Dtype, Json, Salt, Store, System
from ckv_jax.cli.output import Terminal, byte_size

if TYPE_CHECKING:
    from ckv_jax.request import Result

__all__ = ["ask"]


def ask(
    checkpoint: Checkpoint,
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="What follows the stored text, as it is.")
    ],
    store: Store,
    prefix: Annotated[
        str | None,
        typer.Option(
            "--prefix",
            metavar="ID",
            help="Which stored text: the id that `ckv ingest` printed, or how it begins. "
            "May be left out where the store holds just one.",
        ),
    ] = None,
    budget: Budget = None,
    system: System = "ckv",
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", metavar="N", min=1, help="Tokens to answer with, at most."),
    ] = 1,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Put the question into the tokenizer's chat template."),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write the timeline here; ui.perfetto.dev opens it."
        ),
    ] = None,
    dtype: Dtype = "bfloat16",
    salt: Salt = "",
    json: Json = False,
) -> None:
    """Answer a question over a stored text, reading only the share of it that the budget allows.

    Prints the answer, then where the time to its first token went. The first question of a
    process also pays for compilation; ask many with `ckv batch`.
    """
    if not question.strip():
        raise ValueError("the question is empty")
    terminal = Terminal(as_json=json)
    with terminal.status("loading JAX and the model"):
        from ckv_jax.answer import answer_json
        from ckv_jax.cli.serving import find_prefix, open_engine
        from ckv_jax.request import Request

        engine = open_engine(
            checkpoint, store, budget=budget, system=system, dtype=dtype, salt=salt
        )
    with engine:
        stored = find_prefix(engine, prefix)
        if chat:
            question = engine.chat(question)
        request = Request(prefix=stored, suffix=question, budget=budget)
        with terminal.status("answering"):
            (result,) = engine.reprefill([request])
        answer = answer_json(result, engine, stored, model=checkpoint.name, question=question)
    if trace is not None:
        from ckv_jax.trace import write_perfetto

        write_perfetto(trace, [result.trace])
    if json:
        terminal.json(answer)
    else:
        terminal.out.print(result.text, markup=False)
        _show(terminal, result, answer)


def _show(terminal: Terminal, result: Result, answer: dict[str, Any]) -> None:
    """The breakdown as a bar chart, and what was read, in words."""
    terminal.out.print()
    result.trace.breakdown_bar(terminal.out)
    chunks = answer["chunks"]
    share = chunks["selected"] / chunks["total"] if chunks["total"] else 1.0
    ssd, host, device = (byte_size(answer["bytes"][tier]) for tier in ("ssd", "host", "device"))
    terminal.say(
        f"\n{share:.1%} of {answer['prefix_tokens']:,} tokens took part, holding "
        f"{answer['attention_mass']:.1%} of the probe's attention; "
        f"read {ssd} from SSD, {host} from host and {device} from device memory"
    )
