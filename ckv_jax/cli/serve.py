"""`ckv serve`: serves OpenAI's and Anthropic's HTTP APIs over a model and a store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ckv_jax.cli import options
from ckv_jax.cli.output import Terminal


def serve(
    checkpoint: options.Checkpoint,
    store: options.Store,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="NAME", help="Address to listen on; 0.0.0.0: all interfaces."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port; 0: any free port.")
    ] = 8000,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="The model's name for clients. Without it: its folder's name.",
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            "--api-keys",
            metavar="FILE",
            help="TOML file with a table per tenant: keys, and optionally salt, max_requests and "
            "max_bytes. Without it: requests need no key, and all clients share one tenant.",
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            metavar="SHARE",
            help="Default budget of requests: the share of a stored prefix that an answer attends "
            "to. 1: all of it, exact. mass:0.95: the chunks that hold 95% of the question's "
            "attention. fidelity:0.95, auto: see `ckv calibrate`.",
        ),
    ] = "1",
    sparse_budget: Annotated[
        str,
        typer.Option(
            "--sparse-budget", metavar="SHARE", help="Default budget of the model NAME:sparse."
        ),
    ] = "0.25",
    system: options.System = "ckv",
    codec: options.Codec = "none",
    dtype: options.Dtype = "bfloat16",
    weights: options.Weights = None,
    tensor_parallel: options.TensorParallel = 1,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", metavar="N", help="Default maximum tokens of a chat's answer."
        ),
    ] = 1024,
    max_requests: Annotated[
        int,
        typer.Option(
            "--max-requests",
            metavar="N",
            help="Answers in progress at once; further requests get status 429.",
        ),
    ] = 64,
    chat_template_kwargs: Annotated[
        str,
        typer.Option(
            "--chat-template-kwargs",
            rich_help_panel=options.RARE,
            metavar="JSON",
            help='Default variables of the chat template, such as {"enable_thinking": false}.',
        ),
    ] = "{}",
    cors_origin: Annotated[
        list[str],
        typer.Option(
            "--cors-origin",
            rich_help_panel=options.RARE,
            metavar="ORIGIN",
            help="Origin whose pages may call the API from a browser (CORS), or *. May be "
            "repeated.",
        ),
    ] = [],  # noqa: B006 - as typer takes it
    allowed_host: Annotated[
        list[str],
        typer.Option(
            "--allowed-host",
            rich_help_panel=options.RARE,
            metavar="NAME",
            help="Host name that requests without --api-keys may use. IP addresses, names without "
            "a dot and this machine's name are always accepted. .NAME also accepts all subdomains. "
            "May be repeated.",
        ),
    ] = [],  # noqa: B006
    warm_up: Annotated[
        int,
        typer.Option(
            "--warm-up",
            metavar="TOKENS",
            help="Compile the programs of prompts of about this many tokens before /ready is 200. "
            "0: compile at first use.",
        ),
    ] = 0,
    warm_batch: Annotated[
        int,
        typer.Option(
            "--warm-batch",
            rich_help_panel=options.RARE,
            metavar="N",
            help="While idle, compile the programs of questions over a newly stored prefix, for "
            "batches of up to N. 0: compile at first use.",
        ),
    ] = 8,
    store_tokens: Annotated[
        int,
        typer.Option(
            "--store-tokens",
            metavar="N",
            help="Minimum tokens of a prompt that is stored after its answer.",
        ),
    ] = 1024,
    guard_disk: Annotated[
        bool,
        typer.Option(
            "--guard-disk/--no-guard-disk",
            rich_help_panel=options.RARE,
            help="Skip storing while writing KV takes longer than computing it, or always store.",
        ),
    ] = True,
    request_time: Annotated[
        float,
        typer.Option("--request-time", metavar="SECONDS", help="Time limit of an answer."),
    ] = 600.0,
    drain_time: Annotated[
        float,
        typer.Option(
            "--drain-time",
            rich_help_panel=options.RARE,
            metavar="SECONDS",
            help="Time limit of running answers after SIGTERM.",
        ),
    ] = 60.0,
    device_cache: Annotated[
        str, typer.Option("--device-cache", metavar="SIZE", help="KV cache in device memory.")
    ] = "512MiB",
    host_cache: Annotated[
        str, typer.Option("--host-cache", metavar="SIZE", help="KV cache in host memory.")
    ] = "1GiB",
    max_bytes: options.MaxBytes = None,
    eviction: options.EvictionPolicy = "attention",
    direct_io: options.DirectIo = None,
    io_concurrency: options.IoConcurrency = 32,
    encrypt_key_file: options.EncryptKeyFile = None,
) -> None:
    """Serve OpenAI's API (chats, completions, responses) and Anthropic's messages.

    Any OpenAI client works, with base_url=http://HOST:PORT/v1. The stored part of a prompt is read
    instead of computed. SIGTERM or Ctrl-C stops the server after the running answers; a second one
    stops it at once.
    """
    terminal = Terminal(as_json=True)
    try:
        from ckv_jax.server.app import bind, create_app, run
        from ckv_jax.server.config import ServerConfig
        from ckv_jax.server.messages import parse_template_kwargs
        from ckv_jax.server.observability import log_to_stderr
        from ckv_jax.server.tenants import Tenants
    except ImportError as error:
        raise ValueError(
            f"the package {error.name} is missing; to serve, run: pip install -e '.[serve]'"
        ) from error
    config = ServerConfig(
        model=name or checkpoint.resolve().name,
        budget=_served_budget(budget),
        sparse_budget=_served_budget(sparse_budget),
        max_tokens=max_tokens,
        max_requests=max_requests,
        chat_template_kwargs=parse_template_kwargs(chat_template_kwargs),
        cors_origins=tuple(cors_origin),
        allowed_hosts=tuple(allowed_host),
        warm_tokens=warm_up,
        store_tokens=store_tokens,
        guard_disk=guard_disk,
        request_s=request_time,
        drain_s=drain_time,
    )
    tenants = Tenants() if api_keys is None else Tenants.load(api_keys)
    settings = replace(
        options.store_config(max_bytes, eviction, direct_io, io_concurrency, encrypt_key_file),
        quotas={t.salt: t.max_bytes for t in tenants.all() if t.max_bytes is not None},
    )
    caches = {"device": options.parse_size(device_cache), "host": options.parse_size(host_cache)}
    with bind(host, port) as bound:
        with terminal.loading():
            from ckv_jax.systems import preset

            engine = options.open_engine(
                checkpoint,
                store,
                settings=settings,
                budget=1.0,  # requests have their own
                system=preset(system, codec=codec),
                dtype=dtype,
                weights=weights,
                tensor_parallel=tensor_parallel,
                warm_batch=warm_batch,
                device_cache_bytes=caches["device"],
                host_cache_bytes=caches["host"],
            )
        with engine:
            log_to_stderr()
            app = create_app(engine, config, tenants)
            try:
                run(app, bound)
            finally:
                app.state.service.close()


def _served_budget(text: str) -> float | str:
    """Parses a budget as `Engine.ask` takes it."""
    from ckv_jax.fidelity import fidelity_of

    return options.parse_budget(text) if fidelity_of(text) is None else text
