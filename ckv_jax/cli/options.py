"""Options shared by several commands, parsers of their values, and opening of store and engine."""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckv_jax.cli.output import Terminal, byte_size, number_of, one_line
from ckv_jax.config import MIB, check_budget
from ckv_jax.errors import CkvError
from ckv_jax.storage.errors import PrefixNotFound
from ckv_jax.storage.place.place import folder_of
from ckv_jax.storage.prefix import MOST_LETTERS, first_words
from ckv_jax.storage.tools.inspect import find_prefix, listed

if TYPE_CHECKING:
    from ckv_jax.config import SystemConfig
    from ckv_jax.engine import Engine
    from ckv_jax.model.config import ModelConfig
    from ckv_jax.model.tokenizer import Tokenizer
    from ckv_jax.storage.chain import Fingerprint
    from ckv_jax.storage.config import StoreConfig
    from ckv_jax.storage.layout import Layout
    from ckv_jax.storage.prefix import Prefix
    from ckv_jax.storage.store import ChunkStore

_QUESTION = "What does the document say about this?"
"""A question of typical length, for which programs are compiled."""
RARE = "Less common options"
"""The panel of a command's help for options that few users need."""
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
        help="The store of the KV cache: a folder, or a URL: file://…, s3://bucket/path, "
        "gs://bucket/path.",
    ),
]
MaxBytes = Annotated[
    str | None,
    typer.Option(
        "--max-bytes",
        rich_help_panel=RARE,
        metavar="SIZE",
        help="Size limit of the store, such as 50GB or 10GiB. When it is reached, the least "
        "valuable prefixes are evicted. Without it: the size of the disk.",
    ),
]
TenantBytes = Annotated[
    str | None,
    typer.Option(
        "--tenant-bytes",
        rich_help_panel=RARE,
        metavar="SIZE",
        help="Size limit of each tenant: of the prefixes of one --salt, or of those without a "
        "salt. When it is reached, prefixes of that tenant are evicted. Without it: the limit of "
        "the store.",
    ),
]
EvictionPolicy = Annotated[
    str,
    typer.Option(
        "--eviction",
        rich_help_panel=RARE,
        metavar="NAME",
        help="Eviction policy: attention (the least importance x frequency first) or lru (the "
        "least recently used first).",
    ),
]
DirectIo = Annotated[
    bool | None,
    typer.Option(
        "--direct-io/--no-direct-io",
        rich_help_panel=RARE,
        help="Read with direct I/O, which bypasses the page cache, or without. Without either "
        "option: with direct I/O where the file system supports it.",
    ),
]
IoConcurrency = Annotated[
    int,
    typer.Option(
        "--io-concurrency",
        metavar="N",
        rich_help_panel=RARE,
        help="Reads in flight at once, 1 to 1024.",
    ),
]
EncryptKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--encrypt-key-file",
        rich_help_panel=RARE,
        metavar="FILE",
        envvar="CKV_ENCRYPT_KEY_FILE",
        help="File with the key of an encrypted store: 64 hexadecimal digits (openssl rand -hex "
        "32). A new store is encrypted with it.",
    ),
]
System = Annotated[
    str,
    typer.Option(
        "--system",
        metavar="NAME",
        help="The method that lays out, selects and caches KV: ckv, ckv-fast, ckv-16, recompute "
        "or another of docs/concepts.md; or package.module:NAME, one of your own. "
        "recompute stores and reads nothing. Ask with the system that the document was ingested "
        "with, or with recompute.",
    ),
]
Codec = Annotated[
    str,
    typer.Option(
        "--codec",
        metavar="NAME",
        help="Quantisation of stored keys and values: none, int8 (half the bytes of bfloat16) or "
        "k8v4 (keys in 8 bits, values in 4: two fifths).",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        rich_help_panel=RARE,
        metavar="NAME",
        help="Element type of weights, keys and values: bfloat16, float16 or float32.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        rich_help_panel=RARE,
        metavar="int8",
        help="Quantise the model's weights to 8 bits: half the memory, faster tokens, slightly "
        "different predictions (docs/models.md#int8-weights has figures). Give it with every "
        "command over the same store.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="SHARE",
        help="Share of the document that the answer attends to, more than 0 and at most 1. "
        "0.05 reads a twentieth of the document; 1 reads all of it. mass:0.9 reads the chunks "
        "that hold 90% of the question's attention; mass:0.9:0.05-0.5 does so within 5 to 50% of "
        "the document. fidelity:0.95 (`ckv ask`, after `ckv calibrate`) reads the smallest share "
        "whose first token equals that of the whole document with a probability of 95%; auto means "
        "fidelity:0.98. Without it: 0.25.",
    ),
]
Salt = Annotated[
    str,
    typer.Option(
        "--salt",
        rich_help_panel=RARE,
        metavar="TEXT",
        help="Secret name of a tenant: its prefixes are invisible under any other salt.",
    ),
]
JsonOutput = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-parallel",
        rich_help_panel=RARE,
        metavar="N",
        help="Number of devices to split the model over, by KV head. The stored KV does not "
        "depend on it.",
    ),
]


def parse_budget(text: str) -> float | str:
    """Parses a budget: a share of the text, or a share of the attention. `ValueError` for anything
    else."""
    try:
        number = float(text)
    except ValueError:
        if text == "auto" or text.startswith("fidelity:"):
            raise ValueError(
                f"got budget {text}, which only `ckv ask` and `ckv serve` accept; expected a share "
                "such as 0.25, or mass:0.9"
            ) from None
        return check_budget(text)
    return check_budget(number)


def parse_seconds(text: str) -> float:
    """Parses a duration such as `90`, `30m`, `12h` or `7d` into seconds. `ValueError` for anything
    else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([smhd]?)\s*", text)
    if found is None:
        raise ValueError(f"got {text!r}, expected a time such as 90s, 30m, 12h or 7d")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def parse_size(text: str) -> int:
    """Parses a size such as `50GB`, `1.5 GiB` or `1000` into bytes. `ValueError` for anything
    else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"got {text!r}, expected a size such as 1000, 50GB or 10GiB")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def read_text(source: str) -> str:
    """Reads a text file, or stdin for `-`. `ValueError` if it is empty or not UTF-8."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is not UTF-8 text: {error.reason} at byte {error.start}; convert it to text "
            "first (a PDF: pdftotext)"
        ) from error
    except IsADirectoryError as error:
        raise ValueError(f"{source} is a directory; name a text file") from error
    if "\0" in text:
        raise ValueError(f"{source} is not text: character {text.index(chr(0))} is NUL")
    if not text.strip():
        where = "stdin" if source == "-" else source
        raise ValueError(f"the text in {where} is empty; name a file with text")
    return text


def check_writable(path: Path | None) -> None:
    """Raises `ValueError` for an output file that could not be written after the work."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"{path} cannot be written: it is a folder, or its folder is missing")


# -- stores and engines ----------------------------------------------------------------------------


def is_store(url: str) -> bool:
    """Whether a store's URL has content; always true for a URL that is not a local folder."""
    folder = folder_of(url)
    return folder is None or (folder.is_dir() and any(folder.iterdir()))


def open_store(
    url: str, config: StoreConfig | Path | None = None, *, readonly: bool = False
) -> ChunkStore:
    """Opens an existing store; `ValueError` if there is none. `config`: settings, or a key file."""
    from ckv_jax.storage.config import StoreConfig
    from ckv_jax.storage.store import ChunkStore

    if not is_store(url):
        raise ValueError(f"there is no store at {url}; create one with `ckv ingest`")
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
    """Builds the store's configuration from a command's options; `ValueError` for wrong ones."""
    from ckv_jax.storage.config import StoreConfig

    return StoreConfig(
        max_bytes=None if max_bytes is None else parse_size(max_bytes),
        tenant_bytes=None if tenant_bytes is None else parse_size(tenant_bytes),
        eviction=eviction,
        direct_io=direct_io,
        io_concurrency=io_concurrency,
        encrypt_key_file=encrypt_key_file,
    )


def check_room(
    tokens: int, layout: Layout, max_bytes: str | None, tenant_bytes: str | None
) -> None:
    """Raises `ValueError` for a text of `tokens` whose KV is larger than a size limit, as given."""
    needed = tokens // layout.chunk_tokens * layout.chunk_bytes
    for option, limit in (("--max-bytes", max_bytes), ("--tenant-bytes", tenant_bytes)):
        if limit is not None and needed > parse_size(limit):
            raise ValueError(
                f"the text needs at least {byte_size(needed)}, {option} allows {limit}; give a "
                "larger size"
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
    """Opens an engine over a checkpoint and a store; `config` has fields of `EngineConfig`.

    A `budget` of None means the default of `EngineConfig`. `check`: see `Engine.from_pretrained`.
    """
    from ckv_jax.config import EngineConfig
    from ckv_jax.engine import Engine

    if budget is not None:
        config["budget"] = budget
    return Engine.from_pretrained(
        checkpoint, store=store, config=EngineConfig(**config), store_config=settings, check=check
    )


def find_prefixes(
    store: ChunkStore, names: Sequence[str] | None, *, salt: str, model: Callable[[], Fingerprint]
) -> list[Prefix]:
    """Finds stored prefixes by their names or ids; without any, returns the only stored document.

    Without names, a prefix that continues another, as a turn of a chat does, counts only if it has
    a record. Of several, those of `model` count, which is called only then. Raises
    `PrefixNotFound`, `FingerprintMismatch` where all are of other models, or `ValueError` where
    several prefixes match.
    """
    if names:
        return [find_prefix(store, name, salt=salt) for name in names]
    known = store.records(salt=salt)
    stored = {prefix.id: prefix for prefix in store.prefixes(salt=salt)}
    if not stored:
        raise ValueError("the store has no prefix yet; store a text with `ckv ingest`")
    for id_ in known.keys() - stored.keys():
        with suppress(PrefixNotFound):
            stored[id_] = store.prefix(id_, salt=salt)
    found, outer = [], None
    keys = {id_: one.fingerprint.hex.encode() + one.tokens.tobytes() for id_, one in stored.items()}
    for id_ in sorted(stored, key=keys.__getitem__):  # what continues a prefix follows it
        continues = outer is not None and keys[id_] != outer and keys[id_].startswith(outer)
        if id_ in known or not continues:
            found.append(stored[id_])
        if not continues:
            outer = keys[id_]
    if len(found) > 1:
        asked = model()
        others, found = found, [one for one in found if one.fingerprint == asked]
        if not found:
            others[0].fingerprint.require(asked)
    if len(found) > 1:
        said = listed(sorted(prefix.id for prefix in found), known)
        raise ValueError(f"{len(found)} prefixes are stored; name one with --prefix: {said}")
    return found


def fingerprint(checkpoint: Path, *, dtype: str, weights: str | None) -> Fingerprint:
    """Computes the fingerprint that an engine over a checkpoint has. Raises `CheckpointError`."""
    from ckv_jax.model.checkpoint import is_orbax
    from ckv_jax.model.config import ModelConfig
    from ckv_jax.model.tensor_map import open_tensors
    from ckv_jax.model.weights import model_fingerprint

    orbax = is_orbax(checkpoint)
    config = ModelConfig.from_hf(checkpoint) if orbax else open_tensors(checkpoint)[0]
    return model_fingerprint(checkpoint, config, dtype=dtype, weights=weights)


def origin(files: Sequence[str], text: str, *, salt: str) -> dict[str, Any]:
    """Names the source and the first words of a stored text, as fields of its `PrefixRecord`."""
    names = ", ".join("stdin" if file == "-" else Path(file).name for file in files)
    return {"source": names[-MOST_LETTERS:], "begins": "" if salt else first_words(text)}


def codec_name(prefix: Prefix) -> str:
    """Returns the `SystemConfig.codec` that a prefix was stored with. `ValueError` for an unknown
    codec."""
    from ckv_jax.storage.codec import codec_of

    codec_of(prefix.layout)
    return prefix.layout.codec.partition(":")[0]


def generates(system: SystemConfig) -> bool:
    """Whether a system generates tokens after the first."""
    return system.own.generates and not system.computes_all


def figures(answer: Mapping[str, Any], *, direct: bool) -> str:
    """Summarises an answer (as JSON) in one line. `direct`: reads bypassed the page cache."""
    chunks = answer["chunks"]
    share = chunks["selected"] / chunks["total"] if chunks["total"] else 1.0
    compiled = answer["compiled"]
    read = answer["bytes"]["ssd"] + answer.get("decode_ssd_bytes", 0)
    parts = [
        f"first token {answer['ttft_ms'] / 1e3:.2f} s"
        + (f" with {number_of(compiled, 'program')} compiled or loaded" if compiled else ""),
        f"{answer['tokens_s']:.1f} tokens/s" if answer.get("tokens_s") else "",
        f"{answer['whole_s']:.1f} s in all",
        f"{share:.1%} of {number_of(answer['prefix_tokens'], 'token')} took part",
        f"{answer['attention_mass']:.1%} of the attention covered",
        f"{byte_size(read)} from {'SSD' if direct else 'the store'}",
    ]
    return "; ".join(part for part in parts if part)


def show_citations(terminal: Terminal, citations: Iterable[Mapping[str, Any]]) -> None:
    """Prints the passages under an answer, each with its share of the attention."""
    for one in citations:
        terminal.say(f"{one['share']:>4.0%}  “{one['text']}”")


def low_coverage_message(covered: float, budget: float | str, *, option: str = "--budget") -> str:
    """Words the warning about a budget that covers little of the question's attention."""
    more = f"with a larger {option}"
    if isinstance(budget, float):
        more = f"with {option} {min(1.0, 2 * budget):g}"
    return f"this budget covers only {covered:.0%} of the question's attention; ask again {more}"


def kv_bytes(prefix: Prefix) -> int:
    """Bytes of all packs of a prefix."""
    return prefix.num_chunks * prefix.layout.groups * prefix.layout.pack_bytes


def room_for(size: int, most: float) -> dict[str, Any]:
    """Sizes an engine's pools for `size` bytes of KV: the default, or more where that is too small.

    Programs are compiled for each pool size, so pools have one size for most texts and few sizes
    for larger ones. `most` is the largest share of the KV that a budget can select; it is ignored
    on a CPU, which takes memory only as it is used. Returns fields of `EngineConfig`, in bytes.
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
    """Compiles the programs of questions over `prefix`; returns the seconds that it took.

    It compiles for the engine's budget and for 1.0, for one question and for `at_once` together.
    Call it after an ingest that had to compile: otherwise an earlier text of similar length has
    left these programs in the cache. A failure is only a warning, because the text is stored.

    `room`: fields of the asking engine's configuration, where it differs from `engine`'s.
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
        with asked as asking, terminal.status("compiling the programs of questions"):
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
        terminal.warn(f"the first question has to compile its programs: {one_line(error)}")
        return 0.0
    except KeyboardInterrupt:
        terminal.warn("interrupted: the text is stored; the first question compiles its programs")
        return 0.0
    return time.perf_counter() - start


def recomputed_message(chunks: int, engine: Engine, store: str) -> str:
    """Words the warning for an answer some of whose chunks were recomputed."""
    late = engine.stats().read_errors and not engine.stats().quarantined
    limit = engine.config.read_deadline_s
    are, were = ("is", "was") if chunks == 1 else ("are", "were")
    why, then = (
        (f"{were} not read within {limit:g} s", "check the disk")
        if late
        else (f"{are} damaged on disk", f"run: ckv verify {store}")
    )
    return (
        f"{number_of(chunks, 'chunk')} {why} and {were} recomputed: "
        f"the answer is correct but slower; {then}"
    )
