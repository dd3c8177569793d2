"""`ckv ask`: answers one question over stored documents."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckv_jax.cli import options
from ckv_jax.cli.output import Terminal, byte_size, number_of

if TYPE_CHECKING:
    from ckv_jax.engine import Engine
    from ckv_jax.request import Generation, Request, Result
    from ckv_jax.storage.prefix import Prefix


def ask(
    checkpoint: options.Checkpoint,
    question: Annotated[
        str,
        typer.Argument(
            metavar="QUESTION",
            help="The question about the document. After a document stored with --raw: the text "
            "that continues it.",
        ),
    ],
    store: options.Store,
    prefix: Annotated[
        list[str] | None,
        typer.Option(
            "--prefix",
            metavar="ID|NAME",
            help="The stored document: the id that `ckv ingest` printed, the start of that id, or "
            "its --name. Optional if the store has only one document. Repeat it to ask about "
            "several documents, concatenated in this order.",
        ),
    ] = None,
    budget: options.Budget = None,
    recompute: Annotated[
        float | None,
        typer.Option(
            "--recompute",
            metavar="SHARE",
            help="With several documents: share of the tokens to recompute, of those that a layer "
            "attends to, so that each document sees those before it; 0 to 1. Without it: 0.2.",
        ),
    ] = None,
    system: options.System = "ckv",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            metavar="N",
            min=1,
            help="Maximum tokens of the answer. Without it: 256, or fewer where the model's "
            "context has less room; 1 with a --system that computes first tokens only.",
        ),
    ] = None,
    timing: Annotated[
        bool,
        typer.Option(
            "--timing",
            help="Ask twice and show the breakdown of the second time to first token, after all "
            "programs are compiled.",
        ),
    ] = False,
    sources: Annotated[
        bool,
        typer.Option(
            "--sources",
            help="Show the passages that the answer attended to most. Attention is evidence, not "
            "proof.",
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write the request's timeline to this file, for ui.perfetto.dev.",
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Also show the engine's counters: hits, reads, memory."
        ),
    ] = False,
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
    """Answer a question about a stored document, reading only the share that the budget allows.

    Streams the answer, then prints a line of figures: the time to the first token and of the whole
    command, the share of the document that was attended to, and the bytes read.
    """
    began = time.perf_counter()
    if not question.strip():
        raise ValueError("the question is empty; give one in quotes")
    options.check_writable(trace)
    terminal = Terminal(as_json=json)
    settings = options.store_config(
        max_bytes, eviction, direct_io, io_concurrency, encrypt_key_file
    )
    with terminal.loading():
        from ckv_jax.answer import answer_json, citations_json, room
        from ckv_jax.config import Budget, EngineConfig
        from ckv_jax.fidelity import budget_for, fidelity_of
        from ckv_jax.request import Generation
        from ckv_jax.systems import preset

        wanted = fidelity_of(budget)
        share = EngineConfig().budget
        if budget is not None and wanted is None:
            share = options.parse_budget(budget)
        most = Budget.of(share).most if wanted is None else 1.0
        with options.open_store(store, settings) as opened:
            model = partial(options.fingerprint, checkpoint, dtype=dtype, weights=weights)
            stored = options.find_prefixes(opened, prefix, salt=salt, model=model)
        if wanted is not None and len(stored) > 1:
            raise ValueError(
                f"got --budget {budget} with several texts, expected one --prefix, or a share such "
                "as --budget 0.25"
            )
        if recompute is not None and len(stored) == 1:
            raise ValueError("got --recompute with one text, expected --prefix A --prefix B")
        chosen = preset(system, codec=options.codec_name(stored[0]))
        if max_tokens is None and not options.generates(chosen):
            max_tokens = 1
        engine = options.open_engine(
            checkpoint,
            store,
            settings=settings,
            system=chosen,
            dtype=dtype,
            weights=weights,
            tensor_parallel=tensor_parallel,
            salt=salt,
            budget=share,
            **options.room_for(sum(map(options.kv_bytes, stored)), most),
        )
    with engine:
        for one in stored:
            engine.check_prefix(one)
        request, settled = _request(engine, stored, question, recompute), None
        if max_tokens is None:
            tokens = sum(one.num_tokens for one in stored)
            limit = engine.model_config.max_position_embeddings
            max_tokens = room(tokens, len(request.suffix), limit)
        with terminal.status("compiling or loading programs") as waiting:
            if wanted is not None:
                settled = budget_for(engine, stored[0], engine.encode(request.suffix), wanted)
                request = replace(request, budget=settled.budget)
            if timing:
                _answer(engine, request, min(2, max_tokens), lambda text: None)
                for one in stored:
                    engine.demote(one).result()
            show = (lambda text: None) if json else terminal.stream(waiting)
            outcome = _answer(engine, request, max_tokens, show)
        answer = answer_json(outcome, engine, *stored, model=checkpoint.name)
        if settled is not None:
            answer["ttft_ms"] += settled.ms
            answer["bytes"]["ssd"] += settled.ssd_bytes
        if sources and isinstance(outcome, Generation):
            with terminal.status("looking for sources"):
                answer["citations"] = citations_json(engine.citations(outcome))
        lost = options.recomputed_message(answer["recomputed_chunks"], engine, store)
        direct = engine.store.reads_past_cache
        if verbose:
            answer["engine"] = engine.stats().to_json()
    answer["whole_s"] = time.perf_counter() - began
    if answer["recomputed_chunks"]:
        terminal.warn(lost)
    if trace is not None:
        from ckv_jax.trace import write_perfetto

        write_perfetto(trace, [outcome.trace])
    if json:
        terminal.json(answer)
        return
    terminal.out.print("\n")
    options.show_citations(terminal, answer.get("citations", ()))
    terminal.figures(options.figures(answer, direct=direct))
    if answer["low_coverage"]:
        terminal.warn(options.low_coverage_message(answer["attention_mass"], answer["budget"]))
    if timing:
        outcome.trace.breakdown_bar(terminal.out)
        _show_reads(terminal, answer)
    for name, value in answer.get("engine", {}).items():
        terminal.say(f"{name.replace('_', ' '):<14} {value:,}")


def _request(
    engine: Engine, stored: list[Prefix], question: str, recompute: float | None
) -> Request:
    """Builds a request over one prefix or several; the question is encoded for the first one."""
    from ckv_jax.request import Blend, Request

    suffix = engine.question(stored[0], question).tolist()
    if len(stored) == 1:
        return Request(prefix=stored[0], suffix=suffix)
    blend = Blend() if recompute is None else Blend(recompute=recompute)
    return Request(documents=stored, suffix=suffix, blend=blend)


def _answer(
    engine: Engine, request: Request, max_tokens: int, show: Callable[[str], object]
) -> Result | Generation:
    """Computes the first token or a generation, whose text `show` gets piece by piece."""
    from ckv_jax.model.sampling import SamplingParams

    if max_tokens == 1:  # all that every system gives
        (result,) = engine.reprefill([request])
        result.raise_for_error()
        show(result.text)
        return result
    with engine.generate(request, SamplingParams(max_tokens=max_tokens)) as stream:
        for event in stream:
            show(event.text)
        (generation,) = stream.results()
    generation.raise_for_error()
    return generation


def _show_reads(terminal: Terminal, answer: dict[str, Any]) -> None:
    """Prints the bytes by source, which `--timing` shows besides the breakdown."""
    unused = answer["ssd_bytes_unused"]
    host, device, needed = (
        byte_size(count)
        for count in (
            answer["bytes"]["host"],
            answer["bytes"]["device"],
            answer["bytes"]["ssd"] - unused,
        )
    )
    if "blended_tokens" in answer:
        terminal.say(
            "of the documents after the first, "
            f"{number_of(answer['blended_tokens'], 'token')} used as stored, "
            f"{answer['recomputed_tokens']:,} recomputed"
        )
    terminal.say(
        f"before the first token: {needed} read from the store and used, {byte_size(unused)} "
        f"prefetched and not used; {host} from host memory, {device} from device memory"
    )
    if decode := answer.get("decode"):
        terminal.say(
            f"packs that later tokens selected: {decode['device_hits']:.1%} were in device memory, "
            f"{decode['host_hits']:.1%} in host memory"
        )
