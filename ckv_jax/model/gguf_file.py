"""One GGUF file: its checked header, and one tensor at a time, dequantised.

The format (docs/gguf.md of ggml) is a magic and a version, pairs of key and value, an entry for
every tensor, and the tensors' bytes, each at a multiple of the alignment; all of it little-endian.
Reading tensor by tensor with plain file reads keeps host memory at one tensor in float32.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ckv_jax.errors import CheckpointError
from ckv_jax.model.safetensors_file import check_pointer

__all__ = ["MAGIC", "GgufFile"]

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_TENSORS = 200_000
_MOST_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q",
            11: "<q", 12: "<d"}  # fmt: skip
_PLAIN: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_QUANTISED = frozenset(
    "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS "
    "IQ3_S IQ4_NL IQ4_XS".split()
)
"""What the `gguf` package dequantises."""


class GgufFile:
    """The metadata and the tensors of one file, by llama.cpp's names. Holds no open file.

    Shapes are `[out, in]` as in PyTorch: the reverse of the file's order. Raises `CheckpointError`
    for a file that is missing, cut short, or whose header does not describe its bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        check_pointer(path)
        try:
            with path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise CheckpointError(f"{path} is not a GGUF file")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    self._parse(_Cursor(data))
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except (struct.error, IndexError) as error:
            raise CheckpointError(f"{path} is cut short within its header") from error
        except (UnicodeDecodeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{path} has a broken GGUF header: {error!r}") from error
        self.shapes = {name: shape for name, (_, shape, _, _) in self._entries.items()}
        """The shape of every tensor in the file."""
        self.types = {name: kind for name, (kind, _, _, _) in self._entries.items()}
        """The element type of every tensor by ggml's name, such as Q4_K or F32."""

    def read(self, name: str) -> np.ndarray:
        """One tensor in fresh memory: F16 and BF16 as stored, anything else in float32."""
        kind, shape, start, size = self._entries[name]
        data = np.fromfile(self.path, dtype=np.uint8, count=size, offset=start)
        if data.size != size:
            raise CheckpointError(f"{self.path} was cut short while tensor {name!r} was read")
        if kind in _PLAIN:
            return data.view(_PLAIN[kind]).reshape(shape)
        from gguf import GGMLQuantizationType, dequantize

        rows = data.reshape(*shape[:-1], -1)  # dequantised 16 rows at a time
        values: np.ndarray = dequantize(rows, GGMLQuantizationType[kind])
        return values

    def _parse(self, cursor: _Cursor) -> None:
        cursor.at = len(MAGIC)
        (version,) = cursor.take("<I")
        if version not in _VERSIONS:
            order = " (big-endian)" if version & 0xFFFF == 0 else ""
            raise CheckpointError(
                f"{self.path} is a GGUF file of version {version}{order}, expected "
                f"{' or '.join(map(str, _VERSIONS))}"
            )
        tensors, pairs = cursor.take("<QQ")
        if tensors > _MOST_TENSORS:
            raise CheckpointError(
                f"{self.path}: got {tensors} tensors, expected at most {_MOST_TENSORS}"
            )
        for _ in range(pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(*cursor.take("<I"))
        found = [_tensor_entry(cursor) for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise CheckpointError(f"{self.path} has an alignment of {alignment!r}")
        data_start = -(-cursor.at // alignment) * alignment
        for name, shape, kind, offset in found:
            if name in self._entries:
                raise CheckpointError(f"duplicate tensor {name!r} in {self.path}")
            self._entries[name] = self._checked(
                name, shape, kind, data_start + offset, file_bytes=len(cursor.data)
            )

    def _checked(
        self, name: str, shape: tuple[int, ...], kind: int, start: int, *, file_bytes: int
    ) -> tuple[str, tuple[int, ...], int, int]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        one = next((one for one in GGMLQuantizationType if one == kind), None)
        if one is None or (one.name not in _PLAIN and one.name not in _QUANTISED):
            called = f"of type {kind}" if one is None else one.name
            raise CheckpointError(
                f"tensor {name!r} in {self.path} is {called}, which cannot be dequantised"
            )
        block, block_bytes = GGML_QUANT_SIZES[one]
        if not shape or min(shape) < 1 or shape[-1] % block:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} has shape {shape}, expected rows of whole blocks "
                f"of {block}"
            )
        size = math.prod(shape) // block * block_bytes
        if start + size > file_bytes:
            raise CheckpointError(
                f"{self.path} is cut short: tensor {name!r} ends at byte {start + size}, "
                f"the file at {file_bytes}"
            )
        return one.name, shape, start, size


class _Cursor:
    """Reads the header's values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (size,) = self.take("<Q")
        end = self.at + size
        if end > len(self.data):
            raise IndexError(end)
        text = self.data[self.at : end].decode()
        self.at = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])[0]
        inner, count = self.take("<IQ")
        if count > len(self.data) - self.at:  # an item has one byte at least
            raise IndexError(count)
        if inner in _SCALARS:
            return list(self.take(f"<{count}{_SCALARS[inner][1]}"))
        return [self.value(inner) for _ in range(count)]


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape outermost first, ggml's number of the type, offset within the data."""
    name = cursor.string()
    (dimensions,) = cursor.take("<I")
    if dimensions > _MOST_DIMENSIONS:
        raise CheckpointError(f"tensor {name!r} has {dimensions} dimensions, expected at most 4")
    shape = cursor.take(f"<{dimensions}Q")[::-1]
    kind, offset = cursor.take("<IQ")
    return name, shape, kind, offset
