"""atheris on one target: `python -m tests.faults.fuzz_guided TARGET INPUTS FOLDER OUT`.

libFuzzer ends the process by itself: the counts are written at the last input.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path

import atheris  # type: ignore[import-not-found,unused-ignore]

with atheris.instrument_imports(include=["ckv_jax.storage", "ckv_jax.model"]):
    from tests.faults.fuzz import count
    from tests.faults.fuzz_targets import feed, targets
    from tests.faults.tally import Tally


def main() -> None:
    """Run."""
    logging.disable(logging.WARNING)
    name, inputs, folder, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    target, tally = targets(folder)[name], Tally()
    (folder / "corpus").mkdir()
    for i, value in enumerate(target.seeds):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        (folder / "corpus" / str(i)).write_bytes(data)

    def one(data: bytes) -> None:
        count(tally, feed(target, data), f"{name}, guided: {data[:60]!r}")
        if tally.states == inputs:
            out.write_text(json.dumps(dataclasses.asdict(tally)))

    options = [f"-runs={inputs + 8}", "-verbosity=0", "-rss_limit_mb=4096", "-max_len=8192"]
    atheris.Setup([sys.argv[0], *options, str(folder / "corpus")], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
