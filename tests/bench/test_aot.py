"""What fails a row of `bench.aot`, and how it takes bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.aot import dumps
from bench.aot.__main__ import kept, main
from bench.aot.chips import CHIPS
from bench.aot.processes import compiled_rows
from bench.aot.verdict import judged

POOL = (22491, 4, 2, 16, 2, 64)
RUN_ON_V5E = """
%fused_computation.19 (param_0.61: s32[1,16]) -> s32[16] {
  %param_0.61 = s32[1,16]{1,0:T(1,128)} parameter(0)
  ROOT %bitcast.204 = s32[16]{0:T(128)S(1)} bitcast(%param_0.61)
}
  %copy-start = (bf16[9728,896]{1,0:T(8,128)(2,1)S(1)}, bf16[9728,896]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%states_0___mlp____gate_up_kernel__.1), cross_program_prefetch_index=0
  %pages.1 = bf16[22491,4,2,16,2,64]{0,5,4,3,2,1:T(8,128)(2,1)} parameter(38), sharding={replicated}
  %copy.84 = bf16[22491,4,2,16,2,64]{5,4,3,2,1,0:T(2,128)(2,1)} copy(%pages.1), sharding={replicated}
  %bitcast.15 = bf16[179928,16,2,64]{3,2,1,0:T(2,128)(2,1)} bitcast(%copy.84)
  %run.4 = (bf16[1,2,256,64]{3,2,1,0:T(8,128)(2,1)S(1)}, f32[1,2,256,1]{3,2,1,0:T(8,128)}) custom-call(%copy-done.44, /*index=5*/%copy-done.10, %bitcast.15), custom_call_target="tpu_custom_call", operand_layout_constraints={}
  %custom-call.6 = bf16[896,896]{1,0:T(8,128)(2,1)S(1)} custom-call(%slice-done.24, %slice-done.25), custom_call_target="ConcatBitcast", backend_config={"flag_configs":[]}
"""  # noqa: E501


def test_only_a_copy_of_the_whole_pool_counts() -> None:
    [copy] = dumps.copies_of(RUN_ON_V5E, [POOL])
    assert (copy.name, copy.opcode, copy.shape) == ("copy.84", "copy", POOL)
    assert not dumps.copies_of(RUN_ON_V5E.replace("copy(%pages.1)", "bitcast(%pages.1)"), [POOL])
    [weights] = dumps.copies_of(RUN_ON_V5E, [(9728, 896)])
    assert weights.opcode == "copy-start"


def row(**changes: Any) -> dict[str, Any]:
    """A row that passes, with changes."""
    good = {
        "compiled": True, "why": None, "implementation": "tpu", "kernels": 4, "kernels_expected": 4,
        "pool_copies": 0, "temp_bytes": 5_105_152, "temp_bound": 60_000_000, "aliased_bytes": 0,
        "donated_bytes": 0, "spill_bytes": None, "bundles": None, "spill_stores": None,
        "kinds_dropped": False, "weight_bytes": 15_231_233_024, "device_bytes": 15_974_000_000,
        "memory_bytes": CHIPS["v5e"].memory_bytes, "fits": True, "must_read_bytes": None,
        "moves_more": None,
    }  # fmt: skip
    return good | changes


@pytest.mark.parametrize(
    ("changes", "status", "why"),
    [
        ({}, "ok", None),
        ({"pool_copies": 1}, "failed", "copies the whole pool"),
        ({"temp_bytes": 1_480_225_792}, "failed", "temporary"),
        ({"donated_bytes": 736_755_712}, "failed", "donated"),
        ({"implementation": "reference"}, "failed", "nothing says why"),
        (
            {
                "implementation": "mosaic_gpu; reference",
                "kernels": 2,
                "why": "mosaic_gpu does not: got compute capability (10, 0), expected (9, 0)",
            },
            "explained",
            "compute capability",
        ),
        (
            {"implementation": "reference", "why": "mosaic_gpu does not: got chunks of 1 tokens"},
            "failed",
            "chunks of 1",
        ),
        ({"kinds_dropped": True}, "explained", "memory kinds"),
        ({"spill_bytes": 1600}, "failed", "spilled"),
        (
            {"bundles": 7432, "spill_stores": 2832, "spills_more": "with fewer it takes longer"},
            "explained",
            "2832 spills in 7432 instructions: with fewer it takes longer",
        ),
        (
            {"bundles": 7432, "spill_stores": 4500, "spills_more": "with fewer it takes longer"},
            "failed",
            "4500 spills in 7432 instructions",
        ),
        ({"kernel_bytes": 1500, "must_read_bytes": 1000}, "failed", "moves 1.5 times"),
        (
            {"collectives": {"all-reduce": 8, "all-gather": 1}, "sums_expected": 8},
            "failed",
            "send each other 1 all-gather, 8 all-reduce, expected 8 all-reduce",
        ),
        ({"pool_prefetches": 1}, "explained", "brought there"),
        ({"fits": False, "weight_bytes": 145_400_000_000}, "explained", "do not leave"),
    ],
)
def test_what_fails_a_row(changes: dict[str, Any], status: str, why: str | None) -> None:
    found = judged(row(**changes))
    assert found["status"] == status
    assert found["why"] is None if why is None else why in found["why"]


def test_what_is_unknown_or_missing_is_said_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = tmp_path / "aot.json"
    targets = ["--target", "v9", "v5e", "v5e:4", "H100"]
    asked = [*targets, "--model", "0.5B", "9B", "--program", "run", "head", "stage"]
    assert main([*asked, "--json", str(out)]) == 1
    rows = json.loads(out.read_text())["rows"]
    found = {(r["target"], r["model"], r["program"]): (r["status"], r["why"]) for r in rows}
    assert "unknown target" in found["v9", "0.5B", "all"][1]
    assert "unknown model" in found["v5e", "9B", "all"][1]
    assert "a divisor of the model's 2 KV heads" in found["v5e:4", "0.5B", "all"][1]
    assert found["v5e", "0.5B", "run"] == ("skipped", "libtpu is not installed: run `make aot`")
    assert found["H100", "0.5B", "head"][1].startswith("jax-cuda13-plugin is not installed")
    assert "FAILED v9" in capsys.readouterr().out
    assert kept(out) == []  # all of it is asked again


@pytest.mark.slow
def test_a_process_that_ends_costs_the_row_it_was_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing to compile with there
    [found] = compiled_rows("v5e", "0.5B", ["embed"], row_s=60)
    assert found["status"] == "failed" and "its process ended with 1" in found["why"]
