"""A dense request, by itself: when whoever waits for it is told."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from ckv_jax import Prefix, Request
from ckv_jax.serving.alone import Alone
from ckv_jax.serving.sequence import Sequence, result_of
from ckv_jax.serving.sequence_job import sequence_job
from ckv_jax.trace import Trace
from tests.support.truth import FINGERPRINT, SMALL


def test_a_dense_request_settles_once_its_job_has_left() -> None:
    nothing: Any = None
    plan: Any = SimpleNamespace(steps=())
    alone = Alone(
        nothing, nothing, nothing, nothing, plan=plan, token_bytes=1, computes_all=True,
        finish=lambda sequence, token, logits, trace: sequence.answer(token, "", logits, trace),
        begin_text=nothing, store_prompt=nothing,
    )  # fmt: skip
    prefix = Prefix.empty(FINGERPRINT, SMALL, "")
    made = Sequence(Request(prefix=prefix, suffix=[7, 8]))
    made.place(prefix, np.array([7, 8], np.int32), 1.0)
    waits = threading.Thread(target=made.settled_result, daemon=True)
    waits.start()

    def steps() -> Any:
        alone.dense_done(made, np.zeros((1, 9), np.float32), 3, {}, Trace())
        return
        yield

    told: list[bool] = []

    def leave() -> None:
        waits.join(0.2)
        told.append(waits.is_alive())

    assert not sequence_job(made, steps(), 1).advance(leave)
    waits.join(20)
    assert told == [True] and not waits.is_alive()
    assert result_of(made).token_id == 3
