"""`ckv batch`: answers many questions from a file, and resumes where it stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ckv_jax.cli import options
from ckv_jax.cli.output import Terminal, number_of


def batch(
    checkpoint: options.Checkpoint,
    requests: Annotated[
        Path,
        typer.Argument(
            metavar="REQUESTS.jsonl",
            help="One JSON object per line: question (text or token ids) and prefix, or a whole "
            "prompt. Optional fields: id, budget, max_tokens (default: 256 after a document in the "
            "chat template, else 1), temperature, top_p, top_k, seed, stop, stop_token_ids.",
        ),
    ],
    store: options.Store,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="RESULTS.jsonl",
            help="File of the results: one JSON object per line, in order of completion.",
        ),
    ],
    prefix: Annotated[
        str | None,
        typer.Option(
            "--prefix", metavar="ID|NAME", help="The stored document of lines without a prefix."
        ),
    ] = None,
    budget: options.Budget = None,
    system: options.System = "ckv",
    together: Annotated[
        int,
        typer.Option(
            "--batch",
            metavar="N",
            min=1,
            max=32,
            help="Questions answered at once. Programs for 2, 4, 8 and so on questions are "
            "compiled at first use; 1 uses the programs of `ckv ask`.",
        ),
    ] = 8,
    codec: options.Codec = "none",
    dtype: options.Dtype = "bfloat16",
    weights: options.Weights = None,
    tensor_parallel: options.TensorParallel = 1,
    salt: options.Salt = "",
    max_bytes: options.MaxBytes = None,
    eviction: options.EvictionPolicy = "attention",
    direct_io: options.DirectIo = None,
    io_concurrency: options.IoConcurrency = 32,
    encrypt_key_file: options.EncryptKeyFile = None,
    json: options.JsonOutput = False,
) -> None:
    """Answer many questions from a file.

    Questions over one stored document are answered together and share the chunks that they read. A
    prefix of 256 tokens or more that several whole prompts share is stored once. If the command is
    interrupted, run it again: it keeps the answers in the result file and computes the rest. A bad
    line is reported and skipped, and its error is written to the result file; the exit code is then
    3, and all other answers are complete.
    """
    options.check_writable(out)
    terminal = Terminal(as_json=json)
    settings = options.store_config(
        max_bytes, eviction, direct_io, io_concurrency, encrypt_key_file
    )
    with terminal.loading():
        from ckv_jax.cli.lines import Answerer, BadLine, RequestLine, Results, batches, read_lines
        from ckv_jax.systems import preset

        lines = list(read_lines(requests, prefix=prefix))
        prompts = any(isinstance(line, RequestLine) and line.prefix is None for line in lines)
        largest = 0
        if not prompts or options.is_store(store):  # the store may be made for prompts
            with options.open_store(store, settings) as opened:
                largest = max(map(options.kv_bytes, opened.prefixes()), default=0)
        engine = options.open_engine(
            checkpoint,
            store,
            settings=settings,
            system=preset(system, codec=codec),
            dtype=dtype,
            weights=weights,
            tensor_parallel=tensor_parallel,
            salt=salt,
            budget=None if budget is None else options.parse_budget(budget),
            prefetch_device_bytes=options.room_for(largest, 1.0)["prefetch_device_bytes"],
        )
    start = time.perf_counter()
    answered = failed = recomputed = compiling = 0
    with engine, Results(out) as results, terminal.progress() as bar, _report_interrupt(out):
        left = [line for line in lines if (line.line, line.digest) not in results.done]
        kept = len(lines) - len(left)
        valid = [line for line in left if isinstance(line, RequestLine)]
        faults: list[tuple[RequestLine | BadLine, str]] = [
            (line, line.error) for line in left if not isinstance(line, RequestLine)
        ]
        answerer = Answerer(engine, model=checkpoint.name)
        every = [line for line in lines if isinstance(line, RequestLine)]
        stored = answerer.store_shared_prefixes(every if valid else [], bar("prompts"))
        report = bar("questions")
        for part in batches(valid, together, prefix_of=answerer.prefix_of):
            for one, found in answerer.answer(part):
                if isinstance(found, str):
                    faults.append((one, found))
                else:
                    results.write({"line": one.line, "digest": one.digest, "id": one.id} | found)
                    answered += 1
                    recomputed += int(found["recomputed_chunks"])
                    compiling += bool(found["compiled"])
            report(kept + answered + len(faults), len(lines))
        lost = options.recomputed_message(recomputed, engine, store)
        for line, error in faults:
            terminal.warn(f"{requests}, line {line.line}: {error}")
            results.write({"line": line.line, "digest": line.digest, "id": line.id, "error": error})
            failed += 1
    seconds = time.perf_counter() - start
    summary = {"answered": answered, "kept": kept, "failed": failed, "seconds": seconds}
    shared = {"shared_prefixes": stored} if stored else {}
    if json:
        terminal.json(summary | shared)
    else:
        terminal.say(
            f"{answered} answered in {seconds:.1f} s, {kept} kept from before, {failed} failed; "
            f"results in {out}"
        )
        if stored:
            terminal.say(
                f"{len(stored)} shared {'prefix is' if len(stored) == 1 else 'prefixes are'} "
                f"stored, {number_of(sum(stored.values()), 'token')}"
            )
    if compiling:
        terminal.warn(
            f"the times of {number_of(compiling, 'answer')} include compiling or loading programs: "
            'see "compiled" in the result file'
        )
    if recomputed:
        terminal.warn(lost)
    if failed:
        raise typer.Exit(3)


@contextmanager
def _report_interrupt(out: Path) -> Iterator[None]:
    """On Ctrl-C, reports the file with the answers so far and ends the command with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        Terminal(as_json=False).warn(
            f"interrupted: the answers so far are in {out}; run the command again to continue"
        )
        raise typer.Exit(130) from None
