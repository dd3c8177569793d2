"""One model on one device and split over several: same answers, same selections, same store."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import random_fingerprint
from sharded.checkpoint import checkpoint

from ckv_jax import Engine, EngineConfig
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.shardings import Shardings
from ckv_jax.model.weights import random_model, save_pretrained
from ckv_jax.storage import ChunkStore

pytestmark = pytest.mark.slow

CASES = [("ckv", 2), ("ckv", 4), ("contiguous-kv", 2), ("as-h2o-lru", 2)]
MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=36, num_layers=2, num_heads=6, num_kv_heads=3,
    head_dim=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and room for a store."""
    folder = tmp_path_factory.mktemp("sharded")
    checkpoint(folder / "model")
    return folder


@pytest.fixture(scope="module")
def found(home: Path) -> dict[str, Any]:
    """What `several_devices.py` printed."""
    script = Path(__file__).parent / "several_devices.py"
    paths = [str(script.parents[1]), os.environ.get("PYTHONPATH", "")]
    process = subprocess.run(
        [sys.executable, str(script), str(home)], capture_output=True, text=True, timeout=250,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    read: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return read


def assert_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for budget in one:
        logits, theirs = (np.array(x[budget]["logits"]) for x in (one, other))
        assert np.abs(theirs - logits).max() <= 1e-5 * np.abs(logits).max()
        assert other[budget]["selected"] == one[budget]["selected"]


@pytest.mark.parametrize(("system", "size"), CASES)
def test_answers_and_selections_do_not_depend_on_the_devices(
    found: dict[str, Any], system: str, size: int
) -> None:
    one, split = found["answers"][f"{system} 1"], found["answers"][f"{system} {size}"]
    assert_alike(one, split)
    for budget in one:
        assert split[budget]["warm"]
        assert split[budget].get("tokens") == one[budget].get("tokens")


def test_what_four_devices_wrote_one_reads(found: dict[str, Any]) -> None:
    assert found["same id"]
    assert_alike(found["answers"]["ckv 1"], found["written"])


def test_periods_are_one_call_over_two_devices(found: dict[str, Any]) -> None:
    apart, together, calls = found["one call"]
    assert apart == together
    assert calls == 2  # periods


def test_a_layer_sums_twice_and_sends_nothing_else(found: dict[str, Any]) -> None:
    sent = found["collectives"]
    assert sent["run"] == 2
    assert sent["select"] == 1
    assert sent["other"] == 0


def test_loading_holds_one_tensor_of_the_host(found: dict[str, Any]) -> None:
    # A tensor, its shares, and what reading a header takes.
    assert found["host bytes"] <= 2.5 * found["largest"]


@pytest.mark.parametrize(
    ("size", "says"),
    [(2, "divisor of the model's 3 KV heads"), (3, "divisor of"), (9, "expected 1 to")],
)
def test_devices_that_do_not_suit(size: int, says: str) -> None:
    model = dataclasses.replace(MODEL, intermediate_size=32 if size == 3 else 36)
    with pytest.raises(ValueError, match=says):
        Shardings.over(model, size, devices=range(4))  # refused before any is used


def test_more_devices_than_there_are_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    save_pretrained(random_model(MODEL, dtype="float32"), tmp_path / "model")
    config = EngineConfig(dtype="float32", tensor_parallel=3)
    with pytest.raises(ValueError, match="got tensor_parallel=3, expected 1 to 1, the number"):
        Engine.from_pretrained(tmp_path / "model", store=str(tmp_path / "store"), config=config)
    assert not (tmp_path / "store").exists()


def test_a_system_that_some_heads_decide_is_refused(tmp_path: Path) -> None:
    model = random_model(MODEL, dtype="float32")
    config = EngineConfig(system="impress", dtype="float32", tensor_parallel=3)
    with (
        ChunkStore.open(tmp_path / "store") as store,
        pytest.raises(ValueError, match="expected 1, the number of devices that the model"),
    ):
        Engine(model, None, store, random_fingerprint(model), config)
    save_pretrained(model, tmp_path / "model")
    with pytest.raises(ValueError, match="system 'impress', expected 1"):
        Engine.from_pretrained(tmp_path / "model", store=str(tmp_path / "s"), config=config)
