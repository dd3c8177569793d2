"""A GGUF file is the model that it was made of; what cannot be read is refused by name."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ckv_jax.errors import CheckpointError, CkvError, UnsupportedModel
from ckv_jax.model.checkpoint import stored_dtype, weight_files
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.tensor_map import inspect_model
from ckv_jax.model.tokenizer import load_tokenizer
from ckv_jax.model.weights import convert, load_pretrained, model_fingerprint
from tests.model.gguf_files import finish, write_gguf, write_metadata, write_tokenizer_metadata
from tests.model.hf_checkpoints import LLAMA3, their_logits, write_checkpoint
from tests.model.small import CHAT, dense, write_tokenizer
from tests.model.spm_checkpoint import SENTENCE, spm_tokenizer

Q8_K = GGMLQuantizationType.Q8_K
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
AS_PUBLISHED = LLAMA3 | {"original_max_position_embeddings": 8192}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": AS_PUBLISHED, "head_dim": 16},
    "llama-odd": {"rope_parameters": PLAIN},
}
QUANTISED = ("F16", "BF16", "Q8_0", "Q4_K")
FAMILIES = ("qwen2", "qwen3-odd", "llama", "llama-odd", "mistral")

forward = nnx.jit(dense)


def check_parity(path: Path, folder: Path) -> None:
    """The logits of both are the same to 1e-4 of scale."""
    model = load_pretrained(path, dtype="float32")
    tokens = np.random.default_rng(2).integers(0, model.config.vocab_size, (2, 100))
    theirs = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager").eval()
    expected = their_logits(theirs, tokens)
    got = np.asarray(forward(model, jnp.asarray(tokens, jnp.int32)))
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, name, **CHANGES.get(name, {}))
    path = write_gguf(tmp_path, tmp_path / "model.gguf")
    check_parity(path, tmp_path)
    ours, theirs = ModelConfig.from_hf(path), ModelConfig.from_hf(tmp_path)
    assert ours.rope_scaling == theirs.rope_scaling
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_quantisation(kind: str, tmp_path: Path) -> None:
    size = 256 if kind == "Q4_K" else 64
    write_checkpoint(tmp_path, "llama-yarn", hidden_size=size, intermediate_size=size)
    path = write_gguf(tmp_path, tmp_path / "model.gguf", kind=kind)
    check_parity(path, tmp_path)
    found = inspect_model(path)
    assert (found.format, found.stored_dtype) == ("gguf", f"{kind}, F32")
    assert stored_dtype(path) == "float32"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model in both formats, tokenizer included."""
    folder = tmp_path_factory.mktemp("gguf")
    write_checkpoint(folder, "qwen2", vocab_size=300, hidden_size=64, intermediate_size=96)
    write_tokenizer(folder)
    write_gguf(folder, folder / "model.gguf", kind="Q8_0")
    return folder


def test_converted_to_a_folder_it_is_the_same(small: Path, tmp_path: Path) -> None:
    convert(small / "model.gguf", tmp_path / "hf", to="hf")
    check_parity(small / "model.gguf", tmp_path / "hf")
    ours, theirs = load_tokenizer(small / "model.gguf"), load_tokenizer(tmp_path / "hf")
    text = "the cat sat on 12 mats, größer"
    assert ours.encode(text).tolist() == theirs.encode(text).tolist()
    assert ours._backend.eos_token_id == theirs._backend.eos_token_id
    assert ModelConfig.from_hf(tmp_path / "hf") == ModelConfig.from_hf(small / "model.gguf")


def test_the_files_content_is_the_fingerprint(small: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_hf(small / "model.gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes((small / "model.gguf").read_bytes())
    first = model_fingerprint(small / "model.gguf", config, dtype="float32")
    assert model_fingerprint(path, config, dtype="float32") == first
    changed = bytearray(path.read_bytes())
    changed[-100] ^= 1
    path.write_bytes(changed)
    assert model_fingerprint(path, config, dtype="float32") != first


def test_a_model_of_several_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    write_gguf(tmp_path, tmp_path / "model.gguf", split_max_tensors=5)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    for given in (parts[0], parts[1]):
        assert weight_files(given) == parts
        check_parity(given, tmp_path)
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=rf"missing: {parts[1].name}"):
        load_pretrained(parts[0])
    lonely = parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(CheckpointError, match="part 1 of a model of"):
        load_pretrained(lonely)


def test_reading_takes_the_memory_of_one_tensor(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "intermediate_size": 96,
    }
    write_checkpoint(tmp_path, "qwen3", **sizes)
    path = write_gguf(tmp_path, tmp_path / "model.gguf", kind="Q8_0")
    load_pretrained(path)  # compiles, so that only data is counted below
    tracemalloc.start()
    try:
        load_pretrained(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * 4096 * 256 * 4  # the embedding in float32, and as it is stored


def header(
    arch: str = "llama", more: Callable[[GGUFWriter], object] = lambda out: None
) -> Callable[[Path], None]:
    """Writes a file of metadata and one tensor."""
    sizes = {
        "num_hidden_layers": 1, "max_position_embeddings": 128, "hidden_size": 32,
        "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "rope_parameters": PLAIN,
    }  # fmt: skip

    def write(path: Path) -> None:
        out = GGUFWriter(path, arch)
        write_metadata(out, sizes)
        out.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
        more(out)
        finish(out)

    return write


def adding(what: str, *values: Any, **named: Any) -> Callable[[Path], None]:
    """Writes a file with one thing more."""
    return header(more=lambda out: getattr(out, f"add_{what}")(*values, **named))


def cut(share: float) -> Callable[[Path], None]:
    """Writes the first part of a file."""

    def write(path: Path) -> None:
        header()(path)
        data = path.read_bytes()
        path.write_bytes(data[: int(share * len(data))])

    return write


@pytest.mark.parametrize(
    ("write", "error", "says"),
    [
        (header("gemma3"), UnsupportedModel, "'gemma3', which has layers that see only a sliding"),
        (header("qwen3moe"), UnsupportedModel, "'qwen3_moe', which is a mixture of experts"),
        (header("phi3"), UnsupportedModel, "'phi3', a family that is not supported"),
        (header("mistral"), UnsupportedModel, "architecture 'mistral', expected one of qwen2"),
        (adding("expert_count", 8), UnsupportedModel, "mixture of experts"),
        (adding("sliding_window", 64), UnsupportedModel, "sliding_window 64"),
        (
            adding("rope_scaling_type", RopeScalingType.LINEAR),
            UnsupportedModel,
            "rope type 'linear'",
        ),
        (
            adding("tensor", "rope_freqs.weight", np.arange(1, 9.0, dtype="f")),
            UnsupportedModel,
            "not Llama 3's scaling",
        ),
        (adding("type", "adapter"), CheckpointError, "is a LoRA adapter"),
        (
            adding("tensor", "output.weight", np.zeros((8, 292), np.uint8), raw_dtype=Q8_K),
            CheckpointError,
            "'output.weight' in .* is Q8_K, which cannot be dequantised",
        ),
        (header(), CheckpointError, "missing tensor 'model.layers.0.input_layernorm.weight'"),
        (cut(0.9), CheckpointError, "cut short: tensor 'token_embd.weight' ends at byte"),
        (cut(0.1), CheckpointError, "cut short within its header"),
        (lambda path: path.write_bytes(b"GGUF\0\0\0\3" + bytes(32)), CheckpointError, "big-endian"),
        (lambda path: path.write_bytes(b"lmgg" + bytes(32)), CheckpointError, "not a GGUF file"),
        (lambda path: path.touch(), CheckpointError, "not a GGUF file"),
        (
            lambda path: path.write_text(
                "version https://git-lfs.github.com/spec/v1\noid sha256:0"
            ),
            CheckpointError,
            "is a git-lfs pointer, not the file itself",
        ),
        (lambda path: None, CheckpointError, "there is no file"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    write: Callable[[Path], None], error: type[CkvError], says: str, tmp_path: Path
) -> None:
    write(tmp_path / "model.gguf")
    with pytest.raises(error, match=says) as refusal:
        load_pretrained(tmp_path / "model.gguf")
    assert "\n" not in str(refusal.value)


def test_any_cut_is_one_clear_error(small: Path, tmp_path: Path) -> None:
    data = (small / "model.gguf").read_bytes()
    rng = np.random.default_rng(0)
    for size in [*rng.integers(0, len(data), 40), *range(0, 200, 7)]:
        (tmp_path / "model.gguf").write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            load_pretrained(tmp_path / "model.gguf")


# -- tokenizers ------------------------------------------------------------------------------------


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
    assert (tokenizer._backend.eos_token_id, len(tokenizer._backend)) == (end, len(original))
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
    assert tokenizer._backend.eos_token_id == 2


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
    tokenizer = load_tokenizer(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="no chat template"):
        tokenizer.apply_chat([{"role": "user", "content": "hello"}])
