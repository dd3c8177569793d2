"""Segments that readers share: who opens them, who lets them go, and what interrupts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ckv_jax.storage import ChunkStore, SegmentDamaged, StoreUnavailable
from ckv_jax.storage.place.place import Place
from ckv_jax.storage.prefix import Span
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.segment import OpenSegments, Segment
from tests.support.truth import ingest, some_tokens


@pytest.fixture
def spans(placed: ChunkStore) -> list[Span]:
    """Of two segments."""
    return [ingest(placed, some_tokens(32, seed)).spans[0] for seed in range(2)]


def held(place: Place, span: Span) -> bool:
    """Whether somebody reads a segment, so that nobody may remove it."""
    claim = place.files.claim(span.segment_id)
    if claim is not None:
        claim.release()
    return claim is None


def opening(
    store: ChunkStore, place: Place, before: Callable[[int], None], counted: list[str] | None = None
) -> OpenSegments:
    """`before` is told how often a manifest has been asked for, whenever one is."""
    asked = 0

    def manifest(segment_id: str, checksum: str) -> Manifest:
        nonlocal asked
        asked += 1
        before(asked)
        return store.index.manifest(segment_id, checksum)

    return OpenSegments(place, manifest, ([] if counted is None else counted).append)


def test_who_opens_a_segment_later_than_another_thread_shares_its(
    placed: ChunkStore, place: Place, spans: list[Span]
) -> None:
    others: list[Segment] = []

    def faster(asked: int) -> None:
        if asked == 1:
            others.append(shared.acquire(spans[0]))

    shared = opening(placed, place, faster)
    found = shared.acquire(spans[0])
    assert found is others[0] is shared.acquire(spans[0])
    for _ in range(3):
        assert held(place, spans[0])
        shared.release([found])
    assert not held(place, spans[0])


@pytest.mark.parametrize("error", [SegmentDamaged("replaced"), KeyboardInterrupt()], ids=type)
def test_a_segment_that_is_replaced_before_it_is_held_is_let_go(
    placed: ChunkStore, place: Place, spans: list[Span], error: BaseException
) -> None:
    seen: list[bool] = []

    def replaced(asked: int) -> None:
        seen.append(held(place, spans[0]))
        if asked == 2:
            raise error

    with pytest.raises(type(error)):
        opening(placed, place, replaced).acquire(spans[0])
    assert seen == [False, True] and not held(place, spans[0])


def test_what_was_opened_before_an_interruption_is_let_go(
    placed: ChunkStore, place: Place, spans: list[Span]
) -> None:
    seen: list[bool] = []

    def interrupted(asked: int) -> None:
        if asked == 3:
            seen.append(held(place, spans[0]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opening(placed, place, interrupted).acquire_all(spans)
    assert seen == [True] and not held(place, spans[0])


def test_segments_that_are_not_there_are_passed_over(
    placed: ChunkStore, place: Place, spans: list[Span]
) -> None:
    """Only what cannot be asked for just now counts as unread."""
    counted: list[str] = []

    def away(asked: int) -> None:
        if asked == 3:
            raise StoreUnavailable("no answer")

    gone = [replace(spans[0], checksum=text) for text in ("another", "a third")]
    shared = opening(placed, place, away, counted)
    found = shared.acquire_all([spans[0], spans[1], *gone, spans[1]])
    assert [type(one) for one in found] == [
        Segment, StoreUnavailable, SegmentDamaged, SegmentDamaged, Segment,
    ]  # fmt: skip
    assert counted == ["unread"] and all(held(place, span) for span in spans)
    shared.release(found)
    assert not any(held(place, span) for span in spans)
