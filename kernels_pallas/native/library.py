"""The native library of this process: found or compiled, loaded once, registered with XLA."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ckv_jax.kernels_pallas.native.build import SOURCES, compile_library, headers, library_name
from ckv_jax.user_cache import cache_folder

__all__ = ["LEVELS", "Native", "call", "find", "native", "required_level"]

LEVELS = ("portable", "AVX2", "AVX-512")
"""What the kernels are compiled for, one for each set of instructions."""
_FUNCTIONS = ("ckv_score", "ckv_product")


class Native(NamedTuple):
    """What this process has of native kernels."""

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
    include = headers()
    if include is None:
        return Native(None, 0, "got a jaxlib without XLA's headers, expected them in its include")
    name, refused = library_name(include), ""
    same_sources = SOURCES.glob(name[: name.rindex("-")] + "-*.so")  # of a wheel, for another XLA
    for path in (*(folder / name for folder in (SOURCES, *folders)), *same_sources):
        if path.is_file() and not (refused := _load(path)):
            return Native(path, _level(path), "")
    for folder in folders:
        try:
            path = compile_library(folder)
        except OSError as error:
            refused = refused or str(error)
            continue
        if not (refused := _load(path)):
            return Native(path, _level(path), "")
    return Native(None, 0, refused)


def required_level(level: int | None) -> int:
    """The level to run at: the one that is asked for, or the best, which has to be AVX2 at least.

    Raises NotImplementedError where there is no library, or the processor lacks the instructions.
    """
    found = native()
    if found.path is None:
        raise NotImplementedError(f"no native library: {found.refused}")
    if level is None and found.level == 0:
        raise NotImplementedError("got a processor without AVX2, expected one with it")
    if level is not None and level > found.level:
        raise NotImplementedError(f"got a processor without {LEVELS[level]}, expected one with it")
    return found.level if level is None else level


def call(
    name: str, results: Sequence[tuple[tuple[int, ...], DTypeLike]], *args: Array, **settings: float
) -> list[Array]:
    """Calls a function of the library in a traced program; `results`: shapes and dtypes.

    `settings` are its attributes: whole numbers as int64, others as float32, truth as it is.
    """
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]  # type: ignore[no-untyped-call]
    kinds = {bool: np.bool_, int: np.int64, float: np.float32}
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


def _level(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).ckv_level())
