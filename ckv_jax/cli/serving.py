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
from ckv_jax.storage.errors import PrefixNotFound
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

    Raises `PrefixNotFound` with close ids, `FingerprintMismatch` where another model, tokenizer
    or dtype made it, and `ValueError` where another system laid it out.
    """
    store = engine.store
    if name is None:
        stored = [prefix.id for prefix in store.prefixes() if prefix.salt == engine.config.salt]
        if not stored:
            raise ValueError("the store holds no prefix; `ckv ingest` makes one")
        if len(stored) > 1:
            ids = ", ".join(prefix_id[:12] for prefix_id in stored[:5])
            more = f" and {len(stored) - 5} more" if len(stored) > 5 else ""
            raise ValueError(f"{len(stored)} prefixes are stored; say --prefix: {ids}{more}")
        (name,) = stored
    prefix = store.prefix(name, fingerprint=engine.fingerprint)
    if prefix.salt != engine.config.salt:
        raise PrefixNotFound(name)
    if prefix.layout != engine.layout:
        stored_as, asked = asdict(prefix.layout), asdict(engine.layout)
        differ = ", ".join(
            f"{field} (stored {stored_as[field]!r}, got {asked[field]!r})"
            for field in asked
            if stored_as[field] != asked[field]
        )
        raise ValueError(f"the prefix was stored with another --system; these differ: {differ}")
    return prefix


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
