"""`ckv inspect`, `verify`, `prune` and `pin` maintain a store without loading JAX; `ckv convert`
and `ckv calibrate` work on a checkpoint, which `ckv inspect` shows too."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from ckv_jax.cli import options
from ckv_jax.cli.output import Terminal, byte_size, number_of
from ckv_jax.storage.errors import PrefixNotFound, StoreError

if TYPE_CHECKING:
    from ckv_jax.model.tensor_map import ModelInfo
    from ckv_jax.storage.store import ChunkStore
    from ckv_jax.storage.tools.inspect import Inspection, PrefixInfo, SegmentInfo

_StoreArgument = Annotated[
    str, typer.Argument(metavar="STORE", help="The store, a folder or a URL.")
]
_MOST_UNUSABLE = 5  # segments that are named
_BLOCKS = " ▁▂▃▄▅▆▇█"
_TREE = (
    "A segment is a run of tokens that was stored at once; those on its branch continue it. A bold "
    "id is that of a prefix that no other continues. Evictions take the lowest score first."
)


def inspect(
    store: Annotated[str, typer.Argument(metavar="STORE|MODEL", help="A store or a checkpoint.")],
    prefix: Annotated[
        str | None,
        typer.Argument(
            metavar="[PREFIX]",
            help="A stored document: its name, its id, or the start of its id.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Plot the attention that each chunk drew."),
    ] = None,
    dtype: options.Dtype = "bfloat16",
    encrypt_key_file: options.EncryptKeyFile = None,
    json: options.JsonOutput = False,
) -> None:
    """Show the prefixes of a store, statistics of one prefix, or the sizes of a checkpoint.

    With a PREFIX, it reads the prefix and shows statistics of its keys and values. For a
    checkpoint, it shows the family, the sizes, the bytes of KV per token in --dtype, and how many
    tokens fit on common devices.
    """
    terminal = Terminal(as_json=json)
    if is_checkpoint(store):
        if prefix is not None or plot is not None:
            raise ValueError(
                f"got PREFIX or --plot with the checkpoint {store}, expected a store: only stores "
                "have prefixes"
            )
        inspect_checkpoint(terminal, Path(store), dtype=dtype)
        return

    from ckv_jax.storage.tools.inspect import inspect_store, plot_importance

    options.check_writable(plot)
    if plot is not None and prefix is None:
        raise ValueError("got --plot without a PREFIX, expected the prefix to plot")
    with _open_to_look(store, encrypt_key_file) as opened, terminal.status("reading"):
        try:
            found = inspect_store(opened, prefix)
        except PrefixNotFound as error:
            raise _evicted(opened, error) from error
        if plot is not None and prefix is not None:
            try:
                plot_importance(opened, prefix, plot)
            except ImportError as error:
                raise ValueError(
                    "the package matplotlib is missing; for --plot, run: pip install matplotlib"
                ) from error
    if json:
        terminal.json(found.to_dict())
    else:
        _show_inspection(terminal, found)
    if plot is not None:
        terminal.say(f"wrote {plot}", wrap=False)


def verify(
    store: _StoreArgument,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Repair, remove or quarantine damaged segments; rebuild the index."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --repair: report the repairs, change nothing.")
    ] = False,
    encrypt_key_file: options.EncryptKeyFile = None,
    json: options.JsonOutput = False,
) -> None:
    """Read and check all data of a store. The exit code is 1 if data is damaged or unread,
    or the index differs from the disk.

    --repair restores what it can. If a segment (a run of chunks) cannot be restored, its chunks
    before the first damaged one stay usable. Where chunks are clusters of tokens, only whole runs
    of clusters do. A segment without usable chunks is removed, and so is a damaged one that only
    reorders the tokens of others. `ckv ingest` of the same document recomputes what was lost.
    """
    from ckv_jax.storage.tools.verify import planned_repairs, ranges, verify_store

    if dry_run and not repair:
        raise ValueError("got --dry-run without --repair, expected both")
    terminal = Terminal(as_json=json)
    repair = repair and not dry_run
    with (
        options.open_store(store, encrypt_key_file, readonly=not repair) as opened,
        terminal.progress() as bar,
    ):
        report = verify_store(opened, repair, bar("bytes"))
        lost = planned_repairs(opened, report) if dry_run else ()
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
            terminal.say(
                f"foreign  {segment_id}: of another format version or key, not changed; ingest "
                "the text again"
            )
        for segment_id in report.unfinished:
            terminal.say(f"upload   {segment_id}: not finished, not changed")
        for segment_id in report.unindexed:
            terminal.say(f"index    {segment_id}: the index differs from the disk")
        faults = len(report.damages) + len(report.unindexed)
        limited = [id_ for id_ in report.quarantined if id_ not in report.unrepaired]
        done = [
            f"{len(ids)} {name}"
            for name, ids in (
                ("repaired", report.remade),
                ("kept until their text is ingested again", report.unrepaired),
                ("removed", report.removed),
                ("limited to their good chunks", limited),
                ("found undamaged", report.pardoned),
            )
            if ids
        ]
        terminal.say(
            f"{number_of(report.segments, 'segment')}, {number_of(report.packs, 'pack')}, "
            f"{byte_size(report.bytes)}: "
            + ("no damage" if report.ok else f"{number_of(faults, 'fault')}")
            + (f", {len(report.unread)} not read" if report.unread else "")
            + (f"; {', '.join(done)}" if done else "")
        )
    if not json and (report.quarantined or report.removed):
        terminal.say("ingest the same text again to restore what was lost")
    if (report.damages or report.unindexed) and not repair:
        more = "" if dry_run else "   (--dry-run: only report)"
        key = f" --encrypt-key-file {encrypt_key_file}" if encrypt_key_file else ""
        terminal.say(f"run: ckv verify {store} --repair{key}{more}", wrap=False)
    if not report.ok and (not repair or report.unread):
        raise typer.Exit(1)


def prune(
    store: _StoreArgument,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-bytes", metavar="SIZE", help="Size to shrink the store to: 50GB, 10GiB, 0."
        ),
    ] = None,
    expired: Annotated[
        bool, typer.Option("--expired", help="Remove prefixes whose time to live has passed.")
    ] = False,
    encrypt_key_file: options.EncryptKeyFile = None,
    json: options.JsonOutput = False,
) -> None:
    """Remove whole segments, least valuable first, until the store is small enough.

    Pinned prefixes and those in use stay. The exit code is 3 if the store is larger than
    --max-bytes because of them.
    """
    from ckv_jax.storage.tools.inspect import prune_store

    terminal = Terminal(as_json=json)
    if max_bytes is None and not expired:
        raise ValueError("got nothing to remove, expected --max-bytes SIZE, --expired, or both")
    bound = None if max_bytes is None else options.parse_size(max_bytes)
    with options.open_store(store, encrypt_key_file) as opened:
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
            f"the store still has {byte_size(report.bytes_after)}, more than {byte_size(bound)}: "
            "the rest is pinned, in use, or the beginning of such a prefix"
        )
        raise typer.Exit(3)


def pin(
    store: _StoreArgument,
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="PREFIX", help="A stored document: its name, its id, or the start of its id."
        ),
    ],
    unpin: Annotated[bool, typer.Option("--unpin", help="Remove the pin.")] = False,
    encrypt_key_file: options.EncryptKeyFile = None,
    json: options.JsonOutput = False,
) -> None:
    """Pin a prefix, so that it is not evicted or pruned until it is unpinned."""
    from ckv_jax.storage.tools.inspect import pin_prefix

    terminal = Terminal(as_json=json)
    with options.open_store(store, encrypt_key_file) as opened:
        prefix_id = pin_prefix(opened, prefix, not unpin)
    if json:
        terminal.json({"prefix": prefix_id, "pinned": not unpin})
    else:
        terminal.say(f"{prefix_id} is {'unpinned' if unpin else 'pinned'}")


def _open_to_look(url: str, key_file: Path | None) -> ChunkStore:
    """Opens a store for `inspect`; an error also says why the argument is no checkpoint."""
    try:
        return options.open_store(url, key_file, readonly=True)
    except (StoreError, ValueError) as error:
        if type(error) not in (StoreError, ValueError):
            raise  # a store that cannot be read just now
        if "://" in url:
            raise
        from ckv_jax.model.checkpoint import not_a_checkpoint

        raise ValueError(f"{error}; as a checkpoint: {not_a_checkpoint(Path(url))}") from error


def _evicted(store: ChunkStore, error: PrefixNotFound) -> Exception:
    """Returns an error with the reason of the prefix's eviction, or `error` if none is known."""
    found = None if error.several > 1 else store.why_evicted(error.prefix_id)
    if found is None:
        return error
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.time))
    return ValueError(f"prefix {found.prefix_id} was evicted on {when}: {found.reason}")


def _show_inspection(terminal: Terminal, found: Inspection) -> None:
    """Prints the store as a tree, in which the children of a segment continue it."""
    bound = "" if found.max_bytes is None else f" of {byte_size(found.max_bytes)} allowed"
    tree = Tree(
        f"{number_of(len(found.prefixes), 'prefix')} in "
        f"{number_of(len(found.segments), 'segment')}, "
        f"{byte_size(found.bytes)} on disk{bound}"
    )
    roots = [(tree, segment) for segment in reversed(found.children(None))]
    while roots:
        branch, segment = roots.pop()
        node = branch.add(_describe(segment, leaf=segment.prefix_id in found.prefixes))
        roots += [(node, child) for child in reversed(found.children(segment.id))]
    terminal.out.print(tree)
    if found.segments:
        terminal.say(_TREE)
    for reason in list(found.unusable.values())[:_MOST_UNUSABLE]:
        terminal.warn(reason)
    if len(found.unusable) > _MOST_UNUSABLE:
        terminal.warn(f"and {len(found.unusable) - _MOST_UNUSABLE} more; `ckv verify` lists all")
    if found.prefix is not None:
        _show_prefix(terminal, found.prefix)


def _describe(segment: SegmentInfo, *, leaf: bool) -> str:
    layout = segment.layout
    similar = "similar " if layout.get("grouping") == "alike" else ""
    kind = f"{layout['dtype']} in chunks of {layout['chunk_tokens']} {similar}tokens"
    if layout["probe"] != "none":
        kind += f", selected by keys of {'all' if layout['probe'] == 'keys' else 'some'} heads"
    if layout["digest"] != "none":
        kind += f", selected by compressed keys ({layout['digest']})"
    if "codec" in layout:
        kind += f", codec {layout['codec']}"
    notes = [
        "pinned" if segment.pinned else "",
        "of a tenant" if segment.salted else "",
        f"eviction score {segment.score:.3g}" if segment.score is not None else "",
        f"only {segment.usable_chunks} of {segment.chunks} chunks can be served"
        if segment.usable_chunks < segment.chunks
        else "",
    ]
    about = " ".join(
        part
        for part in (
            escape(segment.name),
            f"“{escape(segment.begins)}”" if segment.begins else "",
            f"from {escape(segment.source)}" if segment.source else "",
            f"stored {time.strftime('%Y-%m-%d %H:%M', time.localtime(segment.created))}",
        )
        if part
    )
    first = segment.first_chunk * layout["chunk_tokens"]
    return ", ".join(
        part
        for part in (
            f"{'[bold]' if leaf else ''}{segment.prefix_id}{'[/bold]' if leaf else ''}",
            about,
            f"tokens {first + 1:,} to {first + segment.tokens:,}",
            byte_size(segment.bytes),
            kind,
            *notes,
        )
        if part
    )


def _show_prefix(terminal: Terminal, prefix: PrefixInfo) -> None:
    tokens, chunks = number_of(prefix.num_tokens, "token"), number_of(prefix.num_chunks, "chunk")
    terminal.say(f"\n{prefix.id}: {tokens} in {chunks}")
    if prefix.bad_packs:
        terminal.warn(f"{number_of(prefix.bad_packs, 'pack')} could not be read")
    if prefix.lost_orders:
        segments = number_of(prefix.lost_orders, "segment")
        terminal.warn(
            f"the record of which tokens each chunk has is damaged in {segments}; run ckv verify"
        )
    terminal.say(
        "keys and values of each layer: the range, the mean of the absolute values, and how many "
        "are not finite"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("layer", "keys from", "to", "mean", "values from", "to", "mean"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("NaN, infinite", justify="right")
    for layer in prefix.layers:
        numbers = (
            layer.key_min, layer.key_max, layer.key_mean_abs,
            layer.value_min, layer.value_max, layer.value_mean_abs,
        )  # fmt: skip
        table.add_row(
            str(layer.layer), *(f"{n:.3g}" for n in numbers), f"{layer.nan}, {layer.infinite}"
        )
    terminal.out.print(table)
    if prefix.importance is not None:
        terminal.say("attention that the chunks drew, from the first to the last")
        terminal.say(_sparkline(prefix.importance))


def _sparkline(values: Sequence[float], width: int = 56) -> str:
    """Draws the largest value of each of `width` spans as a row of block characters."""
    step = max(1, math.ceil(len(values) / width))
    peaks = [max(values[i : i + step]) for i in range(0, len(values), step)]
    top = max(peaks, default=0.0)
    return "".join(_BLOCKS[round(8 * peak / top)] if top > 0 else " " for peak in peaks)


# -- checkpoints -----------------------------------------------------------------------------------

_FIDELITIES = (0.9, 0.95, 0.98, 0.99)


def is_checkpoint(place: str) -> bool:
    """Whether a path is a model: a GGUF file, or a folder with `config.json` (no store has one)."""
    from ckv_jax.model.gguf import is_gguf

    return (Path(place) / "config.json").is_file() or is_gguf(place)


def inspect_checkpoint(terminal: Terminal, folder: Path, *, dtype: str) -> None:
    """Prints the family and sizes of a checkpoint, and its memory use in element type `dtype`."""
    from ckv_jax.config import EngineConfig
    from ckv_jax.model.sampling import generation_defaults
    from ckv_jax.model.tensor_map import inspect_model

    EngineConfig(dtype=dtype)  # refuses unknown ones
    found = inspect_model(folder)
    ignored = dict(generation_defaults(folder).ignored)
    if terminal.as_json:
        terminal.json(found.to_json(dtype) | {"generation_ignored": ignored})
    else:
        _show_checkpoint(terminal, folder, found, dtype, ignored)


def _show_checkpoint(
    terminal: Terminal, folder: Path, found: ModelInfo, dtype: str, ignored: Mapping[str, Any]
) -> None:
    c = found.config
    kv, context = found.kv_bytes(dtype), c.max_position_embeddings
    head = "tied to the embedding" if c.tie_word_embeddings else "not tied"
    facts = {
        "family": f"{c.family.title} ({c.model_type})",
        "parameters": f"{found.parameters:,}, {found.stored_dtype} in {found.format} format",
        "layers": f"{c.num_layers}, hidden size {c.hidden_size:,}, MLP {c.intermediate_size:,}",
        "heads": f"{c.num_heads} query and {c.num_kv_heads} KV heads, size {c.head_dim}",
        "vocabulary": f"{c.vocab_size:,}, head {head}",
        "context": f"{context:,} tokens, {_rope(found)}",
        "weights": f"{byte_size(found.weight_bytes(dtype))} in {dtype}",
        "KV cache": f"{byte_size(kv)} per token, {byte_size(kv * context)} per context, in {dtype}",
        "disk": f"1 TB holds the KV of {10**12 // kv:,} tokens",
    }
    terminal.say(str(folder))
    for name, fact in facts.items():
        terminal.say(f"  {name:<11} {fact}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("one device with", no_wrap=True)
    table.add_column("free after weights", justify="right")
    table.add_column("tokens of KV that fit", justify="right")
    for fit in found.fits(dtype):
        room = byte_size(fit.room) if fit.room > 0 else f"{byte_size(-fit.room)} too small"
        table.add_row(fit.memory, room, f"{fit.tokens:,}" if fit.tokens else "none")
    terminal.out.print(table)
    terminal.say("A tenth of each is reserved for computing. KV on disk needs no device memory.")
    if ignored:
        listed = ", ".join(f"{name} {value}" for name, value in ignored.items())
        terminal.warn(f"unsupported settings in generation_config.json are ignored: {listed}")


def _rope(found: ModelInfo) -> str:
    scaling = found.config.rope_scaling
    if scaling is None:
        return f"RoPE base {found.config.rope_theta:,.0f}"
    trained = scaling.original_max_position_embeddings
    return f"RoPE scaled from {trained:,} by {scaling.factor:g} ({scaling.rope_type})"


def convert(
    checkpoint: options.Checkpoint,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The folder to write, new or empty.")
    ],
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help="orbax (loads faster) or hf (Hugging Face)."),
    ] = "orbax",
    json: options.JsonOutput = False,
) -> None:
    """Write a checkpoint in another format, with the same weights and tokenizer.

    Weights keep their element type and every bit. If a checkpoint has several element types or
    quantised weights, all its weights are written in float32.

    Every command accepts the new folder. A store identifies a model by the content of its files, so
    texts have to be ingested again for the converted model.
    """
    terminal = Terminal(as_json=json)
    with terminal.status("converting"):
        from ckv_jax.model.weights import convert as convert_folder

        convert_folder(checkpoint, target, to=to)  # type: ignore[arg-type]  # it checks `to`
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    if json:
        terminal.json({"checkpoint": str(target), "format": to, "bytes": size})
    else:
        terminal.say(f"{target}: {byte_size(size)} in {to} format")


# -- calibration -----------------------------------------------------------------------------------


def calibrate(
    checkpoint: options.Checkpoint,
    store: options.Store,
    prefix: Annotated[
        list[str] | None,
        typer.Option(
            "--prefix",
            metavar="ID|NAME",
            help="A stored document to calibrate on. May be repeated: several documents make the "
            "result less specific to one. Without it: the only document in the store.",
        ),
    ] = None,
    questions: Annotated[
        int,
        typer.Option(
            "--questions", metavar="N", min=50, help="Number of passages that the model continues."
        ),
    ] = 200,
    system: options.System = "ckv",
    dtype: options.Dtype = "bfloat16",
    weights: options.Weights = None,
    salt: options.Salt = "",
    encrypt_key_file: options.EncryptKeyFile = None,
    json: options.JsonOutput = False,
) -> None:
    """Measure at which budgets first tokens equal those of the whole document, for --budget auto.

    The model continues passages of the stored documents at several budgets. The result is kept for
    this model and system; `ckv ask` and `ckv serve` use it for --budget auto and fidelity:0.95.
    """
    terminal = Terminal(as_json=json)
    with terminal.loading():
        from ckv_jax.storage.config import StoreConfig
        from ckv_jax.systems import preset

        settings = StoreConfig(encrypt_key_file=encrypt_key_file)
        with options.open_store(store, settings) as opened:
            model = partial(options.fingerprint, checkpoint, dtype=dtype, weights=weights)
            stored = options.find_prefixes(opened, prefix, salt=salt, model=model)
        chosen = preset(system, codec=options.codec_name(stored[0]))
        engine = options.open_engine(
            checkpoint,
            store,
            settings=settings,
            system=chosen,
            dtype=dtype,
            weights=weights,
            salt=salt,
        )
    with engine:
        for one in stored:
            engine.check_prefix(one)
        with terminal.progress() as bar:
            found = engine.calibrate(stored, questions=questions, progress=bar("questions"))
        spread = dict(zip(found.budgets, found.spread.tolist(), strict=True))
        same = {b: sum(row[i] for row in found.same) for i, b in enumerate(found.budgets)}
        thresholds = {p: found.threshold(p) for p in _FIDELITIES}
    if json:
        terminal.json(
            {
                "questions": len(found.gaps),
                "same": {f"{b:g}": n / len(found.gaps) for b, n in same.items()},
                "error_of_gaps": {f"{b:g}": value for b, value in spread.items()},
                "thresholds": {
                    f"{p:g}": None if math.isinf(value) else value
                    for p, value in thresholds.items()
                },
            }
        )
        return
    for budget, count in same.items():
        terminal.say(
            f"{budget:>4.0%} of the text: {count} of {len(found.gaps)} first tokens are equal"
        )
    for fidelity, threshold in thresholds.items():
        if math.isinf(threshold):
            terminal.say(
                f"fidelity:{fidelity:g} reads the whole text: use more --questions to calibrate it"
            )
    terminal.say("`ckv ask --budget auto`, or --budget fidelity:0.95, now uses this calibration")
