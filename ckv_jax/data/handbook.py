"""The packaged long text: the handbook of an observatory that does not exist.

Twelve chapters were written for this package (`handbook.txt`); the night log of chapter 13 is
put together from templates by a seeded generator, so that the text can be as long as a test
needs and still holds facts that a question can ask about. `python -m ckv_jax.data.handbook` prints
the chapters.
"""

from __future__ import annotations

import random
from datetime import date, timedelta
from importlib.resources import files

QUESTION = "Which plate hangs above the door of the console room?"

_KEEPERS = (
    "Yusuf Kettering", "Marigold Tran", "Ewan Silverthorne", "Amara Lindqvist",
    "Piet Vandermolen", "Saoirse Delacroix", "Consuelo Petrakis",
)  # fmt: skip
_SKIES = (
    "clear until {hour} o'clock, then high cloud from the west",
    "fog below bend {bend}, and above it the best sky of the month",
    "wind at {wind} kilometres an hour, so that the western dome stayed shut",
    "thin cloud all night, seeing {seeing} seconds of arc",
    "rain at dusk, clear after {hour}, humidity never under {humid} per cent",
    "clear and still, seeing {seeing} seconds of arc at the zenith",
)
_WORK = (
    "{count} spectra of the star {star} with Lantern, {minutes} minutes each",
    "{count} photographs of the cluster {star} with the left half of the Twin",
    "the Sentry reported a new object in field {field}, and it was a satellite",
    "the Sentry reported a new object in field {field}; Moss confirmed it in {minutes} minutes",
    "teaching with Moss: {count} students each took a spectrum of {star}",
    "the Moon, for {minutes} minutes and with no excuse",
)
_FAULTS = (
    "the lamp of Lantern stands at {lamp} hours",
    "fuse {fuse} in the eastern dome was replaced; the box of spares now holds {count}",
    "nothing",
    "the shutter chain of the western dome jumped a tooth at {hour} o'clock",
    "the Beetle lost a track at bend {bend}; it is back on",
    "the radio in the roof hut has a flat battery, the new one is in drawer {fuse}",
    "the dewar was filled to {litres} litres, and the oxygen alarm was tested",
)
_SENTENCES = (
    "The fox came to the kitchen door at {hour} and left without comment.",
    "Parallax was found asleep on cable drum {fuse}.",
    "Somebody has put stone number {stone} on the wall.",
    "Bertrand made soup with {count} kinds of beans, and the keeper had all of them.",
    "A meteor crossed the whole of {star}'s field while nobody was exposing.",
    "The visitors asked {count} questions, of which one was new.",
    "It was so quiet that the clock in the library could be heard on the stairs.",
)
_STARS = (
    "Thessaly", "Old Margrave", "Ninefold", "Carrow", "Little Harrow", "Vesper Gate",
    "Quillon", "Saint Orrin", "Deep Lantern", "Halfpenny", "Wren's Eye", "Tallow",
)  # fmt: skip


def night_log(nights: int) -> str:
    """`nights` entries of the log, about 60 words each; always the same text."""
    rng = random.Random(1974)
    night, entries = date(2024, 1, 3), []
    for _ in range(nights):
        facts = {
            "hour": rng.randint(1, 5), "bend": rng.randint(1, 23), "wind": rng.randint(55, 90),
            "seeing": f"{rng.randint(45, 240) / 100:.2f}", "humid": rng.randint(60, 87),
            "count": rng.randint(3, 48), "star": rng.choice(_STARS), "minutes": rng.randint(5, 95),
            "field": rng.randint(1000, 9999), "lamp": rng.randint(12, 449),
            "fuse": rng.randint(1, 40), "litres": rng.randint(80, 120),
            "stone": rng.randint(900, 4000),
        }  # fmt: skip
        keeper, guest = rng.sample(_KEEPERS, 2)
        parts = (_SKIES, _WORK, _FAULTS, _SENTENCES)
        sky, work, fault, last = (rng.choice(part).format(**facts) for part in parts)
        day = f"{night.day} {night:%B} {night.year}"
        entries.append(
            f"{day}. Keeper: {keeper}; with {guest}. Sky: {sky}. "
            f"Observed: {work}. Broke: {fault}. {last}"
        )
        night += timedelta(days=rng.randint(2, 6))
    return "\n\n".join(entries)


def chapters() -> str:
    """The twelve chapters: 2,400 words."""
    return (files(__package__) / "handbook.txt").read_text(encoding="utf-8")


def handbook(nights: int = 40) -> str:
    """The whole text: the chapters and a log of `nights` nights."""
    intro = (
        "13. The night log\n\nThese are pages of the log as the keepers left them, "
        "with the five parts in their order."
    )
    return f"{chapters().strip()}\n\n{intro}\n\n{night_log(nights)}\n"


if __name__ == "__main__":
    print(chapters(), end="")
