"""Page-locked memory, by a stand-in for CUDA's runtime: no GPU is here."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from ckv_jax.prefix import pools as host


class Runtime:
    """Counts what is locked; refuses what is larger than `most` bytes."""

    def __init__(self, most: int) -> None:
        self.locked: set[int] = set()
        self.cleared = 0
        self._most = most

    def cudaHostRegister(self, address: Any, size: Any, flags: Any) -> int:
        if size.value > self._most:
            return 2  # out of memory
        self.locked.add(address.value)
        return 0

    def cudaHostUnregister(self, address: Any) -> int:
        self.locked.remove(address.value)
        return 0

    def cudaGetLastError(self) -> int:
        self.cleared += 1
        return 2


def test_memory_is_unlocked_once_and_a_refusal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(most=8192)
    monkeypatch.setattr(host, "_cuda_runtime", lambda: runtime)
    memory, locked = host.aligned_bytes(4096), host.PageLocked()
    assert locked.lock(memory) and runtime.locked == {memory.ctypes.data}
    assert not locked.lock(host.aligned_bytes(16384)) and runtime.cleared == 1
    locked.close()
    locked.close()
    assert not runtime.locked


def test_without_a_runtime_nothing_is_locked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host.ctypes, "CDLL", Mock(side_effect=OSError))
    locked = host.PageLocked()
    for _ in range(2):
        assert not locked.lock(host.aligned_bytes(4096))
    assert caplog.text.count("no CUDA runtime") == 1
    locked.close()
