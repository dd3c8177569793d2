"""`ckv heads profile`: which heads of a model find things, so that they alone score chunks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from ckv_jax.cli.ingest import read_text
from ckv_jax.cli.options import Checkpoint, Dtype, Json, SampleTexts, SampleTokens, System
from ckv_jax.cli.output import Terminal, check_writable, json_line

if TYPE_CHECKING:
    from ckv_jax.config import Heads
    from ckv_jax.head_profile import Profile

__all__ = ["profile"]


def profile(
    checkpoint: Checkpoint,
    text: SampleTexts = None,
    tokens: SampleTokens = 4096,
    layers: Annotated[
        int,
        typer.Option(
            "--layers",
            metavar="N",
            min=1,
            help="Layers of each period that score, each by one head: those that find most.",
        ),
    ] = 2,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.json", help="Write the heads here, for --heads."),
    ] = None,
    system: System = "ckv",
    dtype: Dtype = "bfloat16",
    json: Json = False,
) -> None:
    """Find the heads that find things, for --heads: what is scored then is a fraction of the rest.

    Repeats excerpts of the texts at their end, and measures which heads attend to where they stood
    first.
    """
    terminal = Terminal(as_json=json)
    check_writable(out)
    read = [read_text(source) for source in text or ()]
    with terminal.loading():
        from ckv_jax import compilation_cache
        from ckv_jax.config import EngineConfig
        from ckv_jax.data.handbook import handbook
        from ckv_jax.head_profile import measured
        from ckv_jax.model.tokenizer import load_tokenizer
        from ckv_jax.model.weights import load_pretrained
        from ckv_jax.sample_texts import pieces_of
        from ckv_jax.systems import preset

        EngineConfig(dtype=dtype)  # refuses one that no engine has
        compilation_cache.enable()
        period = preset(system).period
        preset(system, heads=((0, 0),))  # refuses a system that has no digest
        tokenizer = load_tokenizer(checkpoint)
        encoded = [tokenizer.encode(one, begins=True) for one in read or [handbook()]]
        pieces = pieces_of(encoded, tokens)
        model = load_pretrained(checkpoint, dtype=dtype)
    with terminal.progress() as bar:
        found = measured(model, period, pieces, bar("layers"))
    heads = found.best(period, layers)
    body = {
        "heads": [list(pair) for pair in heads],
        "found": [float(found.found[pair]) for pair in heads],
        "held": [float(found.held[pair]) for pair in heads],
        "chance": found.chance,
        "model": checkpoint.resolve().name,
        "system": system,
    }
    if out is not None:
        out.write_text(json_line(body), encoding="utf-8")
    if json:
        terminal.json(body)
        return
    _show(terminal, heads, found)
    if out is not None:
        terminal.say(f"wrote {out}; use it with --heads {out}", wrap=False)


def _show(terminal: Terminal, heads: Heads, found: Profile) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("layer", "KV head", "finds", "the layer's others", "in few chunks"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer, head in heads:
        others = [share for at, share in enumerate(found.found[layer]) if at != head]
        span = f"{min(others):.1%} to {max(others):.1%}" if others else "none"
        own, held = found.found[layer, head], found.held[layer, head]
        table.add_row(str(layer), str(head), f"{own:.1%}", span, f"{held:.1%}")
    terminal.out.print(table)
    terminal.say(
        f"{len(heads)} of {found.found.size} heads. “Finds” is the attention to where an excerpt "
        f"stood first, {found.chance:.1%} by chance; “in few chunks” what a twentieth of them hold."
    )
