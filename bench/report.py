"""Runs the benchmarks and writes one HTML page with figures, what they show, machines and commands.

    python -m bench.report --quick --out bench/results/cpu-quick
    python -m bench.report --out bench/results/cpu --only ttft warm
    python -m bench.report --out bench/results --redraw
    python -m bench.report --out bench/results --resume

`--resume`, which `make bench` says, leaves out what has a result of this code already: one whose
commit differs from this one in nothing but documents and results, and that was run in full (or
`--quick`, if that is asked). What is left is reported before anything runs.

Each script runs in a process of its own, one after the other. JSON and PNG land beside the page. A
script that fails is shown with its error and does not stop the rest. `--redraw` measures
nothing: it draws every figure again from the JSON in the folder, and writes the page.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common import Json, NotWhole, command, commit, read_json, result_folder, write_text
from bench.figures import FIGURES, draw_again, result_of
from bench.kept import same_code
from bench.lab import KEPT

KEPT_IN = Path(__file__).parents[1] / "build" / "bench"
"""What scripts share; `make clean` removes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One benchmark that the page runs."""

    module: str
    more: tuple[str, ...] = ()
    """Arguments of its own."""
    name: str = ""
    """Of its files; "": the module's."""
    plots: bool = True
    """Whether it draws a figure."""
    quick: bool = True
    """Whether it knows `--quick`."""
    compiles: bool = False
    """Whether what it measures hangs on programs being compiled here: it gets none from disk."""

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
    "--windows", "1", "2", "3",
)  # fmt: skip
"""The ablation of decode's windows, and everything attended to by systems that choose. Host memory
holds nothing, or what windows miss would not be read."""

SCRIPTS = (
    Script(module="ttft"),
    Script(module="warm", plots=False),
    Script(module="accuracy"),
    Script(module="batch", plots=False),
    Script(module="peers", plots=False),
    Script(module="serving", plots=False, compiles=True),
    Script(module="server", plots=False),
    Script(module="storage", plots=False, quick=False),
    Script(module="memory", plots=False, quick=False, compiles=True),
    Script(module="kernels", plots=False),
    Script(module="decode"),
    Script(module="decode", name="decode_windows", more=WINDOWS, plots=False),
    Script(module="decode_accuracy"),
)

STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2.5rem auto;
       padding: 0 1.2rem }
h1 { margin-bottom: .2rem } h2 { margin: 3.5rem 0 .4rem; border-top: 1px solid #ddd;
       padding-top: 1.4rem }
nav ol { columns: 2; column-gap: 2.5rem } nav li { margin: .15rem 0 } a { color: #0072b2 }
figure { margin: 1rem 0 } figcaption { color: #555; font-size: 14px; margin-top: .4rem }
img { max-width: 100%; border: 1px solid #eee } .shows { font-weight: 600 }
.machine { color: #555; font-size: 13px } code { font-size: 13px; overflow-wrap: anywhere }
details { margin: .6rem 0 } summary { cursor: pointer; color: #555; font-size: 14px }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: 12px; line-height: 1.35 }
table { border-collapse: collapse; font-size: 14px } .failed { color: #a00 }
td, th { border: 1px solid #ddd; padding: .2rem .6rem; text-align: right }
@media (max-width: 45rem) { nav ol { columns: 1 } }
"""


def run(script: Script, folder: Path, *, quick: bool) -> None:
    """Runs one script; its output, exit status and time go to `<name>.run.json`."""
    command = [sys.executable, *script.command(folder, quick=quick)]
    print("$ " + " ".join(command[1:]), flush=True)
    start, env = time.monotonic(), environment(script)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    record = {
        "command": "python " + " ".join(command[1:]),
        "seconds": round(time.monotonic() - start, 1),
        "status": done.returncode,
        "output": done.stdout[-20_000:],
        "error": done.stderr[-4_000:] if done.returncode else "",
    }
    write_text(folder / f"{script.stem}.run.json", json.dumps(record))
    said = f"{record['seconds']} s, exit status {done.returncode}"
    print(f"  {script.stem}: {said}", flush=True)


def environment(script: Script) -> dict[str, str]:
    """What a script runs with; one that measures compiling gets no compiled programs."""
    found = dict(os.environ)
    if script.compiles:
        found.pop("JAX_COMPILATION_CACHE_DIR", None)
        found["CKV_COMPILATION_CACHE"] = "off"
    return found | kept(compiles=script.compiles)


def kept(*, compiles: bool) -> dict[str, str]:
    """Environment by which scripts share what none of them measures: prefixes that were computed
    by this code, and, but for those that measure compiling, compiled programs.

    Prefixes of other code go; what code is that is not committed keeps none.
    """
    head = commit()
    for other in (KEPT_IN / "prefixes").glob("*"):
        if other.name != head:
            shutil.rmtree(other, ignore_errors=True)
    found = {}
    if same_code(head):
        found[KEPT] = str(KEPT_IN / "prefixes" / head)
    if not compiles:
        found |= {
            "JAX_COMPILATION_CACHE_DIR": str(KEPT_IN / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    return found


def is_done(script: Script, folder: Path, *, quick: bool) -> bool:
    """Whether the folder has this script's result, of this code and made with these arguments."""
    path = folder / f"{script.stem}.json"
    try:
        ran = _record(folder / f"{script.stem}.run.json")
        if ran is None or ran["status"] or not path.is_file():
            return False
        found = read_json(path)
    except NotWhole as broken:
        print(f"{broken}; it is made again", flush=True)
        return False
    asked = " ".join(["python", *script.command(folder, quick=quick)])
    said = found.get("machine") or {}
    committed = not said.get("dirty") and same_code(str(said.get("commit", "unknown")))
    return ran["command"] == asked and committed


def page(folder: Path) -> str:
    """The HTML page of whatever is in `folder`: a section for each figure and each run. What cannot
    be read as a result is named in its section."""
    titles = {name: figure.title for name, figure in FIGURES.items()}
    titles |= {script.stem: script.stem for script in SCRIPTS if script.stem not in FIGURES}
    sections = {}
    for name, title in titles.items():
        try:
            text = _section(name, folder) if name in FIGURES else _without_figure(name, folder)
        except NotWhole as broken:
            text = f"<p class='failed'>{html.escape(str(broken))}</p>"
        if text is not None:
            heading = f"<h2>{html.escape(title)}</h2>"
            sections[name] = f"<section id='{name}'>{heading}\n{text}\n</section>"
    contents = "".join(
        f"<li><a href='#{name}'>{html.escape(titles[name])}</a></li>" for name in sections
    )
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'><title>ckv benchmarks</title>",
        f"<style>{STYLE}</style><h1>ckv benchmarks</h1>",
        "<p>Machines differ between sections: compare within one, not between two.</p>",
        f"<nav><ol>{contents}</ol></nav>",
        *sections.values(),
    ]
    return "\n".join(parts) + "\n"


def _section(name: str, folder: Path) -> str | None:
    """A figure, what it shows and how it was made, or the error of the run that draws it."""
    figure, ran = FIGURES[name], _record(folder / f"{name}.run.json")
    failed = ran is not None and bool(ran["status"])
    result = None if failed else result_of(name, folder)
    image = folder / f"{name}.png"
    if not failed and (result is None or not image.is_file()):
        return None
    parts = []
    if failed and ran is not None:
        parts.append(f"<pre class='failed'>{html.escape(ran['error'])}</pre>")
    elif result is not None:
        data = base64.b64encode(image.read_bytes()).decode()
        caption = re.sub("`(.*?)`", r"<code>\1</code>", html.escape(figure.caption), flags=re.S)
        parts += [
            f"<p class='shows'>{html.escape(figure.conclude(result))}</p>",
            f"<figure><img alt='{html.escape(figure.title)}' src='data:image/png;base64,{data}'>",
            f"<figcaption>{caption}</figcaption></figure>",
            f"<p class='machine'>{html.escape(_machine(result.get('machine')))}</p>",
        ]
        if name == "ttft":
            parts.append(_speedups("cold", result["speedup"]))
            warm = _record(folder / "warm.json")
            parts.append(_speedups("warm", {} if warm is None else warm["speedup"]))
    if ran is not None:
        parts.append(_output(ran))
    elif result is not None and "command" in result:
        parts.append(f"<p class='machine'><code>{html.escape(result['command'])}</code></p>")
    return "\n".join(parts)


def _without_figure(name: str, folder: Path) -> str | None:
    """A run that draws nothing: what it printed, or its error."""
    ran = _record(folder / f"{name}.run.json")
    if ran is None:
        return None
    failed = f"<pre class='failed'>{html.escape(ran['error'])}</pre>\n" if ran["status"] else ""
    return failed + _output(ran)


def _output(ran: Json) -> str:
    """What a run printed, behind its command."""
    said = f"<code>{html.escape(ran['command'])}</code>, {ran['seconds']} s"
    return f"<details><summary>{said}</summary><pre>{html.escape(ran['output'])}</pre></details>"


def _record(path: Path) -> Json | None:
    return read_json(path) if path.is_file() else None


def _machine(found: Json | None) -> str:
    """The machine of one result in one line."""
    if found is None:
        return "This result did not record its machine."
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    native = f", native kernels: {found['native_kernels']}" if "native_kernels" in found else ""
    return (
        f"{found['cpu']}, {found['cores']} cores, {found['memory_gib']} GiB, {found['device']}"
        f"{native}; Python {found['python']}, {packages}; load {found['load_average']:.1f}, commit "
        f"{found['commit']}"
    )


def _speedups(how: str, found: Json) -> str:
    """Ratios `[ours][budget][baseline]` as a table; nothing where there are none."""
    if not found:
        return ""
    baselines = list(dict.fromkeys(r for by in found.values() for row in by.values() for r in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("ours", "budget", *baselines))
    rows = []
    for ours, by_budget in found.items():
        for budget, row in by_budget.items():
            cells = "".join(
                f"<td>{row[r]:.2f}×</td>" if r in row else "<td></td>" for r in baselines
            )
            rows.append(f"<tr><td>{ours}</td><td>{float(budget):.0%}</td>{cells}</tr>")
    table = f"<table><tr>{head}</tr>{''.join(rows)}</table>"
    said = f"mean TTFT of each baseline over ours, {how}"
    return f"<details><summary>{said}</summary>{table}</details>"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    p = command(__doc__, result=False)
    names = [script.stem for script in SCRIPTS]
    p.add_argument("--quick", action="store_true", help="run the short variant of each benchmark")
    p.add_argument(
        "--out", type=result_folder, required=True, help="folder for page, JSON and figures"
    )
    p.add_argument("--only", nargs="+", choices=names, help="run only these")
    mode = p.add_mutually_exclusive_group()
    mode.add_argument(
        "--redraw", action="store_true", help="draw the figures of existing JSON; run nothing"
    )
    mode.add_argument(
        "--resume", action="store_true", help="skip benchmarks that have a result of this code"
    )
    args = p.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    if args.redraw:
        draw_again(args.out)
    else:
        chosen = [script for script in SCRIPTS if not args.only or script.stem in args.only]
        left = [
            script
            for script in chosen
            if not args.resume or not is_done(script, args.out, quick=args.quick)
        ]
        print(
            f"{len(left)} of {len(chosen)} benchmarks to run: "
            + (", ".join(script.stem for script in left) or "none"),
            flush=True,
        )
        for script in left:
            run(script, args.out, quick=args.quick)
        records = {one.stem: _record(args.out / f"{one.stem}.run.json") for one in left}
        failed = [name for name, ran in records.items() if ran is not None and ran["status"]]
    path = args.out / "report.html"
    write_text(path, page(args.out))
    print(f"wrote {path}")
    if failed:
        sys.exit(f"failed, as the page says: {', '.join(failed)}")


if __name__ == "__main__":
    main()
