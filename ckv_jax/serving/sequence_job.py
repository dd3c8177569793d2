"""One sequence as a job of its own: what goes wrong with it is its own outcome."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from ckv_jax.errors import CkvError
from ckv_jax.serving.job import Job
from ckv_jax.serving.sequence import Sequence


def sequence_job(sequence: Sequence, steps: Generator[None, None, Any], num_bytes: int) -> Job:
    """A job whose errors are the sequence's; one that is answered settles once the job has left."""
    job = Job(steps, num_bytes=num_bytes)

    def ended(_: object) -> None:
        error = None if job.future.cancelled() else job.future.exception()
        if isinstance(error, (CkvError, ValueError)):
            sequence.fail(error)
        elif error is not None:
            sequence.crash(error)
        elif sequence.done():
            sequence.settle()

    job.future.add_done_callback(ended)
    return job


def given_up(sequence: Sequence) -> bool:
    """Whether nobody waits for it any more; then it has failed."""
    error = sequence.lapsed()
    if error is not None:
        sequence.fail(error)
    return error is not None
