"""The word lists of the reference ledger, and the vocabulary that numbers them.

Names and topics are split by position: every fourth is for tests only, the rest for training.
"""

from __future__ import annotations

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


def _split(words: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    unique = list(dict.fromkeys(words))
    return tuple(unique[0::4] + unique[1::4] + unique[2::4]), tuple(unique[3::4])


NAMES, TEST_NAMES = _split(_NAMES)
TOPICS, TEST_TOPICS = _split(_TOPICS)
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
