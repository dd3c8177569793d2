"""`ckv heads profile`: heads that find what a text repeats, and prefixes that they alone score."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from command_line import Here
from engine_support import SMALL

from ckv_jax.data.reference import LEARNED, demo_ledger, reference_folder
from ckv_jax.head_profile import EXCERPT, Profile, measured
from ckv_jax.model.weights import load_pretrained, random_model, save_pretrained
from ckv_jax.sample_texts import pieces_of
from tests.model.small import write_tokenizer

WORDS = "the lamp was lit at two and the keeper wrote of rain, fog and a broken fuse. "


def test_the_reference_has_two_heads_in_four_that_find_things() -> None:
    model = load_pretrained(reference_folder(), dtype="float32")
    text = demo_ledger(900, 512, asked=LEARNED).tokens
    counted: list[tuple[int, int]] = []
    profile = measured(model, 4, [text, text[:300]], lambda *at: counted.append(at))
    found = profile.found
    assert found.shape == (16, 4) and ((found >= 0) & (found <= 1)).all()
    assert counted == [(n, 32) for n in range(1, 33)]
    assert profile.chance == pytest.approx((17 / 512 + 17 / 300) / 2)  # tokens that count as found
    assert found[:, 2:].max() < 2 * profile.chance < found[4:13].max(axis=1).min()
    assert found[[4, 8, 12], 1].min() > 0.4
    assert (profile.held >= 1 / 20).all() and (profile.held <= 1).all()
    (first, *rest) = profile.best(4, 1)
    assert (
        first[0] < 4 and profile.held[first] == profile.held[:4].max()
    )  # there is nothing to find
    assert len(rest) == 3 and all(found[pair] > 0.4 for pair in rest)
    again = measured(model, 4, [text, text[:300]])
    np.testing.assert_array_equal(found, again.found)


def test_of_each_period_the_layers_with_the_best_heads() -> None:
    found, held = np.zeros((2, 6, 3), np.float32)
    found[1, 2], found[2, 0], found[2, 1], found[4, 1] = 0.5, 0.6, 0.7, 0.1
    held[2, 2], held[4, 0], held[5, 2] = 0.9, 0.4, 0.3
    profile = Profile(found, 0.05, held)
    assert profile.best(4, 1) == ((2, 1), (4, 0))  # what chance would find is none
    assert profile.best(4, 2) == ((1, 2), (2, 1), (4, 0), (5, 2))
    assert profile.best(4, 9) == ((0, 0), (1, 2), (2, 1), (3, 0), (4, 0), (5, 2))


def test_pieces_are_of_all_texts() -> None:
    texts = [np.arange(5000), np.arange(5000, 5100)]
    pieces = pieces_of(texts, 4096)
    assert [len(piece) for piece in pieces] == [1024, 1024, 100] and pieces[1][0] == 1024
    with pytest.raises(ValueError, match="a text of 63 tokens, expected at least 64"):
        pieces_of([np.arange(63)], 4096)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    config = dataclasses.replace(SMALL, vocab_size=300)  # the tokenizer's
    save_pretrained(random_model(config), home / "model")
    write_tokenizer(home / "model")
    (home / "text.txt").write_text(WORDS * 10)
    return home


def test_heads_are_found_used_and_shown(home: Path, tmp_path: Path, here: Here) -> None:
    out, store = tmp_path / "heads.json", tmp_path / "kv"
    command = ("heads", "profile", home / "model", "--text", home / "text.txt", "--tokens", 128)
    code, said, err = here(*command, "--layers", 1, "--out", out)
    assert code == 0, err
    assert f"--heads {out}" in said and "3 of 20 heads" in said
    body = json.loads(out.read_text())
    assert len(body["heads"]) == 3 == len(body["found"])
    code, again, _ = here(*command, "--layers", 1, "--json")
    assert code == 0 and json.loads(again) == body
    ingest = ("ingest", home / "model", home / "text.txt", "--store", store, "--json")
    code, said, err = here(*ingest, "--heads", out)
    assert code == 0, err
    stored = json.loads(said)
    code, said, _ = here("inspect", store, stored["prefix"], "--json")
    layout = json.loads(said)["segments"][0]["layout"]
    assert code == 0
    assert [[*pair] for pair in zip(layout["digest_layers"], layout["digest_heads"], strict=True)] \
        == body["heads"]  # fmt: skip
    assert "digest int4 of 3 heads" in here("inspect", store)[1]
    code, said, err = here(
        "ask", home / "model", "lamp", "--store", store, "--budget", "0.5", "--no-warm-up", "--json"
    )
    assert code == 0 and json.loads(said)["prefix_tokens"] == stored["tokens"], err
    ask = ("ask", home / "model", "lamp", "--store", store, "--no-warm-up", "--json")
    code, said, err = here(*ask, "--system", "recompute")
    assert code == 0 and json.loads(said)["bytes"]["ssd"] == 0, err
    code, _, err = here(*ask, "--system", "contiguous-kv")
    assert code == 1 and "stored with --system ckv --heads, asked with" in err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ('{"heads": [[0, 0]]}', "some of 10 layers with 2 KV heads, in each period"),
        ('{"heads": [[0, 0], [4, 2], [8, 0]]}', "some of 10 layers with 2 KV heads"),
        ('{"heads": [[4, 0], [0, 0]]}', "at most one a layer, layers ascending"),
        ("no heads", "got no list of heads"),
        (None, "no such file"),
    ],
)
def test_what_names_no_heads_of_this_model_stores_nothing(
    home: Path, tmp_path: Path, here: Here, given: str | None, says: str
) -> None:
    path, store = tmp_path / "h.json", tmp_path / "kv"
    if given is not None:
        path.write_text(given)
    code, out, err = here(
        "ingest", home / "model", home / "text.txt", "--store", store, "--heads", path
    )
    assert (code, out) == (1, "") and says in err and len(err.splitlines()) == 1
    assert not store.exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--out", "/nowhere/x.json"], "cannot be written"),
        (["--text", "/nowhere"], "no such file"),
        (["--system", "magic"], "contiguous-kv"),
        (["--system", "impress"], "without a resident digest"),
        (["--dtype", "int3"], "bfloat16"),
    ],
)
def test_bad_input_is_one_clear_line(home: Path, here: Here, args: list[str], says: str) -> None:
    text = () if "--text" in args else ("--text", home / "text.txt")
    code, out, err = here("heads", "profile", home / "model", "--tokens", 64, *text, *args)
    assert (code, out) == (1, "") and says in err and len(err.splitlines()) == 1


def test_an_excerpt_fits_into_the_shortest_piece() -> None:
    assert EXCERPT < 64
