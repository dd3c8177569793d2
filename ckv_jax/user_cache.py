"""The user's cache folder, `$XDG_CACHE_HOME/ckv_jax`, the compiled programs in it, and partial
files of killed processes."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SWITCH = "CKV_COMPILATION_CACHE"
_ABANDONED_S = 86_400.0  # another machine may be writing what has changed since


def cache_folder() -> Path:
    """The user's cache folder for this package; it need not exist yet.

    `XDG_CACHE_HOME` counts only if it is absolute, as its specification says: what is trusted must
    not come out of whatever folder the program is started in.
    """
    said = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (said if said.is_absolute() else Path.home() / ".cache") / "ckv_jax"


def partial_of(path: Path) -> Path:
    """Returns the name under which `path` is written, `.NAME.PID.tmp`; removes abandoned ones."""
    remove_abandoned(path.parent, rf"\.{re.escape(path.name)}\.\d+\.tmp")
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def remove_abandoned(folder: Path, name: str) -> None:
    """Removes what has such a name and has not changed for a day: its process was killed."""
    with suppress(OSError):
        for path in folder.iterdir():
            if re.fullmatch(name, path.name) and path.lstat().st_mtime < time.time() - _ABANDONED_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def enable_compilation_cache() -> None:
    """Turns JAX's persistent compilation cache on, in the user's cache folder.

    What compiles in less than JAX's default second is kept, too: a request needs many such
    programs. Changes nothing where JAX has a cache folder already (`JAX_COMPILATION_CACHE_DIR`,
    `jax.config`), where the environment says CKV_COMPILATION_CACHE=off, or where the folder cannot
    be made. JAX runs what it finds in there, so the folder is the user's alone.

    For the whole process; may be called again, and after something has been compiled.
    """
    import jax  # here: the store's tools find the folder without it

    off = os.environ.get(_SWITCH, "").lower() == "off"
    if off or jax.config.values["jax_compilation_cache_dir"]:
        return
    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # a home that is read-only or not there: compiling again costs time alone
        return
    limits = {
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    said = {name for name in limits if os.environ.get(name.upper())}
    for name in limits.keys() - said:
        jax.config.update(name, limits[name])  # type: ignore[no-untyped-call]
    jax.config.update("jax_compilation_cache_dir", str(folder))  # type: ignore[no-untyped-call]


@contextmanager
def count_compiled() -> Iterator[list[str]]:
    """Collects an entry for each program that is compiled meanwhile and put in the cache."""
    from jax import monitoring

    compiled: list[str] = []

    def listen(event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/cache_misses":
            compiled.append(event)

    monitoring.register_event_listener(listen)
    try:
        yield compiled
    finally:
        monitoring.unregister_event_listener(listen)
