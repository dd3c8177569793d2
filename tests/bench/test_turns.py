"""Requests against filled caches."""

from __future__ import annotations

import dataclasses

from bench.common import Setting
from bench.lab import Lab
from bench.turns import warm_run
from ckv_jax.systems import SYSTEMS


def test_a_policy_learns_nothing_from_the_one_before() -> None:
    """Scores outlive an engine in the store; of two policies the second would know the future."""
    system = dataclasses.replace(SYSTEMS["contiguous-kv"], policy="lfu")
    with Lab(Setting(model="tiny", prefix_tokens=512, prefixes=3)) as lab:
        rows = [warm_run(lab, system, "warm", 0.2, requests=18).row() for _ in range(2)]
        prefix = lab.prefix(0, lab.engine(system))
        scores = lab.store.load_scores(prefix.spans[0].segment_id)
        assert scores is not None and scores[1].any()
        lab.forget_scores()
        scores = lab.store.load_scores(prefix.spans[0].segment_id)
        assert scores is not None and not scores[0].any() and not scores[1].any()
    assert rows[0]["hit_rate"] == rows[1]["hit_rate"]
