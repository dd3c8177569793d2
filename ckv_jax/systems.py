"""The table of systems by name: those of the core, the baselines, and your own.

A system is a `SystemConfig`. It is found by a name of `SYSTEMS`, as `package.module:NAME`, or by an
entry point of the group `ckv_jax.systems` in an installed package (docs/add_a_system.md). A module
is imported only when its system is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from ckv_jax.config import SystemConfig
from ckv_jax.errors import WrongType
from ckv_jax.selection.select import Coarse, Ends, Select
from ckv_jax.storage.codec import Codec

GROUP = "ckv_jax.systems"
"""The group of entry points that name systems."""

_DECODE = Select(score_layers=2, queries=4, peaks=True, coarse=Coarse(survivors=4, least=64))

CKV = SystemConfig(
    name="ckv",
    chunk_tokens=8,
    period=2,
    subperiod=2,
    pack_layers=2,
    digest="int4",
    prefetch="previous",
    always=Ends(),
    reprefill=Select(score_layers=2, queries=16, peaks=True),
    decode=_DECODE,
    policy="frequency-attention",
)
"""Ours: `docs/fidelity.md` says what it costs on a real model."""

CKV_FAST = replace(CKV, name="ckv-fast", decode=replace(_DECODE, every=2))
"""`ckv` for long generations of prose, over its stores: two tokens share a selection. The second of
them reads nothing, and may miss a fact that only it looks up."""

CKV_16 = replace(
    CKV,
    name="ckv-16",
    chunk_tokens=16,
    period=4,
    subperiod=4,
    pack_layers=4,
    reprefill=Select(score_layers=3, queries=16, peaks=True),
    decode=Select(score_layers=3, queries=4, peaks=True, coarse=Coarse(survivors=4, least=64)),
)
"""`ckv` over the chunks of stores that it wrote before: half the selections, a quarter of the
reads, and answers further from full attention's."""

_RECOMPUTE = SystemConfig(name="recompute", digest="none", prefetch="none")
_CORE = {system.name: system for system in (_RECOMPUTE, CKV, CKV_FAST, CKV_16)}


def system_named(name: str) -> SystemConfig:
    """The system of a name, or at `package.module:NAME`.

    Raises `ValueError` in one line: for a name there is none of, with those there are; for a name
    of two systems; for a module that does not import, or has no `SystemConfig` of that name.
    """
    if ":" in name:
        return _at(name, f"system={name!r}")
    places = [place for known, place in _places() if known == name]
    if len(places) > 1:
        raise ValueError(
            f"got {len(places)} systems named {name!r} ({', '.join(places)}), expected one"
        )
    if not places:
        raise ValueError(f"got system={name!r}, expected {_expected()}")
    if name in _CORE:
        return _CORE[name]
    system = _at(places[0], f"system={name!r}")
    if system.name != name:
        raise ValueError(
            f"got system={name!r} at {places[0]}, which is named {system.name!r}, expected one name"
        )
    return system


class _Systems(Mapping[str, SystemConfig]):
    """Every system that has a name; `system_named` for each look-up."""

    def __getitem__(self, name: str) -> SystemConfig:
        return system_named(name)

    def __contains__(self, name: object) -> bool:
        return any(name == known for known, _ in _places())

    def __iter__(self) -> Iterator[str]:
        return iter(dict(_places()))

    def __len__(self) -> int:
        return len(dict(_places()))


SYSTEMS: Mapping[str, SystemConfig] = _Systems()
"""Systems by name: of the core, of `ckv_jax.baselines`, and of entry points. Iterating over names
imports no system's module; a look-up imports that of one system."""


def loadable_systems() -> Iterator[SystemConfig]:
    """Every named system but those that do not load."""
    for name in SYSTEMS:
        try:
            yield system_named(name)
        except ValueError:
            continue


def preset(name: str, *, codec: str | Codec = "none") -> SystemConfig:
    """The preset `name` with packs encoded by a codec, or by the one of a name.

    Raises as `system_named`, and `ValueError` for a codec there is none of.
    """
    return replace(system_named(name), codec=codec)


def system_of(system: str | SystemConfig) -> SystemConfig:
    """A system given by its name, or itself.

    Raises as `system_named`, and `TypeError` for what is neither.
    """
    if isinstance(system, str):
        return system_named(system)
    if not isinstance(system, SystemConfig):
        raise WrongType(f"got system={system!r}, expected a SystemConfig or {_expected()}")
    return system


def _expected() -> str:
    return f"one of {', '.join(SYSTEMS)}, or package.module:NAME"


def _places() -> list[tuple[str, str]]:
    """(name, place) of every named system, in the order of reports; a name may come twice."""
    core = [(name, f"{__name__}:{name}") for name in _CORE]
    baselines = import_module("ckv_jax.baselines")
    ours = [(name, f"{baselines.__name__}.{place}") for name, place in baselines.SYSTEMS.items()]
    return [*core, *ours, *((point.name, point.value) for point in _installed())]


@cache
def _installed() -> tuple[EntryPoint, ...]:
    """Entry points of installed packages; one that two folders of `sys.path` list counts once."""
    return tuple(dict.fromkeys(sorted(entry_points(group=GROUP), key=lambda point: point.name)))


def _at(place: str, asked: str) -> SystemConfig:
    """The system at `package.module:NAME`."""
    module, _, attribute = place.partition(":")
    try:
        found = getattr(import_module(module), attribute, None)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"got {asked}, whose module {module!r} does not import ({why}), expected one that does"
        ) from error
    if not isinstance(found, SystemConfig):
        why = "is not there" if found is None else f"has the type {type(found).__name__}"
        raise ValueError(f"got {asked}, which {why}; expected a SystemConfig at {place}")
    return found
