"""Errors of requests are reported to clients; all others are logged and not disclosed."""

from __future__ import annotations

import logging

import pytest

from ckv_jax.server.http import as_api_error

SECRET = "slot 7 of the pool is held twice"


def test_a_value_error_below_the_server_is_not_disclosed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "ckv_jax.server"):
        reported = as_api_error(ValueError(SECRET))
    assert (reported.status, reported.code) == (500, "internal_error")
    assert SECRET not in str(reported)
    assert SECRET in caplog.text
