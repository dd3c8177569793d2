"""`ckv demo`: see it work with no model, no network and no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckv_jax.cli.ingest import read_text
from ckv_jax.cli.options import Json, System
from ckv_jax.cli.output import Terminal, byte_size

if TYPE_CHECKING:
    from ckv_jax.demo import Report

__all__ = ["demo"]


def demo(
    text: Annotated[
        str | None,
        typer.Option(
            "--text", metavar="FILE", help="A text of your own, instead of the packaged one."
        ),
    ] = None,
    question: Annotated[
        str | None,
        typer.Option("--question", metavar="TEXT", help="A question of your own about the text."),
    ] = None,
    system: System = "ckv",
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            metavar="FOLDER",
            help="Where the checkpoint and the store are kept for the next time. "
            "Without it: ckv_jax in the user's cache folder.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Store a long text's KV, ask about it at five budgets, and show what each costs.

    Needs no model, no network and no GPU: a small checkpoint and a long text come with the
    package. Each row is one budget: time to the first token, what was read from SSD, and how far
    the answer is from reading everything.
    """
    if question is not None and not question.strip():
        raise ValueError("the question is empty")
    terminal = Terminal(as_json=json)
    own = None if text is None else read_text(text)
    with terminal.status("loading JAX and the checkpoint"):
        from ckv_jax import compilation_cache
        from ckv_jax.demo import Demo
        from ckv_jax.folders import cache_folder
        from ckv_jax.storage.layout import VERSION

        compilation_cache.enable()
        folder = cache or cache_folder()
        made = Demo.prepare(folder, text=own, question=question)
    terminal.say(made.headline)
    with terminal.progress() as bar:
        store = folder / f"store-{VERSION}"
        report = made.run(store, system=system, ingesting=bar("tokens"), asking=bar("questions"))
    if json:
        terminal.json(report.to_json())
    else:
        _show(terminal, report)


def _show(terminal: Terminal, report: Report) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    names = ["budget", "TTFT ms", "speed-up", "SSD MiB", "read", "mass", "KL", "agrees"]
    for name in [*names, *(["right"] if report.trained else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    recompute = report.recompute_ttft_ms
    for row in report.rows:
        chunks = row["chunks"]
        table.add_row(
            f"{row['budget']:.0%}",
            f"{row['ttft_ms']:,.1f}",
            f"{recompute / row['ttft_ms']:,.1f}x",
            f"{row['bytes']['ssd'] / 2**20:,.1f}",
            f"{chunks['selected'] / chunks['total']:.0%}" if chunks["total"] else "-",
            f"{row['attention_mass']:.0%}",
            f"{row['kl_to_recompute']:.0e}",
            f"{row['top1_agrees']:.0%}",
            *([f"{row['accuracy']:.0%}"] if report.trained else []),
        )
    table.add_section()
    table.add_row("recompute", f"{recompute:,.1f}", "1.0x", *["-"] * (len(table.columns) - 3))
    terminal.out.print(table)
    terminal.out.print()
    terminal.say(
        f"{report.prefix_tokens:,} tokens, {byte_size(report.store_bytes)} on disk; "
        f"{report.questions} question{'s' if report.questions > 1 else ''} a row. Times are "
        "medians after a warm-up; the KV is read from disk each time."
    )
    terminal.say(
        "TTFT: time to first token. mass: share of the probe's attention on what was read. "
        "KL, agrees: next-token distribution (nats) and first token against recompute."
        + (" right: right answers." if report.trained else "")
    )
    if not report.trained:
        terminal.say("With random weights attention is flat, so mass follows the budget.")
