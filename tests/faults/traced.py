"""Faults in the kernel: strace makes a real program's calls fail, TensorStore's threads and all.

Needs strace, and leave to trace. One process (`main`) has everything imported and forks one that
does each operation; strace is attached to it anew for each fault. strace counts calls for each
thread on its own, from the fork on, so that the k-th call of every thread fails.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults import farm
from tests.faults.calls import CODES
from tests.faults.scene import OPERATIONS, Done, judge, lay_out, open_files, perform
from tests.faults.sweep import Result, tally_of
from tests.faults.tally import HANG_S, Tally

CALLS = (
    "openat", "newfstatat", "pread64", "preadv", "pwrite64", "fsync", "fdatasync", "flock", "fcntl",
    "rename", "mkdir", "unlink", "unlinkat", "getdents64", "ftruncate", "io_setup", "io_submit",
    "io_getevents",
)  # fmt: skip
"""Calls that fail. Not close: strace would leave the descriptor open, as no kernel does."""
DEATHS = (
    "openat",
    "pwrite64",
    "fsync",
    "fdatasync",
    "rename",
    "mkdir",
    "unlink",
    "unlinkat",
    "io_submit",
)
"""Calls at which the process is killed."""
OPERATIONS_TRACED = (
    "open", "create", "write", "append", "evict", "read", "read directly", "pin", "verify",
    "repair", "replace", "prune", "lookup",
)  # fmt: skip
_CODES = {"io_setup": ("EAGAIN",), "io_submit": ("EAGAIN", "EIO"), "io_getevents": ("EINTR", "EIO")}
_DEEPEST = 40  # a call of one thread that is made to fail at most


def missing() -> str:
    """Why this kind cannot run here; "" where it can."""
    if shutil.which("strace") is None:
        return "strace is not installed (Debian, Ubuntu: apt-get install strace)"
    try:
        run = subprocess.run(
            ["strace", "-f", "-o", "/dev/null", "-e", "inject=fsync:error=EIO", "true"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "strace does not answer"
    return "" if run.returncode == 0 else f"strace may not trace here: {run.stderr.strip()[-120:]}"


@dataclass(frozen=True, slots=True)
class Traced:
    """The `at`-th `call` of every thread fails with `code`; None: the process is killed there."""

    operation: str
    call: str
    at: int
    code: str | None

    @property
    def kind(self) -> str:
        """The kind of fault."""
        return "traced death" if self.code is None else "traced call"


def states(
    made: dict[str, Counter[str]], step: int
) -> Iterator[tuple[tuple[str, int, Any], list[str]]]:
    """(call, at, code) of each fault, and the operations that make so many such calls."""
    number = 0
    for call in CALLS:
        deepest = min(_DEEPEST, max((counts[call] for counts in made.values()), default=0))
        for at in range(1, deepest + 1):
            codes: list[str | None] = list(_CODES.get(call, ()))
            if not codes:  # three of them for each call, other ones for the next
                codes = [CODES[(at * 3 + i) % len(CODES)] for i in range(3)]
            for code in (*codes, *[None] * (call in DEATHS)):
                number += 1
                if number % step == 0:
                    names = [name for name, counts in made.items() if counts[call] >= at]
                    yield (call, at, code), names


def trace(
    pristine: Path, *, jobs: int, step: int = 1, operations: tuple[str, ...] = OPERATIONS_TRACED
) -> dict[tuple[str, str], Tally]:
    """Run all states; a tally for each (kind, operation)."""
    made = count_calls(pristine, operations)
    todo = list(states(made, step))
    tallies: dict[tuple[str, str], Tally] = {}
    shares = [todo[i :: jobs * 3] for i in range(jobs * 3)]
    run = partial(run_faults, pristine)
    batches = [[share] for share in shares if share]
    for share, result in farm.run(run, batches, jobs=jobs, timeout_s=HANG_S * 10):
        if not isinstance(result, list):
            tallies["traced call", "all"] = Tally(states=1, crashes=1, notes=[f"{share}: {result}"])
            continue
        for state, found in result:
            key = (state.kind, state.operation)
            tallies[key] = tallies.get(key, Tally()) + _tally(state, found)
    return tallies


def _tally(state: Traced, result: Any) -> Tally:
    tally = tally_of(state, result)
    tally.notes = [f"{n} [{state.call} {state.at} {state.code}]" for n in tally.notes]
    return tally


# -- in a process of its own -------------------------------------------------------------------


def run_faults(pristine: Path, shares: list[Any], report: Callable[[int, Any], None]) -> None:
    """Work through shares of faults: all operations of each under one strace, then the judge."""
    logging.disable(logging.WARNING)
    for i, share in enumerate(shares):
        report(i, None)
        found: list[tuple[Traced, Any]] = []
        doers = Doer(pristine)
        for (call, at, code), names in share:
            what = "signal=SIGKILL" if code is None else f"error={code}"
            with doers.tracing(f"inject=?{call}:{what}:when={at}", call):
                done = [(name, *doers.do(name)) for name in names]
            for name, folder, result in done:
                state = Traced(name, call, at, code)
                found.append((state, _judged(pristine, state, folder, result)))
                shutil.rmtree(folder, ignore_errors=True)
            report(i, None)
        doers.close()
        report(i, found)


def _judged(pristine: Path, state: Traced, folder: Path, done: Done | str) -> Any:
    if isinstance(done, str):
        if done != "killed" or state.code is not None:
            return done  # a hang, or an end of its own
        done = Done(refused="killed")
    return Result(done, judge(pristine, folder, state.operation, done), failed=state.call)


class Doer:
    """The process that strace is attached to."""

    def __init__(self, pristine: Path) -> None:
        self._pristine = pristine
        self._number = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._line()  # it is ready

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()

    def tracing(self, expression: str, call: str) -> Strace:
        """strace, attached while the block runs."""
        return Strace(self._process.pid, ["-e", f"trace=?{call}", "-e", expression])

    def do(self, operation: str) -> tuple[Path, Done | str]:
        """Do an operation in a fork of the process; where, and what it did or how it ended."""
        self._number += 1
        folder = self._pristine / f"{os.getpid()}-traced-{self._number}"
        lay_out(self._pristine, OPERATIONS[operation], folder)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps([operation, str(folder)])}\n".encode())
        self._process.stdin.flush()
        line = self._line()
        return folder, pickle.loads(bytes.fromhex(line[3:])) if line.startswith("ok ") else line

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(HANG_S)
        self._process.stdout.close()


class Strace:
    """strace attached to a process and all that it forks; a context manager."""

    def __init__(self, pid: int, options: list[str], output: str = "/dev/null") -> None:
        self._command = ["strace", "-f", "-p", str(pid), "-o", output, *options]

    def __enter__(self) -> Strace:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE)
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        if b"attached" not in line:
            self._process.kill()
            raise RuntimeError(f"strace: {line.decode()}")
        self._drain = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._drain.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)  # it detaches
        self._process.wait(HANG_S)
        self._drain.join()
        assert self._process.stderr is not None
        self._process.stderr.close()


def count_calls(pristine: Path, operations: tuple[str, ...]) -> dict[str, Counter[str]]:
    """How often one thread of each operation makes each call, at most."""
    made = {}
    doer = Doer(pristine)
    names = ",".join(f"?{name}" for name in CALLS)
    for name in operations:
        with tempfile.NamedTemporaryFile() as file:
            with Strace(doer._process.pid, ["-e", f"trace={names}"], file.name):
                folder, done = doer.do(name)
            lines = Path(file.name).read_text(errors="replace").splitlines()
        if not isinstance(done, Done) or done.refused or done.crash:
            raise RuntimeError(f"{name} fails without a fault: {done}")
        shutil.rmtree(folder)
        calls = [
            line.split("(")[0].split() for line in lines if "(" in line and "resumed" not in line
        ]
        each = Counter((words[0], words[1]) for words in calls if len(words) == 2)
        made[name] = Counter()
        for (_, call), count in each.items():
            made[name][call] = max(made[name][call], count)
    doer.close()
    return made


# -- the process that is traced ----------------------------------------------------------------


def main() -> None:
    """Read [operation, folder] from each line of the input; do it in a fork; say what came of it.

    Its own calls may be made to fail, too, once each: it only reads, writes, forks and waits.
    """
    _say("ready")
    kept = b""
    while True:
        while b"\n" not in kept:
            more = _again(os.read, 0, 1 << 16)
            if not more:
                return
            kept += more
        line, kept = kept.split(b"\n", 1)
        operation, folder = json.loads(line)
        pipe = os.pipe()
        pid = os.fork()
        if not pid:
            _do(operation, Path(folder), pipe[1])
        os.close(pipe[1])
        _say(_wait(pid, pipe[0]))


def _do(operation: str, folder: Path, pipe: int) -> None:
    logging.disable(logging.WARNING)
    done = Done()
    try:
        done = perform(operation, folder, lambda: None, lambda: None)
        done.leaks += _again(open_files, folder)
    except Exception as e:  # of what is around the operation, which fails as well here
        done.refused = f"around it: {type(e).__name__}: {e}"[:200]
    _again(os.write, pipe, b"ok " + pickle.dumps(done).hex().encode())
    os._exit(0)


def _wait(pid: int, pipe: int) -> str:
    """What the fork said, or how it ended."""
    end = time.monotonic() + HANG_S
    hung = False
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        if time.monotonic() > end:
            hung = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    said = b""
    while part := _again(os.read, pipe, 1 << 16):
        said += part
    os.close(pipe)
    code = os.waitstatus_to_exitcode(status)
    if hung:
        return "hang"
    return said.decode() or ("killed" if code == -signal.SIGKILL else f"died: {code}")


def _say(text: str) -> None:
    _again(os.write, 1, f"{text}\n".encode())


def _again(call: Callable[..., Any], *args: Any) -> Any:
    """Make a call, once more if it is made to fail."""
    for _ in range(3):
        try:
            return call(*args)
        except OSError as e:
            error = e
    raise error


if __name__ == "__main__":
    main()
