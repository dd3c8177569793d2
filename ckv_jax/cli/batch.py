"""`ckv batch`: many questions from a file, resumable."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ckv_jax.cli.options import (
    Budget,
    Checkpoint,
    Codec,
    DirectIo,
    Dtype,
    Eviction,
    IoConcurrency,
    Json,
    MaxBytes,
    Salt,
    Store,
    System,
    TensorParallel,
)
from ckv_jax.cli.output import Terminal, check_writable, number_of
from ckv_jax.cli.store_tools import is_store, open_store, store_config

__all__ = ["batch"]


def batch(
    checkpoint: Checkpoint,
    requests: Annotated[
        Path,
        typer.Argument(
            metavar="REQUESTS.jsonl",
            help="One JSON object per line: question (text or token ids) and prefix, or a whole "
            "prompt; optionally id, budget, max_tokens, temperature, top_p, top_k, seed, stop, "
            "stop_token_ids.",
        ),
    ],
    store: Store,
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="RESULTS.jsonl", help="One JSON object per line, as they finish."
        ),
    ],
    prefix: Annotated[
        str | None,
        typer.Option("--prefix", metavar="ID", help="The stored text of lines that name none."),
    ] = None,
    budget: Budget = None,
    system: System = "ckv",
    together: Annotated[
        int,
        typer.Option("--batch", metavar="N", min=1, max=32, help="Questions answered at once."),
    ] = 8,
    codec: Codec = "none",
    dtype: Dtype = "bfloat16",
    tensor_parallel: TensorParallel = 1,
    salt: Salt = "",
    max_bytes: MaxBytes = None,
    eviction: Eviction = "attention",
    direct_io: DirectIo = None,
    io_concurrency: IoConcurrency = 32,
    json: Json = False,
) -> None:
    """Answer many questions from a file.

    Questions over one stored text share what they read, and are answered one after the other.
    What whole prompts begin with alike (256 tokens or more) is found and stored once. If the
    command is interrupted, run it again: answers that are in the result file already are kept, and
    it goes on from there. A bad line is reported, skipped, and noted in the result file with its
    error; the exit code is then 3, and all other answers are there.
    """
    check_writable(out)
    terminal = Terminal(as_json=json)
    settings = store_config(
        max_bytes=max_bytes,
        eviction=eviction,
        direct_io=direct_io,
        io_concurrency=io_concurrency,
    )
    with terminal.loading():
        from ckv_jax import compilation_cache
        from ckv_jax.cli.jobs import BadLine, Job, Results, read_jobs
        from ckv_jax.cli.serving import Answerer, kv_bytes, parse_budget, say_recomputed
        from ckv_jax.cli.turns import turns
        from ckv_jax.config import EngineConfig
        from ckv_jax.engine import Engine
        from ckv_jax.systems import preset

        compilation_cache.enable()
        lines = list(read_jobs(requests, prefix=prefix))
        prompts = any(isinstance(line, Job) and line.prefix is None for line in lines)
        largest = 0
        if not prompts or is_store(store):  # prompts may be the first that is stored
            with open_store(store, settings) as opened:
                largest = max(map(kv_bytes, opened.prefixes()), default=0)
        default = EngineConfig()
        config = EngineConfig(
            system=preset(system, codec=codec),
            dtype=dtype,
            tensor_parallel=tensor_parallel,
            salt=salt,
            budget=default.budget if budget is None else parse_budget(budget),
            prefetch_device_bytes=max(default.prefetch_device_bytes, round(1.1 * largest)),
        )
        engine = Engine.from_pretrained(
            checkpoint, store=store, config=config, store_config=settings
        )
    start = time.perf_counter()
    answered = failed = recomputed = compiling = 0
    with engine, Results(out) as results, terminal.progress() as bar, _said_if_interrupted(out):
        left = [line for line in lines if (line.line, line.digest) not in results.done]
        kept = len(lines) - len(left)
        jobs = [line for line in left if isinstance(line, Job)]
        faults: list[tuple[Job | BadLine, str]] = [
            (line, line.error) for line in left if not isinstance(line, Job)
        ]
        answerer = Answerer(engine, model=checkpoint.name)
        every = [line for line in lines if isinstance(line, Job)]
        stored = answerer.store_beginnings(every if jobs else [], bar("prompts"))
        report = bar("questions")
        for part in turns(jobs, together, text_of=answerer.text_of):
            for job, found in answerer.answer(part):
                if isinstance(found, str):
                    faults.append((job, found))
                else:
                    results.write({"line": job.line, "digest": job.digest, "id": job.id} | found)
                    answered += 1
                    recomputed += int(found["recomputed_chunks"])
                    compiling += bool(found["compiled"])
            report(kept + answered + len(faults), len(lines))
        lost = say_recomputed(recomputed, engine, store)
        for line, error in faults:
            terminal.warn(f"{requests}, line {line.line}: {error}")
            results.write({"line": line.line, "digest": line.digest, "id": line.id, "error": error})
            failed += 1
    seconds = time.perf_counter() - start
    summary = {"answered": answered, "kept": kept, "failed": failed, "seconds": seconds}
    shared = {"beginnings": stored} if stored else {}
    if json:
        terminal.json(summary | shared)
    else:
        terminal.say(
            f"{answered} answered in {seconds:.1f} s, {kept} kept from before, {failed} failed; "
            f"results in {out}"
        )
        if stored:
            terminal.say(
                f"{number_of(len(stored), 'beginning')} that prompts share "
                f"{'is' if len(stored) == 1 else 'are'} stored, "
                f"{number_of(sum(stored.values()), 'token')}"
            )
    if compiling:
        terminal.warn(
            f"the times of {number_of(compiling, 'answer')} hold compiling or loading programs: "
            '"compiled" in the result file'
        )
    if recomputed:
        terminal.warn(lost)
    if failed:
        raise typer.Exit(3)


@contextmanager
def _said_if_interrupted(out: Path) -> Iterator[None]:
    """Ctrl-C says where the answers so far are, and ends the command with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        Terminal(as_json=False).warn(
            f"interrupted: the answers so far are in {out}; run the command again to go on"
        )
        raise typer.Exit(130) from None
