"""What `ask` and `batch` share: a prefix for an id, an engine with room for it, answers to jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ckv_jax.answer import answer_json
from ckv_jax.cli.beginnings import shared_beginnings
from ckv_jax.cli.jobs import Job
from ckv_jax.cli.output import number_of, one_line
from ckv_jax.config import check_budget
from ckv_jax.engine import Engine
from ckv_jax.errors import CkvError
from ckv_jax.request import Generation, Request, Result
from ckv_jax.storage.codec import codec_of
from ckv_jax.storage.errors import PrefixNotFound
from ckv_jax.storage.index.wishes import Wish
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.manifest import is_id
from ckv_jax.storage.store import ChunkStore

__all__ = [
    "Answerer",
    "codec_name",
    "find_prefix",
    "kv_bytes",
    "parse_budget",
    "say_recomputed",
]


def find_prefix(store: ChunkStore, name: str | None, *, salt: str) -> Prefix:
    """The stored prefix of this name, or whose id is or begins with it; None: the only one there
    is. A whole id comes before a name.

    Raises `PrefixNotFound` with close ids or, where there are none, with what is stored;
    `ValueError` for a name that several have.
    """
    if name is not None and is_id(name):
        with contextlib.suppress(PrefixNotFound):
            return store.prefix(name, salt=salt)  # without a look at everybody's names
    known = store.wishes()
    if name is None:
        stored = [prefix.id for prefix in store.prefixes(salt=salt)]
        if not stored:
            raise ValueError("the store holds no prefix; `ckv ingest` makes one")
        if len(stored) > 1:
            raise ValueError(
                f"{len(stored)} prefixes are stored; say which with --prefix: "
                f"{_list(stored, known)}"
            )
        (name,) = stored
    called = [id_ for id_, wish in known.items() if name and wish.name == name]
    mine = [id_ for id_ in called if _is_whose(store, id_, salt)]
    if len(mine) > 1:
        raise ValueError(
            f"{len(mine)} prefixes are called {name!r}; say which by its id: "
            f"{_list(mine, known, called=False)}"
        )
    try:
        return store.prefix(mine[0] if mine else name, salt=salt)
    except PrefixNotFound as error:
        stored = [prefix.id for prefix in store.prefixes(salt=salt)]
        if error.several or error.close or not stored:
            raise
        raise PrefixNotFound(name, stored=_list(stored, known)) from error


def _is_whose(store: ChunkStore, prefix_id: str, salt: str) -> bool:
    try:
        store.prefix(prefix_id, salt=salt)
    except PrefixNotFound:
        return False
    return True


def _list(
    ids: Sequence[str], known: Mapping[str, Wish], most: int = 5, *, called: bool = True
) -> str:
    """Some ids, each with what it is called, unless all are called the same, or begins with."""
    said = []
    for id_ in ids[:most]:
        wish = known.get(id_, Wish())
        begins = f"“{wish.begins}”" if wish.begins else wish.source
        about = (called and wish.name) or begins
        said.append(f"{id_[:12]}{f' ({about})' if about else ''}")
    return ", ".join(said) + (f" and {len(ids) - most} more" if len(ids) > most else "")


def codec_name(prefix: Prefix) -> str:
    """What `SystemConfig.codec` must be to read a prefix. Raises ValueError for a codec that is not
    known here."""
    codec_of(prefix.layout)
    return prefix.layout.codec.partition(":")[0]


def parse_budget(text: str) -> float | str:
    """A budget from the command line: a number, or what attention it must hold."""
    try:
        number = float(text)
    except ValueError:
        return check_budget(text)
    return check_budget(number)


def kv_bytes(prefix: Prefix) -> int:
    """Bytes of all packs of a prefix."""
    return prefix.num_chunks * prefix.layout.groups * prefix.layout.pack_bytes


def say_recomputed(chunks: int, engine: Engine, store: str) -> str:
    """What to tell the user who got an answer for which chunks had to be computed again."""
    late = engine.stats().read_errors and not engine.stats().quarantined
    limit = engine.config.read_deadline_s
    are, were = ("is", "was") if chunks == 1 else ("are", "were")
    why, then = (
        (f"{were} not read within {limit:g} s", "look at the disk")
        if late
        else (f"{are} damaged on disk", f"run: ckv verify {store}")
    )
    return (
        f"{number_of(chunks, 'chunk')} {why} and {were} computed again: "
        f"the answer is right and came late; {then}"
    )


class Answerer:
    """Answers jobs over one engine; what is wrong with one of them is its own affair."""

    def __init__(self, engine: Engine, *, model: str) -> None:
        self._engine = engine
        self._model = model
        self._prefixes: dict[str, Prefix] = {}
        self._prompts: dict[int, tuple[Prefix | None, np.ndarray]] = {}

    def store_beginnings(
        self, jobs: Sequence[Job], progress: Callable[[int, int], object]
    ) -> dict[str, int]:
        """Stores what several prompts begin with, once: tokens by the id of the prefix.

        The shortest first, which the longer go on from. `progress(done, all)` counts beginnings. A
        prompt that cannot be stored is asked as it is, and its answer says what is wrong with it.
        """
        whole: dict[int, np.ndarray] = {}
        for job in jobs:
            if job.prefix is None:
                with contextlib.suppress(CkvError, ValueError):
                    whole[job.line] = self._engine.encode(job.question, begins=True)
        lengths = shared_beginnings(list(whole.values()))
        found: dict[bytes, Prefix | None] = {b"": None}
        stored: dict[str, int] = {}
        order = sorted(zip(lengths, whole.items(), strict=True), key=lambda entry: entry[0])
        for number, (length, (line, tokens)) in enumerate(order, start=1):
            begins = tokens[:length].tobytes()
            if begins not in found:
                try:
                    found[begins] = self._engine.ingest(tokens[:length])
                except (CkvError, ValueError):
                    found[begins] = None
            prefix = found[begins]
            if prefix is not None:
                stored[prefix.id] = prefix.num_tokens
            self._prompts[line] = prefix, tokens[0 if prefix is None else length :]
            progress(number, len(order))
        return stored

    def text_of(self, job: Job) -> Hashable:
        """What a job's question stands on: jobs over one text follow each other."""
        if job.prefix is not None:
            return job.prefix
        prefix, _ = self._prompts.get(job.line, (None, None))
        return job.line if prefix is None else prefix.id

    def answer(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, dict[str, Any] | str]]:
        """Each job with its answer as JSON, or with what is wrong with it."""
        ready: list[tuple[Job, Request]] = []
        for job in jobs:
            try:
                ready.append((job, self._request(job)))
            except (CkvError, ValueError) as error:
                yield job, one_line(error)
        if not ready:
            return
        for several in (False, True):
            part = [(job, request) for job, request in ready if _several(job) == several]
            yield from zip([job for job, _ in part], self._outcomes(part, several), strict=True)

    def _outcomes(
        self, part: Sequence[tuple[Job, Request]], several: bool
    ) -> Iterator[dict[str, Any] | str]:
        if not part:
            return
        requests = [request for _, request in part]
        found: list[Result | Generation] = []
        if several:
            found += self._engine.generate(requests, [job.sampling for job, _ in part]).results()
        else:
            found += self._engine.reprefill(requests)
        for index, outcome in enumerate(found):
            prefix = part[index][1].prefix
            prefixes = (prefix,) if isinstance(prefix, Prefix) else ()
            try:
                yield answer_json(outcome, self._engine, *prefixes, model=self._model)
            except (CkvError, ValueError) as error:
                yield one_line(error)

    def _request(self, job: Job) -> Request:
        if job.prefix is None:
            return self._whole(job)
        if job.prefix not in self._prefixes:
            engine = self._engine
            prefix = find_prefix(engine.store, job.prefix, salt=engine.config.salt)
            self._prefixes[job.prefix] = prefix
        return Request(
            prefix=self._prefixes[job.prefix], suffix=job.question, budget=job.budget, id=job.id
        )

    def _whole(self, job: Job) -> Request:
        """A prompt: what others begin with is stored, the rest is asked."""
        if job.line not in self._prompts:
            self._engine.encode(job.question, begins=True)  # raises what is wrong with it
        prefix, rest = self._prompts[job.line]
        stored: Prefix | list[int] = [] if prefix is None else prefix
        return Request(prefix=stored, suffix=rest.tolist(), budget=job.budget, id=job.id)


def _several(job: Job) -> bool:
    """Whether more is wanted than the likeliest first token, which every system gives."""
    return job.sampling.max_tokens > 1 or job.sampling.temperature > 0
