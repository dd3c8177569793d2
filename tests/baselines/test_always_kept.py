"""What the published systems select beside their budgets, or within them whatever the scores."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ckv_jax.baselines.decoding import ENDS, HalfLocal
from ckv_jax.baselines.shadowkv import Outliers
from ckv_jax.kernels_pallas.score.probe import MeanKeys
from ckv_jax.selection.base import select_units
from ckv_jax.selection.select import Ends
from ckv_jax.storage.layout import FIRST, LAST, Layout
from ckv_jax.systems import SYSTEMS

LAYOUT = Layout(num_layers=2, num_kv_heads=2, head_dim=8, chunk_tokens=8)
SPARSE = [name for name in SYSTEMS if SYSTEMS[name].own.decoding is not None]


@pytest.mark.parametrize("name", SPARSE)
def test_every_sparse_system_keeps_sinks_and_local_tokens_beside_its_budget(name: str) -> None:
    """4 and 64 tokens (KVDrive §9.1), in whole chunks."""
    system = SYSTEMS[name]
    layout = system.layout(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, dtype="float32")
    ends = 1 + -(-64 // system.chunk_tokens)
    assert system.always.most(layout, 640) >= ends
    assert system.always.most(layout, 40) == layout.num_chunks(40)
    if layout.alike:  # what is always kept stays in its place where tokens are clustered
        assert system.always == Ends(FIRST, LAST)


def probe(oddity: np.ndarray) -> MeanKeys:
    """Means of chunks [M] for each head, whose places by oddity are `oddity` int [M, K]."""
    mean = np.zeros((*oddity.shape, 2), np.float32)
    return MeanKeys(mean, np.zeros(oddity.shape, np.float32), oddity=oddity)


def test_outliers_are_each_heads_own_chunks_of_the_rows_own_prefix() -> None:
    """24 chunks before the ends, of two heads on each of two prefixes."""
    rng, chunks = np.random.default_rng(0), 33
    odd = [np.stack([rng.permutation(chunks) for _ in range(2)], axis=1) for _ in range(2)]
    count, scores = jnp.asarray([chunks] * 4, jnp.int32), jnp.zeros((4, chunks))
    found = np.asarray(
        Outliers(0.125).chunks(scores, [probe(one) for one in odd], count * 8, count, count, 8)
    )
    ends = np.asarray(ENDS.chunks(scores, (), count * 8, count, count, 8))
    for row, (prefix, head) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        np.testing.assert_array_equal(found[row], ends[row] | (odd[prefix][:, head] < 5))


@pytest.mark.parametrize(("budget", "tokens"), [(10, 480), (11, 477), (1, 480), (40, 480)])
def test_half_of_a_budget_is_local(budget: int, tokens: int) -> None:
    """The other half goes by scores, here those of the first chunks."""
    chunks, ends = LAYOUT.num_chunks(tokens), HalfLocal().most(LAYOUT, tokens)
    scores = jnp.arange(64, 0, -1, dtype=jnp.float32)[None, :chunks]
    count, length = jnp.asarray([chunks], jnp.int32), jnp.asarray([tokens], jnp.int32)
    limits = jnp.asarray([budget + ends], jnp.int32)
    always = HalfLocal().chunks(scores, (), length, count, limits, 8)
    ids = np.asarray(select_units(scores, 64, limits, always=always).ids)[0]
    ids = set(ids[ids >= 0].tolist())
    first = (tokens - 64) // 8
    local, best = budget // 2, budget - budget // 2
    assert len(ids) == budget + ends
    assert ids == {0, *range(first, chunks), *range(first - local, first), *range(1, best + 1)}
