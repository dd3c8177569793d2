"""Makes a release: version, change log, artefacts, commit and tag. Pushes nothing.

python .ci/release.py 0.2.0            # a dry run: shows what it would do
python .ci/release.py 0.2.0 --apply
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(version: str, *, apply: bool) -> None:
    """Raises `ValueError` for a version or a tree that cannot be released."""
    changed = changes(version, date.today())
    if not apply:
        for path, text in changed.items():
            before = (ROOT / path).read_text("utf-8")
            lines = difflib.unified_diff(
                before.splitlines(), text.splitlines(), path, path, lineterm="", n=1
            )
            print("\n".join(lines))
        print(
            f"then: make dist; git commit; git tag v{version}\nnothing was changed: --apply does it"
        )
        return
    if git("status", "--porcelain"):
        raise ValueError("got uncommitted changes, expected a clean tree")
    for path, text in changed.items():
        (ROOT / path).write_text(text, "utf-8")
    subprocess.run(["make", "dist"], cwd=ROOT, check=True)
    git("commit", "-am", f"release: {version}")
    text = f"ckv_jax {version}\n\n{notes(changed['CHANGELOG.md'], version)}"
    git("tag", "-a", f"v{version}", "--cleanup=whitespace", "-m", text)  # keeps lines with a #
    print(
        f"tagged v{version}; dist/ has the artefacts\nthen: git push --follow-tags, after which "
        ".github/workflows/release.yml tests, builds and publishes them"
    )


def changes(version: str, today: date) -> dict[str, str]:
    """The files that name the version, as they are to be."""
    texts = {
        path: (ROOT / path).read_text("utf-8")
        for path in ("pyproject.toml", ".github/CITATION.cff", "CHANGELOG.md")
    }
    before = re.search(r'^version = "(.*)"$', texts["pyproject.toml"], re.M)
    assert before is not None
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"got version {version!r}, expected three numbers such as 0.2.0")
    if f"v{version}" in git("tag").split() or _numbers(version) < _numbers(before[1]):
        raise ValueError(f"got version {version}, expected one after {before[1]} without a tag")
    texts["pyproject.toml"] = texts["pyproject.toml"].replace(before[0], f'version = "{version}"')
    cited = re.sub(
        r"^version: .*$", f"version: {version}", texts[".github/CITATION.cff"], flags=re.M
    )
    texts[".github/CITATION.cff"] = cited
    for path in (*sorted((ROOT / "deploy").iterdir()), ROOT / "docs" / "replicas.md"):
        text = path.read_text("utf-8")
        if (image := re.sub(r"\bckv:\d+\.\d+\.\d+\b", f"ckv:{version}", text)) != text:
            texts[str(path.relative_to(ROOT))] = image
    texts["CHANGELOG.md"] = released(texts["CHANGELOG.md"], version, today)
    return texts


def released(log: str, version: str, today: date) -> str:
    """The change log with what is `Unreleased` under the version, and an empty `Unreleased` above.

    A version that has a section already keeps its text, above what was `Unreleased`.
    """
    found = re.search(r"^## Unreleased\n(.*?)(?=^## |\Z)", log, re.M | re.S)
    if found is None:
        raise ValueError("got a change log without '## Unreleased'")
    parts = [notes(log, version), found[1].strip()]
    section = re.compile(rf"^## {re.escape(version)}(?!\S).*?(?=^## |\Z)", re.M | re.S)
    earlier = section.sub("", log[found.end() :]).strip()
    body = "\n\n".join(part for part in parts if part)
    if not body:
        raise ValueError(f"got nothing under 'Unreleased', expected what {version} changes")
    sections = [f"## Unreleased\n\n## {version} ({today.isoformat()})", body, earlier]
    return log[: found.start()] + "\n\n".join(part for part in sections if part) + "\n"


def notes(log: str, version: str) -> str:
    """A version's section of the change log, without its heading."""
    section = re.search(rf"^## {re.escape(version)}(?!\S).*?\n(.*?)(?=^## |\Z)", log, re.M | re.S)
    return section[1].strip() if section else ""


def git(*arguments: str) -> str:
    """The output of git."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--apply", action="store_true")
    given = parser.parse_args()
    try:
        main(given.version, apply=given.apply)
    except ValueError as error:
        sys.exit(f"release: {error}")
