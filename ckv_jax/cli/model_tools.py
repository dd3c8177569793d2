"""`ckv convert`, and what `ckv inspect` shows of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from ckv_jax.cli.options import (
    Checkpoint,
    Json,
)
from ckv_jax.cli.output import Terminal, byte_size

if TYPE_CHECKING:
    from ckv_jax.model.inspection import ModelInfo


def is_checkpoint(place: str) -> bool:
    """Whether this is a model: a GGUF file, or a folder with a `config.json` (no store has one)."""
    from ckv_jax.model.gguf import is_gguf

    return (Path(place) / "config.json").is_file() or is_gguf(place)


def inspect_checkpoint(terminal: Terminal, folder: Path, *, dtype: str) -> None:
    """Prints the family and sizes of a checkpoint, and its memory in an element type."""
    from ckv_jax.config import EngineConfig
    from ckv_jax.model.inspection import inspect_model
    from ckv_jax.model.sampling import generation_defaults

    EngineConfig(dtype=dtype)  # refuses unknown ones
    found = inspect_model(folder)
    ignored = dict(generation_defaults(folder).ignored)
    if terminal.as_json:
        terminal.json(found.to_json(dtype) | {"generation_ignored": ignored})
    else:
        _show_checkpoint(terminal, folder, found, dtype, ignored)


def _show_checkpoint(
    terminal: Terminal, folder: Path, found: ModelInfo, dtype: str, ignored: Mapping[str, Any]
) -> None:
    c = found.config
    kv, context = found.kv_bytes(dtype), c.max_position_embeddings
    head = "tied to the embedding" if c.tie_word_embeddings else "of its own"
    facts = {
        "family": f"{c.family.title} ({c.model_type})",
        "parameters": f"{found.parameters:,}, {found.stored_dtype} in {found.format} format",
        "layers": f"{c.num_layers}, hidden size {c.hidden_size:,}, MLP {c.intermediate_size:,}",
        "heads": f"{c.num_heads} of queries and {c.num_kv_heads} of KV, size {c.head_dim}",
        "vocabulary": f"{c.vocab_size:,}, head {head}",
        "context": f"{context:,} tokens, {_rope(found)}",
        "weights": f"{byte_size(found.weight_bytes(dtype))} in {dtype}",
        "KV": f"{byte_size(kv)} per token in {dtype}, {byte_size(kv * context)} per whole context",
        "disk": f"1 TB holds the KV of {10**12 // kv:,} tokens",
    }
    terminal.say(str(folder))
    for name, fact in facts.items():
        terminal.say(f"  {name:<11} {fact}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("one device of", no_wrap=True)
    table.add_column("room beside the weights", justify="right")
    table.add_column("tokens of KV in it", justify="right")
    for fit in found.fits(dtype):
        room = byte_size(fit.room) if fit.room > 0 else f"{byte_size(-fit.room)} too small"
        table.add_row(fit.memory, room, f"{fit.tokens:,}" if fit.tokens else "none")
    terminal.out.print(table)
    terminal.say("A tenth of each is left for computing. KV on disk needs no room here.")
    if ignored:
        listed = ", ".join(f"{name} {value}" for name, value in ignored.items())
        terminal.warn(f"generation_config.json asks for what is not supported: {listed}")


def _rope(found: ModelInfo) -> str:
    scaling = found.config.rope_scaling
    if scaling is None:
        return f"RoPE base {found.config.rope_theta:,.0f}"
    trained = scaling.original_max_position_embeddings
    return f"RoPE stretched from {trained:,} by {scaling.factor:g} ({scaling.rope_type})"


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

    Every command takes the new folder in place of the old one. A store identifies a model by the
    content of its files, so that texts have to be ingested again for a converted one.
    """
    terminal = Terminal(as_json=json)
    with terminal.status("converting"):
        from ckv_jax.model.weights import convert as convert_folder

        convert_folder(checkpoint, target, to=to)  # type: ignore[arg-type]  # it checks `to`
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    if json:
        terminal.json({"checkpoint": str(target), "format": to, "bytes": size})
    else:
        terminal.say(f"{target}: {byte_size(size)} in {to} format")
