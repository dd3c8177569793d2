"""A checkpoint folder: which files hold its weights, and whether they fit its config. No JAX."""

from __future__ import annotations

import json
from pathlib import Path

from ckv_jax.errors import CheckpointError
from ckv_jax.model.safetensors_file import SafetensorsFile

__all__ = [
    "CONFIG",
    "INDEX",
    "ORBAX_WEIGHTS",
    "SINGLE",
    "Shapes",
    "check_fit",
    "hub_hint",
    "is_orbax",
    "locate",
    "stored_dtype",
    "weight_files",
]

Shapes = dict[str, tuple[int, ...]]

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ORBAX_WEIGHTS = "weights"


def is_orbax(folder: str | Path) -> bool:
    """Whether `save_orbax` wrote this folder (or something that looks like it)."""
    return (Path(folder) / ORBAX_WEIGHTS).is_dir()


def weight_files(folder: str | Path) -> list[Path]:
    """The files that hold a checkpoint's weights, sorted; `CheckpointError` if there are none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}{hub_hint(folder)}")
    if is_orbax(folder):
        return sorted(path for path in (folder / ORBAX_WEIGHTS).rglob("*") if path.is_file())
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return sorted({folder / file for file in _weight_map(folder).values()})
    raise CheckpointError(
        f"not a checkpoint: {folder} has neither {SINGLE} nor {INDEX}"
        + ("; convert pytorch_model*.bin first" if list(folder.glob("pytorch_model*.bin")) else "")
    )


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
    """The element type of a checkpoint's weights; float32 where it mixes several."""
    if is_orbax(folder):
        saved = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
        dtype: str = saved.get("dtype", "bfloat16")
        return dtype
    dtypes = {dtype.name for path in weight_files(folder) for dtype in SafetensorsFile(path).dtypes}
    return dtypes.pop() if len(dtypes) == 1 else "float32"


def locate(folder: Path) -> dict[str, SafetensorsFile]:
    """Which file holds each tensor, checked against the index where there is one."""
    files = [SafetensorsFile(path) for path in weight_files(folder)]
    places: dict[str, SafetensorsFile] = {}
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
        if name not in places or places[name].path.name != file_name:
            raise CheckpointError(f"missing tensor {name!r}: {INDEX} places it in {file_name}")
    for name, file in places.items():
        if name not in index:
            raise CheckpointError(f"unknown tensor {name!r} in {file.path.name}, not in {INDEX}")
    return places


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX
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
