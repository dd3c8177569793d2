"""Which pages a prefix's chunks have, and what is noted of them, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckv_jax.baselines.probe_keys import ProbeSource
from ckv_jax.prefix.open_prefixes import OpenPrefixes, _summed
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix, Span

LAYOUT = Layout(num_layers=4, num_kv_heads=1, head_dim=8, pack_layers=2, probe="none")
PROBED = Layout(num_layers=4, num_kv_heads=1, head_dim=8, pack_layers=2, probe="keys")


class Noted:
    """Caches that give out page numbers in order, and write down what they are told."""

    observes = True

    def __init__(self) -> None:
        self.pages = 100
        self.forgotten: list[tuple[int, int]] = []
        self.recorded: dict[int, float] = {}
        self.observed: dict[int, float] = {}

    def register(self, count: int, *scores: np.ndarray) -> int:
        self.pages += count
        return self.pages - count

    def forget(self, first: int, count: int) -> None:
        self.forgotten.append((first, count))

    def scores(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(count, dtype=np.float32) + first, np.arange(count, dtype=np.uint32)

    def history(self, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return pages.astype(np.float32), pages.astype(np.uint32) % 7

    def record(self, pages: np.ndarray, attention: np.ndarray) -> None:
        self.recorded = dict(zip(pages.tolist(), attention.tolist(), strict=True))

    def observe(self, pages: np.ndarray, attention: np.ndarray) -> None:
        self.observed = dict(zip(pages.tolist(), attention.tolist(), strict=True))


class Saved:
    """A store of scores."""

    def __init__(self) -> None:
        self.scores: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def touch(self, prefix: Prefix) -> None:
        """Nothing is evicted."""

    def load_scores(self, segment: str) -> None:
        return None

    def save_scores(self, segment: str, *scores: np.ndarray) -> None:
        self.scores[segment] = scores  # type: ignore[assignment]


def prefix(id_: str, *spans: tuple[str, int, int, int], tokens: int, layout: Layout) -> Prefix:
    fingerprint: Any = None
    return Prefix(
        id=id_,
        tokens=np.zeros(tokens, np.int32),
        spans=tuple(
            Span(segment_id=s, first_chunk=f, num_chunks=n, segment_chunks=of, checksum="c")
            for s, f, n, of in spans
        ),
        layout=layout,
        fingerprint=fingerprint,
    )


@pytest.fixture
def tiers() -> Noted:
    return Noted()


@pytest.fixture
def store() -> Saved:
    return Saved()


@pytest.fixture
def prefixes(tiers: Noted, store: Saved) -> OpenPrefixes:
    caches: Any = tiers
    saved: Any = store
    nothing: Any = None
    return OpenPrefixes(saved, caches, digest_bytes=10, periods=1, recompute=lambda *_: nothing)


def two_spans(layout: Layout = LAYOUT) -> Prefix:
    return prefix("p", ("a", 0, 3, 5), ("b", 1, 2, 3), tokens=16 * 4 + 7, layout=layout)


def test_a_prefix_has_the_pages_of_its_segments(prefixes: OpenPrefixes) -> None:
    opened = prefixes.known(two_spans())
    assert opened.num_chunks == 5 and opened.chunk_lengths.tolist() == [16] * 4 + [7]
    every = np.arange(5)
    assert opened.pages(0, every).tolist() == [100, 101, 102, 111, 112]
    assert opened.pages(1, every).tolist() == [105, 106, 107, 114, 115]
    assert opened.pages(np.array([0, 1]), np.array([4, 0])).tolist() == [112, 105]
    assert opened.probe_pages(0).tolist() == []
    assert opened.opening.tolist() == [] and opened.recurrence == 0
    assert len(opened.all_pages()) == len(set(opened.all_pages().tolist())) == 10
    assert opened.read_bytes(every[:3]) == 3 * LAYOUT.stored_bytes
    other = prefixes.known(prefix("q", ("a", 1, 2, 5), tokens=32, layout=LAYOUT))
    assert other.pages(1, every[:2]).tolist() == [106, 107]


def test_a_prefix_is_made_once_unless_it_is_stored_anew(prefixes: OpenPrefixes) -> None:
    text = two_spans()
    first = prefixes.known(text, 3)
    assert prefixes.known(text) is first and first.room == 3
    anew = prefixes.known(prefix("p", ("c", 0, 5, 5), tokens=71, layout=LAYOUT))
    assert anew is not first and anew.room == 0


def test_a_dropped_prefix_leaves_what_nobody_uses(
    prefixes: OpenPrefixes, tiers: Noted, store: Saved
) -> None:
    text, other = two_spans(), prefix("q", ("b", 0, 3, 3), tokens=48, layout=LAYOUT)
    prefixes.known(other)
    used = prefixes.use(text, lazily=True)
    prefixes.drop(text)
    assert tiers.forgotten == [] and store.scores == {}
    used.close()
    prefixes.drop(text)  # already dropped: nothing is looked for
    assert tiers.forgotten == []
    prefixes.drop(other)
    assert sorted(tiers.forgotten) == [(100, 6), (106, 10)]
    assert store.scores["a"][0].tolist() == (106 + np.arange(10.0)).reshape(2, 5).tolist()
    assert store.scores["b"][1].tolist() == np.arange(6).reshape(2, 3).tolist()


def test_digests_make_room_for_the_one_that_is_asked_for(prefixes: OpenPrefixes) -> None:
    held = []
    for name, size in (("p", 4), ("q", 0), ("r", 5), ("s", 6)):
        held.append(prefixes.known(prefix(name, ("a", 0, 1, 1), tokens=16, layout=LAYOUT)))
        held[-1].digest = SimpleNamespace(nbytes=size) if size else None  # type: ignore[assignment]
    assert prefixes.digest_bytes == 15
    prefixes._keep_within(held[0])  # of 10 bytes; itself it stays, the next one goes
    assert [one.digest_bytes for one in held] == [4, 0, 0, 6]
    prefixes._keep_within(held[3])
    assert [one.digest_bytes for one in held] == [4, 0, 0, 6]
    held[3].digest.nbytes = 7  # type: ignore[union-attr]
    prefixes._keep_within(held[3])
    assert [one.digest_bytes for one in held] == [0, 0, 0, 7]


def test_the_probe_of_a_prefix_has_room_for_what_is_asked(prefixes: OpenPrefixes) -> None:
    opened = prefixes.known(two_spans())
    assert opened.probe_chunks == 64  # 1,024 tokens
    assert prefixes.known(two_spans()).probe_chunks == 64
    for room, chunks in ((64, 64), (65, 128)):
        opened.room = room
        assert opened.probe_chunks == chunks


def test_a_pack_is_used_once_with_all_the_attention_it_got(
    prefixes: OpenPrefixes, tiers: Noted
) -> None:
    opened = prefixes.known(two_spans())
    chosen: Any = SimpleNamespace(
        ids=np.array([[0, 4], [4, -1]]),
        attention=np.array([[1.0, 2.0], [4.0, 99.0]]),
        scores=np.array([[1.0, 8.0, 0.5, 0.0, 2.0], [16.0, 32.0, 0.25, 64.0, 4.0]]),
    )
    prefixes.record_all(np.array([1]), [(opened, chosen)])
    assert tiers.recorded == {105: 1.0, 115: 6.0}
    assert tiers.observed == {106: 40.0, 107: 0.75, 114: 64.0}
    prefixes.record_all(np.array([[0], [1]]), [(opened, chosen)])  # a row is a choice each
    assert tiers.recorded == {100: 1.0, 112: 2.0, 115: 4.0}
    assert tiers.observed == {101: 8.0, 102: 0.5, 111: 0.0, 105: 16.0, 106: 32.0, 107: 0.25,
                              114: 64.0}  # fmt: skip
    nothing: Any = SimpleNamespace(
        ids=np.array([[-1], [0]]), attention=np.ones((2, 1)), scores=np.ones((2, 5))
    )
    prefixes.record_all(np.array([0]), [(opened, nothing)])  # a row that chose none is none
    assert tiers.observed == {101: 1.0, 102: 1.0, 111: 1.0, 112: 1.0}
    prefixes.record_all(np.array([[1, -1], [0, 2]]), [(opened, chosen)])  # one has fewer groups
    assert tiers.recorded.keys() & {105, 115} == {105, 115} and -1 not in tiers.recorded
    tiers.observes, tiers.observed = False, {}
    prefixes.record_all(np.array([0]), [(opened, chosen)])
    assert tiers.observed == {}


def test_pages_that_several_share_are_summed() -> None:
    pages, got = _summed([np.array([[5, 3], [9, 7]]), np.array([[3]])], [np.array([1, 2]),
                         np.array([4])])  # fmt: skip
    assert dict(zip(pages.tolist(), got.tolist(), strict=True)) == {3: 6, 5: 1, 7: 2, 9: 1}
    pages, got = _summed([np.array([[8, 2]])], [np.array([1, 2], np.float32)])
    assert (pages.tolist(), got.tolist(), got.dtype) == ([8, 2], [1, 2], np.float64)


def test_pages_of_a_probe_are_shared_where_segments_alone_cut_them(
    prefixes: OpenPrefixes, tiers: Noted
) -> None:
    most = PROBED.probe_page_chunks
    of = 2 * most + 1  # three pages a row
    whole = prefixes.known(prefix("w", ("a", 0, of, of), tokens=16 * of, layout=PROBED))
    rows = [whole.probe_pages(row).tolist() for row in range(len(PROBED.probe_layers))]
    assert len(rows) == 2 and [len(row) for row in rows] == [3, 3]
    assert [*rows[0], *rows[1]] == list(range(rows[0][0], rows[0][0] + 6))
    registered = tiers.pages
    part = prefixes.known(
        prefix("p", ("a", 0, most + 1, of), tokens=16 * (most + 1), layout=PROBED)
    )
    assert [part.probe_pages(row)[0] for row in range(2)] == [row[0] for row in rows]
    ends = [int(part.probe_pages(row)[1]) for row in range(2)]
    assert ends == [registered, registered + 1] and tiers.pages == registered + 2
    assert part.probe is not None
    chunks = part.probe.held.chunks.tolist()
    source = ProbeSource(part, part.probe)
    assert source.read_bytes(np.arange(2)) == sum(chunks) * 16 * part.probe.held.token_bytes
    prefixes.record_probe(part, 1)
    assert tiers.recorded == {rows[1][0]: 1.0, ends[1]: 1.0}
    share = np.arange(most + 3, dtype=np.float64)  # there is padding after the last chunk
    prefixes.record_probe(part, 0, share)
    assert tiers.recorded == {rows[0][0]: share[:most].sum(), ends[0]: float(most)}


def test_what_is_known_of_chunks_goes_with_their_tokens_into_another_order(
    prefixes: OpenPrefixes, store: Saved
) -> None:
    old = prefixes.known(prefix("o", ("a", 0, 2, 2), tokens=24, layout=LAYOUT))  # 100, 101; 102 …
    new = prefix("n", ("b", 0, 2, 2), tokens=24, layout=LAYOUT)
    turned = np.tile(np.arange(24)[::-1], (4, 1))
    prefixes.carry_scores(old, None, new, turned)
    importance, frequency = store.scores["b"]
    first = (8 * 101 + 8 * 100) / 16  # of the last 16 tokens, the last 8 are of the second chunk
    assert importance.tolist() == [[first, 100], [first + 2, 102]]
    assert frequency.tolist() == [[round((8 * 3 + 8 * 2) / 16), 2], [4, 4]]
    prefixes.carry_scores(old, turned, new, turned)  # the same order: each keeps its own
    assert store.scores["b"][0].tolist() == [[100, 101], [102, 103]]
    store.scores.clear()
    spans = ("a", 0, 1, 1), ("c", 0, 1, 2), ("d", 0, 1, 1)
    longer = prefixes.known(prefix("l", ("e", 0, 3, 3), tokens=40, layout=LAYOUT))
    prefixes.carry_scores(longer, None, prefix("m", *spans, tokens=40, layout=LAYOUT), None)
    assert list(store.scores) == ["d"]  # not what is in use, nor a part of a segment
    base = longer.pages(0, np.array([2])).tolist()
    assert store.scores["d"][0].tolist() == [[base[0]], [base[0] + 3]]
