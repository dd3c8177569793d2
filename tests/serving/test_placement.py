"""Where requests belong, looked up in a real store and without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tokenizers
from engine_support import SMALL, tokens
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ckv_jax import EngineConfig, Prefix, Request, SamplingParams
from ckv_jax.config import SystemConfig, layout_of
from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.serving.placement import Placement
from ckv_jax.serving.sequence import Sequence
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.codec import codec_named
from ckv_jax.storage.errors import PrefixNotFound
from ckv_jax.storage.store import ChunkStore
from ckv_jax.systems import GROUP, SYSTEMS

OURS = Fingerprint({"weights": "ours"})
TEXT = tokens(40)
CKV = replace(SYSTEMS["ckv"], period=2, subperiod=1, pack_layers=1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path_factory.mktemp("store")) as opened:
        yield opened


def placement(
    store: ChunkStore, system: SystemConfig = CKV, tokenizer: Tokenizer | None = None,
    **config: Any,
) -> Placement:  # fmt: skip
    return Placement(
        model=SMALL, tokenizer=tokenizer, store=store, fingerprint=OURS,
        layout=layout_of(system, SMALL, "float32"), system=system,
        config=EngineConfig(dtype="float32", **config),
    )  # fmt: skip


def stored(
    store: ChunkStore, text: np.ndarray, system: SystemConfig = CKV, salt: str = ""
) -> Prefix:
    layout = layout_of(system, SMALL, "float32")
    with store.writer(fingerprint=OURS, layout=layout, tokens=text, salt=salt) as writer:
        shape = (SMALL.num_layers, 2, len(text), SMALL.num_kv_heads, SMALL.head_dim)
        writer.write(0, np.zeros(shape, layout.numpy_dtype))
        return writer.commit()


@pytest.fixture(scope="module")
def prefix(store: ChunkStore) -> Prefix:
    return stored(store, TEXT)


@pytest.fixture(scope="module")
def begin_of_text() -> Tokenizer:
    """Reads "a" and "b", and puts a begin-of-text (0) before what begins."""
    words = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "?": 3}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>"))


def place(
    where: Placement, sampling: SamplingParams | None = None, *, keep_kv: bool = False, **asked: Any
) -> Sequence:
    """Raises what is wrong with the request."""
    made = Sequence(Request(**{"suffix": [1, 2]} | asked), sampling=sampling, keep_kv=keep_kv)
    where.place(made)
    return made


def test_a_text_begins_a_sequence_where_nothing_is_before_it(
    store: ChunkStore, prefix: Prefix, begin_of_text: Tokenizer
) -> None:
    where = placement(store, tokenizer=begin_of_text)
    assert where.encode("a b").tolist() == [1, 2]
    nothing: list[Any] = [[], (), np.zeros(0, np.int32)]
    for before in nothing:
        assert place(where, prefix=before, suffix="a b").suffix.tolist() == [0, 1, 2]
    some: list[Any] = [[5], (5,), np.array([5])]
    for before in some:
        assert place(where, prefix=before, suffix="a b").suffix.tolist() == [5, 1, 2]
    for before in (prefix, prefix.id):
        assert place(where, prefix=before, suffix="a b").suffix.tolist() == [1, 2]
    assert place(where, documents=[prefix, prefix], suffix="a b").suffix.tolist() == [1, 2]
    for one in ({"prefix": prefix}, {"documents": [prefix, prefix]}):
        with pytest.raises(ValueError, match="got an empty suffix"):
            place(where, suffix=" ", **one)
    with pytest.raises(ValueError, match="token ids from 1 to 999"):
        place(where, SamplingParams(forced_ids=(1, 999)), prefix=prefix)
    stopped = SamplingParams(stop=("b",))
    assert place(where, stopped, prefix=prefix, suffix="a").sampling == stopped


# -- where they stand -----------------------------------------------------------------------------


def test_as_much_as_is_stored_is_used_and_the_rest_computed(
    store: ChunkStore, prefix: Prefix
) -> None:
    where = placement(store, budget=0.5)
    longer = [*TEXT.tolist(), 9]
    found = place(where, prefix=longer)
    assert found.prefix == prefix and found.suffix.tolist() == [9, 1, 2]
    assert found.budget == 0.5 and place(where, prefix=longer, budget=0.25).budget == 0.25
    other = stored(store, tokens(16, 8), salt="hers")
    for name in (other, other.id):
        assert place(where, prefix=name, salt="hers").prefix == other
        with pytest.raises(PrefixNotFound):
            place(where, prefix=name)
    assert place(placement(store, salt="hers"), prefix=other).prefix == other


# -- whose prefixes -------------------------------------------------------------------------------


def test_a_prefix_of_another_system_is_refused_with_its_name(
    store: ChunkStore, prefix: Prefix
) -> None:
    where = placement(store)

    def refused(**changes: Any) -> str:
        with pytest.raises(ValueError) as error:
            where.check_prefix(replace(prefix, layout=replace(theirs, **changes)), "")
        return str(error.value)

    theirs = layout_of(SYSTEMS["quest"], SMALL, "float32")
    assert refused().startswith("stored with --system quest, asked with --system ckv; these differ")
    assert "heads_apart (stored True, got False)" in refused() and "head_dim" not in refused()
    gone = refused(chunk_tokens=64)
    assert gone.startswith("stored by another system or version, asked with --system ckv; these")
    assert f"install it (entry point group {GROUP}) or ask with --system package.module:" in gone
    assert gone.endswith(
        "If the layout of a system has changed, ingest the text again with --system ckv"
    )
    assert "\n" not in gone
    theirs = replace(layout_of(SYSTEMS["contiguous-kv"], SMALL, "float32"), short_last=False)
    int8 = codec_named("int8")
    assert int8 is not None
    coded = refused(codec="int8:1", codec_bytes=int8.num_bytes(theirs))
    assert coded.startswith("stored with --system contiguous-kv, ") and "codec" in coded
    gone = refused(codec="int4-rotated:1", codec_bytes=4096)
    assert gone.startswith("stored with codec 'int4-rotated:1', ") and "ingest the text" in gone
    where = placement(store, SYSTEMS["contiguous-kv"])
    theirs = where.layout
    assert theirs.short_last and "ingest the text again" in refused(short_last=False)
    recompute = placement(store, SYSTEMS["recompute"])
    recompute.check_prefix(prefix, "")  # its tokens alone are used


def test_a_system_that_computes_all_reads_no_part(store: ChunkStore, prefix: Prefix) -> None:
    found = place(placement(store, SYSTEMS["recompute"]), documents=[prefix, prefix], budget=0.25)
    assert found.suffix.tolist() == [*TEXT, *TEXT, 1, 2]
    assert (found.documents, found.prefix.num_tokens, found.budget) == ((), 0, 1.0)
