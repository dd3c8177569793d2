"""What `ask` and `batch` share: an engine for the options given, a prefix for an id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ckv_jax.answer import answer_json
from ckv_jax.cli.jobs import Job
from ckv_jax.cli.output import one_line
from ckv_jax.config import EngineConfig, check_budget
from ckv_jax.engine import Engine
from ckv_jax.errors import CkvError
from ckv_jax.request import Request
from ckv_jax.storage.errors import FingerprintMismatch
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix

__all__ = ["Answerer", "find_prefix", "open_engine"]


def open_engine(
    checkpoint: Path, store: str, *, budget: float | None, system: str, dtype: str, salt: str
) -> Engine:
    """The engine of a checkpoint folder over an existing store."""
    if "://" not in store and not Path(store).is_dir():
        raise ValueError(f"there is no store at {store}; `ckv ingest` makes one")
    config = EngineConfig(
        system=system,
        dtype=dtype,
        salt=salt,
        budget=EngineConfig().budget if budget is None else check_budget(budget),
    )
    return Engine.from_pretrained(checkpoint, store=store, config=config)


def find_prefix(engine: Engine, name: str | None) -> Prefix:
    """The stored prefix whose id is or begins with `name`; None: the only one there is.

    Raises `PrefixNotFound` with close ids, `ValueError` where several begin with `name`, and
    `FingerprintMismatch` where another model, tokenizer, dtype or layout made it.
    """
    store = engine.store
    found = [
        prefix
        for prefix in store.prefixes()
        if prefix.id.startswith(name or "") and prefix.salt == engine.config.salt
    ]
    exact = [prefix for prefix in found if prefix.id == name]
    if len(exact or found) > 1:
        ids = ", ".join(prefix.id[:12] for prefix in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ValueError(f"{len(found)} stored prefixes fit; say --prefix with one of {ids}{more}")
    if not found and name is None:
        raise ValueError("the store holds no prefix; `ckv ingest` makes one")
    prefix_id = (exact or found)[0].id if found else name or ""
    prefix = store.prefix(prefix_id, fingerprint=engine.fingerprint)
    if prefix.layout != engine.layout:
        raise FingerprintMismatch(_strings(prefix.layout), _strings(engine.layout))
    return prefix


def _strings(layout: Layout) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(layout).items()}


class Answerer:
    """Answers jobs over one engine; what is wrong with one of them is its own affair."""

    def __init__(self, engine: Engine, *, model: str) -> None:
        self._engine = engine
        self._model = model
        self._prefixes: dict[str, Prefix] = {}

    def answer(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, dict[str, Any] | str]]:
        """Each job with its answer as JSON, or with what is wrong with it."""
        ready: list[tuple[Job, Request]] = []
        for job in jobs:
            try:
                ready.append((job, self._request(job)))
            except (CkvError, ValueError) as error:
                yield job, one_line(error)
        try:
            results = self._engine.reprefill([request for _, request in ready])
        except (CkvError, ValueError) as error:
            if len(ready) == 1:
                yield ready[0][0], one_line(error)
                return
            for job, _ in ready:
                yield from self.answer([job])
            return
        for (job, request), result in zip(ready, results, strict=True):
            prefix = self._prefixes[job.prefix]
            yield (
                job,
                answer_json(
                    result, self._engine, prefix, model=self._model, question=request.suffix
                ),
            )

    def _request(self, job: Job) -> Request:
        if job.prefix not in self._prefixes:
            self._prefixes[job.prefix] = find_prefix(self._engine, job.prefix)
        return Request(
            prefix=self._prefixes[job.prefix], suffix=job.question, budget=job.budget, id=job.id
        )
