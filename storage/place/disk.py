"""Files and folders of a local disk: opens without following symlinks, writes durably, deletes, and
limits every wait for the disk."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import queue
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ckv_jax.storage.errors import ABSENT, StoreUnavailable, as_unavailable

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a folder and never a symlink."""

NO_FILE = (errno.ENXIO, errno.ELOOP, errno.EISDIR)
"""Error codes of a name that exists and is not a regular file."""
TRIES = 8  # of names that a sweep took away before they were locked
_EXCHANGE = 2  # renameat2: two names change places
_HERE = -100  # renameat2: relative to the working directory
_KIND = 0o170000  # of a mode, what `stat.S_IFMT` keeps
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
T = TypeVar("T")

_MOST_STUCK = 32  # threads left behind at a disk that does not answer; no more are given to it


def close_descriptor(fd: int) -> None:
    """Closes a descriptor, whatever the kernel says of it.

    Linux frees it even where `close` fails, and what this store writes is fsynced before it is
    closed: such an error proves nothing and loses nothing, and must not end an operation that is
    complete, or keep other descriptors open.
    """
    try:  # noqa: SIM105 - for every read, and `contextlib.suppress` takes three calls
        os.close(fd)
    except OSError:
        pass


def names_in(folder: Path) -> list[str]:
    """Lists a folder; nothing where it is missing or is no folder."""
    try:
        found = os.listdir(folder)
    except OSError as e:
        if e.errno in ABSENT:
            return []
        raise
    progress()
    return found


def open_plain(path: str | Path, flags: int = os.O_RDONLY, folder: int | None = None) -> int:
    """Open a plain file, and wait for nothing; anything else is as good as absent."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        plain = os.fstat(fd).st_mode & _KIND == stat.S_IFREG
    except BaseException:
        close_descriptor(fd)
        raise
    if not plain:
        close_descriptor(fd)
        raise OSError(errno.ENXIO, "is no plain file", str(path))
    return fd


def found_at(path: str | Path) -> os.stat_result | None:
    """What is there, itself where it is a link; None: nothing. Raises StoreUnavailable."""
    try:
        found = os.lstat(path)
    except OSError as e:
        if e.errno in ABSENT:
            return None
        raise as_unavailable(path, e) from e
    progress()
    return found


def is_there(kind: Callable[[int], bool], path: str, size: int | None = None) -> bool:
    """Whether something of a kind (`stat.S_ISREG`) is there; raises StoreUnavailable."""
    found = found_at(path)
    return found is not None and kind(found.st_mode) and size in (None, found.st_size)


def is_gone(path: str | Path) -> bool:
    """Whether there is no such name, not even a dangling link; raises OSError where none can say,
    which `os.path.lexists` takes for absence."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    return False


def lock_entry(path: Path) -> int | None:
    """A descriptor that holds the lock of a temporary entry; None: it is gone, or locked. A process
    that makes or removes an entry holds its lock, so the name stays its own."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours, there = os.fstat(fd), os.lstat(path)
        if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        close_descriptor(fd)
        raise
    close_descriptor(fd)
    return None


def sweep_entry(path: Path) -> bool:
    """Remove an entry whose maker is dead; whether that was so. Raises OSError."""
    kind = os.lstat(path).st_mode
    if not (stat.S_ISDIR(kind) or stat.S_ISREG(kind)):
        return False  # we make no others
    fd = lock_entry(path)
    if fd is None:
        return False  # its writer lives
    try:
        delete(path)
    finally:
        close_descriptor(fd)
    return True


def lock_within(fd: int, seconds: float) -> None:
    """Wait for the lock of an open file; raises BlockingIOError where others keep it too long."""
    end = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.01)


def exchange(one: Path, other: Path) -> None:
    """Let two names change places at once; raises OSError where the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, "no renameat2")
    if call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, FOLDER)
    try:
        os.fsync(fd)
    finally:
        close_descriptor(fd)
    progress()


def write_file(path: Path, data: bytes) -> None:
    """Create a private file that must not exist yet, and make its bytes durable."""
    with os.fdopen(os.open(path, _NEW, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    progress()


def write_all(fd: int, data: Any, offset: int) -> None:
    """Write what has a buffer of bytes into an open file, from an offset on."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def replace_file(path: Path, data: bytes, tmp: Path) -> None:
    """Write a small file as a whole, by way of `tmp`, and make it and its name durable."""
    for _ in range(TRIES):
        new = tmp / secrets.token_hex(16)
        with os.fdopen(os.open(new, _NEW, 0o600), "wb") as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)  # against a sweep
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.rename(new, path)
                break
            except (BlockingIOError, FileNotFoundError):
                if not path.parent.is_dir():  # not a sweep's doing
                    delete(new)
                    raise
            except BaseException:
                delete(new)
                raise
    else:
        raise OSError(errno.EAGAIN, "swept away again and again", str(path))
    sync_folder(path.parent)


def delete(path: Path) -> None:
    """Delete a folder, or whatever has its name, as far as that is possible now."""
    for _ in range(2):  # once more where the disk stumbled
        with contextlib.suppress(OSError):
            _delete(path)
            return


def _delete(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for name in os.listdir(path):  # one by one: each of them may be gigabytes
        inner = path / name
        if inner.is_symlink() or not inner.is_dir():
            inner.unlink(missing_ok=True)
        else:
            shutil.rmtree(inner, ignore_errors=True)
        progress()
    path.rmdir()


# -- an end to every wait --------------------------------------------------------------------------


class _Here(threading.local):
    job: _Job | None = None


here = _Here()
"""`here.job`: set in threads whose waits another thread ends, so that they need no further one."""


def progress() -> None:
    """Say, from within the work, that the disk has answered: the wait begins again."""
    if here.job:
        here.job.steps += 1


def may_be_left_behind() -> None:
    """Say that this thread's waits are ended by another: its work needs no other thread.

    A hand-over to another thread and back costs milliseconds where Python threads compete.
    """
    here.job = _Job(lambda: None, None)


class Refused(StoreUnavailable):
    """The work was not even started: too much before it is stuck, or there is no thread for it."""


class DiskTimeout:
    """Runs work with a limit on the time without progress. Thread-safe.

    A system call on a disk that hangs cannot be broken off. So the work has a thread of its own;
    when it gets no further, its caller gets an error and goes on, and the thread stays behind until
    the disk answers.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._stuck = 0
        self._process = os.getpid()

    def run(
        self,
        what: str,
        work: Callable[[], T],
        *,
        seconds: float | None = None,
        late: Callable[[T], object] | None = None,
    ) -> T:
        """The result of `work`, or what it raised; at once where it is part of other such work.

        Raises StoreUnavailable where there is no progress in time. `what` says in that error what
        is done. `seconds` may pass without a call of `progress`; None: those of the constructor.
        `late` takes a result that came after the caller had gone.
        """
        if here.job:
            return work()
        limit = self.seconds if seconds is None else seconds
        job = _Job(work, late)
        self._worker().jobs.put(job)
        steps = quiet = 0
        try:  # half of the limit twice: while this process is stopped, one may pass
            while quiet < 2 and not job.done.wait(limit / 2):
                quiet = quiet + 1 if steps == job.steps else 0
                steps = job.steps
        finally:
            if job.leave():
                with self._lock:
                    self._stuck += 1
        if not job.done.is_set():
            raise StoreUnavailable(f"{what}: the disk has not answered for {limit:g} s")
        if job.error is not None:
            raise job.error
        found: T = job.result
        return found

    def _worker(self) -> _Worker:
        with self._lock:
            if self._process != os.getpid():  # a fork has none of our threads
                self._process, self._idle, self._stuck = os.getpid(), [], 0
            if self._idle:
                return self._idle.pop()
            if self._stuck >= _MOST_STUCK:
                raise Refused(f"the disk has answered none of {self._stuck} requests")
        worker = _Worker(self._back)
        try:
            worker.start()
        except RuntimeError as e:  # the system gives no more threads
            raise Refused(f"cannot start a thread for disk requests: {e}") from e
        return worker

    def _back(self, worker: _Worker, left: bool) -> None:
        with self._lock:
            self._stuck -= left
            self._idle.append(worker)

    def close(self) -> None:
        """Let idle threads end; new work may still come."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.jobs.put(None)


class _Job:
    """Work that a caller waits for, until it gives up."""

    def __init__(self, work: Callable[[], Any], late: Callable[[Any], object] | None) -> None:
        self._work = work
        self._late = late
        self._lock = threading.Lock()
        self._left = False
        self.done = threading.Event()
        self.steps = 0
        self.result: Any = None
        self.error: BaseException | None = None

    def leave(self) -> bool:
        """Stop waiting; whether the work is still going on."""
        with self._lock:
            self._left = not self.done.is_set()
            return self._left

    def run(self) -> bool:
        """Do the work; whether no caller waited for its end."""
        here.job = self
        try:
            self.result = self._work()
        except BaseException as e:
            self.error = e
        finally:
            here.job = None
        with self._lock:
            if not self._left:
                self.done.set()
                return False
        if self.error is None and self._late is not None:
            self._late(self.result)
        return True


class _Worker(threading.Thread):
    """A thread that no exit of the program waits for."""

    def __init__(self, back: Callable[[_Worker, bool], None]) -> None:
        super().__init__(name="ckv-store", daemon=True)
        self._back = back
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            left = job.run()
            del job  # its result is not ours to keep
            self._back(self, left)
