"""The lowest versions that pyproject.toml allows, as constraints of pip.

python .ci/bounds.py > constraints.txt
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path


def constraints(requirements: list[str]) -> list[str]:
    """`name==lowest` for each `name>=lowest`. Raises `ValueError` for one without a bound."""
    found = []
    for requirement in requirements:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[.*\])?>=([0-9.]+)(?:,<[0-9.]+)?", requirement)
        if match is None:
            raise ValueError(f"got {requirement!r}, expected a lower bound such as name>=1.2")
        found.append(f"{match[1]}=={match[2]}")
    return found


if __name__ == "__main__":
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    print("\n".join(constraints(tomllib.loads(project.read_text())["project"]["dependencies"])))
