"""Arguments and options that several commands share, each described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Budget",
    "Checkpoint",
    "Codec",
    "DirectIo",
    "Dtype",
    "Eviction",
    "HeadsFile",
    "IoConcurrency",
    "Json",
    "MaxBytes",
    "Salt",
    "SampleTexts",
    "SampleTokens",
    "Store",
    "System",
    "TenantBytes",
    "TensorParallel",
]

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Folder of a Qwen2.5, Qwen3, Llama or Mistral model in Hugging Face format "
        "(config.json, *.safetensors and the tokenizer's files), or one that `ckv convert` wrote.",
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
        help="What the store may hold, such as 50GB or 10GiB: whole prefixes that are worth least "
        "go to make room. Without it: as much as the disk has.",
    ),
]
TenantBytes = Annotated[
    str | None,
    typer.Option(
        "--tenant-bytes",
        metavar="SIZE",
        help="What the prefixes of one --salt may take of the store, those without one too: others "
        "of the same salt go to make room. Without it: as much as the store may hold.",
    ),
]
Eviction = Annotated[
    str,
    typer.Option(
        "--eviction",
        metavar="NAME",
        help="What is worth least then: attention (importance x frequency) or lru.",
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
        help="How keys and values lie on disk: none, int8 or k8v4 (keys 8 bits, values 4): half "
        "or two fifths of the bytes.",
    ),
]
HeadsFile = Annotated[
    Path | None,
    typer.Option(
        "--heads",
        metavar="FILE.json",
        help="The heads that score what is to be read, as `ckv heads profile` finds them; without "
        "it all of them do.",
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
SampleTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="A text such as those to be stored, UTF-8; may be given several times. Without "
        "it: the handbook of `ckv demo`.",
    ),
]
SampleTokens = Annotated[
    int,
    typer.Option("--tokens", metavar="N", min=64, help="How many tokens of all texts to look at."),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="SHARE",
        help="Share of the text that takes part in the answer, more than 0 and at most 1. "
        "0.05 reads a twentieth of it; 1 reads everything. mass:0.95 reads what holds 95% of the "
        "question's attention, mass:0.95:0.02-0.5 between 2 and 50% of the text. "
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
