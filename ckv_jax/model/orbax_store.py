"""Orbax checkpoints of converted weights: no transposing, no fusing, straight to the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from ckv_jax.errors import CheckpointError
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.checkpoint import (
    CONFIG,
    ORBAX_WEIGHTS,
    Shapes,
    check_fit,
    is_orbax,
    stored_dtype,
)
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.placing import check_whole_model

__all__ = ["restore_orbax", "save_orbax"]

_ORDER = "kernels_out_first"


def save_orbax(model: Transformer, folder: str | Path) -> None:
    """Write the weights in their dtype, with the config beside them; replaces what was there.

    Raises `ValueError` for a model that is split over devices.
    """
    check_whole_model(model)
    import orbax.checkpoint as ocp  # slow to import, and only needed here

    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / ORBAX_WEIGHTS, nnx.to_pure_dict(nnx.state(model)), force=True)
    config = model.config.to_hf(dtype=model.dtype.name) | {_ORDER: model.out_first}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def restore_orbax(
    folder: str | Path, *, dtype: str | None = None, target: Target | None = None
) -> Transformer:
    """The model that `save_orbax` wrote, on this process's first device.

    In its own dtype or `dtype`; the whole model, whatever it is split over later.

    Raises `CheckpointError` if the folder is not such a checkpoint or does not fit its config.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    config = ModelConfig.from_hf(folder)
    if not is_orbax(folder):
        raise CheckpointError(f"not an Orbax checkpoint: {folder} has no {ORBAX_WEIGHTS} folder")
    saved = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    model = Transformer.abstract(
        config,
        dtype=dtype or stored_dtype(folder),
        out_first=saved.get(_ORDER, False),
        target=target,
    )
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = jax.tree.map(
        lambda leaf: leaf.update(sharding=place), nnx.to_pure_dict(nnx.state(model))
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            written = checkpointer.metadata(folder / ORBAX_WEIGHTS).item_metadata.tree
            check_fit(folder, _shapes(wanted), _shapes(written))
            values = checkpointer.restore(folder / ORBAX_WEIGHTS, wanted)
    except (FileNotFoundError, KeyError, ValueError) as error:
        raise CheckpointError(f"cannot restore {folder}: {error}") from error
    nnx.update(model, values)
    return model


def _shapes(tree: Any) -> Shapes:
    """The shape of each array of a tree, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in leaves
    }
