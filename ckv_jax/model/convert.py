"""A checkpoint from one format to another: from Hugging Face's, GGUF or Orbax."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal, get_args

from ckv_jax.model.checkpoint import stored_dtype
from ckv_jax.model.gguf_model import is_gguf
from ckv_jax.model.orbax_store import save_orbax
from ckv_jax.model.tokenizer import load_tokenizer, tokenizer_files
from ckv_jax.model.weights import load_pretrained, save_pretrained

__all__ = ["Format", "convert"]

Format = Literal["orbax", "hf"]

_GENERATION = "generation_config.json"


def convert(source: str | Path, target: str | Path, *, to: Format) -> None:
    """Write the checkpoint `source`, of any format, as a new folder `target`.

    Weights keep their element type and every bit; those of a checkpoint that mixes several, or
    has quantised ones, become float32. The tokenizer and `generation_config.json` come along.
    `target` appears when all of it is written.

    Raises `ValueError` for a target that is not new or a format that does not exist,
    `CheckpointError` for the source.
    """
    source, target = Path(source), Path(target).absolute()
    if to not in get_args(Format):
        raise ValueError(f"got format {to!r}, expected one of {', '.join(get_args(Format))}")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"got {target}, which is there already, expected a new folder")
    beside = tokenizer_files(source)
    if (source / _GENERATION).is_file():
        beside.append(source / _GENERATION)
    model = load_pretrained(source, dtype=stored_dtype(source))
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    partial.mkdir(parents=True)
    try:
        for file in beside:
            shutil.copyfile(file, partial / file.name)
        if is_gguf(source):
            load_tokenizer(source).save(partial)
        (save_orbax if to == "orbax" else save_pretrained)(model, partial)
        partial.replace(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
