"""The ledger: generated documents whose every fact can be asked for in one token.

Five families of facts are scattered among filler sentences, and each is asked by its own question:

========= ============================================== ======================= ===============
family    in the document                                question                answer (chance)
========= ============================================== ======================= ===============
recall    ``code anna copper.``                          ``code anna``           copper (1/98)
multikey  ``room anna lime.`` and ``team anna teal.``    ``room anna``           lime (1/98)
induction ``sample atom laser science.`` (many a class)  ``sample laser orbit``  science (1/6)
verify    ``check boat broken.``                         ``check boat``          no (1/2)
tracking  ``let irene oslo.`` and ``trace kurt irene.``  ``trace kurt``          oslo (1/98)
========= ============================================== ======================= ===============

Training and test documents use disjoint names and topics and disjoint random streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckv_jax.data import words

FAMILIES = ("recall", "multikey", "induction", "verify", "tracking")
SUFFIX_TOKENS = 6  # the longest question

_WIDTH = 10  # the longest sentence
_PER_4096 = {"recall": 40, "multikey": 20, "induction": 72, "verify": 28, "tracking": 12}
_AT_LEAST = {"recall": 4, "multikey": 2, "induction": 12, "verify": 4, "tracking": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """One document and its questions, as token ids of `words.vocabulary()`.

    `needles` holds the prefix position of the token that decides the answer (for induction, of
    one example of the class that shares the question's last word).
    """

    tokens: np.ndarray  # int32 [T]
    questions: np.ndarray  # int32 [Q, SUFFIX_TOKENS], padded on the right with 0
    lengths: np.ndarray  # int32 [Q]
    answers: np.ndarray  # int32 [Q]
    families: np.ndarray  # int32 [Q], an index into FAMILIES
    needles: np.ndarray  # int32 [Q]


def _ids(*names: str) -> np.ndarray:
    return np.array([words.WORD_IDS[name] for name in names], np.int32)


_DOT, _CODE, _SAMPLE, _CHECK, _LET, _TRACE, _YES, _NO = _ids(
    ".", "code", "sample", "check", "let", "trace", "yes", "no"
)
_VALUES, _LABELS = _ids(*words.VALUES), _ids(*words.LABELS)
_STATES = _ids(*words.IN_ORDER, *words.OUT_OF_ORDER)
_ATTRIBUTES, _FILLERS = _ids(*words.ATTRIBUTES), _ids(*words.FILLERS)
_POOLS = {
    "train": (_ids(*words.NAMES), _ids(*words.TOPICS)),
    "test": (_ids(*words.TEST_NAMES), _ids(*words.TEST_TOPICS)),
}
_PREAMBLES = [_ids(*text.replace(":", " :").split()) for text in words.PREAMBLES]


class _Page:
    """Collects sentences (padded rows) and questions that point at a row and a column."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.rows: list[np.ndarray] = []
        self.count = 0
        self.asked: list[tuple[np.ndarray, int, int, int, int]] = []
        self.ordered: list[tuple[int, int]] = []  # rows of which the first must stand first

    def write(self, *columns: np.ndarray | int) -> int:
        """Add one sentence a row, closed by a full stop; returns the first row's number."""
        size = max(np.size(column) for column in columns)
        block = np.full((size, _WIDTH), -1, np.int32)
        for i, column in enumerate((*columns, _DOT)):
            block[:, i] = column
        self.rows.append(block)
        first, self.count = self.count, self.count + size
        return first

    def ask(self, body: tuple[int, ...], answer: int, family: str, row: int, column: int) -> None:
        question = np.array(body, np.int32)
        self.asked.append((question, int(answer), FAMILIES.index(family), row, column))


def _recall(page: _Page, names: np.ndarray) -> None:
    values = page.rng.choice(_VALUES, len(names))
    row = page.write(_CODE, names, values)
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        page.ask((_CODE, name), value, "recall", row + i, 2)


def _multikey(page: _Page, names: np.ndarray) -> None:
    pairs = page.rng.permuted(np.tile(_ATTRIBUTES, (len(names), 1)), axis=1)[:, :2]
    for attributes in pairs.T:
        values = page.rng.choice(_VALUES, len(names))
        row = page.write(attributes, names, values)
        for i, name in enumerate(names):
            page.ask((attributes[i], name), values[i], "multikey", row + i, 2)


def _induction(page: _Page, topics: np.ndarray, examples: int) -> None:
    rng = page.rng
    classes = int(np.clip(examples // 6, 2, 6))
    labels = rng.permutation(_LABELS)[:classes]
    kinds = rng.permutation(topics)[: classes * 6].reshape(classes, 6)
    # every topic closes at least one example: two words of one class, the label after them
    which = np.arange(examples) % (classes * 6)
    group, last = which // 6, which % 6
    other = (last + rng.integers(1, 6, examples)) % 6
    row = page.write(_SAMPLE, kinds[group, other], kinds[group, last], labels[group])
    for i in range(min(examples, classes * 6)):
        seen = other[(which == which[i]).nonzero()]
        fresh = [j for j in range(6) if j != last[i] and j not in seen]
        if fresh:
            first = kinds[group[i], rng.choice(fresh)]
            body = (_SAMPLE, first, kinds[group[i], last[i]])
            page.ask(body, labels[group[i]], "induction", row + i, 3)


def _verify(page: _Page, names: np.ndarray) -> None:
    states = page.rng.integers(0, len(_STATES), len(names))
    row = page.write(_CHECK, names, _STATES[states])
    for i, name in enumerate(names):
        answer = _YES if states[i] < len(words.IN_ORDER) else _NO
        page.ask((_CHECK, name), answer, "verify", row + i, 2)


def _tracking(page: _Page, names: np.ndarray) -> None:
    roots, aliases = names[::2], names[1::2]
    roots = roots[: len(aliases)]
    values = page.rng.choice(_VALUES, len(roots))
    row = page.write(_LET, roots, values)
    alias_row = page.write(_TRACE, aliases, roots)
    for i, alias in enumerate(aliases):
        page.ordered.append((row + i, alias_row + i))
        page.ask((_TRACE, alias), values[i], "tracking", row + i, 2)


def _filler(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Sentences of 5 to 9 random words, at least `tokens` tokens in all: int32 rows."""
    count = tokens // 6 + 1
    block = rng.choice(_FILLERS, (count, _WIDTH))
    length = rng.integers(5, _WIDTH, (count, 1))
    column = np.arange(_WIDTH)[None, :]
    return np.where(column < length, block, np.where(column == length, _DOT, -1)).astype(np.int32)


def make_ledger(
    rng: np.random.Generator,
    tokens: int,
    *,
    split: str = "test",
    questions: int | None = None,
    asked: tuple[str, ...] = FAMILIES,
) -> Ledger:
    """One ledger of exactly `tokens` tokens with up to `questions` questions (None: all of them).

    At 4,096 tokens there are as many facts as the smaller split has names for; shorter documents
    hold proportionally fewer. Facts of all families are written down; questions are of those that
    are `asked`. Raises ValueError for an unknown split or family.
    """
    if split not in _POOLS:
        raise ValueError(f"got split {split!r}, expected one of {sorted(_POOLS)}")
    if unknown := set(asked) - set(FAMILIES):
        raise ValueError(f"got families {sorted(unknown)}, expected some of {FAMILIES}")
    names, topics = _POOLS[split]
    names = rng.permutation(names)
    page = _Page(rng)
    for family in FAMILIES:
        count = round(_PER_4096[family] * tokens / 4096)
        count = max(_AT_LEAST[family], count)
        if family == "induction":
            _induction(page, topics, count)
            continue
        count = 2 * count if family == "tracking" else count
        taken, names = names[:count], names[count:]
        _WRITERS[family](page, taken)
    page.asked = [ask for ask in page.asked if FAMILIES[ask[2]] in asked]
    return _lay_out(page, rng, tokens, questions)


_WRITERS = {"recall": _recall, "multikey": _multikey, "verify": _verify, "tracking": _tracking}


def _lay_out(page: _Page, rng: np.random.Generator, tokens: int, questions: int | None) -> Ledger:
    """Shuffle facts and filler into one page of exactly `tokens` tokens."""
    facts = np.concatenate(page.rows)
    room = tokens - int((facts >= 0).sum()) - 2
    if room < 0:
        raise ValueError(f"got {tokens} tokens, expected at least {tokens - room} for these facts")
    filler = _filler(rng, room)
    width = (filler >= 0).sum(1).cumsum()
    filler = filler[: int(np.searchsorted(width, room, side="right"))]
    spare = room - (int(width[len(filler) - 1]) if len(filler) else 0)
    rows = np.concatenate([facts, filler])
    order = rng.permutation(len(rows))
    place = np.argsort(order)
    for first, second in page.ordered:
        if place[first] > place[second]:
            order[place[first]], order[place[second]] = second, first
    used = rows[order] >= 0
    heading = _ids("ledger", ":")
    closing = np.append(rng.choice(_FILLERS, max(spare - 1, 0)), [_DOT] * min(spare, 1))
    ids = np.concatenate([heading, rows[order][used], closing]).astype(np.int32)
    starts = np.empty(len(rows), np.int64)
    starts[order] = len(heading) + np.cumsum(used.sum(1)) - used.sum(1)

    count = len(page.asked) if questions is None else questions
    chosen = _spread(np.array([ask[2] for ask in page.asked]), count, rng)
    body = np.zeros((len(chosen), SUFFIX_TOKENS), np.int32)
    lengths, answers, kinds, needles = (np.empty(len(chosen), np.int32) for _ in range(4))
    for i, j in enumerate(chosen):
        question, answers[i], kinds[i], row, column = page.asked[j]
        text = np.concatenate([_PREAMBLES[rng.integers(len(_PREAMBLES))], question])
        text = text[-SUFFIX_TOKENS:]
        lengths[i] = len(text)
        body[i, : len(text)] = text
        needles[i] = starts[row] + column
    return Ledger(
        tokens=ids, questions=body, lengths=lengths, answers=answers, families=kinds,
        needles=needles,
    )  # fmt: skip


def _spread(kinds: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Up to `count` questions, families taking turns, each question once."""
    order = rng.permutation(len(kinds))
    turn = np.empty(len(kinds), np.int64)
    for kind in np.unique(kinds):
        mine = order[kinds[order] == kind]
        turn[mine] = np.arange(len(mine))
    return np.lexsort((rng.random(len(kinds)), turn))[:count]
