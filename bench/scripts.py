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
    after: str = ""
    """The result that it is made of, by its stem: given as `--rows`."""

    @property
    def stem(self) -> str:
        """The name of its files."""
        return self.name or self.module

    def command(self, folder: Path, *, quick: bool) -> list[str]:
        """What runs it, after the interpreter's name."""
        words = ["-m", f"bench.{self.module}", "--json", str(folder / f"{self.stem}.json")]
        if self.plots:
            words += ["--plot", str(folder / f"{self.stem}.png")]
        if self.after:
            words += ["--rows", str(folder / f"{self.after}.json")]
        return [*words, *self.more, *(["--quick"] if quick and self.quick else [])]


FIGURE_12 = (
    "--shares", "0.04", "0.10", "--budgets", "0.25", "--rounds", "2", "--ablate",
    "--systems", "ckv", "contiguous-kv", "impress",
)  # fmt: skip
"""The paper's memory beside the KV of 14B and 32B, and the variants and budget of its Figure 12."""
SWEEP = ("--sweep-traffic", "--repeats", "8", "--warm-prefixes", "6")
WINDOWS = (
    "--systems", "kvdrive", "ckv", "--places", "ssd", "--sequences", "2", "--prefix-tokens", "8192",
    "--device-share", "0.3", "--host-share", "0", "--budgets", "0.0625", "1.0",
    "--windows", "0", "1", "2", "3",
)  # fmt: skip
"""The ablation of decode's windows, and everything attended to by systems that choose. Host memory
holds nothing, or what windows miss would not be read."""

SCRIPTS = (
    Script(module="ttft", minutes=8),
    Script(module="ttft", name="ttft_traffic", more=SWEEP, plots=False, minutes=7),
    Script(module="mended", minutes=8),
    Script(module="read_amplification", minutes=3),
    Script(module="breakdown", after="ttft", minutes=0.1),
    Script(module="similarity", minutes=3),
    Script(module="io_reduction", after="ttft", minutes=0.1),
    Script(module="sensitivity", minutes=8),
    Script(module="warm", plots=False, minutes=22),
    Script(module="warm", name="ablation", more=FIGURE_12, minutes=14),
    Script(module="accuracy", timed=False, minutes=14),
    Script(module="cache_policies", more=("--structured",), timed=False, minutes=4),
    Script(module="batch", minutes=4),
    Script(module="simulate", minutes=4),
    Script(module="paper", plots=False, quick=False, minutes=0.5),
    Script(module="versus_transformers", plots=False, quick=False, minutes=4),
    Script(module="peers", plots=False, minutes=6),
    Script(module="serving", plots=False, compiles=True, minutes=4),
    Script(module="server", plots=False, minutes=4),
    Script(module="storage", plots=False, quick=False, minutes=3),
    Script(module="memory", plots=False, quick=False, compiles=True, timed=False, minutes=5),
    Script(module="long_text", plots=False, quick=False, compiles=True, timed=False, minutes=3),
    Script(module="long_decode", quick=False, compiles=True, timed=False, minutes=3),
    Script(module="kernels", plots=False, minutes=6),
    Script(module="decode", minutes=24),
    Script(module="decode", name="decode_windows", more=WINDOWS, plots=False, minutes=3),
    Script(module="decode_study", timed=False, minutes=7),
    Script(module="decode_cache", timed=False, minutes=9),
    Script(module="decode_accuracy", timed=False, minutes=13),
    Script(
        module="parts",
        more=("--skip-ttft",),
        name="parts_accuracy",
        plots=False,
        timed=False,
        minutes=10,
    ),
    Script(module="parts", more=("--documents", "0"), name="parts_ttft", plots=False, minutes=5),
    Script(module="shapes", quick=False, compiles=True, minutes=7),
    Script(module="faults", name="faults_sixth", more=("--every", "6"), plots=False, minutes=7),
)

WARM = {
    "warm": "warm caches of 15% and 36% of the data",
    "ablation": "warm caches of 4% and 10% of the data",
}
"""Results whose speed-ups stand beside the cold ones."""
