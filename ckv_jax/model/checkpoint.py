"""A checkpoint: which files hold its weights, and whether they fit its config. No JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from ckv_jax.errors import CheckpointError
from ckv_jax.model.gguf import GgufModel, gguf_paths, is_gguf
from ckv_jax.model.safetensors_file import SafetensorsFile, check_pointer, is_computed

Shapes = dict[str, tuple[int, ...]]

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ORBAX_WEIGHTS = "weights"


class TensorSource(Protocol):
    """What holds tensors by Hugging Face's names: a file, or a model of several."""

    @property
    def path(self) -> Path:
        """Where it is."""
        ...

    @property
    def shapes(self) -> Shapes:
        """The shape of every tensor."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor in fresh memory."""
        ...


def is_orbax(folder: str | Path) -> bool:
    """Whether `save_orbax` wrote this folder (or something that looks like it)."""
    return (Path(folder) / ORBAX_WEIGHTS).is_dir()


def weight_files(folder: str | Path) -> list[Path]:
    """The files that hold a checkpoint's weights, sorted; `CheckpointError` if there are none."""
    folder = Path(folder)
    if is_gguf(folder):
        return gguf_paths(folder)
    if not folder.is_dir():
        raise not_a_checkpoint(folder)
    if is_orbax(folder):
        return sorted(path for path in (folder / ORBAX_WEIGHTS).rglob("*") if path.is_file())
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return sorted({folder / file for file in _weight_map(folder).values()})
    raise not_a_checkpoint(folder, f"{SINGLE} and no {INDEX}")


def not_a_checkpoint(path: Path, missing: str = CONFIG) -> CheckpointError:
    """The error for a path that holds no model that can be read: what it is, and what to do.

    `missing`: what a checkpoint would have, for a folder that is nothing known.
    """
    if path.is_file():
        return CheckpointError(f"got the file {path}, expected a folder or a GGUF file")
    if not path.is_dir():
        kind = "file" if path.suffix == ".gguf" else "folder"
        return CheckpointError(f"there is no {kind} {path}{hub_hint(path)}")
    for pattern, what in _OTHER_FOLDERS.items():
        found = sorted(path.glob(pattern))
        if found:
            return CheckpointError(f"{path} {what.format(found[0].name)}")
    return CheckpointError(f"not a checkpoint: {path} has no {missing}")


_OTHER_FOLDERS: Mapping[str, str] = {
    "adapter_config.json": "is a LoRA adapter ({}), expected a whole model: merge it into its base "
    "first (peft: merge_and_unload, then save_pretrained)",
    "consolidated.*": "holds weights in the publisher's own format ({}), expected Hugging Face's "
    f"({CONFIG} and {SINGLE}): fetch those, or convert them with transformers",
    "*.bin": "holds PyTorch pickles ({}), which are not read: convert them first (transformers: "
    "from_pretrained, then save_pretrained)",
    "*.gguf": "is a folder of GGUF files: give the file, such as {}",
}
"""What else a folder can hold: a file that says so, and the rest of the sentence."""


def hub_hint(folder: Path) -> str:
    """How to fetch what looks like a name on the Hugging Face hub; "" for anything else."""
    parts = folder.parts
    if len(parts) != 2 or folder.is_absolute() or folder.parent.exists() or parts[0] in (".", ".."):
        return ""
    return (
        f"; to fetch it from the Hugging Face hub: hf download {folder} --local-dir {parts[1]}, "
        f"then give {parts[1]}"
    )


def stored_dtype(folder: str | Path) -> str:
    """The element type of a checkpoint's weights; float32 where it mixes several, or has
    quantised ones."""
    folder = Path(folder)
    if is_gguf(folder):
        found = {_GGUF_DTYPES.get(kind, "float32") for kind in GgufModel(folder).types.values()}
        return found.pop() if len(found) == 1 else "float32"
    if is_orbax(folder):
        saved = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        dtype: str = saved.get("dtype", "bfloat16")
        return dtype
    dtypes = {dtype.name for path in weight_files(folder) for dtype in SafetensorsFile(path).dtypes}
    return dtypes.pop() if len(dtypes) == 1 else "float32"


_GGUF_DTYPES: Mapping[str, str] = {"F16": "float16", "BF16": "bfloat16"}


def locate(folder: Path) -> dict[str, TensorSource]:
    """What holds each tensor, checked against the index where there is one."""
    if is_gguf(folder):
        model = GgufModel(folder)
        return dict.fromkeys(model.shapes, model)
    files = [SafetensorsFile(path) for path in weight_files(folder)]
    places: dict[str, TensorSource] = {}
    for file in files:
        for name in file.shapes:
            if name in places:
                raise CheckpointError(
                    f"duplicate tensor {name!r}: in {places[name].path.name} and {file.path.name}"
                )
            places[name] = file
    if files[0].path.name == SINGLE:
        return places
    index = _weight_map(folder)
    for name, file_name in index.items():
        if not is_computed(name) and (name not in places or places[name].path.name != file_name):
            raise CheckpointError(f"missing tensor {name!r}: {INDEX} places it in {file_name}")
    for name, source in places.items():
        if name not in index:
            raise CheckpointError(f"unknown tensor {name!r} in {source.path.name}, not in {INDEX}")
    return places


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    check_pointer(path)
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        plain = all(Path(file).name == file for file in places.values())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a safetensors index: {error!r}") from error
    if not plain or not places:
        raise CheckpointError(f"{path} is empty or points outside its folder")
    return dict(places)


def check_fit(folder: Path, expected: Shapes, found: Shapes) -> None:
    """Raises `CheckpointError` unless the tensors found, by name and shape, are the model's."""
    faults = [f"missing tensor {name!r} {shape}" for name, shape in expected.items()
              if name not in found]  # fmt: skip
    faults += [f"unknown tensor {name!r} {found[name]}" for name in found if name not in expected]
    faults += [
        f"tensor {name!r} has shape {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(
            f"the weights in {folder} do not fit its config: {'; '.join(faults[:5])}{more}"
        )
