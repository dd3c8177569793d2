"""Two stores on one folder against a dictionary of what they promised."""

from __future__ import annotations

import pytest

from ckv_jax.storage.place.local import LocalFiles
from tests.faults.model import TwoStores, run_machine


def test_two_stores_keep_what_they_promise() -> None:
    assert run_machine(TwoStores, 12, 30).states > 60


def test_the_model_sees_a_store_that_evicts_what_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(TwoStores):
        """The machine without what takes seconds and has nothing to do with pins."""

        crash = paused_lock_holder = corrupt = fault = None  # type: ignore[assignment]

    monkeypatch.setattr(LocalFiles, "pins", lambda self: {})
    with pytest.raises(AssertionError, match="is gone"):
        run_machine(Without, 60, 40)
