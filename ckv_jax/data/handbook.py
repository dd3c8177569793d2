"""The packaged text: the handbook of an observatory that does not exist.

`python -m ckv_jax.data.handbook` prints its chapters.
"""

from importlib.resources import files


def chapters() -> str:
    """The twelve chapters: 2,400 words."""
    return (files(__package__) / "handbook.txt").read_text(encoding="utf-8")


def handbook() -> str:
    """The whole text: the chapters, and a night log of 40 nights as the thirteenth."""
    log = (files(__package__) / "night_log.txt").read_text(encoding="utf-8")
    return f"{chapters().strip()}\n\n{log}"


if __name__ == "__main__":
    print(chapters(), end="")
