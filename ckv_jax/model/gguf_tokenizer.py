"""The tokenizer and the chat template that a GGUF file holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ckv_jax.errors import CheckpointError
from ckv_jax.model.gguf import GgufFile, gguf_paths

_CONTROL, _USER_DEFINED = 3, 4  # of llama.cpp's kinds of token
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """Pre-tokenizer of a byte-level BPE: how it splits a text into words, and its settings."""

    regex: str | None = None  # None: GPT-2's
    digits_apart: bool = False
    whole_words: bool = False  # a word that is in the vocabulary is one token, merges or not
    begins: bool = False  # begin-of-text where the file does not say
    normalised: bool = False  # to NFC


_QWEN = _Split(regex=rf"{_CONTRACTIONS}|\p{{N}}{_REST}", normalised=True)
_LLAMA3 = _Split(regex=rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}{_REST}", whole_words=True, begins=True)
_SPLITS: Mapping[str, _Split] = {
    "gpt-2": _Split(),
    "default": _Split(),
    "smollm": _Split(digits_apart=True),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "tekken": _Split(
        regex=rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        whole_words=True, begins=True,
    ),
}  # fmt: skip
"""By `tokenizer.ggml.pre`: those of our families, as their publishers' `tokenizer.json` have it."""


def gguf_tokenizer(path: str | Path) -> Any:
    """A `PreTrainedTokenizerFast` of a GGUF model, its chat template included.

    Raises `CheckpointError` for a file without a tokenizer, or one of a kind not built here.
    """
    from transformers import PreTrainedTokenizerFast  # slow to import

    values = _values(Path(path))
    tokens, kind = values.get("ggml.tokens"), values.get("ggml.model")
    if not tokens or kind is None:
        raise CheckpointError(f"tokenizer missing: {path} holds none")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{path} has a tokenizer of kind {kind!r}, expected 'gpt2' (byte-level BPE) or 'llama' "
            "(SentencePiece)"
        )
    try:
        backend, begins = _byte_level(values) if kind == "gpt2" else _sentencepiece(values)
        _add_tokens(backend, tokens, values.get("ggml.token_type", ()))
        special = {
            name: tokens[values[f"ggml.{key}_token_id"]]
            for name, key in _SPECIAL.items()
            if f"ggml.{key}_token_id" in values
        }
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the tokenizer in {path} cannot be read: {error!r}") from error
    if values.get("ggml.add_bos_token", begins) and (begin := special.get("bos_token")):
        backend.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], special_tokens=[(begin, values["ggml.bos_token_id"])]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    fast.chat_template = values.get("chat_template")
    return fast


_SPECIAL: Mapping[str, str] = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
}  # fmt: skip


def _values(path: Path) -> dict[str, Any]:
    """The metadata about the tokenizer, and which split a file without one means."""
    metadata = GgufFile(gguf_paths(path)[0]).metadata
    values = {
        key.removeprefix("tokenizer."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.")
    }
    arch = str(metadata.get("general.architecture"))
    return {"ggml.pre": "qwen2" if arch.startswith("qwen") else "gpt-2"} | values


def _byte_level(values: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """A byte-level BPE, and whether it puts a begin-of-text before a text by default."""
    split = _SPLITS.get(values["ggml.pre"])
    if split is None:
        raise ValueError(
            f"got the pre-tokenizer {values['ggml.pre']!r}, expected one of {', '.join(_SPLITS)}"
        )
    merges = [tuple(pair.split(" ", 1)) for pair in values["ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(values["ggml.tokens"])}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole_words)
    )
    if split.normalised:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if split.regex is not None:
        steps = [
            pre_tokenizers.Split(Regex(split.regex), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    if split.digits_apart:
        steps = [pre_tokenizers.Digits(individual_digits=True), *steps]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, split.begins


def _sentencepiece(values: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """A SentencePiece BPE with byte fallback, as Llama 2's `tokenizer.json` has it."""
    tokens = values["ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, values["ggml.scores"]),
            unk_token=tokens[values.get("ggml.unknown_token_id", 0)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaced = values.get("ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if spaced else []), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if spaced else []),
        ]
    )
    return backend, True


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary implies: every way to make a token of two others,
    best score first."""
    found = []
    for token, i in vocabulary.items():
        ways = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in ways if pair[0] in vocabulary and pair[1] in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(scores[i], pair) for pair in known]
    found.sort(key=lambda entry: -entry[0])
    return [pair for _, pair in found]


def _add_tokens(backend: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Control tokens and those of the user are found whole in a text, whatever stands around."""
    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind == wanted
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
