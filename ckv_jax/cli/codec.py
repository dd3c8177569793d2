"""`ckv codec profile`: a table of bits for the codec of one model, from what rounding costs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from ckv_jax.cli.ingest import read_text
from ckv_jax.cli.options import Checkpoint, Dtype, Json, SampleTexts, SampleTokens, System
from ckv_jax.cli.output import Terminal, byte_size, check_writable, json_line
from ckv_jax.cli.store_tools import parse_size

if TYPE_CHECKING:
    from ckv_jax.codec_profile import Choice

__all__ = ["profile"]


def profile(
    checkpoint: Checkpoint,
    text: SampleTexts = None,
    tokens: SampleTokens = 4096,
    target_bytes: Annotated[
        str | None,
        typer.Option(
            "--target-bytes",
            metavar="SIZE",
            help="What a token may take on disk, such as 20KiB. Without it, and without a loss: "
            "as much as with k8v4.",
        ),
    ] = None,
    target_loss: Annotated[
        float | None,
        typer.Option(
            "--target-loss",
            metavar="SHARE",
            help="How far attention may be off, such as 0.02: as few bytes as that allows.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.json", help="Write the table here, for --codec."),
    ] = None,
    system: System = "ckv",
    dtype: Dtype = "bfloat16",
    json: Json = False,
) -> None:
    """Find which bits each layer's keys and values need, and make a table of them for --codec.

    Measures how far the attention of every layer is off when its keys and values are rounded to 8,
    4 or 2 bits, and picks for each layer what loses least in the bytes there are.
    """
    terminal = Terminal(as_json=json)
    check_writable(out)
    if target_bytes is not None and target_loss is not None:
        raise ValueError("got --target-bytes and --target-loss, expected one of them")
    room = None if target_bytes is None else parse_size(target_bytes)
    read = [read_text(source) for source in text or ()]
    with terminal.loading():
        from ckv_jax import compilation_cache
        from ckv_jax.codec_profile import measured
        from ckv_jax.config import EngineConfig
        from ckv_jax.data.handbook import handbook
        from ckv_jax.fitting import layout_of
        from ckv_jax.model.config import ModelConfig
        from ckv_jax.model.tokenizer import load_tokenizer
        from ckv_jax.model.weights import load_pretrained
        from ckv_jax.sample_texts import pieces_of
        from ckv_jax.storage.codec import CODECS
        from ckv_jax.systems import system_named

        EngineConfig(dtype=dtype)  # refuses one that no engine has
        compilation_cache.enable()
        layout = layout_of(system_named(system), ModelConfig.from_hf(checkpoint), dtype)
        tokenizer = load_tokenizer(checkpoint)
        encoded = [tokenizer.encode(one, begins=True) for one in read or [handbook()]]
        pieces = pieces_of(encoded, tokens)
        model = load_pretrained(checkpoint, dtype=dtype)
    with terminal.progress() as bar:
        found = measured(model, layout, pieces, bar("layers"))
    if target_loss is not None:
        choice = found.within_loss(target_loss)
    else:
        like = CODECS["k8v4"]
        assert like is not None
        size = like.num_bytes(layout) * layout.groups / layout.chunk_tokens
        choice = found.within_bytes(size if room is None else room)
    body = choice.to_json() | {"model": checkpoint.resolve().name, "system": system}
    if out is not None:
        out.write_text(json_line(body), encoding="utf-8")
    if json:
        terminal.json(body)
        return
    _show(terminal, choice)
    if out is not None:
        terminal.say(f"wrote {out}; use it with --codec {out}", wrap=False)


def _show(terminal: Terminal, choice: Choice) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("layer", "bits of keys", "of values", "attention is off by"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer, (pair, loss) in enumerate(zip(choice.codec.bits, choice.layers, strict=True)):
        table.add_row(str(layer), *map(str, pair), f"{loss:.2%}")
    terminal.out.print(table)
    terminal.say(
        f"{byte_size(choice.bytes_per_token)} per token; attention is off by {choice.loss:.2%}"
    )
