"""What a token's calls are given: positions, places in the buffers, and the tables of packs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_support import SMALL
from kernel_targets import CPU

from ckv_jax.decode.decoder import Decoder, KvRows, Row
from ckv_jax.model.decoder import Transformer
from ckv_jax.pipeline.layers import Layers
from ckv_jax.pipeline.plan import Period, Plan, Step


class Calls:
    """Stands for the layers: writes down what each call is given, and computes nothing."""

    def __init__(self) -> None:
        self.layers = Layers(Transformer.abstract(SMALL, dtype="float32", target=CPU))
        self.config = SMALL
        self.made: list[SimpleNamespace] = []

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        assert tokens.shape[1] == 1
        return tokens

    def put(self, arrays: Any) -> Any:
        return arrays

    def extend(
        self, layers: range, hidden: Any, start: Any, buffers: Any, at: Any, pages: Any,
        tables: Any, *, context: int, parts: int,
    ) -> tuple[Any, Any]:  # fmt: skip
        tables = np.asarray(tables)
        self.made.append(SimpleNamespace(
            layers=layers, start=start.tolist(), at=at.tolist(), slots=tables[:-parts],
            lengths=tables[-parts:], context=context,
        ))  # fmt: skip
        return hidden, buffers

    def head(self, hidden: Any, place: np.ndarray) -> tuple[Any, None]:
        assert place.tolist() == [0] * len(hidden)
        return hidden, None


def plan(parts: int) -> Plan:
    """Two steps of one layer each, of one period; with so many choices, a layer group for each."""
    steps = tuple(
        Step(index=n, layers=range(n, n + 1), groups=range(n * parts, (n + 1) * parts), period=0,
             selects=n == 0)
        for n in range(2)
    )  # fmt: skip
    groups = np.arange(2 * parts).reshape(2, parts).T
    return Plan(steps, (Period(steps, groups, [0]),), parts, group_table=groups)


class Window:
    """`count` packs for each choice, all in slot 10 times the layer group and full but the last."""

    held = True

    def __init__(self, count: int) -> None:
        self.widest = count

    def attended(self, choices: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shape = len(groups), self.widest
        valid = np.full(shape, 16) + choices[:, None]
        return np.broadcast_to(10 * groups[:, None], shape), valid


def decoder(calls: Calls, parts: int, *rows: Row) -> Decoder:
    layers: Any = calls
    memory: Any = SimpleNamespace(pool=SimpleNamespace(pages=None))
    made = Decoder(layers, memory, plan(parts), KvRows(calls.layers))
    size = len(rows)
    kv = np.zeros((2, 2, size, 64, SMALL.num_kv_heads * SMALL.head_dim), np.float32)
    made.join([((keys, values),) for keys, values in kv], list(enumerate(rows)))
    return made


def test_a_token_comes_after_all_that_its_row_has() -> None:
    """And buffers grow when the longest row needs it; a place without a row is at 0."""
    calls = Calls()
    rows = [Row(start=100, length=62, window=None), Row(start=7, length=5, window=None)]
    batch = decoder(calls, 1, *rows)
    for _ in range(3):
        batch.step(np.array([3, 4], np.int32))
    assert [call.layers for call in calls.made] == [range(1), range(1, 2)] * 3
    firsts = calls.made[::2]
    assert [call.start for call in firsts] == [[162, 12], [163, 13], [164, 14]]
    assert [call.at for call in firsts] == [[62, 5], [63, 6], [64, 7]]
    assert [call.context for call in firsts] == [64, 64, 128]
    assert [row.length for row in rows] == [65, 8]
    assert not any(call.lengths.any() for call in calls.made)


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_attend_to_the_packs_of_their_windows(parts: int) -> None:
    """Tables are as wide as the widest window; lengths are of each head where heads choose."""
    calls = Calls()
    windows: list[Any] = [Window(3), None, Window(9), Window(1)]
    rows = [Row(start=100, length=5, window=window) for window in windows]
    decoder(calls, parts, *rows).step(np.zeros(4, np.int32))
    for index, call in enumerate(calls.made):
        groups = range(index * parts, (index + 1) * parts)
        assert call.slots.shape == (parts, 4, 10)  # a bucket of 9
        for row, slots in zip(windows, call.slots.swapaxes(0, 1), strict=True):
            count = row.widest if row else 0
            assert slots[:, :count].tolist() == [[10 * group] * count for group in groups]
            assert (slots[:, count:] < 0).all()
        for part, valid in enumerate(call.lengths):
            wanted = [[16 + part] * (row.widest if row else 0) for row in windows]
            assert [line[line > 0].tolist() for line in valid] == wanted


def test_tables_stay_until_rows_come_or_go() -> None:
    calls = Calls()
    windows: list[Any] = [Window(2), Window(3)]
    rows = [Row(start=100, length=5, window=window) for window in windows]
    batch = decoder(calls, 1, *rows)
    batch.step(np.zeros(2, np.int32))
    windows[1].widest = 1
    batch.step(np.zeros(2, np.int32))
    assert [int((call.slots >= 0).sum()) for call in calls.made] == [5] * 4
    batch.leave([0])
    batch.step(np.zeros(1, np.int32))
    assert [call.slots.shape[1] for call in calls.made[4:]] == [1, 1]
    assert [int((call.slots >= 0).sum()) for call in calls.made[4:]] == [1, 1]
    assert calls.made[4].at == [7]
