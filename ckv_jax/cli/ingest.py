"""`ckv ingest`: runs the model over a document once and stores its KV."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ckv_jax.cli import options
from ckv_jax.cli.output import Terminal, byte_size, number_of
from ckv_jax.storage.prefix import PrefixRecord
from ckv_jax.storage.tools.inspect import find_prefix

if TYPE_CHECKING:
    from ckv_jax.model.config import ModelConfig
    from ckv_jax.model.tokenizer import Tokenizer


def ingest(
    checkpoint: options.Checkpoint,
    text_file: Annotated[
        str,
        typer.Argument(
            metavar="TEXTFILE",
            help="The document as UTF-8 text; - reads it from stdin. Document, question and answer "
            "together must fit the model's context, which `ckv inspect CHECKPOINT` shows.",
        ),
    ],
    store: options.Store,
    system: options.System = "ckv",
    codec: options.Codec = "none",
    dtype: options.Dtype = "bfloat16",
    weights: options.Weights = None,
    tensor_parallel: options.TensorParallel = 1,
    salt: options.Salt = "",
    max_bytes: options.MaxBytes = None,
    tenant_bytes: options.TenantBytes = None,
    eviction: options.EvictionPolicy = "attention",
    direct_io: options.DirectIo = None,
    io_concurrency: options.IoConcurrency = 32,
    encrypt_key_file: options.EncryptKeyFile = None,
    retain: Annotated[
        str | None,
        typer.Option(
            "--retain",
            metavar="TIME",
            help="Time to live after the last use, such as 12h or 7d. Expired prefixes are evicted "
            "first, and `ckv prune --expired` removes them. Without it: unchanged, or no limit for "
            "a new document.",
        ),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            "--priority",
            metavar="N",
            help="Eviction priority; lower values are evicted first. Without it: unchanged, or 0 "
            "for a new document.",
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of the stored document: `ckv ask --prefix NAME` finds it, `ckv inspect` "
            "shows it.",
        ),
    ] = "",
    turn: Annotated[
        str | None,
        typer.Option(
            "--turn",
            metavar="system|user",
            help="The turn of the chat template that contains the document. Without it: the system "
            "turn, or the user turn where the template supports no system turn.",
        ),
    ] = None,
    instructions: Annotated[
        str,
        typer.Option(
            "--instructions",
            metavar="TEXT",
            help="Instructions in the system turn, before the document.",
        ),
    ] = "",
    warm_batch: Annotated[
        int,
        typer.Option(
            "--warm-batch",
            metavar="N",
            min=0,
            help="Compile the programs of questions after the ingest, for one question and for N "
            "at once (see `ckv batch --batch`). 0: compile at first use.",
        ),
    ] = 1,
    raw: Annotated[
        bool, typer.Option("--raw", help="Store the document alone, without the chat template.")
    ] = False,
    json: options.JsonOutput = False,
) -> None:
    """Run the model over a document once and store its KV cache.

    The document is stored inside the model's chat template, if there is one; `ckv ask` continues it
    with a question. Prints the id of the stored prefix, for `ckv ask --prefix`. If the store has
    the beginning of the document already, only the rest is computed and stored. An interrupted
    ingest stores nothing; run it again. The first document of a new length also compiles the
    programs of questions, so that the first question does not wait for them.
    """
    terminal = Terminal(as_json=json)
    if system == "recompute":
        raise ValueError(
            "got --system recompute, which stores nothing: ingest with another --system, then ask "
            "with --system recompute"
        )
    settings = options.store_config(
        max_bytes, eviction, direct_io, io_concurrency, encrypt_key_file, tenant_bytes=tenant_bytes
    )
    text = options.read_text(text_file)
    retention = options.origin([text_file], text, salt=salt)
    if retain is not None:
        retention["retain_s"] = options.parse_seconds(retain)
    if priority is not None:
        retention["priority"] = priority
    if name:
        retention["name"] = name
    PrefixRecord(**retention)  # refuses wrong values before the model is loaded
    with terminal.loading():
        from ckv_jax.config import Budget, layout_of
        from ckv_jax.conversation import document_tokens
        from ckv_jax.systems import preset
        from ckv_jax.user_cache import count_compiled

        chosen = preset(system, codec=codec)

        def check(tokenizer: Tokenizer, model: ModelConfig) -> None:
            tokens, _ = document_tokens(
                tokenizer, model, text, raw=raw, turn=turn, instructions=instructions
            )
            layout = layout_of(chosen, model, dtype)
            options.check_room(len(tokens), layout, max_bytes, tenant_bytes)

        engine = options.open_engine(
            checkpoint,
            store,
            settings=settings,
            system=chosen,
            dtype=dtype,
            weights=weights,
            salt=salt,
            tensor_parallel=tensor_parallel,
            warm_batch=0,
            check=check,
        )
    with engine, count_compiled() as compiled:
        start = time.perf_counter()
        try:
            with terminal.progress() as bar:
                prefix = engine.ingest(
                    text,
                    raw=raw,
                    turn=turn,
                    instructions=instructions,
                    progress=bar("tokens"),
                    grouping=bar("runs of tokens clustered"),
                )
        except KeyboardInterrupt:
            terminal.warn("interrupted: nothing of this text was stored; run the command again")
            raise typer.Exit(130) from None
        seconds = time.perf_counter() - start
        before = engine.store.record_of(prefix)
        engine.store.set_record(prefix.id, replace(before, **retention))
        try:
            unique = bool(name) and find_prefix(engine.store, name, salt=salt) == prefix
        except ValueError:  # other prefixes have this name
            unique = False
        stored = engine.store.usage()
        compiling = 0.0
        if warm_batch > 1 or (warm_batch and compiled):
            most = Budget.of(engine.config.budget).most
            room = options.room_for(options.kv_bytes(prefix), most)  # as `ckv ask` has it
            compiling = options.compile_questions(
                terminal, engine, prefix, room, at_once=warm_batch
            )
    if json:
        terminal.json(
            {
                "prefix": prefix.id,
                "tokens": prefix.num_tokens,
                "chunks": prefix.num_chunks,
                "seconds": seconds,
                "compile_seconds": compiling,
                "store_bytes": stored,
                "system": system,
                "codec": prefix.layout.codec.partition(":")[0],
                "dtype": dtype,
                "weights": weights,
            }
        )
        return
    terminal.say(f"prefix  {prefix.id}")
    terminal.say(
        f"        {number_of(prefix.num_tokens, 'token')} in {seconds:.1f} s; "
        f"the store now holds {byte_size(stored)}"
    )
    if compiling:
        terminal.say(
            f"        {compiling:.1f} s more to compile for questions, once for texts of about "
            "this length"
        )
    command = ["ckv", "ask", str(checkpoint), "your question", "--store", store]
    command += ["--prefix", name if unique else prefix.id[:8]]
    for option, value, default in (
        ("--system", system, "ckv"),
        ("--dtype", dtype, "bfloat16"),
        ("--weights", weights or "", ""),
        ("--tensor-parallel", str(tensor_parallel), "1"),
        ("--encrypt-key-file", str(encrypt_key_file or ""), ""),
    ):
        command += [option, value] if value != default else []
    line = f"{shlex.join(command)} --salt …" if salt else shlex.join(command)
    terminal.say(f"try     {line}", wrap=False)
