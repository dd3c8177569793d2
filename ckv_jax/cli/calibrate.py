"""`ckv calibrate`: learns, for a model, what a first token that equals full attention's takes."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from ckv_jax.cli.options import Checkpoint, Dtype, Json, Salt, Store, System, Weights
from ckv_jax.cli.output import Terminal
from ckv_jax.cli.stores import codec_name, find_prefix, open_store

_FIDELITIES = (0.9, 0.95, 0.98, 0.99)


def calibrate(
    checkpoint: Checkpoint,
    store: Store,
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
    system: System = "ckv",
    dtype: Dtype = "bfloat16",
    weights: Weights = None,
    salt: Salt = "",
    json: Json = False,
) -> None:
    """Learn which share of a text gives the whole text's first token, for `ckv ask --budget auto`.

    Passages of stored texts are begun again at every budget. What that says is kept for this model.
    """
    terminal = Terminal(as_json=json)
    with terminal.loading():
        from ckv_jax.config import EngineConfig
        from ckv_jax.engine import Engine
        from ckv_jax.systems import preset
        from ckv_jax.user_cache import enable_compilation_cache

        enable_compilation_cache()
        with open_store(store) as opened:
            names: list[str | None] = [*prefix] if prefix else [None]
            stored = [find_prefix(opened, name, salt=salt) for name in names]
        chosen = preset(system, codec=codec_name(stored[0]))
        config = EngineConfig(system=chosen, dtype=dtype, weights=weights, salt=salt)
        engine = Engine.from_pretrained(checkpoint, store=store, config=config)
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
