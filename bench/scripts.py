"""What `make bench` runs: every benchmark of the page, with its arguments and how long it takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One benchmark that the page runs."""

    module: str
    more: tuple[str, ...] = ()
    """Arguments of its own."""
    name: str = ""
    """Of its files; "": the module's."""
    minutes: float
    """How long it takes in full on two cores, as far as parts of it were measured, for where it has
    not been run yet; of what is not timed, beside another one."""
    plots: bool = True
    """Whether it draws a figure."""
    quick: bool = True
    """Whether it knows `--quick`."""
    compiles: bool = False
    """Whether what it measures hangs on programs being compiled here: it gets none from disk."""
    timed: bool = True
    """Whether it measures time, and so wants the machine for itself."""

    @property
    def stem(self) -> str:
        """The name of its files."""
        return self.name or self.module

    def command(self, folder: Path, *, quick: bool) -> list[str]:
        """What runs it, after the interpreter's name."""
        words = ["-m", f"bench.{self.module}", "--json", str(folder / f"{self.stem}.json")]
        if self.plots:
            words += ["--plot", str(folder / f"{self.stem}.png")]
        return [*words, *self.more, *(["--quick"] if quick and self.quick else [])]


WINDOWS = (
    "--systems", "kvdrive", "ckv", "--places", "ssd", "--sequences", "2", "--prefix-tokens", "8192",
    "--device-share", "0.3", "--host-share", "0", "--budgets", "0.0625", "1.0",
    "--windows", "0", "1", "2", "3",
)  # fmt: skip
"""The ablation of decode's windows, and everything attended to by systems that choose. Host memory
holds nothing, or what windows miss would not be read."""

SCRIPTS = (
    Script(module="ttft", minutes=8),
    Script(module="warm", plots=False, minutes=22),
    Script(module="accuracy", timed=False, minutes=14),
    Script(module="batch", minutes=4),
    Script(module="peers", plots=False, minutes=6),
    Script(module="serving", plots=False, compiles=True, minutes=4),
    Script(module="server", plots=False, minutes=4),
    Script(module="storage", plots=False, quick=False, minutes=3),
    Script(module="memory", plots=False, quick=False, compiles=True, timed=False, minutes=5),
    Script(module="kernels", plots=False, minutes=6),
    Script(module="decode", minutes=24),
    Script(module="decode", name="decode_windows", more=WINDOWS, plots=False, minutes=3),
    Script(module="decode_accuracy", timed=False, minutes=13),
)
