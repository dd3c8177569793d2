"""`ckv convert`, `ckv calibrate`, and what `ckv inspect` shows of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from ckv_jax.cli import options
from ckv_jax.cli.output import Terminal, byte_size

if TYPE_CHECKING:
    from ckv_jax.model.tensor_map import ModelInfo

_FIDELITIES = (0.9, 0.95, 0.98, 0.99)


def is_checkpoint(place: str) -> bool:
    """Whether this is a model: a GGUF file, or a folder with a `config.json` (no store has one)."""
    from ckv_jax.model.gguf import is_gguf

    return (Path(place) / "config.json").is_file() or is_gguf(place)


def inspect_checkpoint(terminal: Terminal, folder: Path, *, dtype: str) -> None:
    """Prints the family and sizes of a checkpoint, and its memory in an element type."""
    from ckv_jax.config import EngineConfig
    from ckv_jax.model.sampling import generation_defaults
    from ckv_jax.model.tensor_map import inspect_model

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
    checkpoint: options.Checkpoint,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The folder to write; it must be new.")
    ],
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help="orbax (loads faster) or hf (Hugging Face)."),
    ] = "orbax",
    json: options.Json = False,
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


# -- calibration -----------------------------------------------------------------------------------


def calibrate(
    checkpoint: options.Checkpoint,
    store: options.Store,
    prefix: Annotated[
        list[str] | None,
        typer.Option(
            "--prefix",
            metavar="ID|NAME",
            help="A stored text to ask about; several depend less on what one is like. Without it: "
            "the one text in the store.",
        ),
    ] = None,
    questions: Annotated[
        int,
        typer.Option(
            "--questions", metavar="N", min=50, help="Passages of the texts to begin again."
        ),
    ] = 200,
    system: options.System = "ckv",
    dtype: options.Dtype = "bfloat16",
    weights: options.Weights = None,
    salt: options.Salt = "",
    encrypt_key_file: options.EncryptKeyFile = None,
    json: options.Json = False,
) -> None:
    """Learn which share of a text gives the whole text's first token, for `ckv ask --budget auto`.

    Passages of stored texts are begun again at every budget. What that says is kept for this model.
    """
    terminal = Terminal(as_json=json)
    with terminal.loading():
        from ckv_jax.storage.config import StoreConfig
        from ckv_jax.systems import preset

        settings = StoreConfig(encrypt_key_file=encrypt_key_file)
        with options.open_store(store, settings) as opened:
            names: list[str | None] = [*prefix] if prefix else [None]
            stored = [options.find_prefix(opened, name, salt=salt) for name in names]
        chosen = preset(system, codec=options.codec_name(stored[0]))
        engine = options.open_engine(
            checkpoint, store, settings=settings, system=chosen, dtype=dtype, weights=weights,
            salt=salt,
        )  # fmt: skip
    with engine:
        for one in stored:
            engine.check_prefix(one)
        with terminal.progress() as bar:
            found = engine.calibrate(stored, questions=questions, progress=bar("questions"))
        spread = dict(zip(found.budgets, found.spread.tolist(), strict=True))
        same = {b: sum(row[i] for row in found.same) for i, b in enumerate(found.budgets)}
        thresholds = {p: found.threshold(p) for p in _FIDELITIES}
    if json:
        terminal.json(
            {
                "questions": len(found.gaps),
                "same": {f"{b:g}": n / len(found.gaps) for b, n in same.items()},
                "error_of_gaps": {f"{b:g}": value for b, value in spread.items()},
                "thresholds": {
                    f"{p:g}": None if math.isinf(value) else value
                    for p, value in thresholds.items()
                },
            }
        )
        return
    for budget, count in same.items():
        terminal.say(
            f"{budget:>4.0%} of the text: {count} of {len(found.gaps)} first tokens are the same"
        )
    for fidelity, threshold in thresholds.items():
        if math.isinf(threshold):
            terminal.say(f"fidelity:{fidelity:g} needs more questions: everything is read for it")
    terminal.say("`ckv ask --budget auto`, or fidelity:0.95, asks for as little as it can now")
