"""Compiled programs under a common limit on their number and on the process's memory mappings.

Linux gives a process 65,530 memory mappings. XLA's CPU compiler takes three for each kernel of a
program: about 140 for one that selects, 120 for one that runs four layers. A process that has used
them up is ended by the compiler, so the least recently used programs are let go long before.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ckv_jax.kernels_pallas.target import Dispatched, dispatches

T = TypeVar("T")
_log = logging.getLogger(__name__)

MOST_PROGRAMS = 1024
"""Limit where programs are smaller, or where mappings are not limited."""

MAPPED = 0.5
"""Share of the process's mappings that may be in use when a program is to be compiled."""

_FULL = 0.8

Watcher = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Given a function's name, the jitted function and its arguments, calls it; returns its result."""


class Programs:
    """The jitted functions of one model, each compiled per key. Thread-safe.

    A key names everything that a call's shapes depend on, so that looking a program up costs no
    walk over the arguments. A program that was let go is compiled again when it is next called.
    """

    def __init__(self, most: int = MOST_PROGRAMS, mapped: float = MAPPED) -> None:
        self._most = most
        self._mapped = int(mapped * mappings_allowed())
        self._programs: dict[Hashable, Program] = {}
        self._lock = threading.Lock()
        self.uses = itertools.count()
        """Numbers calls, so that it is known which program was used last."""
        self.watcher: Watcher | None = None
        """See `watch`."""
        self.made = 0
        """Programs made from the start, those that were let go and made again included."""

    def __len__(self) -> int:
        """Programs held now."""
        return sum(len(program.held) for program in list(self._programs.values()))

    @property
    def full(self) -> bool:
        """Whether a few more programs would make others go."""
        return len(self) > _FULL * self._most or mappings_held() > _FULL * self._mapped

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
        with self._lock:
            return self._programs.setdefault((function, made.static, made.donate), made)

    @contextmanager
    def watch(self, watcher: Watcher) -> Iterator[None]:
        """Every call is made by `watcher` meanwhile, for measurements; one at a time."""
        if self.watcher is not None:
            raise ValueError("got a second watcher, expected one at a time")
        self.watcher = watcher
        try:
            yield
        finally:
            self.watcher = None

    def hold(self, program: Program, key: Hashable, made: _Made | None = None) -> _Made:
        """Returns `program` for a key. A new key holds `made` (None: jitted here, compiled by its
        first call); the least recently used programs are released if there is no room for it."""
        with self._lock:
            if key not in program.held:
                if mappings_held() > self._mapped:
                    self._release(-(-len(self) // 4))
                self._release(len(self) + 1 - self._most)
                program.held[key] = made or program.make(key)
                self.made += 1
            return program.held[key]

    def _release(self, count: int) -> None:
        """Lets the `count` least recently used go."""
        if count <= 0:
            return
        held = [(p, key) for p in self._programs.values() for key in p.held]
        held.sort(key=lambda entry: entry[0].held[entry[1]].used)
        for program, key in held[:count]:
            del program.held[key]
            program.dispatched.pop(key, None)

    @property
    def dispatched(self) -> dict[tuple[Callable[..., Any], Hashable], tuple[Dispatched, ...]]:
        """The kernels' implementations in every program held now, by its function and key, in the
        order of the calls; programs that were never called are not there."""
        return {
            (program.function, key): dispatched
            for program in list(self._programs.values())
            for key, dispatched in list(program.dispatched.items())
        }


@dataclass(slots=True, eq=False)
class _Made:
    """One function for one key."""

    call: Callable[..., Any]
    """The function, jitted once more."""
    used: int
    """Number of the latest call."""


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
        self.held: dict[Hashable, _Made] = {}
        """By key; `Programs` decides what is held."""
        self.dispatched: dict[Hashable, tuple[Dispatched, ...]] = {}
        """The kernels that the tracing for each key that is held took, once it was called."""

    def __call__(self, key: Hashable, *args: Any, **named: Any) -> Any:
        owner = self._owner
        made = self.held.get(key) or owner.hold(self, key)
        made.used = next(owner.uses)
        watcher = owner.watcher
        if watcher is None:
            return made.call(*args, **named)
        return watcher(self.function.__name__, made.call, args, named)

    def compiled(self, key: Hashable) -> bool:
        """Whether a call with this key compiles nothing."""
        return key in self.held

    def compile(self, key: Hashable, *args: Any, **named: Any) -> None:
        """Compiles for one more key without a call, also beside calls on another thread.

        Of the arguments only shapes, dtypes and placements count, see `specs`.
        """
        made = self.make(key)
        jitted: Any = made.call
        jitted.lower(*args, **named).compile()  # a call with equal arguments finds the result
        self._owner.hold(self, key, made)

    def make(self, key: Hashable) -> _Made:
        """The function, jitted once more for one key."""
        function = self.function

        # A function object of its own: JAX keeps what it compiled for as long as that lives.
        @functools.wraps(function)
        def own(*args: Any, **named: Any) -> Any:
            with dispatches() as made:
                out = function(*args, **named)
            self.dispatched[key] = tuple(made)
            return out

        jitted = jax.jit(own, static_argnames=self.static, donate_argnames=self.donate)
        return _Made(jitted, next(self._owner.uses))


class Background:
    """Compiles programs of one engine on a thread, beside its requests. Engine thread only, but
    for `settle` and `close`."""

    def __init__(self) -> None:
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckv-compile")
        self._begun: dict[tuple[Program, Hashable], Future[None]] = {}
        """By program and key: its compilation, for good if that has failed."""

    def compile(self, program: Program, key: Hashable, *args: Any, **named: Any) -> None:
        """Begins to compile a call of these arguments, if that has not begun before. Where it
        fails, the log says so, and it is not tried again."""
        if self._closed or program.compiled(key):
            return
        begun = self._begun.get((program, key))
        if begun is not None and (not begun.done() or begun.exception() is not None):
            return  # one that was compiled, and let go since, is compiled again
        known = self._begun.items()
        self._begun = {of: one for of, one in known if not of[0].compiled(of[1])}
        begun = self._thread.submit(program.compile, key, *specs(args), **named)
        begun.add_done_callback(_say_failed)
        self._begun[program, key] = begun

    def settle(self, timeout: float | None = None) -> bool:
        """Waits until everything that has begun is compiled, or cannot be. Returns False if
        `timeout` seconds were not enough."""
        return not wait(list(self._begun.values()), timeout).not_done

    def close(self) -> None:
        """Ends the thread; a compilation that runs ends by itself. Idempotent."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)


def _say_failed(begun: Future[None]) -> None:
    if not begun.cancelled() and (error := begun.exception()) is not None:
        _log.warning(
            "a call of one or more periods did not compile, so requests of this shape take more "
            "calls: %s",
            f"{type(error).__name__}: {error}".splitlines()[0],
        )
        error.__traceback__ = None  # the failure is kept, its frames are not


def specs(arrays: T) -> T:
    """Returns the shapes, dtypes and placements of a tree of arrays, as `jax.ShapeDtypeStruct`."""

    def spec(array: ArrayLike) -> Any:
        placed = array.sharding if isinstance(array, jax.Array) and array.committed else None
        of: Any = jax.ShapeDtypeStruct
        return of(np.shape(array), jnp.result_type(array), sharding=placed)

    found: T = jax.tree.map(spec, arrays)
    return found


def mappings_held() -> int:
    """Memory mappings of this process now; 0 where the system does not say."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def mappings_allowed() -> int:
    """Returns the process's limit of mappings; Linux's default where it is unknown."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 65_530
