"""The `ckv` application: registers the commands and turns errors into exit codes."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn, cast

import typer
import typer.core

from ckv_jax.cli import ask, batch, chat, demo, ingest, serve, tools
from ckv_jax.cli.output import one_line
from ckv_jax.errors import CkvError

# Typer has its own copy of click's.
_UsageError = cast(type[Exception], typer.BadParameter.__base__)
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # a checkpoint is a folder; nothing is fetched
    "TRANSFORMERS_VERBOSITY": "error",
}
_ADVICE: dict[type[OSError], str] = {
    FileNotFoundError: "; check the name and the folder",
    PermissionError: "; change its permissions, or name another file",
}


class _Named:
    """Shows arguments and flags without their Python types, such as `<bool>`."""

    def get_params(self, ctx: Any) -> Any:
        found = super().get_params(ctx)  # type: ignore[misc]
        for one in found:
            if isinstance(one, typer.core.TyperArgument) or one.is_flag:
                one.display_type_rich = lambda ctx: None
        return found


class _Command(_Named, typer.core.TyperCommand):
    pass


class _Commands(_Named, typer.core.TyperGroup):
    """Reports an interrupt; Typer would end the process without a message."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _fail("interrupted", code=130)


app = typer.Typer(
    name="ckv",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Answer many questions about one long document, which the model processes only once.\n\n"
        "[bold]ckv ingest[/bold] runs a model over a document and stores its KV cache; "
        "[bold]ckv ask[/bold] then reads only the share that a question needs. "
        "New here? Start with [bold]ckv demo[/bold]: it fetches a small model once and needs no "
        "GPU."
    ),
)
for _command in (
    demo.demo,
    ingest.ingest,
    ask.ask,
    chat.chat,
    batch.batch,
    tools.calibrate,
    serve.serve,
    tools.convert,
    tools.inspect,
    tools.verify,
    tools.prune,
    tools.pin,
):
    # Rich would keep the line ends of a docstring in addition to its own.
    _paragraphs = (_command.__doc__ or "").split("\n\n")
    _help = "\n\n".join(" ".join(paragraph.split()) for paragraph in _paragraphs)
    app.command(_command.__name__, cls=_Command, help=_help)(_command)


def _print_version(context: typer.Context, wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import version

    typer.echo(f"ckv {version('ckv-jax')}")
    if context.params["verbose"]:
        from ckv_jax.kernels_pallas.native.library import LEVELS, native

        typer.echo(f"jax {version('jax')}, jaxlib {version('jaxlib')}")
        found = native()
        typer.echo(
            f"native CPU kernels: {LEVELS[found.level]}, {found.path}"
            if found.path
            else f"native CPU kernels: none, JAX's own are used ({found.refused})"
        )
    raise typer.Exit


@app.callback()
def _root(
    verbose: Annotated[  # eager: known when the version is printed
        bool,
        typer.Option(
            "--verbose",
            "-v",
            is_eager=True,
            help="With --version: also print the versions of JAX and of the native CPU kernels.",
        ),
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    del verbose, version


def main() -> None:
    """Runs `ckv`. Exit code 0: done; 1: failed, with one line on stderr; 2: wrong usage; 3: done in
    part, with lines on stderr about the rest."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        sys.exit(app(prog_name="ckv", standalone_mode=False) or 0)
    except _UsageError as error:
        _fail_usage(error)
    except typer.Abort:
        _fail("interrupted", code=130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        _fail(f"the disk is full: {one_line(error)}" if full else _os_message(error))
    except (CkvError, ValueError) as error:
        _fail(one_line(error))
    except MemoryError:
        _fail("out of memory; free some, or use a smaller model or --weights int8")


def _fail_usage(error: Any) -> NoReturn:
    """Prints what is wrong with a command's arguments, and which help lists them."""
    message = " ".join(error.format_message().split()).removesuffix(".")
    if not message:  # `ckv` alone: its help is out already
        sys.exit(2)
    if message.startswith("Missing argument"):
        message += " (is a shell variable such as $model empty?)"
    command = error.ctx.command_path if error.ctx else "ckv"
    end = "" if message.endswith("?") else ";"
    _fail(f"{message[0].lower()}{message[1:]}{end} see {command} --help", code=2)


def _os_message(error: OSError) -> str:
    if error.filename is None or error.strerror is None:
        return one_line(error)
    return f"{error.filename}: {error.strerror.lower()}{_ADVICE.get(type(error), '')}"


def _fail(message: str, *, code: int = 1) -> NoReturn:
    if os.environ.get("CKV_TRACEBACK"):
        traceback.print_exc()
    print(f"ckv: {message}", file=sys.stderr)
    sys.exit(code)
