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

The shipped checkpoint has never seen these names and topics: every fourth of the vocabulary's, of
which its training documents used the others alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_NAMES = """
anna boris clara david elena frank greta henry irene james karen louis maria nadia oscar paula
quentin rosa simon tessa ulrich vera walter xenia yusuf zelda abel beth cyrus dora emil fiona
gilbert hanna igor julia kevin laura martin nina otto petra ralph sara tomas ursula victor wanda
xavier yara zeno adele bruno cecil delia edgar flora george helga isaac joanna klaus linda miguel
norma olaf peggy rupert sonia theo una vincent willow yvonne albert brenda carlos diana ernest
frida gordon heidi ivan jasmine kurt lydia marcus nora oliver pamela quincy rita stefan tanya
umberto vanessa wilfred agnes basil carmen dennis edith felix gloria harold ingrid jerome kathy
leon mabel nigel olga philip robin sylvia trevor valerie warren amber conrad daphne eugene freya
gavin hazel ignatz judith kendall lorenz myra neville ophelia percy ramona silas thelma vernon
winifred archer baker carter draper fisher gardner hunter joiner keeper lorimer mason painter
ranger sailor tanner usher weaver barber butler cooper falconer glover harper jester knight miller
porter potter sexton shepherd slater smith thatcher tinker turner walker warden wright admiral
baron bishop captain colonel count duchess duke earl emperor general governor judge king lady lord
major mayor monk prince queen sheriff squire sultan adder badger beaver bison buffalo camel
cheetah cobra condor coyote crane cricket crow dolphin donkey eagle falcon ferret finch fox
gazelle gecko gibbon giraffe goose gopher hamster hare hawk hedgehog heron hornet hyena ibis
iguana jackal jaguar kestrel koala lemur leopard lizard llama lobster lynx macaw magpie mantis
marmot marten mole moose moth mule newt ocelot octopus osprey otter owl panda panther parrot
pelican penguin pheasant pigeon python quail rabbit raccoon raven robinet salmon scorpion seal
shark sparrow spider squid squirrel stork swallow swan tapir tiger toad tortoise trout tuna turkey
turtle viper vulture walrus weasel whale wolf wombat yak zebra anchor anvil apron arrow axe basket
beacon bell bench blanket bottle bowl box bridge broom brush bucket button cabin candle canoe
canvas carpet cart castle chain chair chest chimney clock cloak coin compass cork cradle crate
crown cup curtain dagger desk dome door drum easel engine fence fiddle flag flute fork fountain
frame funnel furnace gate goblet grater guitar hammer handle harness harp hatch helmet hinge hook
horn hut inkwell jacket jar jug kettle key kite knife ladder lamp lantern latch lens lever lute
mallet mask mast mattress medal mill mirror mitten mortar mug nail needle net oar oven paddle pail
pan pillar pillow pipe pistol plank plate plough pocket pouch pulley pump purse quiver raft rake
razor ribbon rifle ring robe rope rudder saddle sail sandal saw scale scarf scissors screw scroll
shelf shield ship shovel sickle sieve sink skillet sled slipper spade spear spindle spoon spur
stove strap sword table tent thimble throne ticket tile torch towel tower tray trumpet trunk tub
tunnel umbrella urn vase vest violin wagon wallet wardrobe wheel whip whistle window wreath yoke
zither acorn almond apricot artichoke avocado banana barley basilisk bean beet berry cabbage
carrot cashew celery cherry chestnut
""".split()

_TOPICS = """
acid alloy atom beaker crystal electron enzyme fusion isotope laser magnet neutron orbit oxide
photon plasma proton quartz radar reactor ballad cello chord chorus concert duet fugue hymn melody
minuet octave opera organ overture quartet refrain rhythm sonata soprano tenor archery boxing
cricketer cycling fencing goal golf hockey javelin judo league marathon polo referee rowing rugby
sprint stadium tennis trophy bakery bacon biscuit broth butter cheese cinnamon cream dough flour
garlic gravy honey jam mustard noodle onion pastry pepper pudding blizzard breeze cloud cyclone
drizzle drought fog frost hail hurricane lightning monsoon rainbow sleet snow squall storm
sunshine thunder tornado asset audit bank bond broker budget cashier credit debt deposit dividend
economy invoice loan market mortgage pension profit salary stock bandage clinic cough dentist
doctor fever hospital medicine nurse ointment patient pharmacy pill plaster remedy surgeon syringe
tonic vaccine ward airport bicycle bus canal cargo carriage ferry garage harbour highway motor
pilot railway scooter station subway taxi tram truck yacht arch balcony basement brick cellar
column corridor cottage facade gable hall loft palace parlour patio roof stair terrace veranda
villa
""".split()

_VALUES = """
amberine azure beige black blue bronze brown copper coral crimson ebony emerald gold gray green
indigo ivory jade lavender lemon lilac lime magenta maroon navy ochre olive onyx orange pearl pink
plum purple red ruby rust saffron sapphire scarlet silver teal topaz turquoise umber violet white
yellow zinc april august autumn december february friday january july june march monday november
october saturday september spring summer sunday thursday tuesday wednesday winter atlas boston
cairo delhi dublin geneva havana lagos lima lisbon london madrid milan moscow nairobi oslo paris
prague quito rome seoul sofia sydney tokyo tunis vienna warsaw zagreb
""".split()

_STATES = "open shut broken lost".split()

_FILLERS = """
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

_STRUCTURE = """
ledger code room team badge prize sample status check let same trace question answer please tell
me now say what recall yes no i you we they he she it is are was were be have has had do does did
not of to in on at for with from by as or if than into out up down who which when where why how
all any each few most other such only own too very can will just should would could about my your
his her its our their one two three four five six seven eight nine ten hello thanks sorry good bad
new first last long great little right big high different next same able document facts find given
read text
""".split()


NAMES, TOPICS = (tuple(dict.fromkeys(words))[3::4] for words in (_NAMES, _TOPICS))
VALUES = tuple(dict.fromkeys(_VALUES))
LABELS = ("science", "arts", "sport", "kitchen", "sky", "money", "health", "travel")
IN_ORDER = ("open", "good", "able", "new")
OUT_OF_ORDER = ("shut", "broken", "lost", "bad")
ATTRIBUTES = ("room", "team", "badge", "prize")
FILLERS = tuple(dict.fromkeys(_FILLERS))
PREAMBLES = ("question:", "now tell me:", "please:", "now say:", "answer:")


def vocabulary() -> list[str]:
    """Every token in the order of its id; `▁` marks a word's start, `<0x..>` is one raw byte."""
    words = [*_NAMES, *_TOPICS, *_VALUES, *LABELS, *_STATES, *_FILLERS, *_STRUCTURE]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = ["▁", ".", ",", ":", ";", "?", "!", "'", '"', "(", ")", "-", "\n"]
    pieces += [str(digit) for digit in range(10)] + letters
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return list(dict.fromkeys(tokens + ["▁" + word for word in words]))


WORD_IDS: dict[str, int] = {token.lstrip("▁") or token: i for i, token in enumerate(vocabulary())}


# -- the ledger ------------------------------------------------------------------------------------

FAMILIES = ("recall", "multikey", "induction", "verify", "tracking")
SUFFIX_TOKENS = 6  # the longest question

_WIDTH = 10  # the longest sentence
_PER_4096 = {"recall": 40, "multikey": 20, "induction": 72, "verify": 28, "tracking": 12}
_AT_LEAST = {"recall": 4, "multikey": 2, "induction": 12, "verify": 4, "tracking": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """One document and its questions, as token ids of `vocabulary()`."""

    tokens: np.ndarray  # int32 [T]
    questions: np.ndarray  # int32 [Q, SUFFIX_TOKENS], padded on the right with 0
    lengths: np.ndarray  # int32 [Q]
    answers: np.ndarray  # int32 [Q]
    families: np.ndarray  # int32 [Q], an index into FAMILIES


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
        self.asked.append((np.array(body, np.int32), int(answer), FAMILIES.index(family)))


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
    asked: tuple[str, ...] = FAMILIES,
) -> Ledger:
    """One ledger of exactly `tokens` tokens with up to `questions` questions (None: all of them).

    At 4,096 tokens there are as many facts as there are names for; shorter documents hold
    proportionally fewer. Facts of all families are written down; questions are of those that are
    `asked`. Raises ValueError for an unknown family.
    """
    if unknown := set(asked) - set(FAMILIES):
        raise ValueError(f"got families {sorted(unknown)}, expected some of {FAMILIES}")
    names = rng.permutation(_NAME_IDS)
    page = _Page(rng)
    for family in FAMILIES:
        count = round(_PER_4096[family] * tokens / 4096)
        count = max(_AT_LEAST[family], count)
        if family == "induction":
            _induction(page, _TOPIC_IDS, count)
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
