"""What one adds to the engine is one object, and touches no other file."""

from __future__ import annotations

import ast
import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_support import TIGHT, scale_error, small_engine, tokens
from engine_tiny import TINY, tiny_engine
from safetensors import safe_open

from ckv_jax import EngineConfig, Request, SamplingParams, SystemConfig
from ckv_jax.config import OwnParts
from ckv_jax.errors import CkvError
from ckv_jax.kernels_pallas.score.probe import Keys, Probe
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.families import FAMILIES
from ckv_jax.model.families.family import NAMES, Family
from ckv_jax.model.weights import load_pretrained, random_model, save_pretrained
from ckv_jax.pipeline.batch import Batch
from ckv_jax.pipeline.executor import Executor, FirstToken, ReprefillExecutor
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.policy import Policy
from ckv_jax.selection.select import Select
from ckv_jax.serving.worker import Worker
from ckv_jax.storage import Layout, verify_store
from ckv_jax.systems import system_named
from ckv_jax.trace import Trace
from tests.support.pages import DOCS, add_largest, blocks


def the_last_chunks(
    q: jnp.ndarray, probe: Probe, *, num_tokens: jnp.ndarray, q_lengths: jnp.ndarray,
    chunk_tokens: int, target: Target,
) -> jnp.ndarray:  # fmt: skip
    """A selector: later chunks are worth more."""
    chunks = jnp.arange(probe.shape[0] // chunk_tokens, dtype=jnp.float32)
    return jnp.broadcast_to(chunks[None, :], (q.shape[0], len(chunks)))


def first_come(importance: np.ndarray, frequency: np.ndarray, last_used: np.ndarray) -> np.ndarray:
    """A cache policy: what was used earliest stays."""
    return np.where(last_used > 0, 1.0 / np.maximum(last_used, 1), 0.0)


@dataclasses.dataclass(frozen=True)
class Inverted:
    """A codec: every bit the other way round, and `more` bytes that mean nothing."""

    more: int
    name = "inverted"
    version = 1

    def num_bytes(self, layout: Layout) -> int:
        return layout.pack_bytes + self.more

    def encode(self, packs: np.ndarray, layout: Layout) -> np.ndarray:
        return np.pad(~packs.reshape(len(packs), -1).view(np.uint8), [(0, 0), (0, self.more)])

    def decode(self, stored: jax.Array, layout: Layout) -> jax.Array:
        bits = (~stored[:, : layout.pack_bytes]).reshape(
            -1, *layout.pack_shape, layout.disk_dtype.itemsize
        )
        return jax.lax.bitcast_convert_type(bits, layout.disk_dtype)


class Halved(Executor):
    """An executor: each request selects from half of its budget."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.runtime)

    def run(self, batch: Batch, packs: Packs, trace: Trace, *, hold: bool = False) -> FirstToken:
        members = tuple(
            dataclasses.replace(member, limits=(member.limits + 1) // 2) for member in batch.members
        )
        halved = dataclasses.replace(batch, members=members)
        return super().run(halved, packs, trace, hold=hold)


HALVED = SystemConfig(
    name="halved", chunk_tokens=16, period=2, subperiod=1, pack_layers=1, digest="int4",
    policy="lru", own=OwnParts(executor=Halved, generates=False),
)  # fmt: skip
"""A system, found as `test_seams:HALVED`."""


TOY = Family(
    model_type="toy",
    title="Toy",
    architecture="ToyForCausalLM",
    names={**NAMES, "embedding": "words", "layer": "blocks.{}", "query": "attention.q",
           "down": "feed.down"},
    always_biased=True,
    defaults={"num_key_value_heads": 1},
)  # fmt: skip
"""A model family: Qwen2.5's layers by other names."""


@pytest.mark.parametrize(
    "names", ["the_last_chunks", "first_come", "Inverted", "Halved HALVED", "TOY"]
)
def test_each_is_thirty_lines_at_most(names: str) -> None:
    lines = 0
    for part in ast.parse(Path(__file__).read_text("utf-8")).body:
        named = part.targets[0] if isinstance(part, ast.Assign) else part
        if getattr(named, "name", getattr(named, "id", "")) in names.split():
            first = min(one.lineno for one in (part, *getattr(part, "decorator_list", ())))
            lines += part.end_lineno - first + 1
    assert 3 <= lines <= 30


def test_a_system_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    config = EngineConfig(system="test_seams:HALVED", dtype="float32")
    with tiny_engine(tmp_path) as plain, plain.variant(config) as engine:
        prefix = engine.ingest(tokens(160))
        request = Request(prefix=prefix, suffix=[1, 2], budget=0.4)
        (result,) = engine.reprefill([request])
        assert result.error is None
        assert [len(ids) for ids in engine.last_selection(prefix)] == [2, 2]  # of 10 chunks
        (refused,) = engine.generate(request).results()
        assert "system 'halved' serves first tokens only" in str(refused.error)


def test_an_executor_that_answers_nothing_is_refused(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as plain:
        threads = set(threading.enumerate())
        for made, name in ((ReprefillExecutor(), "ReprefillExecutor"), (3, "int")):
            own = OwnParts(executor=lambda worker, made=made: made)
            system = dataclasses.replace(HALVED, own=own)
            with pytest.raises(
                ValueError, match=f"got {name} from the executor of system 'halved'"
            ):
                plain.variant(EngineConfig(system=system, dtype="float32"))
        assert set(threading.enumerate()) <= threads


def test_a_selector_and_a_policy_of_ones_own(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as plain:
        pack = plain.layout.pack_bytes
        prefix, other = plain.ingest(tokens(160)), plain.ingest(tokens(160, 1))
        system = dataclasses.replace(
            plain.system,
            reprefill=Select(score=the_last_chunks, score_layers=3),
            policy=Policy(first_come),
            prefetch="intra",
        )
        config = dataclasses.replace(
            plain.config, system=system, device_cache_bytes=8 * pack, host_cache_bytes=0
        )
        with plain.variant(config) as engine:
            for text in (prefix, other, prefix):
                request = Request(prefix=text, suffix=[1, 2], budget=0.2)
                (result,) = engine.reprefill([request])
                for selected in engine.last_selection(text):
                    assert selected.tolist() == [8, 9]
            assert result.trace.bytes["ssd"] == 0  # two chunks of four layers: the first to come
            assert result.trace.bytes["device"] == 8 * pack


@pytest.mark.parametrize(
    ("more", "mapped", "dtype"), [(0, True, "float32"), (9, False, "bfloat16")]
)
def test_a_codec_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, mapped: bool, dtype: str
) -> None:
    """`mapped`: a CPU's pool; otherwise what a device has of its own."""
    text, small_pool = tokens(200), {"device_cache_bytes": 0, "host_cache_bytes": 0}
    # Past the window an ingest reads back, and decodes, what it has written.
    window = {"prefill_block": 16, "prefill_window": 32}
    with tiny_engine(tmp_path, dtype=dtype, **small_pool, **window) as plain:
        prefix = plain.ingest(text)
        system = dataclasses.replace(plain.system, codec=Inverted(more))
        monkeypatch.setattr(Target, "in_host_memory", mapped)
        with plain.variant(dataclasses.replace(plain.config, system=system)) as engine:
            missed = engine.store.longest_prefix(
                text, fingerprint=engine.fingerprint, layout=engine.layout
            )
            assert missed.num_tokens == 0  # though the other engine's is there
            (refused,) = engine.reprefill([Request(prefix=prefix, suffix=[1])])
            assert isinstance(refused.error, (CkvError, ValueError))
            engine.ingest(text[:100])
            stored = engine.ingest(text)  # goes on from there
            assert len(stored.spans) == 2 and stored.id != prefix.id
            for budget in (0.2, 1.0):
                got, expected = (
                    one.reprefill([Request(prefix=its, suffix=[1, 2], budget=budget)])[0]
                    for one, its in ((engine, stored), (plain, prefix))
                )
                np.testing.assert_array_equal(got.logits, expected.logits)
                assert got.trace.bytes["ssd"] > 0
            assert engine.layout.stored_bytes == plain.layout.pack_bytes + more
        assert verify_store(plain.store).ok


def test_a_family_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a Qwen2.5 under the family's names give the same answers."""
    monkeypatch.setitem(FAMILIES, TOY.model_type, TOY)
    save_pretrained(random_model(TINY, dtype="float32"), tmp_path / "qwen2")
    toy = random_model(dataclasses.replace(TINY, model_type="toy"), dtype="float32")
    save_pretrained(toy, tmp_path / "toy")
    written = json.loads((tmp_path / "toy" / "config.json").read_text())
    for omitted in TOY.defaults:
        del written[omitted]
    (tmp_path / "toy" / "config.json").write_text(json.dumps(written))
    with safe_open(tmp_path / "toy" / "model.safetensors", "np") as file:
        assert {"words.weight", "blocks.3.attention.q.bias"} < set(file.keys())
    answers = []
    for name in ("qwen2", "toy"):
        weights = load_pretrained(tmp_path / name, dtype="float32")
        with small_engine(tmp_path / f"{name}.kv", system="ckv", weights=weights) as engine:
            request = Request(prefix=engine.ingest(tokens(160)), suffix=[1, 2], budget=0.4)
            (result,) = engine.reprefill([request])
            assert result.error is None and result.trace.bytes["ssd"] > 0
            answers.append(result.logits)
    np.testing.assert_array_equal(*answers)


# -- the examples of the pages ---------------------------------------------------------------------


def test_the_codec_of_its_page_runs(tmp_path: Path) -> None:
    """Half of the bytes, and an answer near the exact one."""
    names: dict[str, Any] = {}
    for code in blocks(DOCS / "add_a_codec.md", "python")[:2]:
        exec(compile(code, "add_a_codec.md", "exec"), names)
    with tiny_engine(tmp_path, dtype="bfloat16") as plain:
        system = dataclasses.replace(plain.system, codec=names["config"].system.codec)
        with plain.variant(dataclasses.replace(plain.config, system=system)) as engine:
            request = Request(prefix=engine.ingest(tokens(200)), suffix=[1, 2, 3], budget=1.0)
            (result,) = engine.reprefill([request])
            assert engine.layout.stored_bytes * 2 == engine.layout.pack_bytes
            assert result.codec == "float8:1"
            assert scale_error(result.logits, engine.recompute(request).logits) < 0.05


@pytest.fixture
def largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemConfig:
    """The system of add_a_system.md."""
    return system_named(add_largest(tmp_path, monkeypatch))


def test_the_system_of_its_page_runs(tmp_path: Path, largest: SystemConfig) -> None:
    with small_engine(tmp_path / "store", system=largest, model=TINY) as engine:
        prefix = engine.ingest(tokens(200))
        request = Request(prefix=prefix, suffix=[1, 2, 3], budget=0.25)
        (result,) = engine.reprefill([request])
        assert result.error is None and 0 < result.trace.attention_mass < 1
        # Of 25 chunks a quarter, the first 2 and the last 8.
        assert [len(ids) for ids in engine.last_selection(prefix)] == [17, 17]
        text = engine.generate(request, SamplingParams(max_tokens=3)).results()[0]
        assert text.error is None and len(text.token_ids) == 3
        (exact,) = engine.reprefill([Request(prefix=prefix, suffix=[1, 2, 3], budget=1.0)])
        assert scale_error(exact.logits, engine.recompute(exact.request).logits) < TIGHT


def test_its_score_is_of_real_queries_and_keys(largest: SystemConfig) -> None:
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 5, 4, 8)).astype(np.float32)
    keys = rng.normal(size=(32, 2, 8)).astype(np.float32)
    score = largest.reprefill.score
    found = jax.jit(score, static_argnames=("chunk_tokens", "target"))(
        q, Keys(keys), num_tokens=np.int32(19), q_lengths=np.array([5, 2], np.int32),
        chunk_tokens=8, target=None,
    )  # fmt: skip
    for row, queries in enumerate((5, 2)):
        grouped = q[row, :queries].reshape(queries, 2, 2, 8)
        best = np.einsum("skgd,tkd->tskg", grouped, keys[:19]).max(axis=(1, 2, 3))
        expected = [best[start : start + 8].max(initial=-np.inf) for start in (0, 8, 16, 24)]
        np.testing.assert_allclose(found[row], expected, rtol=1e-5)
