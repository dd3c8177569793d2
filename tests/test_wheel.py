"""A wheel installs all three folders under one import root; a release names its version."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from datetime import date
from pathlib import Path
from types import ModuleType

import pytest

from ckv_jax.kernels_pallas.native.build import compiler, lacking

ROOT = Path(__file__).resolve().parent.parent
PROBE = """
import sys
import ckv_jax, ckv_jax.storage, ckv_jax.kernels_pallas, ckv_jax.cli
from ckv_jax.storage.layout import Layout
from ckv_jax.data.handbook import handbook
assert len(handbook()) > 10_000
for module in (ckv_jax, ckv_jax.storage, ckv_jax.kernels_pallas):
    assert module.__file__.startswith(sys.prefix), module.__file__
for name in ("storage", "kernels_pallas", "bench", "tests"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{name} is importable by itself")
assert "jax" not in sys.modules, "the store must not need jax"
assert "scipy" not in sys.modules, "only what trains codebooks needs it, which takes long to import"
"""


@pytest.mark.slow
def test_the_wheel_installs_under_one_import_root(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("ckv_jax", "storage", "kernels_pallas"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source])
    (wheel,) = tmp_path.glob("*.whl")

    names = zipfile.ZipFile(wheel).namelist()
    (metadata,) = (name for name in names if name.endswith("/METADATA"))
    assert "\nLicense-Expression: Apache-2.0\n" in zipfile.ZipFile(wheel).read(metadata).decode()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ckv_jax"}
    for folder, inside in (
        ("ckv_jax", ""),
        ("storage", "storage/"),
        ("kernels_pallas", "kernels_pallas/"),
    ):
        expected = {
            f"ckv_jax/{inside}{file.relative_to(source / folder)}"
            for pattern in ("*.py", "*.cc", "*.h")
            for file in (source / folder).rglob(pattern)
        }
        assert expected <= set(names), expected - set(names)
    assert "ckv_jax/py.typed" in names
    native = [name for name in names if name.endswith(".so")]
    assert len(native) == (1 if compiler() and not lacking() else 0)
    assert {"ckv_jax/data/handbook.txt", "ckv_jax/data/night_log.txt"} <= set(names)
    reference = ROOT / "ckv_jax" / "data" / "reference"
    assert {f"ckv_jax/data/reference/{file.name}" for file in reference.glob("*")} <= set(names)

    venv = tmp_path / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", venv])
    python = venv / "bin" / "python"
    run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel])
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run([python, "-c", PROBE], cwd=tmp_path)
    version = run([venv / "bin" / "ckv", "--version"], cwd=tmp_path)
    assert version.startswith("ckv ")


def run(command: list[object], cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("written", ["", "## 0.2.0\n\nIn short.\n\n"])
def test_a_release_holds_what_was_unreleased(release: ModuleType, written: str) -> None:
    log = "# Changelog\n\n## Unreleased\n\n### Added\n\n- A.\n\n" + written
    new = release.released(f"{log}## 0.1.0 (2026-01-01)\n\nB.\n", "0.2.0", date(2026, 2, 3))
    assert re.findall("^## .*", new, re.M) == [
        "## Unreleased",
        "## 0.2.0 (2026-02-03)",
        "## 0.1.0 (2026-01-01)",
    ]
    assert release.notes(new, "Unreleased") == ""
    short = "In short.\n\n" if written else ""
    assert release.notes(new, "0.2.0") == f"{short}### Added\n\n- A."
    assert release.notes(new, "0.1.0") == "B."


def test_a_release_names_its_version_everywhere(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "released", lambda log, *_: log)
    changed = release.changes("9.8.7", date(2026, 2, 3))
    images = ("compose.yaml", "kubernetes.yaml", "kuberay.yaml", "Dockerfile")
    named = {"pyproject.toml", ".github/CITATION.cff", "docs/replicas.md"}
    named |= {f"deploy/{image}" for image in images}
    assert set(changed) == named | {"CHANGELOG.md"}
    assert all("9.8.7" in changed[path] for path in named)


def test_a_release_of_nothing_is_refused(release: ModuleType) -> None:
    with pytest.raises(ValueError, match="nothing under 'Unreleased'"):
        release.released("## Unreleased\n\n## 0.1.0\n\nB.\n", "0.2.0", date(2026, 2, 3))
    with pytest.raises(ValueError, match="without '## Unreleased'"):
        release.released("## 0.1.0\n\nB.\n", "0.2.0", date(2026, 2, 3))
