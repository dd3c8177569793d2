"""Whose fault an error is: what clients sent is told to them, all else is logged and kept back."""

from __future__ import annotations

import logging

import pytest

from ckv_jax.server.errors import ApiError, as_api_error, what_clients_sent

SECRET = "slot 7 of the pool is held twice"


def test_a_value_error_below_the_server_is_its_own_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "ckv_jax.server"):
        told = as_api_error(ValueError(SECRET))
    assert (told.status, told.code) == (500, "internal_error")
    assert SECRET not in str(told)
    assert SECRET in caplog.text


def test_a_value_error_over_what_a_client_sent_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ApiError, match="expected a text") as told, what_clients_sent():
        raise ValueError("got 7, expected a text")
    assert told.value.status == 400
    assert not caplog.records
