"""Compiled programs under a common limit on their number and on the process's memory mappings.

Linux gives a process 65,530 memory mappings. XLA's CPU compiler takes three for each kernel of a
program: about 140 for one that selects, 120 for one that runs four layers. A process that has used
them up is ended by the compiler, so the least recently used ones are let go long before.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import jax

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
    """The jitted functions of one model. Thread-safe.

    JAX compiles a program for each shape, dtype and placement of a call's arguments, and for each
    static value. Where there is no room for one more, the least recently used functions let all
    theirs go; what is called again is compiled again.
    """

    def __init__(self, most: int = MOST_PROGRAMS, mapped: float = MAPPED) -> None:
        self._most = most
        self._mapped = int(mapped * mappings_allowed())
        self._programs: dict[Hashable, Program] = {}
        self._lock = threading.Lock()
        self.uses = itertools.count()
        """Numbers calls, so that it is known which function was used last."""
        self.watcher: Watcher | None = None
        """See `watch`."""
        self.made = 0
        """Programs made from the start, those that were let go and made again included."""

    def __len__(self) -> int:
        """Programs held now."""
        return sum(len(program.dispatched) for program in list(self._programs.values()))

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

    def make_room(self) -> None:
        """Makes room for one more program, which is being traced: the programs of the functions
        that were called longest ago go, and last those of functions that a thread compiles for."""
        with self._lock:
            self.made += 1
            held = len(self)
            go = -(-held // 4) if mappings_held() > self._mapped else held + 1 - self._most
            for program in sorted(self._programs.values(), key=_AGE):
                if go > 0 and (count := len(program.dispatched)):
                    program.let_go()
                    go -= count

    @property
    def dispatched(self) -> list[tuple[Callable[..., Any], tuple[Dispatched, ...]]]:
        """The kernels' implementations in every program held now, in the order of the calls, each
        with the program's function; programs that were never called are not there."""
        return [
            (program.function, one)
            for program in list(self._programs.values())
            for one in list(program.dispatched)
        ]


class Program:
    """One function of `Programs`, called with the function's own arguments."""

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
        self.used = 0
        """Number of the latest call."""
        self.compiling = 0
        """Calls of `compile` in progress."""
        self.times_let_go = 0
        """Changes when what was compiled is let go."""
        self.let_go()

    def __call__(self, *args: Any, **named: Any) -> Any:
        owner = self._owner
        self.used = next(owner.uses)
        watcher = owner.watcher
        if watcher is None:
            return self._jitted(*args, **named)
        return watcher(self.function.__name__, self._jitted, args, named)

    def compile(self, *args: Any, **named: Any) -> bool:
        """Compiles without a call, also beside calls on another thread. Returns True.

        Of the arguments only shapes, dtypes and placements count, see `specs`.
        """
        key, known, self.used = signature(args, named), self.known, next(self._owner.uses)
        if key not in known:
            with self._owner._lock:
                self.compiling += 1
            try:
                self._jitted.lower(*args, **named).compile()  # a call with equal arguments finds it
            finally:
                with self._owner._lock:
                    self.compiling -= 1
            known.add(key)
        return True

    def compiled(self, *args: Any, **named: Any) -> bool:
        """Whether `compile` was called for such arguments. It looks at all of them, so that callers
        keep the answer, for as long as `times_let_go` stays the same."""
        return signature(args, named) in self.known

    def let_go(self) -> None:
        """Lets all programs go."""
        function, owner = self.function, self._owner
        dispatched: list[tuple[Dispatched, ...]] = []

        # A new function object: JAX keeps what it compiled for as long as the old one lives.
        @functools.wraps(function)
        def traced(*args: Any, **named: Any) -> Any:
            owner.make_room()
            with dispatches() as made:
                out = function(*args, **named)
            dispatched.append(tuple(made))
            return out

        self._jitted: Any = jax.jit(
            traced, static_argnames=self.static, donate_argnames=self.donate
        )
        self.dispatched = dispatched
        """Of each program: the kernels that its tracing took."""
        self.known: set[Hashable] = set()
        """Signatures of what `compile` has compiled."""
        self.times_let_go += 1


_AGE = attrgetter("compiling", "used")


def signature(args: tuple[Any, ...], named: dict[str, Any]) -> Hashable:
    """Returns what a call is compiled for: shapes, dtypes and placements of arrays, or of their
    `specs`, and static values by name."""
    leaves, tree = jax.tree.flatten(args)
    return tree, *[(x.shape, x.dtype, _placed(x)) for x in leaves], *named.items()


def _placed(array: Any) -> jax.sharding.Sharding | None:
    """Where an array, or its spec, has to lie; None: anywhere."""
    return getattr(array, "sharding", None) if getattr(array, "committed", True) else None


class Background:
    """Compiles programs of one engine on a thread, beside its requests. Engine thread only, but
    for `settle` and `close`."""

    def __init__(self) -> None:
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckv-compile")
        self._begun: dict[tuple[Program, Hashable], Future[bool]] = {}
        """By program and signature: its compilation, for good if that has failed."""

    def compile(self, program: Program, *args: Any, **named: Any) -> bool:
        """Returns whether a call of these arguments is compiled, see `Program.compiled`, and begins
        to compile it, if that has not begun before. Where it fails, the log says so, and it is not
        tried again."""
        key = signature(args, named)
        if self._closed or key in program.known:
            return key in program.known
        begun = self._begun.get((program, key))
        if begun is not None and (not begun.done() or begun.exception() is not None):
            return False  # one that was compiled, and let go since, is compiled again
        known = self._begun.items()
        self._begun = {of: one for of, one in known if of[1] not in of[0].known}
        begun = self._thread.submit(program.compile, *specs(args), **named)
        begun.add_done_callback(_say_failed)
        self._begun[program, key] = begun
        return False

    def settle(self, timeout: float | None = None) -> bool:
        """Waits until everything that has begun is compiled, or cannot be. Returns False if
        `timeout` seconds were not enough."""
        return not wait(list(self._begun.values()), timeout).not_done

    def close(self) -> None:
        """Ends the thread; a compilation that runs ends by itself. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        for begun in list(self._begun.values()):
            if begun.cancelled():
                begun.set_running_or_notify_cancel()  # or who settles waits for it for ever


def _say_failed(begun: Future[bool]) -> None:
    if not begun.cancelled() and (error := begun.exception()) is not None:
        _log.warning(
            "a call of one or more periods did not compile, so requests of this shape take more "
            "calls: %s",
            f"{type(error).__name__}: {error}".splitlines()[0],
        )
        error.__traceback__ = None  # the failure is kept, its frames are not


def specs(arrays: T) -> T:
    """Returns the shapes, dtypes and placements of a tree of arrays, as `jax.ShapeDtypeStruct`."""
    of: Any = jax.ShapeDtypeStruct
    found: T = jax.tree.map(lambda x: of(x.shape, x.dtype, sharding=_placed(x)), arrays)
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
