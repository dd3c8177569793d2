"""`ckv ingest`: run the model over a text once and store its KV."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ckv_jax.cli.options import (
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
    TenantBytes,
    TensorParallel,
)
from ckv_jax.cli.output import Terminal, byte_size, number_of
from ckv_jax.cli.store_tools import parse_seconds, store_config
from ckv_jax.storage.index.wishes import MOST_LETTERS, Wish, first_words

__all__ = ["ingest", "read_text"]


def ingest(
    checkpoint: Checkpoint,
    text_file: Annotated[
        str,
        typer.Argument(
            metavar="TEXTFILE",
            help="The text, UTF-8; - reads it from stdin. With question and answer it has to fit "
            "the model's context, which `ckv inspect CHECKPOINT` tells.",
        ),
    ],
    store: Store,
    system: System = "ckv",
    codec: Codec = "none",
    dtype: Dtype = "bfloat16",
    tensor_parallel: TensorParallel = 1,
    salt: Salt = "",
    max_bytes: MaxBytes = None,
    tenant_bytes: TenantBytes = None,
    eviction: Eviction = "attention",
    direct_io: DirectIo = None,
    io_concurrency: IoConcurrency = 32,
    retain: Annotated[
        str | None,
        typer.Option(
            "--retain",
            metavar="TIME",
            help="Let it expire when it has not been used for so long: 12h, 7d. Expired prefixes "
            "are evicted first, and `ckv prune --expired` removes them. Without it, what was said "
            "of the same text before holds.",
        ),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            "--priority",
            metavar="N",
            help="What has less is evicted first. Without it: what was said before, or 0.",
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="NAME",
            help="What to call it: `ckv ask --prefix NAME` finds it, `ckv inspect` shows it.",
        ),
    ] = "",
    json: Json = False,
) -> None:
    """Run the model over a text once and keep its KV cache in the store.

    Prints the id of the stored prefix, which `ckv ask --prefix` wants. A text that begins like a
    stored one is computed and stored only from where they part. An interrupted ingest leaves
    nothing behind; run it again.
    """
    terminal = Terminal(as_json=json)
    if system == "recompute":
        raise ValueError(
            "recompute stores nothing: ingest with another --system, then ask with "
            "--system recompute"
        )
    settings = store_config(
        max_bytes=max_bytes,
        tenant_bytes=tenant_bytes,
        eviction=eviction,
        direct_io=direct_io,
        io_concurrency=io_concurrency,
    )
    text = read_text(text_file)
    said: dict[str, Any] = {
        "source": "stdin" if text_file == "-" else Path(text_file).name[-MOST_LETTERS:],
        "begins": "" if salt else first_words(text),
    }
    if retain is not None:
        said["retain_s"] = parse_seconds(retain)
    if priority is not None:
        said["priority"] = priority
    if name:
        said["name"] = name
    Wish(**said)  # refuses what cannot be before anything is loaded
    with terminal.loading():
        from ckv_jax import compilation_cache
        from ckv_jax.cli.serving import find_prefix
        from ckv_jax.config import EngineConfig
        from ckv_jax.engine import Engine
        from ckv_jax.systems import preset

        compilation_cache.enable()
        config = EngineConfig(
            system=preset(system, codec=codec),
            dtype=dtype,
            salt=salt,
            tensor_parallel=tensor_parallel,
        )
        engine = Engine.from_pretrained(
            checkpoint, store=store, config=config, store_config=settings
        )
    with engine:
        start = time.perf_counter()
        try:
            with terminal.progress() as bar:
                prefix = engine.ingest(
                    text, progress=bar("tokens"), grouping=bar("runs of tokens grouped")
                )
        except KeyboardInterrupt:
            terminal.warn("interrupted: nothing of this text was kept; run the command again")
            raise typer.Exit(130) from None
        seconds = time.perf_counter() - start
        before = engine.store.wishes().get(prefix.id, Wish())
        engine.store.set_wish(prefix.id, replace(before, **said))
        try:
            alone = bool(name) and find_prefix(engine.store, name, salt=salt) == prefix
        except ValueError:  # others are called the same
            alone = False
        stored = engine.store.usage()
    if json:
        terminal.json(
            {
                "prefix": prefix.id,
                "tokens": prefix.num_tokens,
                "chunks": prefix.num_chunks,
                "seconds": seconds,
                "store_bytes": stored,
                "system": system,
                "codec": prefix.layout.codec.partition(":")[0],
                "dtype": dtype,
            }
        )
        return
    terminal.say(f"prefix  {prefix.id}")
    terminal.say(
        f"        {number_of(prefix.num_tokens, 'token')} in {seconds:.1f} s; "
        f"the store now holds {byte_size(stored)}"
    )
    command = ["ckv", "ask", str(checkpoint), "your question", "--store", store]
    command += ["--prefix", name if alone else prefix.id[:8]]
    for option, value, default in (
        ("--system", system, "ckv"),
        ("--dtype", dtype, "bfloat16"),
        ("--tensor-parallel", str(tensor_parallel), "1"),
    ):
        command += [option, value] if value != default else []
    line = f"{shlex.join(command)} --salt …" if salt else shlex.join(command)
    terminal.say(f"try     {line}", wrap=False)


def read_text(source: str) -> str:
    """The text of a file, or of stdin for `-`. `ValueError` if it is empty or not UTF-8."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error
    if not text.strip():
        raise ValueError(f"the text in {'stdin' if source == '-' else source} is empty")
    return text
