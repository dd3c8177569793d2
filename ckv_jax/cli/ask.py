"""`ckv ask`: answers one question over stored texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckv_jax.cli.options import (
    Budget,
    Checkpoint,
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
    check_writable,
    parse_budget,
)
from ckv_jax.cli.output import Terminal, byte_size, number_of
from ckv_jax.cli.stores import (
    codec_name,
    find_prefix,
    kv_bytes,
    open_store,
    recomputed_message,
    store_config,
)

if TYPE_CHECKING:
    from ckv_jax.engine import Engine
    from ckv_jax.request import Generation, Request, Result
    from ckv_jax.storage.prefix import Prefix

__all__ = ["ask"]

_MIB = 2**20


def ask(
    checkpoint: Checkpoint,
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="What follows the stored text, as it is.")
    ],
    store: Store,
    prefix: Annotated[
        list[str] | None,
        typer.Option(
            "--prefix",
            metavar="ID|NAME",
            help="The stored text: the id that `ckv ingest` printed, the start of that id, or its "
            "--name. May be left out if the store holds just one. Given several times: those texts "
            "one after the other, in this order.",
        ),
    ] = None,
    budget: Budget = None,
    recompute: Annotated[
        float | None,
        typer.Option(
            "--recompute",
            metavar="SHARE",
            help="With several texts: share of the selected chunks that is computed again, so that "
            "each text takes the texts before it into account; 0 to 1. Default: 0.2.",
        ),
    ] = None,
    system: System = "ckv",
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens",
            metavar="N",
            min=1,
            help="Tokens to answer with, at most. Text, question and answer together have to fit "
            "the model's context.",
        ),
    ] = 1,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Put the question into the tokenizer's chat template."),
    ] = False,
    warm_up: Annotated[
        bool,
        typer.Option(
            "--warm-up/--no-warm-up",
            help="Answer once before measuring, so that the times exclude compilation.",
        ),
    ] = True,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write the timeline here; ui.perfetto.dev opens it."
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Also show the engine's counters: hits, reads, room."),
    ] = False,
    dtype: Dtype = "bfloat16",
    tensor_parallel: TensorParallel = 1,
    salt: Salt = "",
    max_bytes: MaxBytes = None,
    eviction: Eviction = "attention",
    direct_io: DirectIo = None,
    io_concurrency: IoConcurrency = 32,
    json: Json = False,
) -> None:
    """Answer a question over stored texts, reading only the share that the budget allows.

    Prints the answer as it comes, then where the time to its first token went: programs compiled
    and the digest of the keys in memory, as in a server that is running, and the KV on disk. With
    --max-tokens the warm-up also leaves packs in memory; --no-warm-up shows the first time.
    """
    if not question.strip():
        raise ValueError("the question is empty")
    check_writable(trace)
    terminal = Terminal(as_json=json)
    settings = store_config(
        max_bytes=max_bytes,
        eviction=eviction,
        direct_io=direct_io,
        io_concurrency=io_concurrency,
    )
    with terminal.loading():
        from ckv_jax import compilation_cache
        from ckv_jax.answer import answer_json
        from ckv_jax.budget import Budget
        from ckv_jax.config import EngineConfig
        from ckv_jax.engine import Engine
        from ckv_jax.systems import preset

        compilation_cache.enable()
        share = EngineConfig().budget if budget is None else parse_budget(budget)
        most = Budget.of(share).most
        with open_store(store, settings) as opened:
            names: list[str | None] = [*prefix] if prefix else [None]
            stored = [find_prefix(opened, name, salt=salt) for name in names]
        if recompute is not None and len(stored) == 1:
            raise ValueError("got --recompute for one text, expected --prefix A --prefix B")
        several, size = max_tokens > 1, sum(map(kv_bytes, stored))
        config = EngineConfig(
            system=preset(system, codec=codec_name(stored[0])),
            dtype=dtype,
            tensor_parallel=tensor_parallel,
            salt=salt,
            budget=share,
            # A first token asks for nothing twice; those after it do.
            device_cache_bytes=round(2 * most * size) if several else 0,
            host_cache_bytes=EngineConfig().host_cache_bytes if several else 0,
            prefetch_device_bytes=_MIB * 64 + round(1.1 * most * size),
        )
        engine = Engine.from_pretrained(
            checkpoint, store=store, config=config, store_config=settings
        )
    with engine:
        for one in stored:
            engine.check_prefix(one)
        if chat:
            question = engine.chat(question)
        request = _request(stored, question, recompute)
        if warm_up:
            with terminal.status("compiling"):
                _answer(engine, request, min(2, max_tokens))
        outcome = _answer(engine, request, max_tokens, None if json else terminal)
        answer = answer_json(outcome, engine, *stored, model=checkpoint.name)
        lost = recomputed_message(answer["recomputed_chunks"], engine, store)
        if verbose:
            answer["engine"] = engine.stats().to_json()
    if not json:
        terminal.out.print("\n")
    if answer["compiled"]:
        terminal.warn(
            f"the time to the first token holds that of compiling or loading "
            f"{number_of(answer['compiled'], 'program')}"
        )
    if answer["recomputed_chunks"]:
        terminal.warn(lost)
    if trace is not None:
        from ckv_jax.trace import write_perfetto

        write_perfetto(trace, [outcome.trace])
    if json:
        terminal.json(answer)
    else:
        outcome.trace.breakdown_bar(terminal.out)
        _show_reads(terminal, answer)
        if answer.get("tokens_s"):
            terminal.say(_speed(answer))
        for name, value in answer.get("engine", {}).items():
            terminal.say(f"{name.replace('_', ' '):<14} {value:,}")


def _request(stored: list[Prefix], question: str, recompute: float | None) -> Request:
    """A request over one prefix, or over several put together."""
    from ckv_jax.parts.blend import Blend
    from ckv_jax.request import Request

    if len(stored) == 1:
        return Request(prefix=stored[0], suffix=question)
    blend = Blend() if recompute is None else Blend(recompute=recompute)
    return Request(parts=stored, suffix=question, blend=blend)


def _answer(
    engine: Engine, request: Request, max_tokens: int, terminal: Terminal | None = None
) -> Result | Generation:
    """The first token, or a generation; printed as it comes if there is a `terminal`."""
    from ckv_jax.model.sampling import SamplingParams

    if max_tokens == 1:  # all that every system gives
        (result,) = engine.reprefill([request])
        result.raise_for_error()
        if terminal is not None:
            terminal.out.out(result.text, end="")
        return result
    with engine.generate(request, SamplingParams(max_tokens=max_tokens)) as stream:
        for event in stream:
            if terminal is not None:
                terminal.out.out(event.text, end="")
        (generation,) = stream.results()
    generation.raise_for_error()
    return generation


def _speed(answer: dict[str, Any]) -> str:
    """Tokens per second after the first, and which tier their packs were in."""
    line = f"{answer['tokens_s']:.1f} tokens/s"
    if decode := answer["decode"]:
        line += (
            f"; of the packs that a token selected {decode['device_hits']:.1%} were on the device, "
            f"{decode['host_hits']:.1%} in host memory; {byte_size(round(decode['ssd_bytes']))} "
            "per token came from SSD"
        )
    return line


def _show_reads(terminal: Terminal, answer: dict[str, Any]) -> None:
    chunks = answer["chunks"]
    share = chunks["selected"] / chunks["total"] if chunks["total"] else 1.0
    host, device = (byte_size(answer["bytes"][tier]) for tier in ("host", "device"))
    unused = answer["ssd_bytes_unused"]
    needed = byte_size(answer["bytes"]["ssd"] - unused)
    terminal.say(
        f"\nattended to {share:.1%} of {number_of(answer['prefix_tokens'], 'token')}, which hold "
        f"{answer['attention_mass']:.1%} of the probe's attention"
    )
    if "blended_tokens" in answer:
        terminal.say(
            "of the texts after the first, "
            f"{number_of(answer['blended_tokens'], 'token')} as stored, "
            f"{answer['recomputed_tokens']:,} computed again"
        )
    terminal.say(
        f"read from SSD: {needed} needed, {byte_size(unused)} ahead and not used; "
        f"host {host}, device {device}"
    )
