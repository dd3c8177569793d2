"""The tokenizer that a GGUF file holds gives the ids of the one that it was made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ckv_jax.errors import CheckpointError
from ckv_jax.model.tokenizer import Tokenizer as Ours
from ckv_jax.model.tokenizer import load_tokenizer
from tests.model.gguf_files import finish, write_tokenizer_metadata
from tests.model.small import CHAT
from tests.model.spm_checkpoint import SENTENCE, spm_tokenizer

TEXTS = (
    "the cat sat on the mat",
    "In  1984 it cost  $12.50, we'RE told\n\n  \tthe   end.\r\n",
    "größer 漢字 🙂 é e\u0301",
    "CamelCase HTTPServer12 don't/\n",
    "<|begin|>the cat<|end|>the",
)
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)


def split(regex: str) -> list[pre_tokenizers.PreTokenizer]:
    """Words by a regex, then bytes."""
    return [
        pre_tokenizers.Split(Regex(regex), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


PUBLISHED = {
    "gpt-2": [GPT2],
    "smollm": [DIGITS, GPT2],
    "qwen2": split(rf"{WORDS}|\p{{N}}|{REST}"),
    "llama-bpe": split(rf"{WORDS}|\p{{N}}{{1,3}}|{REST}"),
}


def trained(pre: str) -> PreTrainedTokenizerFast:
    """A tokenizer in the manner of a family, trained on `TEXTS`."""
    backend = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED[pre])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*TEXTS[:4]] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>"
    )
    fast.chat_template = CHAT
    return fast


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level(pre: str, tmp_path: Path) -> None:
    original = trained(pre)
    original.save_pretrained(str(tmp_path))
    out = GGUFWriter(tmp_path / "model.gguf", "llama")
    write_tokenizer_metadata(out, tmp_path, pre=pre)
    finish(out)
    tokenizer = load_tokenizer(tmp_path / "model.gguf")
    begin, end = original.convert_tokens_to_ids(["<|begin|>", "<|end|>"])
    for text in TEXTS:
        expected = original.encode(text, add_special_tokens=False)
        got = tokenizer.encode(text, begins=True).tolist()
        assert got == [begin, *expected[expected[:1] == [begin] :]]
        assert tokenizer.decode(expected) == original.decode(expected)
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (end, len(original))
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat(messages) == "<user>hello</><assistant>"


def write_spm(path: Path, *, more: Callable[[GGUFWriter], object] = lambda out: None) -> None:
    """The SentencePiece tokenizer of `spm_checkpoint`, its merges as scores."""
    original = spm_tokenizer()
    vocabulary = sorted(original.get_vocab().items(), key=lambda entry: entry[1])
    tokens = [token for token, _ in vocabulary]
    kinds = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    kinds |= {f"<0x{i:02X}>": TokenType.BYTE for i in range(256)}
    out = GGUFWriter(path, "llama")
    out.add_tokenizer_model("llama")
    out.add_token_list(tokens)
    out.add_token_scores([-float(i) for i in range(len(tokens))])
    out.add_token_types([kinds.get(token, TokenType.NORMAL) for token in tokens])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    more(out)
    finish(out)


def test_sentencepiece(tmp_path: Path) -> None:
    write_spm(tmp_path / "model.gguf")
    tokenizer, original = load_tokenizer(tmp_path / "model.gguf"), spm_tokenizer()
    for text in (SENTENCE, "the  quick", "größer 🙂", "is</s>the"):
        expected = original.encode(text)
        assert tokenizer.encode(text, begins=True).tolist() == expected
        assert tokenizer.decode(expected) == original.decode(expected)
    assert len(tokenizer.encode("the quick")) == 2
    assert tokenizer.eos_token_id == 2


def test_without_a_space_in_front(tmp_path: Path) -> None:
    write_spm(tmp_path / "model.gguf", more=lambda out: out.add_add_space_prefix(False))
    tokenizer = load_tokenizer(tmp_path / "model.gguf")
    ids = tokenizer.encode("the quick")
    assert tokenizer.decode(ids) == "the quick"
    assert len(ids) == 4  # t, h, e without the word's mark


@pytest.mark.parametrize(
    ("add", "says"),
    [
        (lambda out: None, "tokenizer missing"),
        (lambda out: out.add_tokenizer_model("bert"), "of kind 'bert', expected 'gpt2'"),
        (
            lambda out: (out.add_tokenizer_model("gpt2"), out.add_tokenizer_pre("viking")),
            "pre-tokenizer 'viking', expected one of gpt-2",
        ),
        (lambda out: out.add_tokenizer_model("gpt2"), "'ggml.merges'"),
    ],
)
def test_tokenizers_that_cannot_be_read(
    add: Callable[[GGUFWriter], object], says: str, tmp_path: Path
) -> None:
    out = GGUFWriter(tmp_path / "model.gguf", "llama")
    add(out)
    if says != "tokenizer missing":
        out.add_token_list(["a", "b"])
    finish(out)
    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(tmp_path / "model.gguf")


def test_no_chat_template(tmp_path: Path) -> None:
    write_spm(tmp_path / "model.gguf")
    tokenizer: Ours = load_tokenizer(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="no chat template"):
        tokenizer.apply_chat([{"role": "user", "content": "hello"}])
    assert isinstance(tokenizer.encode("the"), np.ndarray)
