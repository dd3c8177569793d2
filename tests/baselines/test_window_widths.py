"""Widths by layer and head: profiles, the greedy spread against the best one, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckv_jax.baselines.decoding import lru
from ckv_jax.baselines.window_widths import (
    Recorded,
    Widths,
    load_widths,
    misses_by_width,
    plain_name,
    replay,
    save_widths,
    spread,
    widths_of,
)
from ckv_jax.decode.eviction import empty_window, lookahead
from ckv_jax.storage.chain import Fingerprint

WHO = Fingerprint({"weights": "some"})


def drifting(rng: np.random.Generator, shape: tuple[int, int, int, int], rho: np.ndarray):
    """Scores [T, S, R, M] that change by rows at their own pace, and the best six of each."""
    steps, sequences, rows, chunks = shape
    scores = np.empty(shape, np.float32)
    now = rng.standard_normal((sequences, rows, chunks))
    keep = rho[None, :, None]
    for step in range(steps):
        now = keep * now + np.sqrt(1 - keep**2) * rng.standard_normal(now.shape)
        scores[step] = now
    ids = np.sort(np.argsort(-scores, axis=-1)[..., :6], axis=-1).astype(np.int32)
    return ids, scores


def test_a_replay_counts_what_no_window_held() -> None:
    """By hand: every step's choice less what the window of the step before held."""
    ids = np.array([[[0, 1]], [[1, 2]], [[0, 1]], [[3, 4]], [[0, 1]]], np.int32)
    scores = jnp.zeros((5, 1, 8), jnp.float32)
    for width, wanted in ((2, [2, 1, 1, 2, 2]), (3, [2, 1, 0, 2, 1]), (5, [2, 1, 0, 2, 0])):
        window = empty_window(np.array([width]), np.array([2]))
        missed = replay(window, jnp.asarray(ids), scores, lru)
        assert missed[:, 0].tolist() == wanted


def test_wider_windows_miss_less() -> None:
    rng = np.random.default_rng(0)
    ids, scores = drifting(rng, (40, 3, 2, 40), np.array([0.98, 0.7]))
    widths = np.array([6, 9, 12, 24, 40], np.int32)
    for keep in (lru, lookahead):
        missed = misses_by_width(ids, scores, widths, keep, skip=8)
        assert missed.shape == (2, 5) and missed.dtype == np.int64
        assert (np.diff(missed, axis=1) <= 0).all()
        assert (missed[0] < missed[1]).all()  # the row that changes less
    every = misses_by_width(ids, scores, widths, lru)
    assert (every[:, -1] <= 3 * 40).all()  # each chunk once, where all have room
    with pytest.raises(ValueError, match="window of 5 slots for a choice of 6"):
        misses_by_width(ids, scores, np.array([5, 9], np.int32), lru)


def best(benefit: np.ndarray, cost: np.ndarray, limit: int) -> float:
    """The greatest benefit there is, by dynamic programming over the cost."""
    most = np.full(limit + 1, -np.inf)
    most[0] = 0
    for values, prices in zip(benefit, cost, strict=True):
        fresh = np.full_like(most, -np.inf)
        for value, price in zip(values, prices, strict=True):
            if price <= limit:
                fresh[price:] = np.maximum(fresh[price:], most[: limit + 1 - price] + value)
        most = fresh
    return float(most.max())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 8),
    options=st.integers(1, 5),
    room=st.integers(0, 60),
    concave=st.booleans(),
)
def test_greedy_against_the_best(
    seed: int, rows: int, options: int, room: int, concave: bool
) -> None:
    rng = np.random.default_rng(seed)
    cost = np.cumsum(rng.integers(1, 9, (rows, options)), axis=1)
    steps = rng.exponential(size=(rows, options)) * rng.exponential(size=(rows, 1))
    if concave:
        steps = -np.sort(-steps, axis=1)
        cost = np.arange(1, options + 1) * rng.integers(1, 9, (rows, 1))
    benefit = np.cumsum(steps, axis=1)
    limit = int(cost[:, 0].sum()) + room
    option = spread(benefit, cost, limit)
    at = np.arange(rows), option
    assert cost[at].sum() <= limit
    base = benefit[:, 0].sum()
    found, most = benefit[at].sum() - base, best(benefit, cost, limit) - base
    assert found <= most + 1e-9 and found >= most / 2 - 1e-9


def test_one_row_that_gains_most_takes_all() -> None:
    """Greedy by ratio would spend on the second row and leave the first, of most gain, out."""
    benefit, cost = np.array([[0.0, 100.0], [0.0, 2.0]]), np.array([[1, 101], [1, 2]])
    assert spread(benefit, cost, 102).tolist() == [1, 0]


def test_what_cannot_be_spread_is_refused() -> None:
    cost = np.array([[4, 8], [4, 8]])
    with pytest.raises(ValueError, match="room for 7 slots, expected at least the 8"):
        spread(np.zeros((2, 2)), cost, 7)
    with pytest.raises(ValueError, match="ascending costs"):
        spread(np.zeros((2, 2)), cost[:, ::-1], 100)
    with pytest.raises(ValueError, match="ascending costs"):
        spread(np.zeros((2, 3)), cost, 100)
    with pytest.raises(ValueError, match="ascending costs"):
        spread(np.zeros(2), np.array([4, 8]), 100)
    with pytest.raises(ValueError, match="ascending costs"):
        spread(np.zeros((1, 2)), np.array([[4, 4]]), 100)


def test_room_is_spent_on_what_gains_most_for_it_and_on_nothing_else() -> None:
    benefit = np.array([[0.0, 3.0], [0.0, 4.0], [0.0, 2.5], [0.0, 0.0]])
    cost = np.array([[1, 2], [1, 3], [1, 2], [1, 2]])
    assert spread(benefit, cost, 6).tolist() == [1, 0, 1, 0]  # 3 and 2.5 a slot, not 2
    assert spread(benefit, cost, 99).tolist() == [1, 1, 1, 0]
    assert spread(benefit, cost, 4).tolist() == [0] * 4


def test_slots_share_the_room_of_even_windows() -> None:
    """Whole, at least a choice, and together no more packs than even windows have."""
    widths, packs = Widths(times=((1.0, 1.5), (2.0, 3.5))), np.array([1, 1])
    np.testing.assert_array_equal(widths.slots(10, 2.0, packs), [[10, 15], [20, 35]])
    np.testing.assert_array_equal(widths.slots(10, 1.0, packs), np.full((2, 2), 10))
    np.testing.assert_array_equal(widths.slots(10, 1.5, packs), [[10, 12], [15, 22]])
    even = Widths.even(2.0, groups=3, rows=2)
    np.testing.assert_array_equal(even.slots(7, 2.0, np.ones(3, int)), np.full((3, 2), 14))
    alone = Widths.even(1.0, groups=2, rows=1)  # nothing says who is to have more
    np.testing.assert_array_equal(alone.slots(7, 3.0, packs), [[21], [21]])
    rng = np.random.default_rng(0)
    for _ in range(200):
        packs, limit = rng.integers(1, 5, 4), int(rng.integers(1, 40))
        times = float(rng.uniform(1, 5))
        widths = Widths(times=tuple((float(t),) for t in rng.choice([1.0, 1.5, 2.0, 4.0], 4)))
        slots = widths.slots(limit, times, packs)
        assert slots.min() >= limit
        assert (slots[:, 0] * packs).sum() <= limit * times * packs.sum() + 1e-3


def test_what_texts_chose_says_how_wide_windows_are() -> None:
    """A period that keeps its choice gains by a wider window less than one that goes back."""
    stays, returns = Recorded(), Recorded()
    rng = np.random.default_rng(1)
    for step in range(60):
        for text in (stays, returns):
            text.add(0, np.arange(4), np.ones(32, np.float32))  # always the same
            cycle = 4 * (step % 3) + np.arange(4)  # what was chosen three tokens ago
            text.add(1, cycle, rng.random(32).astype(np.float32))
    widths = widths_of([stays, returns], np.array([1, 1]), 2.0, lru)
    assert widths.times == ((1.0,), (3.0,))  # holds all of the cycle: nothing is fetched any more
    ids, scores = stays.arrays(2)
    assert ids.shape == (60, 1, 2, 4) and scores.shape == (60, 1, 2, 32)


def test_what_is_written_down_is_of_whole_tokens() -> None:
    text = Recorded()
    ids, scores = text.arrays(2)
    assert ids.shape[:3] == scores.shape[:3] == (0, 1, 2)
    for token, (first, second) in enumerate((([3, 5], [1]), ([2], [4, 6, 7]), ([0], []))):
        text.add(0, np.array(first), np.full(8, token, np.float32))
        if second:
            text.add(1, np.array(second), np.full(8, -token, np.float32))
    ids, scores = text.arrays(2)
    wanted = [[[[3, 5, -1], [1, -1, -1]]], [[[2, -1, -1], [4, 6, 7]]]]
    assert ids.tolist() == wanted and ids.dtype == np.int32
    assert scores[..., 0].tolist() == [[[0, 0]], [[1, -1]]] and scores.shape == (2, 1, 2, 8)


def test_heads_have_widths_of_their_own_and_packs_weigh() -> None:
    """Two periods of two heads: of each the second one comes back to what it chose."""
    text, rng = Recorded(), np.random.default_rng(2)
    for step in range(40):
        for choice in range(4):
            chosen = 2 * (step % 2) * (choice % 2) + np.arange(2)
            text.add(choice, chosen, rng.random(16).astype(np.float32))
    short = Recorded()
    short.add(0, np.arange(2), np.ones(16, np.float32))
    for packs, times, wanted in (
        ([1, 1], 1.5, ((1.0, 2.0), (1.0, 2.0))),
        ([1, 3], 1.4, ((1.0, 1.0), (1.0, 2.0))),
    ):
        found = widths_of([short, text], np.array(packs), times, lru, rows=2)
        assert found.times == wanted


def test_texts_that_say_nothing_are_refused() -> None:
    short = Recorded()
    for _ in range(16):
        short.add(0, np.arange(2), np.ones(8, np.float32))
    for texts in ([], [Recorded()], [short]):
        with pytest.raises(ValueError, match="no text that chose for more than 16 tokens"):
            widths_of(texts, np.array([1]), 2.0, lru)
    for times in (1.0, 0.5):
        with pytest.raises(ValueError, match=f"window={times:g}, expected more than one choice"):
            widths_of([short], np.array([1]), times, lru)


def test_widths_are_whole_choices_at_least() -> None:
    for bad in (
        (),
        ((),),
        ((), ()),
        ((1.0,), (1.0, 2.0)),
        ((0.5,),),
        ((float("nan"),),),
        ((2000.0,),),
        ((True,),),
    ):
        with pytest.raises(ValueError, match="got width"):
            Widths(times=bad)
    assert Widths(times=((1, 1024.0),)).times == ((1, 1024.0),)
    assert len(Widths.even(1.0, groups=256, rows=256).times) == 256
    with pytest.raises(ValueError, match=r"widths of 256 groups of \[257\] rows"):
        Widths.even(1.0, groups=256, rows=257)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_widths_are_kept_for_their_model(home: Path) -> None:
    widths = Widths(times=((1.0, 1.5), (2.0, 4.0), (1.0, 1.0)))
    assert load_widths(WHO, "kvdrive", groups=3, rows=2) is None
    path = save_widths(widths, WHO, "kvdrive")
    assert path.is_relative_to(home)
    assert load_widths(WHO, "kvdrive", groups=3, rows=2) == widths
    assert load_widths(WHO, "ckv", groups=3, rows=2) is None
    assert load_widths(Fingerprint({"weights": "other"}), "kvdrive", groups=3, rows=2) is None
    save_widths(Widths.even(2.0, groups=3, rows=2), WHO, "kvdrive")
    again = load_widths(WHO, "kvdrive", groups=3, rows=2)
    assert again is not None and again.times[0] == (2.0, 2.0)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    for name in ("", "../up", "A", "a" * 65, ".hidden"):
        with pytest.raises(ValueError, match="got name"):
            save_widths(widths, WHO, name)
        save_widths(widths, WHO, plain_name(name))


@pytest.mark.parametrize(
    "text",
    [
        "", "no json", "[]", "{}", '{"times": 2}', '{"times": [[1.0, 2.0]]}',
        '{"times": [[1.0], [1.0]]}', '{"times": [[1.0, "2"], [1.0, 2.0]]}',
        '{"times": [[1.0, NaN], [1.0, 2.0]]}', '{"times": [[1.0, Infinity], [1.0, 2.0]]}',
        '{"times": [[1.0, 0.99], [1.0, 2.0]]}', '{"times": [[1.0, 1e9], [1.0, 2.0]]}',
        '{"times": [[1.0, true], [1.0, 2.0]]}', "[" * 100_000, "\x00" * 64,
        '{"times": [[1, 2], [1, 2]], "pad": "' + "x" * (1 << 20) + '"}',
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_a_file_of_anything_else_is_none(
    home: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_widths(Widths.even(2.0, groups=2, rows=2), WHO, "ckv")
    path.write_text(text)
    assert load_widths(WHO, "ckv", groups=2, rows=2) is None
    assert str(path) in caplog.text
    assert path.read_text() == text  # left alone


def test_a_folder_in_the_place_of_the_file_is_none(home: Path) -> None:
    path = save_widths(Widths.even(2.0, groups=2, rows=2), WHO, "ckv")
    assert json.loads(path.read_text()) == {"times": [[2.0, 2.0], [2.0, 2.0]]}
    path.unlink()
    path.mkdir()
    assert load_widths(WHO, "ckv", groups=2, rows=2) is None
    with pytest.raises(OSError, match=r".*"):
        save_widths(Widths.even(2.0, groups=2, rows=2), WHO, "ckv")
    assert list(path.parent.iterdir()) == [path]
