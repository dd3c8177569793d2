"""`ckv convert`: a checkpoint from one format to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckv_jax.cli.options import Checkpoint, Json
from ckv_jax.cli.output import Terminal, byte_size

__all__ = ["convert"]


def convert(
    checkpoint: Checkpoint,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The folder to write; it must be new.")
    ],
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help="orbax (loads faster) or hf (Hugging Face)."),
    ] = "orbax",
    json: Json = False,
) -> None:
    """Write a checkpoint in another format, weights bit for bit, tokenizer included.

    Quantised weights of a GGUF file are written in float32.

    The new folder can be given to every command in place of the old one. A store knows a model by
    the content of its files, so that texts are ingested anew for a converted one.
    """
    terminal = Terminal(as_json=json)
    with terminal.status("converting"):
        from ckv_jax.model.convert import convert as convert_folder

        convert_folder(checkpoint, target, to=to)  # type: ignore[arg-type]  # it checks `to`
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    if json:
        terminal.json({"checkpoint": str(target), "format": to, "bytes": size})
    else:
        terminal.say(f"{target}: {byte_size(size)} in {to} format")
