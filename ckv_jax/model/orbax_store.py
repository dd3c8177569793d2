"""Orbax checkpoints of converted weights: no transposing, no fusing, straight to the device."""

from __future__ import annotations

import json
from pathlib import Path

import jax
from flax import nnx

from ckv_jax.errors import CheckpointError
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.qwen2 import Qwen2

__all__ = ["is_orbax", "orbax_dtype", "orbax_files", "restore_orbax", "save_orbax"]

_CONFIG = "config.json"
_WEIGHTS = "weights"
_ORDER = "kernels_out_first"


def is_orbax(folder: str | Path) -> bool:
    """Whether `save_orbax` wrote this folder (or something that looks like it)."""
    return (Path(folder) / _WEIGHTS).is_dir()


def orbax_files(folder: str | Path) -> list[Path]:
    """The files that hold the weights, sorted."""
    return sorted(path for path in (Path(folder) / _WEIGHTS).rglob("*") if path.is_file())


def save_orbax(model: Qwen2, folder: str | Path) -> None:
    """Write the weights in their dtype, with the config beside them; replaces what was there."""
    import orbax.checkpoint as ocp  # slow to import, and only needed here

    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / _WEIGHTS, nnx.to_pure_dict(nnx.state(model)), force=True)
    config = model.config.to_hf(dtype=model.dtype.name) | {_ORDER: model.out_first}
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def orbax_dtype(folder: str | Path) -> str:
    """The element type in which `save_orbax` wrote the weights."""
    saved = json.loads((Path(folder) / _CONFIG).read_text(encoding="utf-8"))
    dtype: str = saved.get("dtype", "bfloat16")
    return dtype


def restore_orbax(
    folder: str | Path, *, dtype: str | None = None, target: Target | None = None
) -> Qwen2:
    """The model that `save_orbax` wrote, on the default device, in its own dtype or `dtype`.

    Raises `CheckpointError` if the folder is not such a checkpoint or does not fit its config.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    config = ModelConfig.from_hf(folder)
    if not is_orbax(folder):
        raise CheckpointError(f"not an Orbax checkpoint: {folder} has no {_WEIGHTS} folder")
    saved = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    model = Qwen2.abstract(
        config,
        dtype=dtype or orbax_dtype(folder),
        out_first=saved.get(_ORDER, False),
        target=target,
    )
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(
        lambda leaf: leaf.update(sharding=place), nnx.to_pure_dict(nnx.state(model))
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            values = checkpointer.restore(folder / _WEIGHTS, wanted)
    except (FileNotFoundError, KeyError, ValueError) as error:
        raise CheckpointError(f"cannot restore {folder}: {error}") from error
    nnx.update(model, values)
    return model
