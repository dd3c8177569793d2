"""The ledger: generates documents whose every fact can be asked for in one token.

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

The shipped checkpoint has never seen these names and topics: its training documents used others of
its vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _word_ids() -> dict[str, int]:
    """The ids of the shipped tokenizer's words, where `▁` marks a word's start."""
    file = Path(__file__).parent / "reference" / "tokenizer.json"
    pieces = json.loads(file.read_text("utf-8"))["model"]["vocab"]
    return {piece.lstrip("▁") or piece: id_ for id_, (piece, _) in enumerate(pieces)}


WORD_IDS = _word_ids()

NAMES = """
david henry louis paula tessa xenia beth fiona julia nina sara wanda adele edgar isaac miguel rupert
vincent brenda frida jasmine nora rita vanessa carmen gloria kathy olga trevor conrad gavin kendall
ophelia thelma baker gardner lorimer sailor barber glover miller shepherd tinker wright captain duke
governor lord prince sultan bison cobra cricket eagle fox giraffe hare hornet jackal lemur lobster
mantis moose ocelot owl pelican python raven seal squid swan tortoise turtle weasel yak apron beacon
bottle broom cabin carpet chair cloak cradle curtain door fence fork furnace guitar harp hook jacket
key lamp lever mast mirror nail oven pillar plank pouch quiver ribbon rope sandal scissors shield
sieve slipper spoon sword throne towel trunk urn wagon whip yoke apricot barley berry celery
""".split()

TOPICS = """
beaker fusion neutron plasma reactor chorus hymn opera refrain tenor cycling hockey marathon rugby
trophy broth cream gravy noodle pudding cyclone frost monsoon squall tornado bond credit economy
mortgage stock dentist medicine pharmacy surgeon ward canal garage pilot subway yacht brick cottage
loft roof villa
""".split()

VALUES = """
amberine azure beige black blue bronze brown copper coral crimson ebony emerald gold gray green
indigo ivory jade lavender lemon lilac lime magenta maroon navy ochre olive onyx orange pearl pink
plum purple red ruby rust saffron sapphire scarlet silver teal topaz turquoise umber violet white
yellow zinc april august autumn december february friday january july june march monday november
october saturday september spring summer sunday thursday tuesday wednesday winter atlas boston
cairo delhi dublin geneva havana lagos lima lisbon london madrid milan moscow nairobi oslo paris
prague quito rome seoul sofia sydney tokyo tunis vienna warsaw zagreb
""".split()

FILLERS = """
the a this that some every another old young quiet loud narrow broad pale dark bright heavy light
slow quick early late small large distant nearby empty full gentle rough river valley hill meadow
forest village road garden field shore island lake coast path mountain desert plain stream wood
orchard morning evening night season hour people children travellers farmers neighbours visitors
turned moved waited rested wandered gathered listened watched passed stayed returned looked walked
slept worked sang talked remained appeared vanished along across beyond under over near behind
between beside through toward around after before while and but so then often never always seldom
rarely quietly slowly gladly together alone again once more there here nothing something
everything world weather wind water stone grass leaves smoke dust shadow silence music voice story
letter book word picture
""".split()

LABELS = ("science", "arts", "sport", "kitchen", "sky", "money", "health", "travel")
IN_ORDER = ("open", "good", "able", "new")
OUT_OF_ORDER = ("shut", "broken", "lost", "bad")
ATTRIBUTES = ("room", "team", "badge", "prize")
PREAMBLES = ("question:", "now tell me:", "please:", "now say:", "answer:")


# -- the ledger ------------------------------------------------------------------------------------

QUESTION_FAMILIES = ("recall", "multikey", "induction", "verify", "tracking")
SUFFIX_TOKENS = 6  # the longest question

_WIDTH = 10  # the longest sentence
_PER_4096 = {"recall": 40, "multikey": 20, "induction": 72, "verify": 28, "tracking": 12}
_AT_LEAST = {"recall": 4, "multikey": 2, "induction": 12, "verify": 4, "tracking": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """One document and its questions, as token ids of the shipped tokenizer."""

    tokens: np.ndarray  # int32 [T]
    questions: np.ndarray  # int32 [Q, SUFFIX_TOKENS], padded on the right with 0
    lengths: np.ndarray  # int32 [Q]
    answers: np.ndarray  # int32 [Q]
    families: np.ndarray  # int32 [Q], an index into QUESTION_FAMILIES


def _ids(*names: str) -> np.ndarray:
    return np.array([WORD_IDS[name] for name in names], np.int32)


_DOT, _CODE, _SAMPLE, _CHECK, _LET, _TRACE, _YES, _NO = _ids(
    ".", "code", "sample", "check", "let", "trace", "yes", "no"
)
_VALUE_IDS, _LABEL_IDS = _ids(*VALUES), _ids(*LABELS)
_STATE_IDS = _ids(*IN_ORDER, *OUT_OF_ORDER)
_ATTRIBUTE_IDS, _FILLER_IDS = _ids(*ATTRIBUTES), _ids(*FILLERS)
_NAME_IDS, _TOPIC_IDS = _ids(*NAMES), _ids(*TOPICS)
_PREAMBLE_IDS = [_ids(*text.replace(":", " :").split()) for text in PREAMBLES]


class _Page:
    """Collects sentences (padded rows) and questions."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.rows: list[np.ndarray] = []
        self.count = 0
        self.asked: list[tuple[np.ndarray, int, int]] = []
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

    def ask(self, body: tuple[int, ...], answer: int, family: str) -> None:
        self.asked.append((np.array(body, np.int32), int(answer), QUESTION_FAMILIES.index(family)))


def _recall(page: _Page, names: np.ndarray) -> None:
    values = page.rng.choice(_VALUE_IDS, len(names))
    page.write(_CODE, names, values)
    for name, value in zip(names, values, strict=True):
        page.ask((_CODE, name), value, "recall")


def _multikey(page: _Page, names: np.ndarray) -> None:
    pairs = page.rng.permuted(np.tile(_ATTRIBUTE_IDS, (len(names), 1)), axis=1)[:, :2]
    for attributes in pairs.T:
        values = page.rng.choice(_VALUE_IDS, len(names))
        page.write(attributes, names, values)
        for attribute, name, value in zip(attributes, names, values, strict=True):
            page.ask((attribute, name), value, "multikey")


def _induction(page: _Page, topics: np.ndarray, examples: int) -> None:
    rng = page.rng
    classes = int(np.clip(examples // 6, 2, 6))
    labels = rng.permutation(_LABEL_IDS)[:classes]
    kinds = rng.permutation(topics)[: classes * 6].reshape(classes, 6)
    # every topic closes at least one example: two words of one class, the label after them
    which = np.arange(examples) % (classes * 6)
    group, last = which // 6, which % 6
    other = (last + rng.integers(1, 6, examples)) % 6
    page.write(_SAMPLE, kinds[group, other], kinds[group, last], labels[group])
    for i in range(min(examples, classes * 6)):
        seen = other[(which == which[i]).nonzero()]
        fresh = [j for j in range(6) if j != last[i] and j not in seen]
        if fresh:
            first = kinds[group[i], rng.choice(fresh)]
            body = (_SAMPLE, first, kinds[group[i], last[i]])
            page.ask(body, labels[group[i]], "induction")


def _verify(page: _Page, names: np.ndarray) -> None:
    states = page.rng.integers(0, len(_STATE_IDS), len(names))
    page.write(_CHECK, names, _STATE_IDS[states])
    for name, state in zip(names, states, strict=True):
        page.ask((_CHECK, name), _YES if state < len(IN_ORDER) else _NO, "verify")


def _tracking(page: _Page, names: np.ndarray) -> None:
    roots, aliases = names[::2], names[1::2]
    roots = roots[: len(aliases)]
    values = page.rng.choice(_VALUE_IDS, len(roots))
    row = page.write(_LET, roots, values)
    alias_row = page.write(_TRACE, aliases, roots)
    for i, alias in enumerate(aliases):
        page.ordered.append((row + i, alias_row + i))
        page.ask((_TRACE, alias), values[i], "tracking")


def _filler(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Sentences of 5 to 9 random words, at least `tokens` tokens in all: int32 rows."""
    count = tokens // 6 + 1
    block = rng.choice(_FILLER_IDS, (count, _WIDTH))
    length = rng.integers(5, _WIDTH, (count, 1))
    column = np.arange(_WIDTH)[None, :]
    return np.where(column < length, block, np.where(column == length, _DOT, -1)).astype(np.int32)


def make_ledger(
    rng: np.random.Generator,
    tokens: int,
    *,
    questions: int | None = None,
    asked: tuple[str, ...] = QUESTION_FAMILIES,
) -> Ledger:
    """One ledger of exactly `tokens` tokens with up to `questions` questions (None: all of them).

    At 4,096 tokens there are as many facts as there are names for; shorter documents hold
    proportionally fewer. Facts of all families are written down; questions are of those that are
    `asked`.
    """
    names = rng.permutation(_NAME_IDS)
    page = _Page(rng)
    for family in QUESTION_FAMILIES:
        count = round(_PER_4096[family] * tokens / 4096)
        count = max(_AT_LEAST[family], count)
        if family == "induction":
            _induction(page, _TOPIC_IDS, count)
            continue
        count = 2 * count if family == "tracking" else count
        taken, names = names[:count], names[count:]
        _WRITERS[family](page, taken)
    page.asked = [ask for ask in page.asked if QUESTION_FAMILIES[ask[2]] in asked]
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
    closing = np.append(rng.choice(_FILLER_IDS, max(spare - 1, 0)), [_DOT] * min(spare, 1))
    ids = np.concatenate([heading, rows[order][used], closing]).astype(np.int32)

    count = len(page.asked) if questions is None else questions
    chosen = _spread(np.array([ask[2] for ask in page.asked]), count, rng)
    body = np.zeros((len(chosen), SUFFIX_TOKENS), np.int32)
    lengths, answers, kinds = (np.empty(len(chosen), np.int32) for _ in range(3))
    for i, j in enumerate(chosen):
        question, answers[i], kinds[i] = page.asked[j]
        text = np.concatenate([_PREAMBLE_IDS[rng.integers(len(_PREAMBLE_IDS))], question])
        text = text[-SUFFIX_TOKENS:]
        lengths[i] = len(text)
        body[i, : len(text)] = text
    return Ledger(tokens=ids, questions=body, lengths=lengths, answers=answers, families=kinds)


def _spread(kinds: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Up to `count` questions, families taking turns, each question once."""
    order = rng.permutation(len(kinds))
    turn = np.empty(len(kinds), np.int64)
    for kind in np.unique(kinds):
        mine = order[kinds[order] == kind]
        turn[mine] = np.arange(len(mine))
    return np.lexsort((rng.random(len(kinds)), turn))[:count]
