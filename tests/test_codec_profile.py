"""What rounding costs a model's layers, measured, and the table that follows from it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from command_line import Here

from ckv_jax.codec_profile import Profile, measured
from ckv_jax.model.convert import convert
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.weights import random_model, save_pretrained
from ckv_jax.sample_texts import pieces_of
from ckv_jax.storage.bits_table import pairs_of, read_table, table
from ckv_jax.storage.codec import codec_id, decoded, encoded
from ckv_jax.storage.layout import Layout
from ckv_jax.systems import preset
from tests.model.small import CONFIG, write_tokenizer

LAYOUT = Layout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float32", pack_layers=4)
WORDS = "the lamp was lit at two and the keeper wrote of rain, fog and a broken fuse. "


@pytest.fixture(scope="module")
def model() -> Transformer:
    """Its second layer's keys have one head of large values, its third nothing to tell apart."""
    made = random_model(CONFIG, dtype="float32", seed=3)
    for layer, (keys, values) in zip(made.layers, ((4, 1), (60, 1), (1e-3, 1)), strict=True):
        kernel = layer.attention.kv_kernel
        scale = np.repeat([keys, values], 32).astype(np.float32)
        kernel[...] = kernel[...] * jnp.asarray(scale)[None]
        layer.attention.query_kernel[...] = layer.attention.query_kernel[...] * 4
    return made


@pytest.fixture(scope="module")
def found(model: Transformer) -> Profile:
    tokens = np.random.default_rng(0).integers(3, 96, 300).astype(np.int32)
    return measured(model, LAYOUT, [tokens[:150], tokens[150:]])


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_losses_are_those_of_an_attention_in_numpy(model: Transformer, found: Profile) -> None:
    """The first layer's, whose input needs no other."""
    tokens = np.random.default_rng(0).integers(3, 96, 300).astype(np.int32)
    layer, expected = model.layers[0], []
    for piece in (tokens[:150], tokens[150:]):
        hidden = model.embed(jnp.asarray(piece)[None])
        q, k, v = (
            np.asarray(x, np.float64)[0] for x in layer.project(hidden, jnp.arange(150)[None])
        )

        def heads(k: np.ndarray, v: np.ndarray, q: np.ndarray = q) -> np.ndarray:
            k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
            scores = np.einsum("qhd,thd->hqt", q[113:], k) / 4
            scores[:, np.arange(150)[None] > np.arange(113, 150)[:, None]] = -np.inf
            return np.einsum("hqt,thd->qhd", softmax(scores), v)

        def off(pair: tuple[int, int], k: np.ndarray = k, v: np.ndarray = v) -> float:
            rounded = []
            for x, bits in zip((k, v), pair, strict=True):
                low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
                step = (high - low) / (2**bits - 1)
                rounded.append(low + np.rint((x - low) / step) * step)
            exact = heads(k, v)
            return float(np.square(heads(*rounded) - exact).sum() / np.square(exact).sum())

        expected.append([off(pair) for pair in pairs_of(LAYOUT)])
    # The codec's scale and zero are bfloat16, so that it is off by a little more or less.
    np.testing.assert_allclose(found.squares[0], np.mean(expected, axis=0), rtol=0.3)


def test_fewer_bits_lose_more_and_keys_matter_where_they_tell_apart(found: Profile) -> None:
    pairs = pairs_of(LAYOUT)
    by = {pair: found.squares[:, i] for i, pair in enumerate(pairs)}
    for narrow, wide in (((2, 8), (4, 8)), ((4, 8), (8, 8)), ((8, 2), (8, 4)), ((8, 4), (8, 8))):
        assert (by[narrow] >= by[wide]).all()
    assert by[2, 8][1] > by[8, 2][1] and by[2, 8][2] < by[8, 2][2] / 100
    choice = found.within_bytes(3 * 2 * 2 * (4 + 16 * 6 / 8))  # six bits each on average
    keys = [pair[0] for pair in choice.codec.bits]
    assert keys[1] == 8 and keys[2] == 2


def test_a_table_keeps_to_its_bytes_or_its_loss(found: Profile) -> None:
    uniform = {pair: table([pair] * 3) for pair in pairs_of(LAYOUT)}
    size = uniform[8, 4].num_bytes(LAYOUT) / 16
    choice = found.within_bytes(size)
    pairs = pairs_of(LAYOUT)
    even = np.sqrt(found.squares[:, pairs.index((8, 4))].mean())
    assert choice.bytes_per_token <= size and choice.loss <= even
    assert choice.loss == pytest.approx(np.sqrt(np.mean(np.square(choice.layers))))
    again = found.within_loss(choice.loss)
    assert again.loss <= choice.loss and again.bytes_per_token <= choice.bytes_per_token
    with pytest.raises(ValueError, match="8 bits everywhere"):
        found.within_loss(1e-9)
    with pytest.raises(ValueError, match="expected at least"):
        found.within_bytes(10)


def test_pieces_are_of_all_texts() -> None:
    texts = [np.arange(5000), np.arange(5000, 5100)]
    pieces = pieces_of(texts, 4096)
    assert [len(piece) for piece in pieces] == [1024, 1024, 100] and pieces[1][0] == 1024
    with pytest.raises(ValueError, match="a text of 63 tokens, expected at least 64"):
        pieces_of([np.arange(63)], 4096)


def test_a_store_gives_back_what_was_measured() -> None:
    """A table of one pair rounds as that pair does everywhere."""
    packs = np.random.default_rng(0).standard_normal((2, *LAYOUT.pack_shape)).astype(np.float32)
    made = []
    for codec in (table([(8, 4)] * 3), preset("ckv", codec="k8v4").coder):
        assert codec is not None
        size = codec.num_bytes(LAYOUT)
        layout = dataclasses.replace(LAYOUT, codec=codec_id(codec), codec_bytes=size)
        made.append(decoded(codec, encoded(codec, packs, 0, layout), 0, layout))
    np.testing.assert_array_equal(*made)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    config = dataclasses.replace(CONFIG, vocab_size=300)  # the tokenizer's
    save_pretrained(random_model(config), home / "model")
    write_tokenizer(home / "model")
    convert(home / "model", home / "orbax", to="orbax")
    (home / "text.txt").write_text(WORDS * 10)
    return home


def test_a_table_is_made_used_and_shown(home: Path, tmp_path: Path, here: Here) -> None:
    out, store = tmp_path / "table.json", tmp_path / "kv"
    command = ("codec", "profile", home / "model", "--text", home / "text.txt")
    code, said, err = here(*command, "--tokens", 256, "--target-bytes", "200", "--out", out)
    assert code == 0, err
    assert "attention is off by" in said and f"--codec {out}" in said
    body = json.loads(out.read_text())
    assert body["bytes_per_token"] <= 200 and len(body["bits"]) == 3 == len(body["loss_of_layers"])
    code, said, _ = here(
        "codec", "profile", home / "orbax", "--text", home / "text.txt", "--tokens", 256,
        "--target-bytes", "200", "--json",
    )  # fmt: skip
    assert code == 0 and json.loads(said) == body | {"model": "orbax"}
    ingest = ("ingest", home / "model", home / "text.txt", "--store", store, "--json")
    code, said, err = here(*ingest, "--codec", out)
    assert code == 0, err
    stored = json.loads(said)
    assert stored["codec"] == read_table(out).name
    assert (
        here(*ingest, "--codec", stored["codec"])[1] and len(list(store.glob("segments/*/*"))) == 1
    )
    code, said, _ = here("inspect", store, stored["prefix"], "--json")
    found = json.loads(said)
    assert code == 0 and found["prefix"]["bits"] == body["bits"]
    assert found["segments"][0]["layout"]["codec"] == f"{stored['codec']}:1"
    code, said, _ = here("inspect", store, stored["prefix"])
    keys, values = body["bits"][0]
    assert "bits of K, V" in said and f"{keys}, {values}" in said
    code, said, err = here(
        "ask", home / "model", "lamp", "--store", store, "--no-warm-up", "--json"
    )
    assert code == 0 and json.loads(said)["codec"] == f"{stored['codec']}:1", err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ('{"bits": [[8, 4], [8, 4]]}', "bits of 2 layers, expected 3"),
        ('{"bits": [[8, 4], [8, 4], [8, 5]]}', "layer 2: got [8, 5]"),
        ("not a table", "is not a table of bits"),
        (None, "no such file"),
    ],
)
def test_what_is_no_table_of_this_model_stores_nothing(
    home: Path, tmp_path: Path, here: Here, given: str | None, says: str
) -> None:
    path, store = tmp_path / "t.json", tmp_path / "kv"
    if given is not None:
        path.write_text(given)
    code, out, err = here(
        "ingest", home / "model", home / "text.txt", "--store", store, "--codec", path
    )
    assert (code, out) == (1, "") and says in err and len(err.splitlines()) == 1
    assert not store.exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--target-bytes", "9"], "expected at least"),
        (["--target-loss", "0"], "8 bits everywhere"),
        (["--target-loss", "0.1", "--target-bytes", "9"], "expected one of them"),
        (["--out", "/nowhere/x.json"], "cannot be written"),
        (["--text", "/nowhere"], "no such file"),
        (["--system", "magic"], "contiguous-kv"),
    ],
)
def test_bad_input_is_one_clear_line(home: Path, here: Here, args: list[str], says: str) -> None:
    text = () if "--text" in args else ("--text", home / "text.txt")
    code, out, err = here("codec", "profile", home / "model", "--tokens", 64, *text, *args)
    assert (code, out) == (1, "") and says in err and len(err.splitlines()) == 1
