"""The disk's own bandwidth, by fio, else by threads: what the I/O floor divides by."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

FILE_BYTES = 1 << 30
DEPTH = 32


class Disk:
    """Random direct reads at queue depth 32 in one folder, measured once for each block size.

    fio reads where it is installed; `DEPTH` threads of this process read where it is not, which
    gives less of a fast disk. A context manager: leaving it removes the file that was read.
    """

    def __init__(self, folder: Path, *, seconds: float = 2.0, file_bytes: int = FILE_BYTES) -> None:
        self._fio = shutil.which("fio")
        self._file = folder / "fio.dat"
        self._seconds = seconds
        self._file_bytes = file_bytes
        self._found: dict[int, float] = {}
        self._alone: dict[int, float] = {}

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.unlink(missing_ok=True)

    def bandwidth(self, block_bytes: int) -> float:
        """Bytes a second of random reads of `block_bytes` (whole 4 KiB, at most 4 MiB)."""
        size = min(max(4096, block_bytes // 4096 * 4096), 4 << 20)
        if size not in self._found:
            self._found[size] = self._measure(size)
        return self._found[size]

    def latency(self, block_bytes: int) -> float:
        """Seconds of one random read alone."""
        size = min(max(4096, block_bytes // 4096 * 4096), 4 << 20)
        if size not in self._alone:
            self.bandwidth(size)  # lays the file out
            self._alone[size] = size / (self._by_fio if self._fio else self._by_threads)(size, 1)
        return self._alone[size]

    @property
    def tool(self) -> str:
        """What reads: "fio" or "threads"."""
        return "fio" if self._fio else "threads"

    @property
    def found(self) -> dict[str, float]:
        """Everything measured so far, in GB/s by block size."""
        return {str(size): round(rate / 1e9, 3) for size, rate in sorted(self._found.items())}

    def _measure(self, size: int) -> float:
        if not self._file.exists():
            self._lay_out()
        # The better of two: the first may still share the disk with what was written before.
        run = self._by_fio if self._fio else self._by_threads
        return max(run(size) for _ in range(2))

    def _lay_out(self) -> None:
        """Real bytes, on the disk before anything is read: holes and write-back would be timed."""
        block = np.random.default_rng(0).bytes(min(self._file_bytes, 64 << 20))
        with self._file.open("wb") as file:
            for _ in range(max(1, self._file_bytes // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    def _by_threads(self, size: int, depth: int = DEPTH) -> float:
        descriptor = os.open(self._file, os.O_RDONLY | os.O_DIRECT)
        blocks = os.fstat(descriptor).st_size // size
        end = time.perf_counter() + self._seconds / 2

        def read(seed: int) -> int:
            rng, done = np.random.default_rng(seed), 0
            with mmap.mmap(-1, size) as landing:
                while time.perf_counter() < end:
                    done += os.preadv(descriptor, [landing], int(rng.integers(blocks)) * size)
            return done

        try:
            start = time.perf_counter()
            with ThreadPoolExecutor(depth) as pool:
                done = sum(pool.map(read, range(depth)))
            return done / (time.perf_counter() - start)
        finally:
            os.close(descriptor)

    def _by_fio(self, size: int, depth: int = DEPTH) -> float:
        assert self._fio is not None
        command = [
            self._fio, "--name=read", f"--filename={self._file}", "--rw=randread", "--direct=1",
            "--ioengine=libaio", f"--iodepth={depth}", f"--bs={size}",
            f"--size={self._file.stat().st_size}", f"--runtime={self._seconds / 2}",
            "--time_based", "--output-format=json",
        ]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(f"fio failed: {run.stderr.strip()[-400:]}")
        found = json.loads(run.stdout[run.stdout.index("{") :])
        return float(found["jobs"][0]["read"]["bw_bytes"])
