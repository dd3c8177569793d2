"""One model on one device and split over several: same answers, same choices, same store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sharded.checkpoint import checkpoint, free_address

from ckv_jax import Engine, EngineConfig
from ckv_jax.identity import random_fingerprint
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.shardings import Shardings
from ckv_jax.model.weights import random_model, save_pretrained
from ckv_jax.storage import ChunkStore, verify_store

pytestmark = pytest.mark.slow

CASES = [("ckv", 2), ("ckv", 4), ("contiguous-kv", 2), ("as-lru", 2), ("as-h2o-lru", 2)]
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
def pairs(home: Path) -> dict[str, Any]:
    """What the leaders of three pairs of processes printed, and how their followers ended."""
    running = {}
    for what in ("answers", "killed", "fault"):
        address = free_address()
        running[what] = [
            started("one_of_several.py", home, address, process, what) for process in (0, 1)
        ]
    found = {}
    for what, (leader, follower) in running.items():
        said, complaint = leader.communicate(timeout=150)
        assert leader.returncode == 0, complaint[-4000:]
        _, complaint = follower.communicate(timeout=20)
        assert (follower.returncode == 0) == (what == "answers"), complaint[-4000:]
        found[what] = json.loads(said.splitlines()[-1]) | {"follower": follower.returncode}
    return found


@pytest.fixture(scope="module")
def led(pairs: dict[str, Any]) -> dict[str, Any]:
    """Of the pair that was closed cleanly; they store the text that all others read."""
    read: dict[str, Any] = pairs["answers"]
    return read


@pytest.fixture(scope="module")
def found(home: Path, led: dict[str, Any]) -> dict[str, Any]:
    """What `several_devices.py` printed."""
    process = started("several_devices.py", home)
    said, complaint = process.communicate(timeout=250)
    assert process.returncode == 0, complaint[-4000:]
    read: dict[str, Any] = json.loads(said.splitlines()[-1])
    return read


def started(script: str, *args: object) -> subprocess.Popen[str]:
    """A script beside this one."""
    folder = Path(__file__).parent
    paths = [str(folder.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, str(folder / script), *map(str, args)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip


def assert_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for budget in one:
        logits, theirs = (np.array(x[budget]["logits"]) for x in (one, other))
        assert np.abs(theirs - logits).max() <= 1e-5 * np.abs(logits).max()
        assert other[budget]["chosen"] == one[budget]["chosen"]


@pytest.mark.parametrize(("system", "size"), CASES)
def test_answers_and_choices_do_not_depend_on_the_devices(
    found: dict[str, Any], system: str, size: int
) -> None:
    one, split = found["answers"][f"{system} 1"], found["answers"][f"{system} {size}"]
    assert_alike(one, split)
    for budget in one:
        assert split[budget]["warm"]
        assert split[budget].get("tokens") == one[budget].get("tokens")


def test_two_processes_answer_as_one_device_does(
    found: dict[str, Any], led: dict[str, Any]
) -> None:
    one = found["answers"]["ckv 1"]
    assert_alike(one, led["answers"])
    assert led["answers"]["0.2"]["tokens"] == one["0.2"]["tokens"]
    assert led["id"] == found["id"]  # the same store
    assert led["together"] == [one["0.2"]["tokens"][:3], *[found["new text"]] * 2]
    assert led["cancelled"] == "cancelled"  # and what came after was computed
    assert "keep_kv over several processes" in led["refused"]
    assert "expected at most prefill_window=512" in led["too long"]


def test_what_a_process_cannot_read_all_compute_again(led: dict[str, Any]) -> None:
    sparse, dense = (np.array(led["damaged"][name]) for name in ("sparse", "dense"))
    assert np.array_equal(sparse, dense)


def test_what_one_process_alone_cannot_read_all_compute_again(led: dict[str, Any]) -> None:
    dense, without, after = (
        np.array(led["starved"][name]) for name in ("dense", "without", "after")
    )
    assert np.array_equal(without, dense)
    assert not np.array_equal(after, dense)  # a fifth of it takes part, once it can be read


def test_a_process_that_is_killed_fails_what_runs_and_leaves_the_store_sound(
    home: Path, led: dict[str, Any], pairs: dict[str, Any]
) -> None:
    lost = pairs["killed"]
    assert lost["follower"] == -signal.SIGKILL
    kind, said = lost["error"]
    assert kind == "ProcessLost" and said.startswith("process 1 of 2 is gone")
    assert lost["again"] == said
    for name, expected in (("store-killed", set()), ("store", {led["damaged"]["segment"]})):
        assert not list((home / name / "tmp").iterdir())
        with ChunkStore.open(home / name) as store:
            report = verify_store(store)
        assert {damage.segment_id for damage in report.damages} == expected  # by the test


def test_what_the_leader_alone_cannot_do_ends_all(pairs: dict[str, Any]) -> None:
    says = "process 0 of 2 failed: MemoryError: no room"
    assert pairs["fault"]["error"] == ["ProcessLost", says]
    assert pairs["fault"]["again"] == says  # and the follower has ended, too


def test_what_four_devices_wrote_one_reads(found: dict[str, Any]) -> None:
    assert found["same id"]
    assert_alike(found["answers"]["ckv 1"], found["written"])


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
    devices = range(4)  # refused before any is used
    model = MODEL if size != 3 else MODEL.__class__(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=6,
        num_kv_heads=3, head_dim=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match=says):
        Shardings.over(model, size, devices=list(devices))


def test_more_devices_than_there_are_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    save_pretrained(random_model(MODEL, dtype="float32"), tmp_path / "model")
    config = EngineConfig(dtype="float32", tensor_parallel=3)
    with pytest.raises(ValueError, match="got tensor_parallel=3, expected 1 to 1, the devices"):
        Engine.from_pretrained(tmp_path / "model", store=str(tmp_path / "store"), config=config)
    assert not (tmp_path / "store").exists()


def test_a_system_that_some_heads_decide_is_refused(tmp_path: Path) -> None:
    model = random_model(MODEL, dtype="float32")
    config = EngineConfig(system="impress", dtype="float32", tensor_parallel=3)
    with (
        ChunkStore.open(tmp_path / "store") as store,
        pytest.raises(ValueError, match="expected 1, the devices that the model is split over"),
    ):
        Engine(model, None, store, random_fingerprint(model), config)
    save_pretrained(model, tmp_path / "model")
    with pytest.raises(ValueError, match="system 'impress', expected 1"):
        Engine.from_pretrained(tmp_path / "model", store=str(tmp_path / "s"), config=config)
