"""Options that several commands share, how their values are parsed, and how a command opens its
store and engine."""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckv_jax.cli.output import Terminal, byte_size, number_of, one_line
from ckv_jax.config import MIB, check_budget
from ckv_jax.errors import CkvError
from ckv_jax.storage.place.place import folder_of
from ckv_jax.storage.tools.inspect import find_prefix as stored_prefix
from ckv_jax.storage.tools.inspect import listed

if TYPE_CHECKING:
    from ckv_jax.config import SystemConfig
    from ckv_jax.engine import Engine
    from ckv_jax.model.config import ModelConfig
    from ckv_jax.model.tokenizer import Tokenizer
    from ckv_jax.storage.config import StoreConfig
    from ckv_jax.storage.prefix import Prefix
    from ckv_jax.storage.store import ChunkStore

_QUESTION = "What does the document say about this?"
"""As long as most questions are."""
_UNITS = {unit: 10**power for power, unit in ((0, ""), (3, "k"), (6, "m"), (9, "g"), (12, "t"))}
_UNITS |= {f"{unit}b": size for unit, size in _UNITS.items() if unit}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A Qwen2.5, Qwen3, Llama or Mistral model: a folder in Hugging Face format "
        "(config.json, *.safetensors and the tokenizer's files), a GGUF file, or a folder that "
        "`ckv convert` wrote.",
    ),
]
Store = Annotated[
    str,
    typer.Option(
        "--store",
        metavar="URL",
        help="Where KV is kept: a folder, or file://…, s3://bucket/path, gs://bucket/path.",
    ),
]
MaxBytes = Annotated[
    str | None,
    typer.Option(
        "--max-bytes",
        metavar="SIZE",
        help="Bound of the store, such as 50GB or 10GiB: the least valuable prefixes are evicted "
        "to make room. Without it: the size of the disk.",
    ),
]
TenantBytes = Annotated[
    str | None,
    typer.Option(
        "--tenant-bytes",
        metavar="SIZE",
        help="Bound of the prefixes of one --salt, and of those without one: others of the same "
        "salt are evicted to make room. Without it: the bound of the store.",
    ),
]
Eviction = Annotated[
    str,
    typer.Option(
        "--eviction",
        metavar="NAME",
        help="What is evicted first: by attention (importance x frequency) or lru.",
    ),
]
DirectIo = Annotated[
    bool | None,
    typer.Option(
        "--direct-io/--no-direct-io",
        help="Read past the page cache, or through it. Without either: past it where the file "
        "system can.",
    ),
]
IoConcurrency = Annotated[
    int, typer.Option("--io-concurrency", metavar="N", help="Reads in flight at once, 1 to 1024.")
]
EncryptKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--encrypt-key-file",
        metavar="FILE",
        envvar="CKV_ENCRYPT_KEY_FILE",
        help="The key of an encrypted store, 64 hexadecimal digits (openssl rand -hex 32). A new "
        "store is encrypted with it.",
    ),
]
System = Annotated[
    str,
    typer.Option(
        "--system",
        metavar="NAME",
        help="How prefixes are laid out, selected from and cached: ckv (ours), contiguous-kv "
        "(as in the paper), impress, as-h2o-lfu, as-h2o-lru, as-lru, recompute (which reads "
        "and stores nothing), kvdrive and other published systems of decode (docs/decode.md), or "
        "package.module:NAME (docs/add_a_system.md). Ask with the system that ingested, or with "
        "recompute.",
    ),
]
Codec = Annotated[
    str,
    typer.Option(
        "--codec",
        metavar="NAME",
        help="How keys and values are stored: none, int8 or k8v4 (keys 8 bits, values 4): half "
        "or two fifths of the bytes.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="Element type of weights, keys and values: bfloat16, float16 or float32.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="int8",
        help="Rounds the model's weights to 8 bits: half the memory, faster tokens, and answers "
        "that may differ a little. Give it with every command over a store.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="SHARE",
        help="Share of the text that takes part in the answer, more than 0 and at most 1. "
        "0.05 reads a twentieth of it; 1 reads everything. mass:0.95 reads what holds 95% of the "
        "question's attention, mass:0.95:0.02-0.5 between 2 and 50% of the text. "
        "fidelity:0.95, with `ckv ask`: the smallest share whose first token is that of the whole "
        "text with a probability of 95%, once `ckv calibrate` ran; auto: fidelity:0.98. "
        "Without it: 0.25.",
    ),
]
Salt = Annotated[
    str,
    typer.Option(
        "--salt", metavar="TEXT", help="Tenant: prefixes of one salt are invisible to others."
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-parallel",
        metavar="N",
        help="Split the model over the first N devices, by KV head. What is stored does not "
        "depend on it.",
    ),
]


def parse_budget(text: str) -> float | str:
    """A budget: a share of the text, or of the attention that it has to cover."""
    try:
        number = float(text)
    except ValueError:
        if text == "auto" or text.startswith("fidelity:"):
            raise ValueError(
                f"got budget {text}, which `ckv ask` and `ckv serve` take; expected a share such "
                "as 0.25, or mass:0.9"
            ) from None
        return check_budget(text)
    return check_budget(number)


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


def read_text(source: str) -> str:
    """The text of a file, or of stdin for `-`. `ValueError` if it is empty or not UTF-8."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error
    if "\0" in text:
        raise ValueError(f"{source} is not text: it holds a NUL at character {text.index(chr(0))}")
    if not text.strip():
        raise ValueError(f"the text in {'stdin' if source == '-' else source} is empty")
    return text


def check_writable(path: Path | None) -> None:
    """Raises `ValueError` before the work for a file that could not be written after it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"{path} cannot be written: its folder is missing, or it is one")


# -- stores and engines ----------------------------------------------------------------------------


def is_store(url: str) -> bool:
    """Whether there is something at a store's URL; only a local folder is looked at."""
    folder = folder_of(url)
    return folder is None or (folder.is_dir() and any(folder.iterdir()))


def open_store(
    url: str, config: StoreConfig | Path | None = None, *, readonly: bool = False
) -> ChunkStore:
    """Opens an existing store; `ValueError` if there is none. `config`: settings, or a key file."""
    from ckv_jax.storage.config import StoreConfig
    from ckv_jax.storage.store import ChunkStore

    if not is_store(url):
        raise ValueError(f"there is no store at {url}; `ckv ingest` makes one")
    if not isinstance(config, StoreConfig):
        config = StoreConfig(encrypt_key_file=config)
    return ChunkStore.open(url, config=config, readonly=readonly)


def store_config(
    max_bytes: str | None,
    eviction: str,
    direct_io: bool | None,
    io_concurrency: int,
    encrypt_key_file: Path | None,
    *,
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
        encrypt_key_file=encrypt_key_file,
    )


def open_engine(
    checkpoint: Path,
    store: str,
    *,
    settings: StoreConfig | None = None,
    budget: float | str | None = None,
    check: Callable[[Tokenizer, ModelConfig], object] | None = None,
    **config: Any,
) -> Engine:
    """An engine over a checkpoint and a store; `config`: fields of `EngineConfig`.

    `budget`: None: the default of `EngineConfig`. `check`: see `Engine.from_pretrained`.
    """
    from ckv_jax.config import EngineConfig
    from ckv_jax.engine import Engine
    from ckv_jax.user_cache import enable_compilation_cache

    enable_compilation_cache()
    if budget is not None:
        config["budget"] = budget
    return Engine.from_pretrained(
        checkpoint, store=store, config=EngineConfig(**config), store_config=settings, check=check
    )


def find_prefix(store: ChunkStore, name: str | None, *, salt: str) -> Prefix:
    """The stored prefix of a name or an id, see `storage.tools.inspect`; None: the only one stored.

    Raises `PrefixNotFound` and, for a name of several prefixes, `ValueError`.
    """
    if name is not None:
        return stored_prefix(store, name, salt=salt)
    stored = store.prefixes(salt=salt)
    if not stored:
        raise ValueError("the store holds no prefix; `ckv ingest` makes one")
    if len(stored) > 1:
        said = listed([prefix.id for prefix in stored], store.records())
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


def room_for(size: int, most: float) -> dict[str, Any]:
    """Fields of `EngineConfig`: the default's room, or more where `size` bytes of KV need it.

    Programs are compiled for a pool's size, so that this is one size for most texts, and a few for
    larger ones. A CPU takes memory as it is used: there the share `most` of a budget is no matter.
    """
    import jax

    from ckv_jax.buckets import bucket
    from ckv_jax.config import EngineConfig

    default = EngineConfig()
    share = 1.0 if jax.default_backend() == "cpu" else most
    needed = bucket(-(-round(share * size) // MIB)) * MIB
    return {
        "device_cache_bytes": max(default.device_cache_bytes, 2 * needed),
        "prefetch_device_bytes": max(default.prefetch_device_bytes, 64 * MIB + needed * 11 // 10),
    }


def compile_questions(
    terminal: Terminal,
    engine: Engine,
    prefix: Prefix,
    room: Mapping[str, Any] | None = None,
    *,
    at_once: int = 1,
) -> float:
    """Compiles what questions over `prefix` need at the engine's budget and at 1.0, one of them and
    `at_once`; the seconds.

    For an ingest that had to compile: where it had not, an earlier text of about the same length
    has left all of it in the cache. What stops this is a warning, as the text is stored.

    `room`: fields of the configuration of the engine that will be asked, where that is another.
    """
    from ckv_jax.config import EngineConfig

    if not EngineConfig().warm_batch:
        return 0.0
    start = time.perf_counter()
    more = 2 if generates(engine.system) else 0
    try:
        question = len(engine.question(prefix, _QUESTION))
        left = engine.model_config.max_position_embeddings - prefix.num_tokens - question
        asked = engine.variant(replace(engine.config, **room)) if room else nullcontext(engine)
        with asked as asking, terminal.status("compiling what questions need"):
            budgets = {1.0: 0, engine.config.budget: more}
            for (budget, tokens), size in itertools.product(budgets.items(), sorted({1, at_once})):
                if left > tokens:
                    asking.warmup(
                        prefix,
                        min_batch=size,
                        max_batch=size,
                        min_suffix=question,
                        max_suffix=question,
                        budgets=[budget],
                        max_tokens=tokens,
                    )
    except (CkvError, ValueError, RuntimeError) as error:  # the last: no memory for more pools
        terminal.warn(f"the first question has to compile what it needs: {one_line(error)}")
        return 0.0
    except KeyboardInterrupt:
        terminal.warn("interrupted: the text is stored, the first question compiles what it needs")
        return 0.0
    return time.perf_counter() - start


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
