"""Runs the benchmarks and writes one HTML page with tables, plots, machine, versions and commands.

    python -m bench.report --quick --out bench/results/cpu-quick
    python -m bench.report --out bench/results/cpu --only ttft ablation

Each script runs in a process of its own, one after the other; its JSON and PNG land beside the
page. A script that fails is shown with its error and does not stop the rest. Pages can be written
again from earlier results with --no-run.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import html
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common import Json, machine, result_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One benchmark and what it reproduces."""

    module: str
    title: str
    more: tuple[str, ...] = ()
    """Arguments of its own."""


SCRIPTS = (
    Script(module="ttft", title="Time to first token (ContiguousKV Figures 10 and 11)"),
    Script(module="read_amplification", title="Read amplification (Figure 4)"),
    Script(module="breakdown", title="Where the time goes (Figures 5 and 13)"),
    Script(module="similarity", title="Similarity of selections (Figure 7)"),
    Script(module="ablation", title="Ablation (Figure 12)"),
    Script(module="io_reduction", title="Tokens loaded from SSD (Table 2)"),
    Script(module="sensitivity", title="Sensitivity (Figures 14 to 16)"),
    Script(module="accuracy", title="Accuracy (Figure 9)"),
    Script(
        module="cache_policies",
        title="Cache policies over selections of the structured model",
        more=("--structured",),
    ),
    Script(module="batch", title="Many requests at once"),
    Script(module="simulate", title="Simulated at paper scale (predictions, not measurements)"),
)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; font-size: 12px }
img { max-width: 100% } table { border-collapse: collapse }
td, th { border: 1px solid #ccc; padding: .2rem .6rem; text-align: right }
.failed { color: #b00 }
"""


def run(script: Script, folder: Path, *, quick: bool) -> None:
    """Runs one script; its output, exit status and time go to `<module>.run.json`."""
    command = [sys.executable, "-m", f"bench.{script.module}"]
    command += ["--json", str(folder / f"{script.module}.json")]
    command += ["--plot", str(folder / f"{script.module}.png"), *script.more]
    if quick:
        command.append("--quick")
    print("$ " + " ".join(command[1:]), flush=True)
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    record = {
        "command": "python " + " ".join(command[1:]),
        "seconds": round(time.monotonic() - start, 1),
        "status": done.returncode,
        "output": done.stdout[-20_000:],
        "error": done.stderr[-4_000:] if done.returncode else "",
    }
    (folder / f"{script.module}.run.json").write_text(json.dumps(record), encoding="utf-8")
    print(f"  {record['seconds']} s, exit status {done.returncode}", flush=True)


def page(folder: Path, scripts: Sequence[Script]) -> str:
    """The HTML page of whatever is in `folder`."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>ckv benchmarks</title>",
        f"<style>{STYLE}</style><h1>ckv benchmarks</h1><p>{now}</p>",
        _machine_table(machine()),
    ]
    for script in scripts:
        path = folder / f"{script.module}.run.json"
        if path.is_file():
            parts.append(_section(script, folder, json.loads(path.read_text(encoding="utf-8"))))
    return "\n".join(parts) + "\n"


def _section(script: Script, folder: Path, record: Json) -> str:
    parts = [
        f"<h2 id='{script.module}'>{html.escape(script.title)}</h2>",
        f"<p><code>{html.escape(record['command'])}</code>, {record['seconds']} s</p>",
    ]
    result = folder / f"{script.module}.json"
    if script.module == "ttft" and result.is_file():
        parts.append(_speedups(json.loads(result.read_text(encoding="utf-8"))["speedup"]))
    image = folder / f"{script.module}.png"
    if image.is_file():
        data = base64.b64encode(image.read_bytes()).decode()
        parts.append(f"<img alt='{script.module}' src='data:image/png;base64,{data}'>")
    parts.append(f"<pre>{html.escape(record['output'])}</pre>")
    if record["status"]:
        parts.append(f"<pre class='failed'>{html.escape(record['error'])}</pre>")
    return "\n".join(parts)


def _speedups(found: Json) -> str:
    rivals = list(dict.fromkeys(r for by in found.values() for row in by.values() for r in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("ours", "budget", *rivals))
    rows = []
    for ours, by_budget in found.items():
        for budget, row in by_budget.items():
            cells = "".join(f"<td>{row[r]:.2f}×</td>" if r in row else "<td></td>" for r in rivals)
            rows.append(f"<tr><td>{ours}</td><td>{float(budget):.0%}</td>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _machine_table(found: Json) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in found.items()
    )
    return f"<table>{rows}</table>"


def main() -> None:
    """The command."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [script.module for script in SCRIPTS]
    p.add_argument("--quick", action="store_true")
    p.add_argument(
        "--out", type=result_folder, required=True, help="folder for page, JSON and plots"
    )
    p.add_argument("--only", nargs="+", choices=names, help="run only these")
    p.add_argument("--no-run", action="store_true", help="write the page from what is there")
    args = p.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for script in SCRIPTS:
        if not args.no_run and (not args.only or script.module in args.only):
            run(script, args.out, quick=args.quick)
    path = args.out / "report.html"
    path.write_text(page(args.out, SCRIPTS), encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
