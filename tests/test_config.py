"""Configurations refuse what they could not honour."""

from __future__ import annotations

from typing import Any

import pytest

from ckv_jax.config import EngineConfig
from ckv_jax.storage.config import StoreConfig


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": 0},
        {"budget": "half"},
        {"dtype": "int8"},
        {"device_cache_bytes": -1},
        {"host_cache_bytes": "1 GB"},
        {"digest_bytes": 0.5},
        {"io_threads": 0},
        {"io_threads": 1.5},
        {"max_batch": True},
        {"read_deadline_s": 0},
        {"read_deadline_s": float("nan")},
        {"read_deadline_s": float("inf")},
        {"read_deadline_s": None},
        {"salt": 5},
    ],
)
def test_a_bad_value_is_named(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=f"got {name}="):
        EngineConfig(**changes)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="threads"):
        EngineConfig(threads=1)  # type: ignore[call-arg]


def test_a_store_waits_as_long_as_an_engine_does() -> None:
    """Whoever says nothing gets the 10 seconds that the documentation names."""
    assert StoreConfig().deadline_s == EngineConfig().read_deadline_s == 10
