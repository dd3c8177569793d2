"""The simulated pipeline in the cases where the answer is known."""

from __future__ import annotations

import dataclasses

import pytest

from bench import costs
from bench.calibrate import with_engine
from bench.simulation import Hardware, Script, Simulation, Stage
from ckv_jax.model.config import PUBLISHED
from ckv_jax.systems import SYSTEMS

HARDWARE = Hardware(
    name="test",
    read_latency=0.0,
    pack_bandwidth=1e9,
    probe_bandwidth=2e9,
    threads=4,
    link_bandwidth=1e15,
    job_overhead=0.0,
    call_overhead=0.0,
    sync_overhead=0.0,
)
MB = 10**6


def ttft(script: Script, hardware: Hardware = HARDWARE) -> float:
    return Simulation(script, hardware).run().ttft_s


def ours(**values: float) -> Script:
    """Two periods of two steps; the first has nothing that was speculated."""
    first = Stage(**({"compute_s": 0.01, "select_s": 0.002} | values))  # type: ignore[arg-type]
    rest = dataclasses.replace(first, select_s=0.0, probe_bytes=0)
    begin = (dataclasses.replace(x, speculated_bytes=0, unused_bytes=0) for x in (first, rest))
    stages = (*begin, first, rest)
    return Script(kind="ours", stages=stages, pack_bytes=MB, embed_s=0.001, head_s=0.003)


def test_without_reads_times_add_up() -> None:
    assert ttft(ours()) == pytest.approx(0.001 + 2 * 0.002 + 4 * 0.01 + 0.003)


def test_reads_hide_behind_compute() -> None:
    assert ttft(ours(speculated_bytes=4 * MB)) == pytest.approx(ttft(ours()))
    assert ttft(ours(demanded_bytes=4 * MB)) >= ttft(ours()) + 2 * 0.004 - 1e-9


def test_what_no_stage_can_read_is_refused() -> None:
    speculated = Stage(compute_s=0.01, select_s=0.002, speculated_bytes=MB)
    with pytest.raises(ValueError, match="the first period"):
        Script(kind="ours", stages=(speculated,), pack_bytes=MB, embed_s=0.0, head_s=0.0)


@pytest.mark.parametrize("name", ["contiguous-kv", "impress", "as-h2o-lfu", "as-lru"])
def test_every_needed_byte_is_read(name: str) -> None:
    accelerator, model = costs.PRESETS["a800-990pro"], PUBLISHED["7B"]
    profile = costs.Profile(
        loaded_share=1.0, coverage=0.6, unused=0.0, device_hits=0.2, host_hits=0.3
    )
    request = costs.script(
        model, SYSTEMS[name], profile, accelerator, prefix=4096, suffix=32, budget=1.0
    )
    probes = sum(stage.probe_bytes for stage in request.stages)
    asked = Simulation(request, accelerator.hardware).run().asked_bytes
    assert asked - probes == pytest.approx(0.5 * 4096 * 56 * 1024, rel=1e-6)
    copied = sum(stage.host_bytes for stage in request.stages)
    assert copied == pytest.approx(0.3 * 4096 * 56 * 1024, rel=1e-6)


def test_software_takes_its_time_for_each_object() -> None:
    many = ours(demanded_bytes=8 * MB)  # eight packs a stage
    slow = dataclasses.replace(HARDWARE, io_overhead=0.001)
    # Of a period's two stages the second is read while the first computes for 10 ms: 6 more.
    assert ttft(many, slow) == pytest.approx(ttft(many) + 2 * (0.008 + 0.006))


def test_packs_of_the_host_are_copied_and_not_read() -> None:
    link = dataclasses.replace(HARDWARE, link_bandwidth=1e9)
    cached = ours(host_bytes=20 * MB)
    assert Simulation(cached, link).run().asked_bytes == 0
    assert ttft(cached, link) == pytest.approx(0.001 + 2 * (0.002 + 0.02 + 0.02 + 0.01) + 0.003)


def test_a_slow_disk_is_the_floor() -> None:
    assert ttft(ours(demanded_bytes=100 * MB)) >= 4 * 0.1
    assert ttft(ours(demanded_bytes=100 * MB)) <= 4 * 0.1 + ttft(ours())


def test_what_is_not_used_takes_the_disk_from_nobody_who_waits() -> None:
    unused = ours(demanded_bytes=8 * MB, unused_bytes=20 * MB)
    assert ttft(unused) <= ttft(ours(demanded_bytes=8 * MB)) + 0.017  # one job that is not stopped


def test_attention_store_reads_ahead_of_compute() -> None:
    stage = Stage(compute_s=0.01, ahead_bytes=5 * MB)
    script = Script(kind="all", stages=(stage,) * 10, pack_bytes=MB, embed_s=0.0, head_s=0.0)
    assert ttft(script) == pytest.approx(0.005 + 10 * 0.01)
    slow = dataclasses.replace(HARDWARE, pack_bandwidth=1e8)
    assert ttft(script, slow) == pytest.approx(10 * 0.05 + 0.01)


def test_token_systems_wait_for_what_they_choose() -> None:
    stage = Stage(compute_s=0.01, select_s=0.005, ahead_bytes=5 * MB, demanded_bytes=2 * MB)
    script = Script(kind="tokens", stages=(stage,) * 10, pack_bytes=MB, embed_s=0.0, head_s=0.0)
    assert 10 * 0.017 <= ttft(script) <= 10 * 0.017 + 0.011


def test_copies_over_a_finite_link_stand_in_the_way_of_the_calls_that_need_them() -> None:
    """4 MB a stage at 1 GB/s are read in 4 ms; over a link of 0.5 GB/s they take 8 ms more."""
    request = ours(demanded_bytes=4 * MB)
    link = dataclasses.replace(HARDWARE, link_bandwidth=5e8)
    # A period's two stages are read one after the other while the first is copied and computed:
    # select 2, read 4, copy 8, compute 10, and the second stage's copy ends behind that call.
    first = 0.001 + 2 * (0.002 + 0.004 + 0.008 + 2 * 0.01) + 0.003
    assert ttft(request, link) == pytest.approx(first)
    # A link so slow that copies are all that counts: four of them, one after the other.
    slow = dataclasses.replace(HARDWARE, link_bandwidth=1e8)
    copies = 0.001 + 2 * (0.002 + 0.004 + 2 * 0.04 + 0.01) + 0.003
    assert ttft(request, slow) == pytest.approx(copies)


def test_what_is_copied_early_need_not_be_waited_for() -> None:
    """AttentionStore's copies run beside its calls; the link alone is the bound if it is slow."""
    stage = Stage(compute_s=0.01, ahead_bytes=5 * MB)
    script = Script(kind="all", stages=(stage,) * 10, pack_bytes=MB, embed_s=0.0, head_s=0.0)
    fast = dataclasses.replace(HARDWARE, link_bandwidth=1e9)  # 5 ms a copy: all but one are hidden
    assert ttft(script, fast) == pytest.approx(0.005 + 0.005 + 10 * 0.01)
    slow = dataclasses.replace(HARDWARE, link_bandwidth=2e8)  # 25 ms a copy
    assert ttft(script, slow) == pytest.approx(0.005 + 10 * 0.025 + 0.01)


def test_readers_and_calls_share_cores() -> None:
    computing = ours(speculated_bytes=4 * MB)  # read while the period before computes
    free = dataclasses.replace(HARDWARE, cores=2, call_cores=1.0, read_cpu=0.5e-9)
    assert ttft(computing, free) == pytest.approx(ttft(computing))  # half a core, beside one
    wide = dataclasses.replace(free, call_cores=2.0)
    assert ttft(computing) < ttft(computing, wide) < 1.26 * ttft(computing)
    idle = dataclasses.replace(wide, cores=8)
    assert ttft(computing) < ttft(computing, idle) < ttft(computing, wide)


def test_the_engines_own_work_is_found_again() -> None:
    request = ours()
    slow = dataclasses.replace(HARDWARE, sync_overhead=0.003)
    found = with_engine(HARDWARE, request, ttft(request, slow))
    assert found.sync_overhead == pytest.approx(0.003, rel=1e-3)
    everything = dataclasses.replace(request, kind="all")
    found = with_engine(HARDWARE, everything, ttft(everything, slow))
    assert found.sync_overhead == pytest.approx(0.003, rel=1e-3)


def test_one_thread_alone_is_slower_than_all() -> None:
    script = ours(demanded_bytes=8 * MB)  # less than a job: one thread reads it
    slow = dataclasses.replace(HARDWARE, thread_bandwidth=2.5e8)
    assert ttft(script, slow) >= ttft(script) + 2 * (0.032 - 0.008)
    many = dataclasses.replace(script, packs_per_job=2)  # four jobs, four threads
    assert ttft(many, slow) < ttft(script, slow)


@pytest.mark.parametrize("name", ["contiguous-kv", "ckv", "impress", "as-h2o-lfu", "as-lru"])
def test_published_models_on_the_papers_machine(name: str) -> None:
    accelerator = costs.PRESETS["a800-990pro"]
    share = {"as-lru": 1.0, "as-h2o-lfu": 0.98, "impress": 0.7}.get(name, 0.05)
    profile = costs.Profile(loaded_share=share, coverage=0.5, unused=0.2)
    times = []
    for prefix in (4096, 32768):
        script = costs.script(
            PUBLISHED["7B"], SYSTEMS[name], profile, accelerator,
            prefix=prefix, suffix=32, budget=0.05,
        )  # fmt: skip
        times.append(ttft(script, accelerator.hardware))
        needed = share * prefix * 56 * 1024  # 56 KiB a token
        assert times[-1] > needed / accelerator.hardware.pack_bandwidth
        assert times[-1] < costs.recompute_s(PUBLISHED["7B"], accelerator, prefix)
    assert times[0] < times[1]
