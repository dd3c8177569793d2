"""Questions over long real texts whose answer under full attention is the reference.

Every task is made of a text's own tokens, of facts in plain words, or of labelled sentences; all
are deterministic in the text and the seed.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import few_shot
from ckv_jax.model.tokenizer import Tokenizer

SEED = 42
RECALL_TOKENS = 24
"""Tokens of a passage that a recall question repeats."""
CONTINUATION_TOKENS = 32
"""Tokens of the text after the prefix in one continuation question."""
_NAMES = "Anna Bruno Clara David Elena Felix Greta Hugo Irene Jonas Karla Louis".split()
_COLOURS = "red blue green white black yellow purple orange silver golden brown grey".split()
_THINGS = "lamp chair river clock window bottle garden mirror ladder candle basket hammer".split()
_TABLES = {
    "owners": ("Owner", _NAMES),
    "towns": (
        "Town",
        "Aachen Bremen Cottbus Dresden Essen Fulda Gera Hagen Jena Kassel Lingen Mainz".split(),
    ),
}
_TABLE_HEADER = "| {} | Colour | Thing | Price |\n|---|---|---|---|\n"
MANUAL = {
    "python-types": ("types", "with", "try"),
    "python-names": ("specialnames",),
    "python-strings": ("formatstrings", "string-methods"),
}
"""Texts by name: parts of the manual that Python ships."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One suffix over a task's prefix."""

    suffix: np.ndarray
    """int32 [S]."""
    truth: int | None = None
    """The token that comes next in the text, or that a right answer begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Questions over one prefix."""

    kind: str
    """"continuation", "recall", "needle" or the name of a few-shot template."""
    text: str
    """Name of the text."""
    prefix: np.ndarray
    """int32 [T]."""
    questions: tuple[Question, ...]
    labels: np.ndarray | None = None
    """int64 [labels]: first tokens among which a few-shot answer is; None: any token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """Tables that stand in a prefix and are to be written out again, row by row."""

    text: str
    """Name of the text."""
    prefix: np.ndarray
    """int32 [T]."""
    questions: tuple[Question, ...]
    """One a table: a sentence, the header and the first row."""
    rows: tuple[tuple[str, ...], ...]
    """The rows that must follow, of each table."""
    tokens: int
    """What the longest of these takes."""


def continuations(name: str, tokens: np.ndarray, length: int, count: int) -> Task:
    """The text goes on: pieces of what follows its first `length` tokens, each right behind them.

    `truth` is the token after a piece. Raises `ValueError` for a text that is too short.
    """
    size = CONTINUATION_TOKENS
    found = min(count, (len(tokens) - length - 1) // size)
    if found < 1:
        raise ValueError(
            f"got {len(tokens)} tokens in {name}, expected at least {length + size + 1}"
        )
    starts = [length + size * i for i in range(found)]
    return Task(
        kind="continuation",
        text=name,
        prefix=tokens[:length],
        questions=tuple(
            Question(suffix=tokens[at : at + size], truth=int(tokens[at + size])) for at in starts
        ),
    )


def recalls(name: str, tokens: np.ndarray, length: int, count: int, gap: np.ndarray) -> Task:
    """Passages of the prefix begun again, after the tokens `gap`; `truth` is how they go on."""
    if len(tokens) < length:
        raise ValueError(f"got {len(tokens)} tokens in {name}, expected at least {length}")
    size = RECALL_TOKENS
    if length <= 64 + 160 + size:
        raise ValueError(f"got prefixes of {length} tokens, expected at least {225 + size}")
    starts = np.random.default_rng(SEED).integers(64, length - 160 - size, count)
    return Task(
        kind="recall",
        text=name,
        prefix=tokens[:length],
        questions=tuple(
            Question(
                suffix=np.concatenate([gap, tokens[at : at + size]]), truth=int(tokens[at + size])
            )
            for at in starts.tolist()
        ),
    )


def needles(name: str, tokens: np.ndarray, length: int, tokenizer: Tokenizer) -> Task:
    """Facts about twelve people, spread over the text; a question for each person's thing."""
    rng = np.random.default_rng(SEED)
    colours, things = rng.permutation(_COLOURS), rng.permutation(_THINGS)
    facts = [
        tokenizer.encode(f"\n\n{who} owns the {colour} {thing}.\n\n")
        for who, colour, thing in zip(_NAMES, colours, things, strict=True)
    ]
    room = _room(name, tokens, length, facts)
    pieces = np.array_split(tokens[:room], len(facts) + 1)
    prefix = [pieces[0]]
    for fact, piece in zip(facts, pieces[1:], strict=True):
        prefix += [fact, piece]
    asked = []
    for who, colour, thing in zip(_NAMES, colours, things, strict=True):
        before = f"\n\n{who} owns the {colour}"
        suffix, whole = tokenizer.encode(before), tokenizer.encode(f"{before} {thing}")
        asked.append(Question(suffix=suffix, truth=int(whole[len(suffix)])))
    return Task(kind="needle", text=name, prefix=np.concatenate(prefix), questions=tuple(asked))


def extractions(name: str, tokens: np.ndarray, length: int, tokenizer: Tokenizer) -> Extraction:
    """Two tables of twelve rows, at a third and at two thirds of the text (Text2JSON's kind of
    task, arXiv 2604.08426: every fact counts)."""
    rng = np.random.default_rng(SEED)
    tables, suffixes, rows = [], [], []
    for title, (first, keys) in _TABLES.items():
        lines = tuple(
            f"| {key} | {rng.choice(_COLOURS)} | {rng.choice(_THINGS)} | {rng.integers(10, 99)} |"
            for key in rng.permutation(keys)
        )
        head = "\n\n" + _TABLE_HEADER.format(first)
        tables.append(tokenizer.encode(f"{head}{chr(10).join(lines)}\n\n"))
        suffixes.append(tokenizer.encode(f"\n\nThe table of {title} again:{head}{lines[0]}\n"))
        rows.append(lines[1:])
    room = _room(name, tokens, length, tables)
    first, second, third = np.array_split(tokens[:room], 3)
    return Extraction(
        text=name,
        prefix=np.concatenate([first, tables[0], second, tables[1], third]),
        questions=tuple(Question(suffix=suffix) for suffix in suffixes),
        rows=tuple(rows),
        tokens=max(map(len, tables)),
    )


def _room(name: str, tokens: np.ndarray, length: int, added: Sequence[np.ndarray]) -> int:
    """Tokens of a text in a prefix of `length` tokens that holds what is added to it."""
    room = length - sum(map(len, added))
    if room < 1:
        raise ValueError(f"got prefixes of {length} tokens, expected more than {length - room}")
    if len(tokens) < room:
        raise ValueError(f"got {len(tokens)} tokens in {name}, expected at least {room}")
    return room


def f1(text: str, rows: Sequence[str]) -> float:
    """F1 of the complete table rows in a generated text against those that it should have."""
    got = [line.strip() for line in text.split("\n")[: len(rows)] if line.count("|") == 5]
    return 2 * len(set(got) & set(rows)) / (len(got) + len(rows))


def labelled(path: Path, tokenizer: Tokenizer, length: int, count: int) -> Iterator[Task]:
    """Few-shot classification: a file's examples as prefixes of about `length` tokens.

    Raises `ValueError` for a file of one class, or of labels that begin with one token.
    """
    few = few_shot.read_task(path, tokenizer, few_shot.Size(shots=8, prefixes=1, questions=1))
    each = max(1, len(few.prefixes[0]) // 8)
    size = few_shot.Size(shots=max(8, length // each), prefixes=2, questions=count, seed=SEED)
    task = few_shot.read_task(path, tokenizer, size)
    for which, prefix in enumerate(task.prefixes):
        asked = [
            Question(suffix=suffix, truth=int(task.first_tokens[label]))
            for place, suffix, label in task.asked
            if place == which
        ]
        if asked:
            yield Task(
                kind=task.name,
                text=f"{path.stem} {which + 1}",
                prefix=prefix,
                questions=tuple(asked),
                labels=task.first_tokens,
            )


def name_of(path: Path) -> str:
    """The name of a text or a data set: its file's, without `.txt`, `.txt.gz` or `.jsonl`."""
    return Path(path.name.removesuffix(".gz")).stem


def read_text(path: Path) -> str:
    """A text: one of `MANUAL`, or a file, which may be gzipped."""
    if str(path) in MANUAL:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[part] for part in MANUAL[str(path)])
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return text.decode("utf-8", errors="replace").replace("\r\n", "\n")
