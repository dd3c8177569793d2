"""Settings that every test runs under: CPU, no network, no silent dtype or rank promotion."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

# Many tests make the same small engine, in this process, in those that they start and in pytest's
# other workers, which inherit this: what XLA has compiled for one serves the next. Whoever runs
# tests again and again (`make mutants`) names a folder that outlives a run.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get("CKV_TESTS_COMPILED") or (
    os.environ["JAX_COMPILATION_CACHE_DIR"]
    if "PYTEST_XDIST_WORKER" in os.environ
    else tempfile.mkdtemp(prefix="ckv-tests-")
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Compiling is most of what tests do, so programs are compiled quickly rather than well: in a third
# of the time. `CKV_TESTS_OPTIMISED=1` compiles them as users do. XLA ends a process that names a
# flag which it does not know, hence the version.
if not os.environ.get("CKV_TESTS_OPTIMISED"):
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if version("jaxlib").startswith("0.10.") and "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
            " --xla_cpu_parallel_codegen_split_count=1"
        )

import jax
import psutil
import pytest
from nudge import nudge_products

from ckv_jax.config import EngineConfig

if TYPE_CHECKING:
    from command_line import Here
    from engine_sharp import Sharp

    from ckv_jax import Engine

if os.environ.keys().isdisjoint({"CKV_TESTS_COMPILED", "PYTEST_XDIST_WORKER"}):
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
# Engines of tests compile what is asked of them, and nothing besides.
EngineConfig.__init__.__kwdefaults__["warm_batch"] = 0
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Whatever survives is looked through again and again by default, which took an eighth of the
# processor: most of what tests make is JAX's, and stays.
gc.set_threshold(10_000, 20, 20)

# Tests that hold on any processor hold whatever a product's last bits are.
nudge_products()

MOST_BYTES = 1.9e9
"""Resident memory of a worker with which one more file of tests may begin; the largest of them
takes 0.55e9 more."""

give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Returns what is free in the heap to the system; where its C library can. Half of what programs
took stays there otherwise."""


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of benchmarks and the store's sweeps are for `make test-all`."""
    if item.path.parent.name in ("bench", "proof"):
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: whichever worker ends early finds short ones to take over."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """What was imported stays: looking through it again and again took a sixth of the time that
    tests need when nothing is compiled."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def room_for_programs() -> Iterator[None]:
    """What was compiled is let go, and compiled again by whoever needs it, before it takes more
    memory than some: a program of one line takes a megabyte, and JAX keeps each for good."""
    yield
    from engine_support import compiled_layers

    if psutil.Process().memory_info().rss > MOST_BYTES:
        compiled_layers.cache_clear()
        jax.clear_caches()
        gc.collect()
        if give_back is not None:
            give_back(0)


@pytest.fixture
def optimised() -> Iterator[None]:
    """For tests that compute more than they compile: programs as users have them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """here(*args) is a run of `ckv` in this process: its exit code, stdout and stderr."""
    from command_line import in_this_process

    return in_this_process(monkeypatch, capsys)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of a real instruct model; fetched once, skipped where it cannot be."""
    from real_model import smollm2_gguf

    return smollm2_gguf()


@pytest.fixture(scope="session")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sharp]:
    """A model that many tests share, and what is compiled for it."""
    from engine_sharp import Sharp

    made = Sharp(tmp_path_factory.mktemp("sharp"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(sharp: Sharp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One of that model over a store of its own, which a module's tests share."""
    with sharp.fresh(tmp_path_factory.mktemp("store")) as made:
        yield made
