"""Which packs recomputed keys and values make, and how far they have to be computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckv_jax.pipeline.recovery import Recovered, Recoveries, RecoveryNeeded, recover
from ckv_jax.storage.errors import AssignmentDamaged
from ckv_jax.storage.layout import Layout

LAYERS, HEADS, DIM, CHUNK, TOKENS = 4, 2, 3, 4, 10
KV = np.arange(LAYERS * 2 * TOKENS * HEADS * DIM, dtype=np.float32).reshape(
    LAYERS, 2, TOKENS, HEADS, DIM
)


def recovered(order: np.ndarray | None = None, computed: int = TOKENS, **layout: Any) -> Recovered:
    """The KV of ten tokens, of which so many are computed."""
    made = Layout(
        num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="float32",
        chunk_tokens=CHUNK, **layout,
    )  # fmt: skip
    prefix: Any = SimpleNamespace(id="some", num_tokens=TOKENS, layout=made)
    nobody: Any = None
    one = Recovered(prefix, nobody, lambda _: order)
    one._kv, one.tokens = KV, computed
    return one


def test_a_pack_has_the_chunks_of_its_layers_and_zeros_past_the_end() -> None:
    first, last = recovered(pack_layers=2).packs(1, np.array([0, 2]))
    np.testing.assert_array_equal(first, KV[2:4, :, :4])
    np.testing.assert_array_equal(last[:, :, :2], KV[2:4, :, 8:])
    assert last.shape == first.shape and not last[:, :, 2:].any()


def test_keys_and_values_may_have_packs_of_their_own_and_so_may_heads() -> None:
    apart = recovered(pack_layers=1, kv_together=False)
    for group in (4, 5):
        (pack,) = apart.packs(group, np.array([1]))
        np.testing.assert_array_equal(pack[0, 0], KV[2, group % 2, 4:8])
    heads = recovered(pack_layers=1, heads_apart=True, probe="none")
    (pack,) = heads.packs(5, np.array([1]))
    np.testing.assert_array_equal(pack[0], KV[2, :, 4:8, 1:])


def test_tokens_come_in_the_order_that_they_are_stored_in() -> None:
    order = np.stack([np.roll(np.arange(TOKENS), layer) for layer in range(LAYERS)])
    one = recovered(order, pack_layers=2, reordered=True, layer_orders=True)
    (pack,) = one.packs(1, np.array([1]))
    np.testing.assert_array_equal(pack[0], KV[2][:, order[2, 4:8]])
    np.testing.assert_array_equal(pack[1], KV[3][:, order[3, 4:8]])
    np.testing.assert_array_equal(one.keys(3), KV[3, 0, order[3]])
    np.testing.assert_array_equal(one.keys(1), KV[1, 0, order[1]])


@pytest.mark.parametrize(("chunks", "tokens"), [([0], 4), ([1, 0], 8), ([2], 10)])
def test_no_more_is_computed_than_is_asked_for(chunks: list[int], tokens: int) -> None:
    recovered(computed=tokens).packs(0, np.array(chunks))
    short = recovered(computed=tokens - 1)
    with pytest.raises(RecoveryNeeded, match=f"the first {tokens} tokens of prefix some") as found:
        short.packs(0, np.array(chunks))
    assert (found.value.tokens, found.value.recovered) == (tokens, short)
    if tokens < TOKENS:
        with pytest.raises(RecoveryNeeded, match=f"the first {TOKENS} tokens"):
            recovered(computed=tokens).keys(0)


def test_it_is_computed_a_block_a_step_and_then_rests() -> None:
    said: list[str] = []
    one: Any = SimpleNamespace(tokens=0, prefix=SimpleNamespace(id="some"))

    def advance() -> None:
        said.append("block")
        one.tokens += 4

    one.advance, one.pause = advance, lambda: said.append("rest")
    for _ in recover(RecoveryNeeded(one, 8)):
        said.append("others")
    assert said == ["block", "others"] * 2 + ["rest"]


def test_four_prefixes_are_remembered_the_latest_of_which_stay() -> None:
    nobody: Any = None
    known = Recoveries(nobody)
    prefixes: list[Any] = [SimpleNamespace(id=str(n)) for n in range(5)]
    made = [known.of(prefix, nobody) for prefix in prefixes[:4]]
    assert known.of(prefixes[0], nobody) is made[0]  # used last
    known.of(prefixes[4], nobody)
    assert [known.of(prefixes[n], nobody) is made[n] for n in (0, 2, 3)] == [True] * 3
    assert known.of(prefixes[1], nobody) is not made[1]
    longer: Any = SimpleNamespace(id="3", more=True)
    assert known.of(longer, nobody) is not made[3]  # the same id, another prefix


def test_alike_tokens_come_in_an_order_of_each_head() -> None:
    order = np.stack([np.roll(np.arange(TOKENS), group) for group in range(LAYERS * HEADS)])
    one = recovered(order, pack_layers=1, heads_apart=True, probe="none", grouping="alike")
    (pack,) = one.packs(5, np.array([1]))
    np.testing.assert_array_equal(pack[0, :, :, 0], KV[2, :, order[5, 4:8], 1].swapaxes(0, 1))
    for head in range(HEADS):
        np.testing.assert_array_equal(one.keys(2)[:, head], KV[2, 0, order[4 + head], head])


class Blocks:
    """Prefills of the text, four tokens a block."""

    def __init__(self) -> None:
        self.begun: list[tuple[list[int], int]] = []
        self.earlier: Any = None

    def begin(self, rest: np.ndarray, *, start: int, earlier: Any) -> Any:
        self.begun.append((rest.tolist(), start))
        self.earlier = earlier
        blocks = iter([SimpleNamespace(
            first=first, length=min(4, TOKENS - first),
            tokens_kv=lambda dtype, first=first: KV[:, :, first : first + 4].astype(dtype),
        ) for first in range(start, TOKENS, 4)])  # fmt: skip
        return SimpleNamespace(advance=lambda: next(blocks))


def anew(order: Any) -> tuple[Recovered, Blocks]:
    """Nothing of the text is computed yet."""
    blocks: Any = Blocks()
    prefix = recovered(pack_layers=2).prefix
    prefix.tokens = np.arange(100, 100 + TOKENS)  # type: ignore[misc]
    return Recovered(prefix, blocks, order), blocks


def test_what_was_computed_stays_while_the_device_rests() -> None:
    one, blocks = anew(lambda _: None)
    one.advance()
    assert one.tokens == 4
    one.pause()
    one.advance()
    one.advance()
    assert one.tokens == TOKENS
    assert blocks.begun == [([*range(100, 110)], 0), ([*range(104, 110)], 4)]
    np.testing.assert_array_equal(blocks.earlier.read(range(1, 3), 2, 7), KV[1:3, :, 2:7])
    np.testing.assert_array_equal(one.keys(2), KV[2, 0])


def test_an_order_that_is_damaged_is_found_again_by_all_that_is_computed() -> None:
    order = np.stack([np.roll(np.arange(TOKENS), layer) for layer in range(LAYERS)])

    def damaged(kv: np.ndarray | None) -> np.ndarray:
        if kv is None:
            raise AssignmentDamaged("its file has a wrong checksum")
        np.testing.assert_array_equal(kv, KV)
        return order

    one, _ = anew(damaged)
    with pytest.raises(RecoveryNeeded, match=f"the first {TOKENS} tokens"):
        one.packs(0, np.array([0]))
    for _ in range(3):
        one.advance()
    np.testing.assert_array_equal(one.packs(1, np.array([1]))[0, 0], KV[2][:, order[2, 4:8]])
