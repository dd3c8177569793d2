"""Spans, the breakdown, and the Perfetto file."""

from __future__ import annotations

import io
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ckv_jax.trace import STAGES, Trace, perfetto

MS = 1_000_000


def made(*spans: tuple[str, str, int, int], ttft_ms: int = 100) -> Trace:
    """A finished trace with spans given in ms after its start."""
    trace = Trace()
    trace.end_ns = trace.start_ns + ttft_ms * MS
    for name, lane, start, end in spans:
        trace.add(name, lane, trace.start_ns + start * MS, trace.start_ns + end * MS)
    return trace


def complete(events: dict) -> list[dict]:
    return [event for event in events["traceEvents"] if event["ph"] == "X"]


def test_a_span_records_its_block_and_its_arguments() -> None:
    trace = Trace()
    with trace.span("probe_io", lane="host", period=0, bytes=3):
        pass
    with pytest.raises(OSError), trace.span("select", lane="host"):
        raise OSError
    trace.end()
    first, second = trace.spans
    assert (first.name, first.lane, first.args) == ("probe_io", "host", {"period": 0, "bytes": 3})
    assert trace.start_ns <= first.start_ns <= first.end_ns <= second.start_ns <= trace.end_ns
    ended = trace.end_ns
    trace.end()
    assert trace.end_ns == ended


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*STAGES, "pack_read"]), st.integers(-20, 120), st.integers(0, 80)
        )
    )
)
def test_breakdown_always_adds_up_to_the_time_to_first_token(spans) -> None:
    trace = made(*((name, "host", start, start + length) for name, start, length in spans))
    parts = trace.breakdown_ms
    assert all(spent >= 0 for spent in parts.values())
    assert sum(parts.values()) == pytest.approx(trace.ttft_ms)
    covered = {
        ms
        for name, start, length in spans
        if name in STAGES
        for ms in range(max(0, start), min(100, start + length))
    }
    assert parts["other"] == pytest.approx(100 - len(covered))


def test_overlapping_stages_count_once_for_the_one_that_began_last() -> None:
    trace = made(("compute", "compute", 0, 60), ("select", "host", 20, 30), ("compute", "c", 0, 50))
    parts = trace.breakdown_ms
    assert (parts["compute"], parts["select"], parts["other"]) == (50.0, 10.0, 40.0)


def test_counters_and_shares() -> None:
    trace = made()
    assert (trace.coverage, trace.unused, trace.attention_mass) == (1.0, 0.0, 1.0)
    trace.count("demanded", 8)
    trace.count("demanded", 2)
    trace.count("covered", 6)
    trace.count_bytes("ssd", 400)
    trace.count_bytes("unused", 100)
    trace.count_chunks(selected=16, total=313)
    trace.count_chunks(selected=16, total=313)
    trace.period_attention_mass += [0.5, 1.0]
    summary = trace.to_json()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["coverage"] == 0.6 and summary["unused"] == 0.25
    assert summary["attention_mass"] == 0.75
    assert summary["chunks"] == {"selected": 32, "total": 626}
    assert summary["bytes"] == {"ssd": 400, "host": 0, "device": 0, "unused": 100}


@given(
    st.lists(
        st.tuples(st.sampled_from(["ssd", "host"]), st.integers(0, 50), st.integers(0, 30)),
        max_size=40,
    )
)
def test_no_two_events_of_one_perfetto_lane_overlap(spans) -> None:
    events = perfetto([made(*(("read", lane, a, a + b) for lane, a, b in spans))])
    assert len(complete(events)) == len(spans) + 1
    lanes: dict[int, list[tuple[float, float]]] = {}
    for event in complete(events):
        assert event["dur"] >= 0 and event["ts"] >= 0
        lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for lane in lanes.values():
        lane.sort()
        for (_, end), (start, _) in itertools.pairwise(lane):
            assert start >= end


def test_the_bar_chart_shows_every_stage() -> None:
    out = io.StringIO()
    trace = made(("compute", "compute", 0, 50), ("critical_io_wait", "host", 50, 75))
    trace.breakdown_bar(Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == [*STAGES, "other", "ttft"]
    assert max(map(len, lines)) <= 80
    filled = {line.split()[0]: line.count("█") for line in lines}
    assert filled["compute"] == 6 and filled["critical_io_wait"] == 3
    assert "100.0 ms" in lines[-1]
