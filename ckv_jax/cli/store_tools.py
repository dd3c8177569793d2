"""`ckv inspect`, `verify`, `prune` and `pin`: looking after a store, without loading JAX."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckv_jax.cli.inspection import show_inspection
from ckv_jax.cli.model_inspection import inspect_checkpoint, is_checkpoint
from ckv_jax.cli.options import Dtype, Json
from ckv_jax.cli.output import Terminal, byte_size, check_writable, number_of
from ckv_jax.storage.errors import PrefixNotFound, StoreError
from ckv_jax.storage.place.url import folder_of

if TYPE_CHECKING:
    from ckv_jax.storage.config import StoreConfig
    from ckv_jax.storage.store import ChunkStore

__all__ = [
    "inspect",
    "is_store",
    "open_store",
    "parse_seconds",
    "parse_size",
    "pin",
    "prune",
    "store_config",
    "verify",
]

_StoreArgument = Annotated[
    str, typer.Argument(metavar="STORE", help="The store: a folder or a URL.")
]
_UNITS = {
    "": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9,
    "t": 10**12, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def inspect(
    store: Annotated[str, typer.Argument(metavar="STORE|MODEL", help="A store, or a checkpoint.")],
    prefix: Annotated[
        str | None, typer.Argument(metavar="[PREFIX]", help="An id, or how it begins.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.png", help="Draw the importance of the prefix's chunks."
        ),
    ] = None,
    dtype: Dtype = "bfloat16",
    json: Json = False,
) -> None:
    """Show which prefixes a store holds; for one of them, statistics of its keys and values.

    Of a checkpoint: its family and sizes, the bytes of KV per token in --dtype, what fits where.
    """
    terminal = Terminal(as_json=json)
    if is_checkpoint(store):
        if prefix is not None or plot is not None:
            raise ValueError(f"{store} is a checkpoint, which has no prefixes to show")
        inspect_checkpoint(terminal, Path(store), dtype=dtype)
        return

    from ckv_jax.storage.tools.inspect import inspect_store, plot_importance

    check_writable(plot)
    if plot is not None and prefix is None:
        raise ValueError("--plot draws one prefix: say which")
    with _open_to_look(store) as opened, terminal.status("reading"):
        try:
            found = inspect_store(opened, prefix)
        except PrefixNotFound as error:
            raise _evicted(opened, error) from error
        if plot is not None and prefix is not None:
            try:
                plot_importance(opened, prefix, plot)
            except ImportError as error:
                raise ValueError("--plot needs matplotlib: pip install matplotlib") from error
    if json:
        terminal.json(found.to_dict())
    else:
        show_inspection(terminal, found)
    if plot is not None:
        terminal.say(f"wrote {plot}", wrap=False)


def verify(
    store: _StoreArgument,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Mend, remove or fence off what is damaged, and rebuild the index."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --repair: only say what it would do.")
    ] = False,
    json: Json = False,
) -> None:
    """Read everything in a store back and check it. Exit code 1 if something is damaged.

    A repair makes whole what can be made whole; of the rest it removes segments that are of no use
    and limits others to their chunks before the first bad one: those of alike tokens to whole runs.
    A reordered one goes for a single bad pack: its original lies in segments of its own. `ckv
    ingest` of the same text computes again what was lost.
    """
    from ckv_jax.storage.tools.verify import losses, ranges, verify_store

    if dry_run and not repair:
        raise ValueError("--dry-run says what --repair would do: give both")
    terminal = Terminal(as_json=json)
    repair = repair and not dry_run
    with open_store(store, readonly=not repair) as opened, terminal.progress() as bar:
        report = verify_store(opened, repair, bar("bytes"))
        lost = losses(opened, report) if dry_run else ()
    if json:
        terminal.json(report.to_dict() | ({"would_lose": lost} if dry_run else {}))
    else:
        for damage in ranges(report.damages):
            terminal.say(f"damaged  {damage}", wrap=False)
        for miss in ranges(report.unread):
            terminal.say(f"unread   {miss}", wrap=False)
        for line in lost:
            terminal.say(f"would    {line}", wrap=False)
        for segment_id in report.foreign:
            terminal.say(f"foreign  {segment_id}: of another version, left alone; ingest again")
        for segment_id in report.unfinished:
            terminal.say(f"upload   {segment_id}: not finished, left alone")
        for segment_id in report.unindexed:
            terminal.say(f"index    {segment_id}: not as on disk")
        limited = [id_ for id_ in report.quarantined if id_ not in report.unrepaired]
        done = [
            f"{len(ids)} {name}"
            for name, ids in (
                ("made whole", report.remade),
                ("kept for the next ingest of their text", report.unrepaired),
                ("removed", report.removed),
                ("limited to their good chunks", limited),
                ("found whole again", report.pardoned),
            )
            if ids
        ]
        terminal.say(
            f"{number_of(report.segments, 'segment')}, {number_of(report.packs, 'pack')}, "
            f"{byte_size(report.bytes)}: "
            + ("all as written" if report.ok else f"{number_of(len(report.damages), 'damage')}")
            + (f", {len(report.unread)} not read" if report.unread else "")
            + (f"; {', '.join(done)}" if done else "")
        )
    if not json and (report.quarantined or report.removed):
        terminal.say("what was lost comes back when the same text is ingested again")
    if report.damages and not repair:
        more = "" if dry_run else "   (--dry-run: only say what)"
        terminal.say(f"run: ckv verify {store} --repair{more}", wrap=False)
    if not report.ok and not repair:
        raise typer.Exit(1)


def prune(
    store: _StoreArgument,
    max_bytes: Annotated[
        str | None,
        typer.Option("--max-bytes", metavar="SIZE", help="What may stay: 50GB, 10GiB, 0."),
    ] = None,
    expired: Annotated[
        bool, typer.Option("--expired", help="Remove what was kept for a time that is over.")
    ] = False,
    json: Json = False,
) -> None:
    """Remove whole segments, least valuable first, until the store is small enough.

    Pinned prefixes and those in use stay; exit code 3 if the store is larger than --max-bytes
    because of that.
    """
    from ckv_jax.storage.tools.upkeep import prune_store

    terminal = Terminal(as_json=json)
    if max_bytes is None and not expired:
        raise ValueError("say what to remove: --max-bytes SIZE, --expired, or both")
    bound = None if max_bytes is None else parse_size(max_bytes)
    with open_store(store) as opened:
        report = prune_store(opened, bound, expired=expired)
    if json:
        terminal.json({"max_bytes": bound, "expired": expired, **asdict(report)})
    else:
        terminal.say(
            f"{number_of(report.removed, 'segment')} removed: "
            f"{byte_size(report.bytes_before)} before, {byte_size(report.bytes_after)} now"
        )
    if bound is not None and report.bytes_after > bound:
        terminal.warn(
            f"{byte_size(report.bytes_after)} are left, more than {byte_size(bound)}: "
            "the rest is pinned, in use or continued by what is"
        )
        raise typer.Exit(3)


def pin(
    store: _StoreArgument,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="An id, or how it begins.")],
    unpin: Annotated[bool, typer.Option("--unpin", help="Allow eviction again.")] = False,
    json: Json = False,
) -> None:
    """Keep a prefix: it is never evicted or pruned until it is unpinned."""
    from ckv_jax.storage.tools.upkeep import pin_prefix

    terminal = Terminal(as_json=json)
    with open_store(store) as opened:
        prefix_id = pin_prefix(opened, prefix, not unpin)
    if json:
        terminal.json({"prefix": prefix_id, "pinned": not unpin})
    else:
        terminal.say(f"{prefix_id} {'may be evicted again' if unpin else 'is pinned'}")


def is_store(url: str) -> bool:
    """Whether something is at a store's URL, as far as a folder can tell without being opened."""
    folder = folder_of(url)
    return folder is None or (folder.is_dir() and any(folder.iterdir()))


def open_store(
    url: str, config: StoreConfig | None = None, *, readonly: bool = False
) -> ChunkStore:
    """A store that is there already, `readonly` only to look; `ValueError` where there is none."""
    from ckv_jax.storage.store import ChunkStore

    if not is_store(url):
        raise ValueError(f"there is no store at {url}; `ckv ingest` makes one")
    return ChunkStore.open(url, config=config, readonly=readonly)


def _open_to_look(url: str) -> ChunkStore:
    """`open_store`; what is neither a store nor a checkpoint is told to be neither."""
    try:
        return open_store(url, readonly=True)
    except (StoreError, ValueError) as error:
        if type(error) not in (StoreError, ValueError):
            raise  # a store that cannot be asked just now
        if "://" in url:
            raise
        from ckv_jax.model.checkpoint import not_a_checkpoint

        raise ValueError(f"{error}; {not_a_checkpoint(Path(url))}") from error


def store_config(
    *,
    max_bytes: str | None,
    eviction: str,
    direct_io: bool | None,
    io_concurrency: int,
    tenant_bytes: str | None = None,
) -> StoreConfig:
    """The store's settings as the command line says them; `ValueError` for wrong ones."""
    from ckv_jax.storage.config import StoreConfig

    return StoreConfig(
        max_bytes=None if max_bytes is None else parse_size(max_bytes),
        tenant_bytes=None if tenant_bytes is None else parse_size(tenant_bytes),
        eviction=eviction,
        direct_io=direct_io,
        io_concurrency=io_concurrency,
    )


def _evicted(store: ChunkStore, error: PrefixNotFound) -> Exception:
    """The same error, with what became of the prefix where that is known."""
    found = None if error.several > 1 else store.why_evicted(error.prefix_id)
    if found is None:
        return error
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.time))
    return ValueError(f"prefix {found.prefix_id} was evicted on {when}: {found.reason}")


def parse_seconds(text: str) -> float:
    """Seconds in `90`, `30m`, `12h` or `7d`. `ValueError` for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([smhd]?)\s*", text)
    if found is None:
        raise ValueError(f"got {text!r}, expected a time such as 90s, 30m, 12h or 7d")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def parse_size(text: str) -> int:
    """Bytes in `50GB`, `1.5 GiB` or `1000`. `ValueError` for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"got {text!r}, expected a size such as 1000, 50GB or 10GiB")
    return int(float(found[1]) * _UNITS[found[2].lower()])
