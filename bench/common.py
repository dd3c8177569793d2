"""Shared parts of all benchmarks: command line, description of the machine, statistics, output."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.stats import binomtest, bootstrap

from bench.workload import TEMPLATES
from ckv_jax.kernels_pallas.native.library import LEVELS, native
from ckv_jax.model.config import ModelConfig
from ckv_jax.systems import SYSTEMS, system_named

BASELINES = ("impress", "as-h2o-lfu", "as-h2o-lru", "as-lru", "recompute")
OURS = ("contiguous-kv", "ckv")


def _qwen25(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, tied: bool, vocab: int
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        tie_word_embeddings=tied,
        eos_token_ids=(151645, 151643),
    )


# The instruction-tuned models as published, and one thin model with the KV shape of 7B.
PUBLISHED: dict[str, ModelConfig] = {
    "0.5B": _qwen25(896, 4864, 24, 14, 2, tied=True, vocab=151936),
    "1.5B": _qwen25(1536, 8960, 28, 12, 2, tied=True, vocab=151936),
    "3B": _qwen25(2048, 11008, 36, 16, 2, tied=True, vocab=151936),
    "7B": _qwen25(3584, 18944, 28, 28, 4, tied=False, vocab=152064),
    "14B": _qwen25(5120, 13824, 48, 40, 8, tied=False, vocab=152064),
    "32B": _qwen25(5120, 27648, 64, 40, 8, tied=False, vocab=152064),
    "72B": _qwen25(8192, 29568, 80, 64, 8, tied=False, vocab=152064),
    "kv7b-thin": ModelConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_layers=28,
        num_heads=8,
        num_kv_heads=4,
        head_dim=128,
        max_position_embeddings=131072,
    ),
}

SHAPES: dict[str, ModelConfig] = {
    **PUBLISHED,
    "tiny": dataclasses.replace(
        PUBLISHED["kv7b-thin"],
        vocab_size=512, hidden_size=128, intermediate_size=128, num_layers=3, head_dim=64,
        max_position_embeddings=8192,
    ),
}  # fmt: skip
"""Published shapes, and one for tests of the benchmarks themselves."""

Json = dict[str, Any]

CODE = (".", ":!*.md", ":!docs", ":!bench/results")
"""What of the repository is code, as git takes paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured. Everything random follows from `seed`."""

    model: str = "kv7b-thin"
    dtype: str = "bfloat16"
    prefix_tokens: int = 5008
    suffix_tokens: int = 32
    prefixes: int = 2
    budgets: tuple[float, ...] = (0.05, 0.25)
    systems: tuple[str, ...] = (*OURS, *BASELINES)
    repeats: int = 20
    seed: int = 42
    folder: Path | None = None
    """Where the store goes, on the disk to be measured; None: a temporary folder."""
    checkpoint: Path | None = None
    """A checkpoint in HF format in place of structured random weights; needs a task."""
    task: str | None = None
    """A template of `bench.workload`; prefixes and questions come from `train` and `test`."""
    train: Path | None = None
    test: Path | None = None
    shots: int = 100
    """Examples in a prefix of a task."""

    def __post_init__(self) -> None:
        named = {name: getattr(self, name) for name in ("checkpoint", "task", "train", "test")}
        missing = [name for name, value in named.items() if value is None]
        if missing and len(missing) < len(named):
            raise ValueError(f"got no {', '.join(missing)}, expected all of {', '.join(named)}")

    def to_json(self) -> Json:
        """Plain JSON values."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "folder"}
        return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}


def command(
    description: str | None, *, prog: str | None = None, result: bool = True
) -> argparse.ArgumentParser:
    """Creates an argument parser whose help shows a module's docstring unchanged.

    `result`: whether it has the option --json.
    """
    lines = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(prog=prog, description=description, formatter_class=lines)
    if result:
        p.add_argument("--json", type=result_file, help="JSON file of the result")
    return p


def parser(description: str | None, *, quick: Setting, full: Setting) -> argparse.ArgumentParser:
    """Creates the parser of the common options; `setting_of` reads their values."""
    p = command(description)
    p.add_argument("--quick", action="store_true", help="at most 3 minutes on 2 quiet cores")
    p.add_argument("--model", choices=SHAPES, help=f"published shape (default {full.model})")
    p.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="element type of model and KV"
    )
    p.add_argument("--prefix-tokens", type=positive, help="tokens of each prefix")
    p.add_argument("--suffix-tokens", type=positive, help="tokens of each suffix")
    p.add_argument("--prefixes", type=positive, help="number of stored prefixes")
    p.add_argument("--budgets", type=budget_share, nargs="+", help="shares of the prefix in (0, 1]")
    add_systems(p)
    p.add_argument("--repeats", type=positive, help="measured requests per system and budget")
    p.add_argument("--seed", type=whole, help="seed of weights and prefixes")
    p.add_argument(
        "--folder", type=result_folder, help="folder for the store, on the disk to measure"
    )
    p.add_argument(
        "--checkpoint", type=existing_path, help="HF folder (default: structured random weights)"
    )
    p.add_argument(
        "--task", choices=TEMPLATES, help="few-shot task; needs --checkpoint, --train and --test"
    )
    p.add_argument(
        "--train", type=existing_path, help='JSONL file of {"text", "label"} for the prefixes'
    )
    p.add_argument(
        "--test", type=existing_path, help='JSONL file of {"text", "label"} for the questions'
    )
    p.add_argument("--shots", type=positive, help="examples per prefix")
    p.set_defaults(_quick=quick, _full=full)
    return p


def add_systems(
    p: argparse.ArgumentParser, default: Sequence[str] | None = None, *, generates: bool = False
) -> None:
    """Adds the option --systems. `generates`: see `system_name`."""
    p.add_argument(
        "--systems", nargs="+", type=partial(system_name, generates=generates), default=default,
        metavar="SYSTEM",
        help=f"{', '.join(SYSTEMS)}{' that generate' * generates}, or package.module:NAME",
    )  # fmt: skip


def setting_of(args: argparse.Namespace) -> Setting:
    """The quick or the full setting, with what was said on the command line."""
    base: Setting = args._quick if args.quick else args._full
    given = {
        name: getattr(args, name)
        for name in Setting.__slots__
        if getattr(args, name, None) is not None
    }
    values = {name: getattr(base, name) for name in Setting.__slots__} | given
    for name in ("budgets", "systems"):
        values[name] = tuple(values[name])
    try:
        return Setting(**values)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def system_name(text: str, *, generates: bool = False) -> str:
    """Parses a system: a name, or `package.module:NAME`.

    `generates`: refuse a system that computes first tokens only.
    """
    try:
        system = system_named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if generates and (not system.own.generates or system.computes_all):
        raise argparse.ArgumentTypeError(
            f"got system {text!r}, expected one that generates over stored prefixes, such as ckv"
        )
    return text


def _number(kind: type, expected: str, fits: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Creates a parser of numbers, which refuses those that do not fit."""

    def number(text: str) -> Any:
        found = kind(text)
        if not fits(found):
            raise argparse.ArgumentTypeError(f"got {text}, expected {expected}")
        return found

    return number


budget_share = _number(float, "a share of the prefix in (0, 1]", lambda n: 0 < n <= 1)
share = _number(float, "a share of 0 to 1", lambda n: 0 <= n <= 1)
amount = _number(float, "0 or more", lambda n: 0 <= n < float("inf"))
whole = _number(int, "0 or more", lambda n: n >= 0)
positive = _number(int, "1 or more", lambda n: n >= 1)


def existing_folder(text: str) -> Path:
    """Parses the path of an existing folder."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"got {text}, expected an existing folder")
    return Path(text)


def existing_path(text: str) -> Path:
    """Parses the path of an existing file or folder."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"got {text}, expected an existing file or folder")
    return Path(text)


def result_file(text: str) -> Path:
    """Parses the path of a file to write, and checks before the work that it can be written."""
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, expected a file")
    path = Path(text)
    if path.exists() and not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: permission denied")
    _check_writable(path.absolute().parent, text)
    return path


def result_folder(text: str) -> Path:
    """Parses the path of a folder to write, and checks that it can be written."""
    _check_writable(Path(text).absolute(), text)
    return Path(text)


def _check_writable(folder: Path, text: str) -> None:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {there} is a file")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: permission denied in {there}")


def seconds(run: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def summary(values: Sequence[float]) -> Json:
    """Mean, median, 95th percentile, range, and the samples' standard deviation (0 of one)."""
    array = np.asarray(values, np.float64)
    return {
        "mean": float(array.mean()),
        "p50": float(np.percentile(array, 50)),
        "p95": float(np.percentile(array, 95)),
        "min": float(array.min()),
        "max": float(array.max()),
        "std": float(array.std(ddof=1)) if len(array) > 1 else 0.0,
        "n": len(array),
    }


INTERVAL_FROM = 6
"""The fewest values whose range holds the median with a probability of 95%: 1 - 2 / 2**n."""


def median_interval(values: Sequence[float]) -> list[float] | None:
    """The 95% interval of the median: percentiles of 2,000 bootstrap samples, always the same.

    None for fewer values than `INTERVAL_FROM`, which have none: their range is all there is.
    """
    if len(values) < INTERVAL_FROM:
        return None
    found = bootstrap(
        (np.asarray(values, np.float64),), np.median, n_resamples=2_000, method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return [float(found.low), float(found.high)]


def interval(right: int, asked: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    low, high = binomtest(right, asked).proportion_ci(method="wilson")
    return float(low), float(high)


def half_widths(asked: int) -> dict[str, float]:
    """Half of Wilson's 95% interval where 70, 90 and 98% of `asked` answers are right."""
    found = {}
    for share in (0.70, 0.90, 0.98):
        low, high = interval(round(share * asked), asked)
        found[f"{share:.0%}"] = round((high - low) / 2, 4)
    return found


def machine() -> Json:
    """The machine, the device and the versions that a figure belongs to."""
    device = jax.devices()[0]
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "device": f"{device.platform}: {device.device_kind}",
        "native_kernels": _native_kernels(device.platform),
        "python": platform.python_version(),
        "packages": versions("jax", "jaxlib", "flax", "tensorstore", "numpy"),
        "load_average": os.getloadavg()[0],
        **STARTED_AS,
    }


def _native_kernels(platform: str) -> str:
    """The instruction set of the CPU kernels; without them, why the reference took their place."""
    if platform != "cpu":
        return f"none: got a {platform}, expected a CPU"
    found = native()
    return f"none: {found.refused}" if found.path is None else LEVELS[found.level]


def versions(*packages: str) -> dict[str, str]:
    """The version of each package, or "missing"."""
    found = dict.fromkeys(packages, "missing")
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def stamped(body: Json) -> Json:
    """A result after the command that made it and the machine, versions and commit it is of."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).name
    command = f"python -m {name} {' '.join(sys.argv[1:])}".strip()
    return {"command": command, "machine": machine(), **body}


def finish(args: argparse.Namespace, body: Json) -> Json:
    """Stamps a result, writes it where `--json` says, and returns the whole."""
    result = stamped(body)
    if args.json is not None:
        write_text(args.json, json.dumps(result, indent=1) + "\n")
        print(f"wrote {args.json}")
    return result


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Aligned columns for the terminal."""
    cells = [[str(c) for c in header], *([_cell(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(r, widths, strict=True)) for r in cells)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def commit() -> str:
    """The commit of this code, short; "unknown" where git does not say."""
    return (git("rev-parse", "--short", "HEAD") or "").strip() or "unknown"


def git(*words: str) -> str | None:
    """What git says; None where it fails."""
    try:
        run = subprocess.run(
            ["git", *words], cwd=Path(__file__).parents[1], capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if run.returncode else run.stdout


_CHANGED = git("status", "--porcelain", "--", *CODE)
STARTED_AS: Json = {"commit": commit(), "dirty": None if _CHANGED is None else bool(_CHANGED)}
"""The commit, and whether code differs from it (None: git fails), untracked files included. The
import records both, because a commit may land during a run."""


class NotWhole(SystemExit):
    """A file that should be a JSON object and is not; ends a command with one line."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises `NotWhole`, which names the file, where it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # cut short, not JSON, or not text at all
        raise NotWhole(f"{path} cannot be read as a result: {error}") from error
    if not isinstance(found, dict):
        raise NotWhole(f"{path} is no result: got a {type(found).__name__}, expected an object")
    return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a result. Raises `NotWhole`, which names the file, where it has none."""
    rows = read_json(path).get("rows")
    if not isinstance(rows, list) or not rows:
        raise NotWhole(f"{path} is no result: it has no rows")
    return rows


def write_text(path: Path, text: str) -> None:
    """Writes a file that has all of the text or, if this is cut short, what it had before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a terminal, a pipe: nothing to be put in its place
        path.write_text(text, encoding="utf-8")
        return
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
