"""Compiled programs under one cap: a process has room for a limited number of them.

Linux gives a process 65,530 memory mappings. XLA's CPU compiler takes three for each kernel of a
program: about 140 for one that selects, 120 for one that runs four layers. A process that has used
them up is ended by the compiler, so the least recently used programs are let go long before.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from ckv_jax.kernels_pallas.dispatch import Choice, choices
from ckv_jax.pipeline import mappings

MOST_PROGRAMS = 1024
"""Where programs are smaller, or mappings no concern."""

MAPPED = 0.5
"""Share of the process's mappings that may be in use when a program is to be compiled."""

Watcher = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Given a function's name, the jitted function and its arguments, calls it; returns its result."""


class Programs:
    """The jitted functions of one model, each compiled per key. Thread-safe.

    A key names everything that a call's shapes depend on, so that looking a program up costs no
    walk over the arguments. A program that was let go is compiled again when it is next called.
    """

    def __init__(self, most: int = MOST_PROGRAMS, mapped: float = MAPPED) -> None:
        if most < 1:
            raise ValueError(f"got room for {most} programs, expected 1 or more")
        self._most = most
        self._mapped = int(mapped * mappings.allowed())
        self._known: OrderedDict[tuple[Program, Hashable], Callable[..., Any]] = OrderedDict()
        self._chosen: dict[tuple[str, Hashable], tuple[Choice, ...]] = {}
        self._jitted: dict[Hashable, Program] = {}
        self._lock = threading.Lock()
        self._watcher: Watcher | None = None
        self.made = 0
        """Programs made from the start, those that were let go and made again included."""

    def __len__(self) -> int:
        """Programs held now."""
        return len(self._known)

    def jit(
        self,
        function: Callable[..., Any],
        *,
        static: Sequence[str] = (),
        donate: Sequence[str] = (),
    ) -> Program:
        """`function` jitted, with these arguments static or donated, by name.

        The same function gives the same program: asking again compiles nothing.
        """
        made = Program(self, function, tuple(static), tuple(donate))
        return self._jitted.setdefault((function, made.static, made.donate), made)

    @contextmanager
    def watch(self, watcher: Watcher) -> Iterator[None]:
        """Every call is made by `watcher` meanwhile, for measurements; one at a time."""
        if self._watcher is not None:
            raise ValueError("got a second watcher, expected one at a time")
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None

    def call(
        self, program: Program, key: Hashable, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """The result of a program."""
        jitted, watcher = self.get(program, key), self._watcher
        if watcher is None:
            return jitted(*args, **named)
        return watcher(program.function.__name__, jitted, args, named)

    def get(self, program: Program, key: Hashable) -> Callable[..., Any]:
        """The jitted function for one key."""
        with self._lock:
            jitted = self._known.get((program, key))
            if jitted is None:
                if mappings.held() > self._mapped:
                    self._release(-(-len(self._known) // 4))
                self._release(len(self._known) + 1 - self._most)
                jitted = self._known[program, key] = program.make(key)
                self.made += 1
            self._known.move_to_end((program, key))
        return jitted

    def _release(self, count: int) -> None:
        """Lets the `count` least recently used go."""
        for _ in range(count):
            (program, key), _ = self._known.popitem(last=False)
            self._chosen.pop((program.function.__name__, key), None)

    @property
    def chosen(self) -> dict[tuple[str, Hashable], tuple[Choice, ...]]:
        """The kernels' implementations in every program held now, by its function's name and key,
        in the order of the calls; programs that were never called are not there."""
        return dict(self._chosen)

    def note(self, program: Program, key: Hashable, made: Sequence[Choice]) -> None:
        """Keeps what a program's tracing chose."""
        self._chosen[program.function.__name__, key] = tuple(made)

    def has(self, program: Program, key: Hashable) -> bool:
        """Whether calling `program` with this key compiles nothing."""
        return (program, key) in self._known


class Program:
    """One function of `Programs`: called with a key and then the function's own arguments."""

    def __init__(
        self,
        owner: Programs,
        function: Callable[..., Any],
        static: tuple[str, ...],
        donate: tuple[str, ...],
    ) -> None:
        self.function = function
        self._owner = owner
        self.static = static
        self.donate = donate

    def __call__(self, key: Hashable, *args: Any, **named: Any) -> Any:
        return self._owner.call(self, key, args, named)

    def compiled(self, key: Hashable) -> bool:
        """Whether a call with this key compiles nothing."""
        return self._owner.has(self, key)

    def make(self, key: Hashable) -> Callable[..., Any]:
        """The function, jitted anew."""
        function = self.function

        # A function object of its own: JAX keeps what it compiled for as long as that lives.
        @functools.wraps(function)
        def own(*args: Any, **named: Any) -> Any:
            with choices() as made:
                out = function(*args, **named)
            self._owner.note(self, key, made)
            return out

        return jax.jit(own, static_argnames=self.static, donate_argnames=self.donate)
