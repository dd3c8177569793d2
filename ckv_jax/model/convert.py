"""A checkpoint folder from one format to the other: Hugging Face's and Orbax."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal, get_args

from ckv_jax.errors import CheckpointError
from ckv_jax.model.checkpoint import hub_hint, stored_dtype
from ckv_jax.model.orbax_store import save_orbax
from ckv_jax.model.tokenizer import tokenizer_files
from ckv_jax.model.weights import load_pretrained, save_pretrained

__all__ = ["Format", "convert"]

Format = Literal["orbax", "hf"]

_GENERATION = "generation_config.json"


def convert(source: str | Path, target: str | Path, *, to: Format) -> None:
    """Write the checkpoint in `source`, of either format, as a new folder `target`.

    Weights keep their element type (float32 where a checkpoint mixes several) and every bit; the
    tokenizer and `generation_config.json` come along. `target` appears when all of it is written.

    Raises `ValueError` for a target that is not new or a format that does not exist,
    `CheckpointError` for the source.
    """
    source, target = Path(source), Path(target).absolute()
    if to not in get_args(Format):
        raise ValueError(f"got format {to!r}, expected one of {', '.join(get_args(Format))}")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"got {target}, which is there already, expected a new folder")
    if not source.is_dir():
        raise CheckpointError(f"there is no folder {source}{hub_hint(source)}")
    beside = tokenizer_files(source)
    if (source / _GENERATION).is_file():
        beside.append(source / _GENERATION)
    model = load_pretrained(source, dtype=stored_dtype(source))
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    partial.mkdir(parents=True)
    try:
        for file in beside:
            shutil.copyfile(file, partial / file.name)
        (save_orbax if to == "orbax" else save_pretrained)(model, partial)
        partial.replace(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
