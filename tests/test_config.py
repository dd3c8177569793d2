"""What is given to the engine refuses, field by field, what could not be honoured."""

from __future__ import annotations

from typing import Any

import pytest

from ckv_jax import EngineConfig, Request, SamplingParams
from ckv_jax.storage.config import StoreConfig

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": 0}, {"budget": "half"}, {"dtype": "int8"}, {"device_cache_bytes": -1},
        {"host_cache_bytes": "1 GB"}, {"digest_bytes": 0.5}, {"io_threads": 0},
        {"io_threads": 1.5}, {"max_batch": True}, {"read_deadline_s": 0},
        {"read_deadline_s": NAN}, {"read_deadline_s": INFINITY}, {"salt": 5},
        {"system": "nope"},
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_value_of_a_configuration_is_named(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=f"got {name}="):
        EngineConfig(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": "0.5"}, {"budget": True}, {"budget": -0.5}, {"deadline_s": "soon"},
        {"deadline_s": NAN}, {"deadline_s": 0}, {"id": 5},
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_value_of_a_request_is_named(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=f"got {name}="):
        Request(**({"prefix": "00ff", "suffix": [1]} | changes))


@pytest.mark.parametrize(
    ("made", "values", "says"),
    [
        (EngineConfig, {"system": 3}, "expected a SystemConfig or one of recompute"),
        (EngineConfig, {"max_batch": "8"}, "max_batch='8', expected a whole number"),
        (EngineConfig, {"read_deadline_s": None}, "expected a number"),
        (EngineConfig, {"salt": b"x"}, "expected a text"),
        (EngineConfig, {"threads": 1}, "threads"),
        (SamplingParams, {"stop": "x"}, "expected a tuple"),
        (SamplingParams, {"top_k": True}, "expected a whole number"),
        (SamplingParams, {"heat": 1.0}, "heat"),
        (Request, {"prefix": None, "suffix": "x"}, "got prefix=None, expected a Prefix"),
        (Request, {"prefix": "x", "suffix": 5}, "got suffix=5"),
        (Request, {"prefix": "x", "suffix": "x", "id": 7}, "expected a text"),
    ],
)
def test_a_wrong_type_is_a_type_error(made: Any, values: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        made(**values)


@pytest.mark.parametrize("suffix", ["", []])
def test_an_empty_suffix_is_refused(suffix: Any) -> None:
    with pytest.raises(ValueError, match="empty suffix"):
        Request(prefix="00ff", suffix=suffix)


def test_a_store_waits_as_long_as_an_engine_does() -> None:
    """By default the 10 seconds that the documentation names."""
    assert StoreConfig().deadline_s == EngineConfig().read_deadline_s == 10
