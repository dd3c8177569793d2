"""One safetensors file: its checked header, and one tensor at a time in either direction.

The format is eight bytes of header length, a JSON header, and the tensors' bytes. Reading tensor
by tensor with plain file reads keeps host memory at one tensor, whatever the file's size.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ckv_jax.errors import CheckpointError

_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # the format's own limit, in bytes
_MOST_TENSORS = 200_000  # a model of 1,000 layers and 100 experts has half of that
_POINTER = b"version https://git-lfs.github.com/spec/"
_COMPUTED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


def is_computed(name: str) -> bool:
    """Whether a tensor is a buffer that the config determines, as old checkpoints hold them."""
    return name.endswith(_COMPUTED)


def check_pointer(path: Path) -> None:
    """Raises `CheckpointError` for a git-lfs pointer in the place of a file."""
    try:
        with path.open("rb") as file:
            if file.read(len(_POINTER)) != _POINTER:
                return
    except OSError:
        return  # the one that reads the file reports it
    raise CheckpointError(
        f"{path} is a git-lfs pointer, not the file itself; `git lfs pull` fetches it"
    )


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
            raise CheckpointError(f"{path} has a broken safetensors header: {error!r}") from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor in the file."""
        return {name: shape for name, (_, shape, _) in self._entries.items()}

    @property
    def dtypes(self) -> set[np.dtype[Any]]:
        """The element types that occur in the file."""
        return {_DTYPES[dtype] for dtype, _, _ in self._entries.values()}

    def read(self, name: str) -> np.ndarray:
        """One tensor as it is stored, in fresh memory."""
        dtype, shape, (start, _) = self._entries[name]
        bits = np.dtype(f"u{_DTYPES[dtype].itemsize}")
        count = math.prod(shape)
        data = np.fromfile(self.path, dtype=bits, count=count, offset=self._start + start)
        if data.size != count:
            raise CheckpointError(f"{self.path} was cut short while tensor {name!r} was read")
        return data.view(_DTYPES[dtype]).reshape(shape)

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise CheckpointError(f"duplicate tensor {name!r} in {self.path}")
            found[name] = value
        if len(found) > _MOST_TENSORS:
            raise CheckpointError(
                f"{self.path}: got {len(found)} tensors, expected at most {_MOST_TENSORS}"
            )
        return found

    def _check(self, name: str, data_bytes: int) -> None:
        dtype, shape, (start, stop) = self._entries[name]
        if dtype not in _DTYPES:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} is {dtype}, expected {', '.join(_DTYPES)}"
            )
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise CheckpointError(f"tensor {name!r} in {self.path} has no size: {shape}")
        if stop - start != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise CheckpointError(f"tensor {name!r} in {self.path} does not fill its bytes")
        if not 0 <= start <= stop <= data_bytes:
            raise CheckpointError(f"tensor {name!r} in {self.path} lies beyond the file's end")


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
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
