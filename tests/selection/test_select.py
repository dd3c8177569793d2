"""`Select` says how questions and texts choose; what is stored depends on its layers alone."""

from __future__ import annotations

import dataclasses

import pytest

from ckv_jax.selection.select import Coarse, Select
from ckv_jax.systems import SYSTEMS

STORED = {
    "recompute": "3f35ba27", "as-lru": "d6a9cdfa", "as-h2o-lru": "d6a9cdfa",
    "as-h2o-lfu": "d6a9cdfa", "impress": "307fb8eb", "contiguous-kv": "1667e91a",
    "ckv": "c152c980", "ckv-16": "f4e2a4d8", "dense": "468bf215", "flexgen": "c3ca4f0c",
    "quest": "b9ab7383",
    "shadowkv": "47afe08e", "retroinfer": "0858f011", "infinigen": "077d2858",
    "pqcache": "84dc3b15", "kvdrive": "0858f011", "kvswap": "2f6c0063",
    "solidattention": "252b0857",
}  # fmt: skip
"""The first digits of layouts, as stores have them that were written with flat fields; those of
quest, shadowkv, retroinfer and kvdrive since their heads are apart, that of shadowkv since it has
outliers, that of pqcache since its keys are two halves of 6 bits each."""
MODEL = {"num_layers": 10, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "bfloat16"}


def test_stages_and_peaks_are_nothing_that_is_stored() -> None:
    ours = SYSTEMS["ckv"]
    for changed in ({"coarse": Coarse()}, {"peaks": False}):
        other = dataclasses.replace(ours, choose=dataclasses.replace(ours.choose, **changed))
        assert other.choose != ours.choose and other.layout(**MODEL) == ours.layout(**MODEL)


def test_stores_of_every_preset_still_open() -> None:
    assert {name: system.layout(**MODEL).hex[:8] for name, system in SYSTEMS.items()} == STORED


@pytest.mark.parametrize(
    ("choose", "why"),
    [
        ({"queries": 0}, "queries=0"),
        ({"queries": 1.5}, "queries=1.5"),
        ({"score_layers": 0}, "score_layers=0"),
    ],
)
def test_what_no_question_can_be_chosen_by_is_refused(choose: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(SYSTEMS["ckv"], choose=Select(**choose))  # type: ignore[arg-type]


@pytest.mark.parametrize("queries", [None, 65])
def test_a_text_chooses_by_some_tokens(queries: int | None) -> None:
    with pytest.raises(ValueError, match="queries"):
        dataclasses.replace(SYSTEMS["ckv"], decode=Select(queries=queries))
