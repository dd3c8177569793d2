"""How a command opens its store and finds a prefix in it, without loading JAX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ckv_jax.cli.options import parse_size
from ckv_jax.cli.output import Terminal, byte_size, number_of
from ckv_jax.storage.place.place import folder_of
from ckv_jax.storage.tools import upkeep

if TYPE_CHECKING:
    from ckv_jax.config import SystemConfig
    from ckv_jax.engine import Engine
    from ckv_jax.storage.config import StoreConfig
    from ckv_jax.storage.prefix import Prefix
    from ckv_jax.storage.store import ChunkStore


def is_store(url: str) -> bool:
    """Whether there is something at a store's URL; only a local folder is looked at."""
    folder = folder_of(url)
    return folder is None or (folder.is_dir() and any(folder.iterdir()))


def open_store(
    url: str, config: StoreConfig | None = None, *, readonly: bool = False
) -> ChunkStore:
    """Opens an existing store; `ValueError` if there is none."""
    from ckv_jax.storage.store import ChunkStore

    if not is_store(url):
        raise ValueError(f"there is no store at {url}; `ckv ingest` makes one")
    return ChunkStore.open(url, config=config, readonly=readonly)


def store_config(
    *,
    max_bytes: str | None,
    eviction: str,
    direct_io: bool | None,
    io_concurrency: int,
    tenant_bytes: str | None = None,
) -> StoreConfig:
    """The store's settings from options of a command; `ValueError` for wrong ones."""
    from ckv_jax.storage.config import StoreConfig

    return StoreConfig(
        max_bytes=None if max_bytes is None else parse_size(max_bytes),
        tenant_bytes=None if tenant_bytes is None else parse_size(tenant_bytes),
        eviction=eviction,
        direct_io=direct_io,
        io_concurrency=io_concurrency,
    )


def find_prefix(store: ChunkStore, name: str | None, *, salt: str) -> Prefix:
    """The stored prefix of a name or an id, see `storage.tools.names`; None: the only one stored.

    Raises `PrefixNotFound` and, for a name of several prefixes, `ValueError`.
    """
    if name is not None:
        return upkeep.find_prefix(store, name, salt=salt)
    stored = store.prefixes(salt=salt)
    if not stored:
        raise ValueError("the store holds no prefix; `ckv ingest` makes one")
    if len(stored) > 1:
        said = upkeep.listed([prefix.id for prefix in stored], store.records())
        raise ValueError(f"{len(stored)} prefixes are stored; say which with --prefix: {said}")
    return stored[0]


def codec_name(prefix: Prefix) -> str:
    """The value of `SystemConfig.codec` that reads a prefix. Raises `ValueError` for an unknown
    codec."""
    from ckv_jax.storage.codec import codec_of

    codec_of(prefix.layout)
    return prefix.layout.codec.partition(":")[0]


def generates(system: SystemConfig) -> bool:
    """Whether a system goes on after the first token."""
    return system.own.generates and not system.computes_all


def figures(answer: Mapping[str, Any], *, direct: bool) -> str:
    """One line about an answer as JSON. `direct`: whether reads went past the page cache."""
    chunks = answer["chunks"]
    share = chunks["selected"] / chunks["total"] if chunks["total"] else 1.0
    compiled = answer["compiled"]
    read = answer["bytes"]["ssd"] + answer.get("decode_ssd_bytes", 0)
    parts = [
        f"first token {answer['ttft_ms'] / 1e3:.2f} s"
        + (f" with {number_of(compiled, 'program')} compiled or loaded" if compiled else ""),
        f"{answer['tokens_s']:.1f} tokens/s" if answer.get("tokens_s") else "",
        f"{answer['whole_s']:.1f} s in all",
        f"{share:.1%} of {number_of(answer['prefix_tokens'], 'token')} hold "
        f"{answer['attention_mass']:.1%} of the attention",
        f"{byte_size(read)} from {'SSD' if direct else 'the store'}",
    ]
    return "; ".join(part for part in parts if part)


def show_citations(terminal: Terminal, citations: Iterable[Mapping[str, Any]]) -> None:
    """The passages under an answer, each with its share."""
    for one in citations:
        terminal.say(f"{one['share']:>4.0%}  “{one['text']}”")


def low_coverage_message(covered: float, budget: float | str, *, option: str = "--budget") -> str:
    """The warning under an answer that stands on little of the question's attention."""
    more = f"with a larger {option}"
    if isinstance(budget, float):
        more = f"with {option} {min(1.0, 2 * budget):g}"
    return f"the answer covers {covered:.0%} of the question's attention; ask {more} for more"


def kv_bytes(prefix: Prefix) -> int:
    """Bytes of all packs of a prefix."""
    return prefix.num_chunks * prefix.layout.groups * prefix.layout.pack_bytes


def recomputed_message(chunks: int, engine: Engine, store: str) -> str:
    """The warning for an answer some of whose chunks had to be computed again."""
    late = engine.stats().read_errors and not engine.stats().quarantined
    limit = engine.config.read_deadline_s
    are, were = ("is", "was") if chunks == 1 else ("are", "were")
    why, then = (
        (f"{were} not read within {limit:g} s", "look at the disk")
        if late
        else (f"{are} damaged on disk", f"run: ckv verify {store}")
    )
    return (
        f"{number_of(chunks, 'chunk')} {why} and {were} computed again: "
        f"the answer is right and came late; {then}"
    )
