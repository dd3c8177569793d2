"""Checkpoint files: finds the weights, checks them against the config, reads safetensors.

A safetensors file is eight bytes of header length, a JSON header, and the tensors' bytes. Reading
tensor by tensor with plain file reads keeps host memory at one tensor, whatever the file's size. No
JAX.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ckv_jax.errors import CheckpointError
from ckv_jax.model.gguf import (
    DTYPES,
    MOST_TENSORS,
    GgufModel,
    check_pointer,
    gguf_paths,
    is_gguf,
)
from ckv_jax.user_cache import partial_of

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
    """Creates the error for a path without a readable model: what the path is, and what to do.

    `missing`: the file that a checkpoint would have, named for an unknown folder.
    """
    if path.is_file():
        return CheckpointError(f"got the file {path}, expected a folder or a GGUF file")
    if not path.is_dir():
        kind = "file" if path.suffix == ".gguf" else "folder"
        hint = hub_hint(path) or "; give the path of a downloaded model"
        return CheckpointError(f"there is no {kind} {path}{hint}")
    for pattern, what in _OTHER_FOLDERS.items():
        found = sorted(path.glob(pattern))
        if found:
            return CheckpointError(f"{path} {what.format(found[0].name)}")
    return CheckpointError(
        f"not a checkpoint: {path} has no {missing}; give a folder in Hugging Face format or a "
        "GGUF file"
    )


_OTHER_FOLDERS: Mapping[str, str] = {
    "adapter_config.json": "is a LoRA adapter ({}), expected a whole model: merge it into its base "
    "first (peft: merge_and_unload, then save_pretrained)",
    "consolidated.*": "holds weights in the publisher's own format ({}), expected Hugging Face's "
    f"({CONFIG} and {SINGLE}): fetch those, or convert them with transformers",
    "*.bin": "holds PyTorch pickles ({}), which are not read: convert them first (transformers: "
    "from_pretrained, then save_pretrained)",
    "*.gguf": "is a folder of GGUF files: give the file, such as {}",
}
"""Other kinds of folders: a file that identifies each, and the rest of the message."""


_LOCAL = {("..",), ("models",), ("checkpoints",)}
"""Usual first folders of a local path. They are no owners of models on the hub."""


def hub_hint(folder: Path) -> str:
    """Says how to fetch a model by its name on the Hugging Face hub; "" for any other path."""
    parts = folder.parts
    local = folder.is_absolute() or folder.parent.exists() or folder.parts[:1] in _LOCAL
    if len(parts) != 2 or local:
        return ""
    return (
        f"; to fetch it from the Hugging Face hub: hf download {folder} --local-dir {parts[1]}, "
        f"then give {parts[1]}"
    )


def stored_dtype(folder: str | Path) -> str:
    """The element type of a checkpoint's weights; float32 where it mixes several, or has
    quantised ones."""
    folder = Path(folder)
    if is_orbax(folder):
        saved = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        dtype: str = saved.get("dtype", "bfloat16")
        return dtype
    if is_gguf(folder):
        kinds = GgufModel(folder).types.values()
        dtypes = {DTYPES.get(kind, np.dtype(np.float32)) for kind in kinds}
    else:
        dtypes = {dtype for path in weight_files(folder) for dtype in SafetensorsFile(path).dtypes}
    return dtypes.pop().name if len(dtypes) == 1 else "float32"


def locate(folder: Path) -> dict[str, TensorSource]:
    """Maps each tensor to its source, checked against the index where there is one."""
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


# -- safetensors -----------------------------------------------------------------------------------

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # the format's own limit, in bytes
_COMPUTED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


def is_computed(name: str) -> bool:
    """Whether a tensor is a buffer that the config determines, as old checkpoints hold them."""
    return name.endswith(_COMPUTED)


class SafetensorsFile:
    """The tensors of one file, by name, without those that `is_computed`. Holds no open file and
    no data.

    Raises `CheckpointError` for a file that is missing, cut short, names a tensor twice, or
    whose header does not describe its bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_pointer(path)
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
                    raise CheckpointError(f"{path} is not a safetensors file, or is cut short")
                text = file.read(length)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        try:
            header = json.loads(text, object_pairs_hook=self._unique)
            header.pop("__metadata__", None)
            self._start = 8 + length
            self._entries = {
                name: (entry["dtype"], tuple(entry["shape"]), tuple(entry["data_offsets"]))
                for name, entry in header.items()
                if not is_computed(name)
            }
            for name in self._entries:
                self._check(name, size - self._start)
        except (
            AttributeError,
            KeyError,
            OverflowError,
            RecursionError,
            TypeError,
            UnicodeDecodeError,
            ValueError,
        ) as error:
            raise CheckpointError(f"{path} has a damaged safetensors header: {error!r}") from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (_, shape, _) in self._entries.items()}

    @property
    def dtypes(self) -> set[np.dtype[Any]]:
        """The element types that occur in the file."""
        return {DTYPES[dtype] for dtype, _, _ in self._entries.values()}

    def read(self, name: str) -> np.ndarray:
        """One tensor as it is stored, in fresh memory."""
        dtype, shape, (start, _) = self._entries[name]
        bits = np.dtype(f"u{DTYPES[dtype].itemsize}")
        count = math.prod(shape)
        data = np.fromfile(self.path, dtype=bits, count=count, offset=self._start + start)
        if data.size != count:
            raise CheckpointError(f"{self.path} was cut short while tensor {name!r} was read")
        return data.view(DTYPES[dtype]).reshape(shape)

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise CheckpointError(f"duplicate tensor {name!r} in {self.path}")
            found[name] = value
        if len(found) > MOST_TENSORS:
            raise CheckpointError(
                f"{self.path}: got {len(found)} tensors, expected at most {MOST_TENSORS}"
            )
        return found

    def _check(self, name: str, data_bytes: int) -> None:
        dtype, shape, (start, stop) = self._entries[name]
        if dtype not in DTYPES:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} is {dtype}, expected {', '.join(DTYPES)}"
            )
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise CheckpointError(f"tensor {name!r} in {self.path} has no size: {shape}")
        if stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
            raise CheckpointError(f"tensor {name!r} in {self.path} does not fill its bytes")
        if not 0 <= start <= stop <= data_bytes:
            raise CheckpointError(f"tensor {name!r} in {self.path} is beyond the file's end")


TensorSource = SafetensorsFile | GgufModel
"""What holds tensors, by Hugging Face's names."""


def write_safetensors(
    path: Path,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    dtype: np.dtype[Any],
    produce: Callable[[str], np.ndarray],
) -> None:
    """Write tensors of one dtype, asking `produce` for each in turn; whole or not at all.

    `produce(name)` returns the tensor in that shape and dtype. The file appears under its name by
    one rename, after its bytes are on disk.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors:
        stop = offset + math.prod(shape) * dtype.itemsize
        entry = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, stop]}
        header[name] = entry
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = partial_of(path)
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, shape in tensors:
                data = produce(name)
                if data.shape != shape or data.dtype != dtype:
                    raise ValueError(f"got {data.dtype}{data.shape} for {name}, expected {shape}")
                file.write(np.ascontiguousarray(data).view(f"u{dtype.itemsize}").data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
