"""The native library of this process: found or compiled, loaded once, registered with XLA.

Its products of a few rows on a CPU take little longer than their weights take to come from memory.
Those of more rows keep each row in a lane of a vector. A row's sums have one order among few rows,
and one among more, whatever the other rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ckv_jax.kernels_pallas.native.build import SOURCES, compile_library, lacking, library_name
from ckv_jax.kernels_pallas.target import Target, has_matrix_unit
from ckv_jax.user_cache import cache_folder, remove_abandoned

BFLOAT16 = "AVX-512 with BF16"
LEVELS = ("portable", "AVX2", "AVX-512", BFLOAT16)
"""Names of the instruction sets that the kernels are compiled for; all but the first are those of
x86-64."""
PORTABLE = 0
LANES = (4, 8, 16, 16)
"""32-bit numbers of a vector, by level."""
_FUNCTIONS = ("ckv_best", "ckv_score", "ckv_product", "ckv_attend")


class Native(NamedTuple):
    """The native kernels of this process."""

    path: Path | None
    """The library; None: there is none."""
    level: int
    """Of `LEVELS`, the best that this processor has."""
    refused: str
    """Why there is none; empty where there is one."""


@cache
def native() -> Native:
    """The library of this process, of `find`: compiled beside the sources, in `__pycache__`, or
    where that cannot be written in the user's cache folder."""
    return find((SOURCES / "__pycache__", cache_folder() / "native"))


def find(folders: Sequence[Path]) -> Native:
    """Loads the library, which is compiled into the first of `folders` that takes it unless a wheel
    or an earlier process left it. One that does not load, or that this XLA refuses, counts as none.
    """
    if refused := lacking():
        return Native(None, 0, refused)
    name = library_name()
    same_sources = SOURCES.glob(name[: name.rindex("-")] + "-*.so")  # of a wheel, for another XLA
    for path in (*(folder / name for folder in (SOURCES, *folders)), *same_sources):
        if path.is_file() and not (refused := _load(path)):
            return _at(path)
    for folder in folders:
        remove_abandoned(folder, r"\.ckv-.*")  # of compilers that were killed
        try:
            path = compile_library(folder)
        except OSError as error:
            refused = refused or str(error)
            continue
        if not (refused := _load(path)):
            return _at(path)
    return Native(None, 0, refused)


def required_level() -> int:
    """The level to run at. Raises NotImplementedError where there is no library."""
    found = native()
    if found.path is None:
        raise NotImplementedError(f"no native library: {found.refused}")
    return found.level


def call(
    name: str, results: Sequence[tuple[tuple[int, ...], DTypeLike]], *args: Array, **settings: float
) -> list[Array]:
    """Calls a function of the library in a traced program; `results`: shapes and dtypes.

    `settings` are its attributes: whole numbers as int64, others as float32.
    """
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]  # type: ignore[no-untyped-call]
    kinds: dict[type, type[np.generic]] = {int: np.int64, float: np.float32}
    attributes = {key: kinds[type(value)](value) for key, value in settings.items()}
    out = jax.ffi.ffi_call(name, shapes, vmap_method="sequential")(*args, **attributes)
    return list(out)


def _load(path: Path) -> str:
    """Registers the library's functions; why not, or nothing."""
    try:
        library = ctypes.CDLL(str(path))
        for name in _FUNCTIONS:
            handler = jax.ffi.pycapsule(getattr(library, name))  # type: ignore[no-untyped-call]
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        return f"{path.name} does not load: {str(error).splitlines()[0][:200]}"
    return ""


def _at(path: Path) -> Native:
    return Native(path, int(ctypes.CDLL(str(path)).ckv_level()), "")


@cache
def _decoder() -> Any:
    function = ctypes.CDLL(str(native().path)).ckv_decode
    at, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [at, number, at, number, at, *[number] * 7]
    function.restype = None
    return function


def decode_packs(
    stored: np.ndarray,
    slots: np.ndarray,
    packs: np.ndarray,
    *,
    bits: tuple[int, int],
) -> None:
    """Decodes packs into rows of `packs`, at once and without the interpreter's lock.

    Args:
        stored: uint8 [n, stored bytes], as `storage.codec.Quantised` encodes them.
        slots: int32 [n], rows of `packs`; -1: not wanted.
        packs: bfloat16 [slots, layers, kinds, C, K, D], C-contiguous. The bytes of a D of 4 or 8
            bits fill whole vectors of 32.
        bits: of each kind.

    Raises NotImplementedError where there is no library.
    """
    level = required_level()
    _, layers, kinds, chunk, heads, dim = packs.shape
    _decoder()(
        stored.ctypes.data, stored.shape[1], slots.ctypes.data, len(slots), packs.ctypes.data,
        layers * kinds, kinds, chunk * heads, dim, *bits, level,
    )  # fmt: skip


_INPUTS = 32  # two vectors of 16 numbers
_PANEL = 2  # `kPanel`


def most_rows(int8: bool) -> int:
    """Up to how many rows `multiply_rows` is faster here than XLA, which widens int8 first."""
    if native_is_fastest():
        return 512 if int8 else 48
    if native().level == PORTABLE:
        return 8 if int8 else 1
    return 64 if int8 else 16 if LEVELS[native().level] == BFLOAT16 else 8


def native_is_fastest() -> bool:
    """Whether nothing multiplies bfloat16 faster here than the native kernels: they have
    instructions for it, and no matrix unit is there."""
    return LEVELS[native().level] == BFLOAT16 and not has_matrix_unit()


def multiply_rows(x: Array, weight: Array, scale: Array | None = None, *, target: Target) -> Array:
    """x bfloat16 [B, S, I] times weight [O, I]: float32 [B, S, O].

    `weight`: bfloat16, or int8, of which one is worth `scale` float32 [O].

    Raises NotImplementedError for other dtypes, sizes that fill no whole vectors, and where there
    is no library.
    """
    del target  # a CPU
    batch, length, inputs = x.shape
    outputs, rows = weight.shape[0], batch * length
    wanted = jnp.bfloat16 if scale is None else jnp.int8
    if x.dtype != jnp.bfloat16 or weight.dtype != wanted:
        raise NotImplementedError(f"got {x.dtype} times {weight.dtype}, expected bfloat16")
    level = required_level()
    few = rows <= (16 if LEVELS[level] == BFLOAT16 else 64)  # else they are packed into lanes
    least = 4 if few else LANES[level]
    if inputs % _INPUTS or outputs < least:
        raise NotImplementedError(
            f"got weights [{outputs}, {inputs}], expected {least} outputs or more and a multiple "
            f"of {_INPUTS} inputs"
        )
    panel = _PANEL * LANES[level]
    packed = 0 if few else 2 * inputs * panel * -(-rows // panel) + 64
    out, _ = call(
        "ckv_product", [((batch, length, outputs), jnp.float32), ((packed,), jnp.uint8)],
        x, weight, jnp.zeros(0, jnp.float32) if scale is None else scale, level=level,
    )  # fmt: skip
    return out
