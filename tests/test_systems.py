"""A system is found by name, at `module:NAME`, or by an entry point, and refused in one line."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Here

from ckv_jax import EngineConfig, systems
from ckv_jax.config import OwnParts, check_split
from ckv_jax.selection.select import Ends
from ckv_jax.systems import SYSTEMS, loadable_systems, system_named

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that Python imports from, whose entry points are looked up again."""
    monkeypatch.syspath_prepend(tmp_path)
    systems._installed.cache_clear()
    yield tmp_path
    systems._installed.cache_clear()


def write(folder: Path, module: str, text: str) -> None:
    """A module that no other test has imported."""
    sys.modules.pop(module, None)
    (folder / f"{module}.py").write_text(text)


def install(folder: Path, package: str, *points: str) -> None:
    """What an installer leaves of a package with these entry points."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[ckv_jax.systems]", *points, ""]))


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_name_loads_the_system_of_that_name(name: str) -> None:
    assert SYSTEMS[name].name == name and EngineConfig(system=name).system == name


def test_names_are_listed_with_the_core_first() -> None:
    assert [*SYSTEMS][:2] == ["recompute", "ckv"] and len(SYSTEMS) == len({*SYSTEMS})
    assert "kvdrive" in SYSTEMS and "nope" not in SYSTEMS


def test_a_system_at_a_module(package: Path) -> None:
    text = "from ckv_jax import SystemConfig\nMINE = SystemConfig(name='mine', chunk_tokens=8)\n"
    write(package, "of_mine", text)
    assert system_named("of_mine:MINE").chunk_tokens == 8
    assert EngineConfig(system="of_mine:MINE").system == "of_mine:MINE"


def test_an_entry_point_is_listed_and_loads_when_asked_for(package: Path) -> None:
    text = "from ckv_jax import SystemConfig\nMINE = SystemConfig(name='mine', chunk_tokens=8)\n"
    write(package, "of_theirs", text)
    install(package, "theirs", "mine = of_theirs:MINE", "broken = of_nobody:X")
    assert "mine" in [*SYSTEMS] and "of_theirs" not in sys.modules
    assert SYSTEMS["mine"].chunk_tokens == 8
    named = [system.name for system in loadable_systems()]
    assert "mine" in named and "broken" not in named


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("nope", r"got system='nope', expected one of recompute, ckv, .*, or package.module:NAME"),
        ("of_nobody:X", r"module 'of_nobody' does not import \(ModuleNotFoundError: No module"),
        (":X", r"got system=':X', whose module '' does not import"),
        ("of_faults:X", r"which is not there; expected a SystemConfig at of_faults:X"),
        ("of_faults:NUMBER", r"has the type int; expected a SystemConfig at of_faults:NUMBER"),
        ("of_errors:X", r"'of_errors' does not import \(ValueError: got chunk_tokens=0, expected"),
        ("ckv", r"got 2 systems named 'ckv' \(ckv_jax.systems:ckv, of_faults:MINE\), expected one"),
        (
            "other",
            r"got system='other' at of_faults:MINE, which is named 'mine', expected one name",
        ),
        ("broken", r"got system='broken', whose module 'of_nobody' does not import"),
    ],
)
def test_what_does_not_load_is_refused_in_one_line(package: Path, asked: str, says: str) -> None:
    text = "from ckv_jax import SystemConfig\nNUMBER = 3\nMINE = SystemConfig(name='mine')\n"
    write(package, "of_faults", text)
    write(package, "of_errors", text + "X = SystemConfig(name='x', chunk_tokens=0)\n")
    install(
        package, "faulty", "ckv = of_faults:MINE", "other = of_faults:MINE", "broken = of_nobody:X"
    )
    with pytest.raises(ValueError, match=says) as refused:
        EngineConfig(system=asked)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"executor": 3}, "got executor=3, expected a function or a class"),
        ({"decoding": "lru"}, "got decoding='lru', expected a function or a class"),
        ({"selects": "token"}, "got selects='token', generates=True without an executor"),
        ({"generates": False}, "generates=False without an executor, expected one"),
        ({"selects": "h2o"}, "got selects='h2o', expected one of chunk, token, all"),
    ],
)
def test_a_system_that_lacks_a_part_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        OwnParts(**fields)  # type: ignore[arg-type]


def test_chunks_that_are_always_selected_are_of_systems_that_select_chunks() -> None:
    with pytest.raises(ValueError, match=r"got always=Ends\(.*\) with selects='token'"):
        dataclasses.replace(SYSTEMS["as-h2o-lru"], always=Ends())


def test_the_command_line_says_it_in_one_line(here: Here) -> None:
    code, _, err = here("demo", "--system", "of_nobody:X")
    assert code == 1 and "module 'of_nobody' does not import" in err and len(err.splitlines()) == 1


def test_the_core_imports_no_baseline() -> None:
    for folder in ("ckv_jax", "storage", "kernels_pallas"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.parent.name == "baselines":
                continue
            source = path.read_text("utf-8")
            assert not re.search(r"^\s*(from|import) ckv_jax\.baselines", source, re.M), path


@pytest.mark.parametrize("name", ["impress", "quest", "kvswap"])
def test_systems_that_decide_by_single_heads_have_one_device(name: str) -> None:
    shape = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16}
    for system in (SYSTEMS[name], SYSTEMS["ckv"]):
        layout = system.layout(**shape, dtype="bfloat16")  # type: ignore[arg-type]
        check_split(system, layout, 1)
        if system.name == name:
            with pytest.raises(ValueError, match=f"tensor_parallel=2 with system '{name}'"):
                check_split(system, layout, 2)
        else:
            check_split(system, layout, 2)
