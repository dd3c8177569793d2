"""What a request passes between `Engine.reprefill` and the first jitted call, recorded as it runs.

Recorded is every Python function of the package, the store included, that is entered from the call
of `Engine.reprefill` until the first jitted call, in the caller's thread and in the engine's.
How it is counted:

- A *value* is a NamedTuple, a frozen dataclass, an enumeration or an exception. Whatever of it
  runs, generated or not, is data and counts for nothing.
- A class is *entered* if a method of it ran: any method, properties and constructors included.
- It is *passed* if one of its methods called a method of another entered class, directly or
  through functions and values: whoever follows a request must read on from there. The other
  entered classes are *leaves*, which can be read by themselves.
- A file is entered if a function or method in it ran that is no value's, and passed if one of
  those called, directly or through values, into an entered class of another file.
- A class whose name begins with an underscore is part of its file: it is not listed, and a call
  between it and another class of its file makes nothing passed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from engine_tiny import tiny_engine

from ckv_jax import Engine, Request, kernels_pallas, storage

_ROOTS = tuple(str(Path(part.__path__[0])) for part in (sys.modules["ckv_jax"], storage))
_KERNELS = str(Path(kernels_pallas.__path__[0]))
_ENGINE_THREAD = "ckv-engine"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a function stands: its file, and its class, if it has one."""

    file: str
    owner: str | None
    value: bool
    """Whether its class is a value."""

    @property
    def private(self) -> bool:
        """Whether its class is part of its file."""
        return self.owner is not None and self.owner.startswith("_")


class RequestPath:
    """The classes and files of one request's way to the first jitted call, in order."""

    def __init__(self) -> None:
        self.classes: dict[str, bool] = {}
        """Every entered class, in order, and whether it is passed."""
        self.files: dict[str, bool] = {}
        """The same of files."""
        self._caller: int | None = None
        self._on = False

    @property
    def passed(self) -> list[str]:
        """Classes that called others."""
        return [name for name, passed in self.classes.items() if passed]

    @property
    def passed_files(self) -> list[str]:
        """Files from which classes of other files were called."""
        return [name for name, passed in self.files.items() if passed]

    @contextmanager
    def in_new_threads(self) -> Iterator[None]:
        """Threads that begin meanwhile can be recorded later: the engine's own has to be one."""
        threading.setprofile(self._seen)
        try:
            yield
        finally:
            threading.setprofile(None)

    def record(self, engine: Engine, request: Request) -> None:
        """Asks a request and records its way. The engine was made, and ran, `in_new_threads`."""
        self._caller = threading.get_ident()

        def first(name: str, jitted: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            self._on, self._caller = False, None
            return jitted(*args, **named)

        with engine.layers.programs.watch(first):
            sys.setprofile(self._seen)
            try:
                results = engine.reprefill([request])
            finally:
                sys.setprofile(None)
        results[0].raise_for_error()

    def _seen(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or self._caller is None:
            return
        code = frame.f_code
        mine = threading.get_ident() == self._caller
        if mine and code is Engine.reprefill.__code__:
            self._on = True
        if not self._on or not (mine or threading.current_thread().name == _ENGINE_THREAD):
            return
        place = _place(code)
        if place is None or place.value:
            return
        self.files.setdefault(place.file, False)
        if place.owner is None:
            return
        if not place.private:
            self.classes.setdefault(place.owner, False)
        self._call_from(frame.f_back, place)

    def _call_from(self, frame: FrameType | None, callee: Place) -> None:
        """Notes who called a method: the next class, and the next file, up the stack."""
        file_known = False
        while frame is not None:
            caller = _place(frame.f_code)
            if caller is not None and not caller.value:
                if not file_known and caller.file != callee.file:
                    self.files[caller.file] = True
                file_known = True
                if caller.owner is not None:
                    inside = caller.file == callee.file and (caller.private or callee.private)
                    if caller.owner != callee.owner and not caller.private and not inside:
                        self.classes[caller.owner] = True
                    return
            frame = frame.f_back


@functools.cache
def _place(code: CodeType) -> Place | None:
    """Where a function of the package stands; None for all others, and for generated code."""
    root = next((root for root in _ROOTS if code.co_filename.startswith(root + "/")), None)
    if root is None or code.co_filename.startswith(_KERNELS):
        return None
    file = str(Path(code.co_filename).relative_to(Path(root).parent))
    *outer, _ = code.co_qualname.split(".<locals>")[0].split(".")
    owner = ".".join(outer) or None
    return Place(file, owner, owner is not None and _is_value(_module(code.co_filename), owner))


def _module(filename: str) -> ModuleType:
    return next(
        module
        for module in list(sys.modules.values())
        if getattr(module, "__file__", None) == filename
    )


def _is_value(module: ModuleType, name: str) -> bool:
    made = functools.reduce(getattr, name.split("."), module)
    assert isinstance(made, type)
    frozen = dataclasses.is_dataclass(made) and made.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return frozen or issubclass(made, tuple | enum.Enum | BaseException)


def tiny_path(folder: Path, **config: object) -> RequestPath:
    """Of a question that a small engine has been asked twice before, everything compiled."""
    path = RequestPath()
    with path.in_new_threads(), tiny_engine(folder, **config) as engine:  # type: ignore[arg-type]
        prefix = engine.ingest([n % 100 for n in range(200)])
        request = Request(prefix=prefix, suffix=[1, 2, 3, 4], budget=0.25)
        for _ in range(2):
            engine.reprefill([request])[0].raise_for_error()
        path.record(engine, request)
    return path


NOTHING_CACHED = {"device_cache_bytes": 0, "host_cache_bytes": 0}


if __name__ == "__main__":
    for title, config in (("all in memory", {}), ("nothing cached", NOTHING_CACHED)):
        with tempfile.TemporaryDirectory() as temporary:
            found = tiny_path(Path(temporary) / "store", **config)
        for kind, entered in (("classes", found.classes), ("files", found.files)):
            passed = sum(entered.values())
            print(f"{title}: {passed} {kind} passed, {len(entered)} entered")
            print("  " + " ".join(f"{name}{'' if go else '*'}" for name, go in entered.items()))
    print("* a leaf: it calls no other")
