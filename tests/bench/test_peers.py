"""Peers: one that is missing or fails is told and the others go on; what runs answers rightly."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import struct
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bench.peers import PEERS
from bench.peers.__main__ import main
from bench.peers.base import Answer, Case, Held, Holder, NotForThis, Page, Way
from bench.peers.comparison import compare
from bench.peers.gguf_file import BFLOAT16, FLOAT32, write_gguf
from bench.peers.hugging_face import Transformers
from tests.engine_support import SMALL
from tests.numpy_qwen import NumpyQwen

MODEL = dataclasses.replace(
    SMALL, hidden_size=32, intermediate_size=32, num_layers=3, tie_word_embeddings=False
)
TOKENS = np.random.default_rng(1).integers(0, MODEL.vocab_size, 60).astype(np.int32)
SUFFIXES = tuple(np.random.default_rng(2).integers(0, MODEL.vocab_size, (4, 5)).astype(np.int32))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[NumpyQwen, Path]:
    """A model of sharp attention, whose answers depend on what it sees, and its folder."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = NumpyQwen(MODEL, seed=3)
    model.save(folder)
    return model, folder


def case(folder: Path, answers: np.ndarray | None = None, pages: int = 1) -> Case:
    page = Page(tokens=TOKENS, suffixes=SUFFIXES, answers=answers)
    return Case(name="small", folder=folder, pages=(page,) * pages, recomputes=1)


def expected(model: NumpyQwen, suffix: np.ndarray, rows: np.ndarray) -> int:
    """The token after a suffix that sees these rows of the prefix, and stands behind all of it."""
    positions = len(TOKENS) + np.arange(len(suffix))
    seen = np.concatenate(
        [np.ones((len(suffix), len(rows)), bool), np.tri(len(suffix), dtype=bool)], axis=1
    )
    hidden = model.embed(suffix)
    for layer, past in enumerate(model.prefill(TOKENS)):
        own = model.kv(layer, hidden, positions)
        kv = tuple(np.concatenate([a[rows], b]) for a, b in zip(past, own, strict=True))
        hidden = model.layer(layer, hidden, positions, kv, seen)  # type: ignore[arg-type]
    return int(model.logits(hidden[-1]).argmax())


def keeping(rows: np.ndarray) -> Callable[[Any], contextlib.AbstractContextManager[None]]:
    """A press, as kvpress makes them, that leaves these rows of every layer's cache."""

    @contextlib.contextmanager
    def press(model: Any) -> Iterator[None]:
        def hook(module: Any, _: object, kwargs: dict[str, Any], output: Any) -> Any:
            name = "cache" if "cache" in kwargs else "past_key_values"  # before transformers 5.24
            cached = kwargs[name].layers[module.layer_idx]
            cached.keys, cached.values = cached.keys[:, :, rows], cached.values[:, :, rows]
            return output

        layers = model.model.layers
        hooks = [x.self_attn.register_forward_hook(hook, with_kwargs=True) for x in layers]
        yield
        for made in hooks:
            made.remove()

    return press


def test_transformers_computes_all_of_it_or_the_suffix_over_what_is_kept(
    checkpoint: tuple[NumpyQwen, Path],
) -> None:
    model, folder = checkpoint
    everything, some = np.arange(len(TOKENS)), np.arange(3, len(TOKENS), 4)
    theirs = Transformers(folder, dtype="float32")
    theirs.hold(TOKENS)
    full = [expected(model, suffix, everything) for suffix in SUFFIXES]
    assert [theirs.suffix(suffix)[1] for suffix in SUFFIXES] == full
    assert [theirs.recompute(suffix)[1] for suffix in SUFFIXES[:2]] == full[:2]
    assert theirs.further(SUFFIXES[0], SUFFIXES[1]) > 0
    assert theirs.suffix(SUFFIXES[0])[1] == full[0]  # it has left nothing in the cache
    assert theirs.kept == 1
    theirs.hold(TOKENS, press=keeping(some))
    pruned = [expected(model, suffix, some) for suffix in SUFFIXES]
    assert pruned != full  # it matters what is seen
    assert [theirs.suffix(suffix)[1] for suffix in SUFFIXES] == pruned
    assert theirs.kept == len(some) / len(TOKENS)


class Fake:
    """A peer whose one way gives each question's number, and that fails where it is told to."""

    packages: tuple[str, ...] = ()
    install = "pip install fake"

    def __init__(self, fails: str = "", error: Exception | None = None) -> None:
        self._fails, self._error = fails, error or RuntimeError("no luck\nand a long trace")
        self._pages = 0

    @contextlib.contextmanager
    def open(self, case: Case, work: Path) -> Iterator[Holder]:
        def hold(page: Page) -> Held:
            self._pages += 1
            if self._fails == "second page" and self._pages == 2:
                raise self._error
            return {"way": Way(ask=ask, kept=0.25, most=3), "other": "not built for this"}

        def ask(suffix: np.ndarray) -> Answer:
            if self._fails == "question":
                raise self._error
            return Answer(token=int(suffix[0]), ms=2.0, parts_ms={"part": 0.5}, token_ms=0.25)

        if self._fails == "open":
            raise self._error
        yield hold


class Missing(Fake):
    packages = ("a_package_that_nobody_has",)


def test_one_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    answers = np.array([suffix[0] for suffix in SUFFIXES])
    answers[1] += 1
    rows = compare(
        case(tmp_path, answers, pages=2),
        {
            "good": Fake(), "open": Fake("open"), "page": Fake("second page"),
            "question": Fake("question"), "missing": Missing(),
            "apart": Fake("open", NotForThis("has no part in this")),
        },
        tmp_path,
    )  # fmt: skip
    reasons = {(row["peer"], row["what"]): row["why_skipped"] for row in rows}
    assert reasons == {
        ("good", "way"): None,
        ("good", "other"): "not built for this",
        ("page", "way"): "RuntimeError: no luck",
        ("page", "other"): "not built for this",
        ("question", "way"): "RuntimeError: no luck",
        ("question", "other"): "not built for this",
        ("open", None): "RuntimeError: no luck",
        ("missing", None): "a_package_that_nobody_has is not installed: pip install fake",
        ("apart", None): "has no part in this",
    }
    good = rows[0]
    assert (good["right"], good["questions"], good["ttft_ms"]["n"]) == (4, 6, 6)  # 3 of each page
    assert (good["token_ms"]["mean"], good["token_ms"]["n"]) == (0.25, 6)
    assert (good["kept"], good["parts_ms"], good["tokens"]) == (0.25, {"part": 0.5}, len(TOKENS))
    assert all("ttft_ms" not in row for row in rows if row["why_skipped"])


def test_without_any_peer_installed_ours_is_measured_and_the_rest_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = {package for peer in PEERS.values() for package in peer.packages}
    there = importlib.import_module

    def without(name: str, package: str | None = None) -> types.ModuleType:
        if name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return there(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    out = tmp_path / "peers.json"
    command = "--model tiny --prefix-tokens 64 --suffix-tokens 8 --repeats 2 --documents 0"
    command += " --text-tokens 4"
    main([*command.split(), "--budgets", "1", "--folder", str(tmp_path), "--json", str(out)])
    found = json.loads(out.read_text())
    ours, *rest = found["rows"]
    assert ours["peer"] == "ckv" and ours["ttft_ms"]["p50"] > 0 and ours["ttft_ms"]["n"] == 2
    assert ours["token_ms"]["p50"] > 0 and ours["token_ms"]["n"] == 2
    assert {row["peer"] for row in rest} == set(PEERS)
    printed = capsys.readouterr().out
    for row in rest:
        assert "pip install" in row["why_skipped"] and row["why_skipped"] in printed
    assert [path.name for path in tmp_path.iterdir()] == ["peers.json"]  # nothing is left behind


@pytest.mark.parametrize("given", ["vllm", "transformers,vllm", ","])
def test_an_unknown_peer_names_those_there_are(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--peers", given])
    assert error.value.code == 2
    assert "expected some of transformers, llama.cpp, kvpress" in capsys.readouterr().err


def test_a_gguf_file_holds_the_checkpoint_as_llama_cpp_names_it(
    checkpoint: tuple[NumpyQwen, Path], tmp_path: Path
) -> None:
    model, folder = checkpoint
    path = tmp_path / "model.gguf"
    write_gguf(folder, path)
    pairs, tensors = parsed(path.read_bytes())
    assert pairs["general.architecture"] == "qwen2"
    assert pairs["qwen2.block_count"] == 3 and pairs["qwen2.vocab_size"] == MODEL.vocab_size
    assert pairs["qwen2.attention.head_count_kv"] == MODEL.num_kv_heads
    assert pairs["qwen2.rope.freq_base"] == MODEL.rope_theta
    assert pairs["qwen2.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert len(tensors) == len(model.weights)
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.2.self_attn.k_proj.bias": "blk.2.attn_k.bias",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "model.layers.1.post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
    }.items():
        weight = model.weights[ours]
        wide = np.float32 if weight.ndim == 1 else ml_dtypes.bfloat16
        np.testing.assert_array_equal(tensors[theirs], weight.astype(wide).astype(np.float32))


def parsed(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Pairs and tensors (float32) of a GGUF file, read as its format is described."""
    at = 0

    def take(form: str) -> Any:
        nonlocal at
        values = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return values[0] if len(values) == 1 else values

    def text() -> str:
        size = take("Q")
        return str(take(f"{size}s"), "utf-8")

    assert take("4s") == b"GGUF" and take("I") == 3
    count, keys = take("Q"), take("Q")
    readers = {4: lambda: take("I"), 6: lambda: take("f"), 8: text}
    pairs = {text(): readers[take("I")]() for _ in range(keys)}
    places = {}
    for _ in range(count):
        name, dims = text(), take("I")
        shape = [take("Q") for _ in range(dims)]
        places[name] = (shape[::-1], take("I"), take("Q"))
    start = -(-at // pairs["general.alignment"]) * pairs["general.alignment"]
    dtypes = {FLOAT32: np.dtype(np.float32), BFLOAT16: np.dtype(ml_dtypes.bfloat16)}
    tensors = {}
    for name, (shape, kind, offset) in places.items():
        assert offset % 32 == 0
        flat = np.frombuffer(data, dtypes[kind], int(np.prod(shape)), start + offset)
        tensors[name] = flat.reshape(shape).astype(np.float32)
    return pairs, tensors
