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
    terminal = Terminal(as_json=json)
    own = None if text is None else read_text(text)
    with terminal.status("loading JAX and the checkpoint"):
        from ckv_jax.demo import Demo
        from ckv_jax.folders import cache_folder

        folder = cache or cache_folder()
        made = Demo.prepare(folder, text=own, question=question)
    terminal.say(made.headline)
    with terminal.progress() as bar:
        report = made.run(
            folder / "store", system=system, ingesting=bar("tokens"), asking=bar("questions")
        )
    if json:
        terminal.json(report.to_json())
    else:
        _show(terminal, report)


def _show(terminal: Terminal, report: Report) -> None:
    from rich.table import Table

    table = Table(
        title=f"{report.prefix_tokens:,} tokens stored; times are medians, cold, after warm-up",
        title_justify="left",
    )
    for name in ("budget", "first token", "faster", "from SSD", "prefix read", "attention mass"):
        table.add_column(name, justify="right")
    for name in ("KL to recompute", "same token", *(["right answers"] if report.trained else [])):
        table.add_column(name, justify="right")
    recompute = report.recompute_ttft_ms
    for row in report.rows:
        chunks = row["chunks"]
        table.add_row(
            f"{row['budget']:.0%}",
            f"{row['ttft_ms']:.1f} ms",
            f"{recompute / row['ttft_ms']:.1f}x",
            byte_size(row["bytes"]["ssd"]),
            f"{chunks['selected'] / chunks['total']:.1%}" if chunks["total"] else "-",
            f"{row['attention_mass']:.1%}",
            f"{row['kl_to_recompute']:.1e}",
            f"{row['top1_agrees']:.0%}",
            *([f"{row['accuracy']:.0%}"] if report.trained else []),
        )
    table.add_section()
    accuracy = [f"{report.recompute_accuracy:.0%}"] if report.trained else []
    table.add_row("recompute", f"{recompute:.1f} ms", "1.0x", "-", "-", "-", "-", "-", *accuracy)
    terminal.out.print(table)
    terminal.say(f"The store takes {byte_size(report.store_bytes)} on disk.")
    if not report.trained:
        terminal.say(
            "Weights are random: times and bytes are real, answers and agreement mean little."
        )
