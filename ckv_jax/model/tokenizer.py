"""Tokenizer: encodes text by a checkpoint's own tokenizer, offline, and decodes streams of ids."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers.decoders import DecodeStream

from ckv_jax.errors import CheckpointError, check_text
from ckv_jax.model.checkpoint import not_a_checkpoint
from ckv_jax.model.gguf import check_pointer, is_gguf
from ckv_jax.model.gguf_tokenizer import gguf_tokenizer

_CUT = "\ufdd0\ufdd1"  # not characters, so that no text holds them

_WHOLE = "tokenizer.json"
_PARTS = ("vocab.json", "merges.txt")
_NORMALIZERS = frozenset(("NFC", "Prepend"))
_PRE_TOKENIZERS = frozenset(("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"))
_NFC = 3  # bytes of a text for each of its composed form, at most: three letters of one syllable
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_REST = [byte for byte in range(256) if byte not in _PLAIN]
_BYTE_OF = {chr(byte): byte for byte in _PLAIN} | {
    chr(256 + place): byte for place, byte in enumerate(_REST)
}
"""The letters that byte-level vocabularies write bytes as."""
_WORD_END = re.compile("[A-Za-z0-9][ \u0120\u2581]")  # a space as byte-level and as SentencePiece
_PIECE = 1 << 18
_SURE = 2
_EXTRAS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
           "chat_template.jinja")  # fmt: skip
LAST_TOKENS = 16
"""Ids of a prompt that are enough for the spacing of what follows."""
_PATIENCE = 16  # ids that may wait for the end of a character; one has four bytes at most
_CHARACTER = 4  # ids that one character can take


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """Bounds on the text of one token id; None and False where that is unknown."""

    max_bytes: int | None
    """UTF-8 bytes of text."""
    splits_words: bool
    """Whether no id holds the end of a word, a letter or digit of ASCII, and a space after it."""

    @classmethod
    def of(cls, backend: str) -> TokenBounds:
        """From the JSON of a `tokenizers.Tokenizer`."""
        values = json.loads(backend)
        model = values["model"]
        vocab = model.get("vocab", ())
        names = [entry[0] for entry in vocab] if isinstance(vocab, list) else list(vocab)
        added = values.get("added_tokens") or []
        names += [token["content"] for token in added]
        keeps = (
            values.get("truncation") is None
            and _keeps_all(values.get("normalizer"), "normalizers", _NORMALIZERS)
            and _keeps_all(values.get("pre_tokenizer"), "pretokenizers", _PRE_TOKENIZERS)
            and not any(token["lstrip"] or token["rstrip"] for token in added)
        )
        every_byte = model.get("byte_fallback") and set(names) >= _BYTES
        unknown = {"BPE": model.get("unk_token"), "Unigram": True}.get(model["type"], True)
        if not keeps or (unknown and not every_byte):
            return cls(None, False)
        longest = max(len(name.encode("utf-8", "surrogatepass")) for name in names)
        return cls(_NFC * longest, not any(map(_WORD_END.search, names)))

    def least(self, text: bytes) -> int:
        """The fewest ids of a text in UTF-8; 0 where nothing is known."""
        if self.max_bytes is None:
            return 0
        count = -(-len(text) // self.max_bytes)
        if not self.splits_words:
            return count
        ends = 0
        for at in range(0, len(text), _PIECE):
            piece = np.frombuffer(text[at : at + _PIECE + 1], np.uint8)
            lower = piece | 0x20
            word = ((lower >= ord("a")) & (lower <= ord("z"))) | (
                (piece >= ord("0")) & (piece <= ord("9"))
            )
            ends += int(np.count_nonzero(word[:-1] & (piece[1:] == ord(" "))))
        return max(count, ends)


def _keeps_all(part: Any, several: str, known: frozenset[str]) -> bool:
    """Whether a normalizer or pre-tokenizer drops nothing of a text."""
    if part is None:
        return True
    if part["type"] == "Sequence":
        return all(_keeps_all(one, several, known) for one in part[several])
    if part["type"] == "Replace":
        return part["pattern"] == {"String": " "} and bool(part["content"])
    return part["type"] in known and part.get("behavior") != "Removed"


class Tokenizer:
    """Text to token ids and back, so that prefix and suffix just join.

    What the tokenizer puts in front of every text (Llama's and Mistral's begin-of-text; Qwen's
    has nothing) stands once, before a text that begins a sequence, and not before one that goes
    on from another. No other special tokens are added.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        plain, whole = (backend.encode("a", add_special_tokens=extra) for extra in (False, True))
        added = max(0, len(whole) - len(plain))
        self._front: list[int] = next(
            (whole[:at] for at in range(added + 1) if whole[at : at + len(plain)] == plain), []
        )
        self._line: list[int] = backend.encode("\n", add_special_tokens=False)
        spaced = [*self._line, *plain] != backend.encode("\na", add_special_tokens=False)
        self._spaced = spaced  # a SentencePiece tokenizer puts a space before a text
        control = [
            token.content for token in backend.added_tokens_decoder.values() if token.special
        ]
        names = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))
        self._control = re.compile(names) if names else None

    def encode(self, text: str, *, begins: bool = False) -> Int[np.ndarray, " n"]:
        """Token ids, int32; empty for an empty text. `ValueError` if it is not Unicode.

        `begins`: whether a sequence begins with it. A chat template that writes the begin-of-text
        itself adds no second one, and none where the text goes on from another.
        """
        check_text(text)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False)
        front, rest = self._front, ids
        if front and ids[: len(front)] == front:
            rest = ids[len(front) :]
        return np.asarray([*front, *rest] if begins and ids else rest, np.int32)

    @cached_property
    def bounds(self) -> TokenBounds:
        """Bounds on the text of one token id."""
        return TokenBounds.of(self._backend.backend_tokenizer.to_str())

    def exceeds(self, text: str, tokens: int) -> bool:
        """Whether a text is more than so many ids, found without encoding it as a whole.

        False proves nothing. Encoding takes a hundred times the memory of the text: a long one is
        counted by what one id can hold at most, then piece by piece.
        """
        if len(text) <= tokens:
            return False
        data = text.encode("utf-8", "surrogatepass")
        if self.bounds.least(data) > tokens:
            return True
        if len(text) <= _PIECE:
            return False
        count = 0
        for at in range(0, len(text), _PIECE):
            count += len(self._backend.encode(text[at : at + _PIECE], add_special_tokens=False))
            if count > _SURE * tokens:  # where pieces meet, ids may differ: never by as much
                return True
        return False

    def as_text(self, text: str) -> str:
        """Marks names of control tokens in a text, so that `encode_chat` takes them for text."""
        if self._control is None:
            return text
        return self._control.sub(lambda name: f"{name[0][:1]}{_CUT}{name[0][1:]}", text)

    def encode_chat(self, text: str, *, begins: bool = False) -> Int[np.ndarray, " n"]:
        """Token ids, int32, of text of a chat template; names marked by `as_text` are text.

        A text that does not begin a sequence goes on within a line: no space comes before it.
        """
        pieces = text.split(_CUT)
        ids = [self.encode(pieces[0], begins=True)] if begins else []
        return np.concatenate([*ids, *map(self._encode_on, pieces[len(ids) :])]).astype(np.int32)

    def _encode_on(self, text: str) -> Int[np.ndarray, " n"]:
        if not self._spaced:
            return self.encode(text)
        ids, line = self.encode(f"\n{text}"), self._line
        return ids[len(line) :] if ids[: len(line)].tolist() == line else self.encode(text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of token ids, byte for byte; a split character shows as U+FFFD."""
        text: str = self._backend.backend_tokenizer.decode(
            [int(i) for i in ids], skip_special_tokens=skip_special
        )
        return text

    def decode_bytes(self, token_id: int, text: str) -> bytes:
        """The bytes of an id whose text is `text`, also where that shows part of a character."""
        if "\ufffd" not in text:
            return text.encode("utf-8", "surrogatepass")
        found = self._named_bytes(self._backend.backend_tokenizer.id_to_token(token_id) or "")
        return text.encode("utf-8", "surrogatepass") if found is None else found

    def _named_bytes(self, name: str) -> bytes | None:
        """Returns the bytes that a byte vocabulary writes as `name`; None for text."""
        if name in _BYTES:
            return bytes([int(name[3:5], 16)])
        if self._byte_level and all(letter in _BYTE_OF for letter in name):
            return bytes(_BYTE_OF[letter] for letter in name)
        return None

    def token_bytes(self) -> list[bytes]:
        """Returns the bytes of each id within a text; of control tokens, their names."""
        added = {token.content for token in self._backend.added_tokens_decoder.values()}
        names = sorted(self._backend.get_vocab().items(), key=lambda entry: entry[1])
        found = [b""] * (names[-1][1] + 1)
        for name, id_ in names:
            of_name = None if name in added else self._named_bytes(name)
            text = name if name in added else name.replace("\u2581", " ")
            found[id_] = text.encode("utf-8", "surrogatepass") if of_name is None else of_name
        return found

    @property
    def control_ids(self) -> list[int]:
        """Ids of control tokens."""
        added = self._backend.added_tokens_decoder
        return [id_ for id_, token in added.items() if token.special]

    def id_of(self, name: str) -> int | None:
        """The id of a token; None: there is none of this name."""
        found: int | None = self._backend.backend_tokenizer.token_to_id(name)
        return found

    @cached_property
    def _byte_level(self) -> bool:
        decoder = json.loads(self._backend.backend_tokenizer.to_str()).get("decoder") or {}
        parts = decoder.get("decoders", [decoder])
        return any(part.get("type") == "ByteLevel" for part in parts)

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files, as HF has them, to a folder."""
        self._backend.save_pretrained(str(folder))

    def decode_next(self, token_id: int, *, after: Sequence[int]) -> str:
        """The text that one id adds to those before it, or to the last of them."""
        before = last_words(self._backend.backend_tokenizer, after)
        known, text = self.decode(before), self.decode([*before, token_id])
        return text[len(known) :] if text.startswith(known) else self.decode([token_id])

    def detokenizer(self, *, after: Sequence[int] = ()) -> Detokenizer:
        """Turns the ids that follow others into text one at a time, special tokens included."""
        return Detokenizer(self._backend.backend_tokenizer, after=after)

    def without_front(self, ids: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """The ids of a text that goes on from another: without a begin-of-text."""
        count = len(self._front)
        return ids[count:] if count and ids[:count].tolist() == self._front else ids

    def chat_ids(self, messages: Sequence[dict[str, Any]], **values: Any) -> Int[np.ndarray, " n"]:
        """Token ids, int32, of `apply_chat`; names of control tokens in messages, roles
        apart, and in variables are text."""
        _check_messages(messages)
        texts = [
            {key: each if key == "role" else self._as_texts(each) for key, each in message.items()}
            for message in messages
        ]
        return self.encode_chat(self.apply_chat(texts, **self._as_texts(values)), begins=True)

    def _as_texts(self, value: Any) -> Any:
        """`as_text` of every string in a value, keys among them."""
        if isinstance(value, str):
            return self.as_text(value)
        if isinstance(value, Mapping):
            return {
                self.as_text(key) if isinstance(key, str) else key: self._as_texts(each)
                for key, each in value.items()
            }
        if isinstance(value, Sequence):
            return [self._as_texts(each) for each in value]
        return value

    @property
    def chat_template(self) -> str:
        """The source of the chat template; empty without one."""
        found = self._backend.chat_template or ""
        return found if isinstance(found, str) else "".join(map(str, found.values()))

    def apply_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **values: Any,
    ) -> str:
        """Renders `{"role", "content"}` messages as text, by the tokenizer's chat template.

        `values`: variables of the template, such as `enable_thinking`. Raises `ValueError` for
        messages the template refuses and `CheckpointError` if the tokenizer has no template.
        """
        _check_messages(messages)
        if not self._backend.chat_template:
            raise CheckpointError("the tokenizer has no chat template; use a chat model")
        from jinja2.exceptions import TemplateError  # what the templates are written in

        try:
            text: str = self._backend.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except (TemplateError, TypeError) as error:  # TypeError: what it joins is no text
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return text


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence):
        raise ValueError(f"got messages={messages!r}, expected a list of messages")
    if not messages:
        raise ValueError("got no messages, expected at least one")
    for message in messages:
        if not isinstance(message, Mapping):
            raise ValueError(f"got a message {message!r}, expected role and content")
        if not {"role", "content"} <= message.keys():
            names = sorted(map(str, message))
            raise ValueError(f"got a message with {names}, expected role and content")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint: a folder, or a GGUF file, which holds its own.

    Of a folder `tokenizer.json` is taken as it is; without it, `vocab.json` and `merges.txt`.
    Raises `CheckpointError` with the reason if it is missing or broken.
    """
    # transformers would warn that PyTorch is missing; nothing here needs it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    folder = Path(folder)
    if is_gguf(folder):
        return Tokenizer(gguf_tokenizer(folder))
    tokenizer_files(folder)
    if (folder / _WHOLE).is_file():
        from transformers import PreTrainedTokenizerFast as Kind  # slow to import
    else:
        from transformers import AutoTokenizer as Kind  # far slower: it loads PyTorch if it can
    try:
        backend = Kind.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the backend raises a bare Exception for a bad tokenizer.json
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {error}") from error
    if not backend.is_fast:  # it could not stream
        raise CheckpointError(
            f"got a {type(backend).__name__} in {folder}, expected one with a {_WHOLE}"
        )
    return Tokenizer(backend)


def tokenizer_files(folder: str | Path) -> list[Path]:
    """The files that decide how text becomes ids, sorted; `CheckpointError` if there are none.

    Of a GGUF file none: its weights and its tokenizer are in one file.
    """
    folder = Path(folder)
    if is_gguf(folder):
        return []
    if not folder.is_dir():
        raise not_a_checkpoint(folder)
    if (folder / _WHOLE).is_file():
        core: tuple[str, ...] = (_WHOLE,)
    elif all((folder / name).is_file() for name in _PARTS):
        core = _PARTS
    else:
        raise CheckpointError(
            f"tokenizer missing: {folder} has neither {_WHOLE} nor {' and '.join(_PARTS)}"
        )
    found = sorted(folder / name for name in (*core, *_EXTRAS) if (folder / name).is_file())
    for path in found:
        check_pointer(path)
    return found


# -- ids to text, one at a time --------------------------------------------------------------------


class Detokenizer:
    """The text of a sequence of ids, piece by piece, over `tokenizers`' own `DecodeStream`.

    The first id follows those that came before, if any: SentencePiece's decoders take the space
    off the first word of a text, which the first word of an answer is not.

    Pieces joined equal decoding all ids at once, wherever what follows cannot change what came
    before (byte fallback turns a whole run of bytes to U+FFFD at its first wrong one; what has
    been given out by then stays). An id takes bounded time and only the latest ids are kept, also
    where they never become text.
    """

    def __init__(self, backend: Any, *, after: Sequence[int] = ()) -> None:
        """`backend` is a `tokenizers.Tokenizer`; `after` are the ids before the first, or the last
        of them."""
        self._backend = backend
        self._context = last_words(backend, after)  # spacing depends on them
        self._stream = DecodeStream(ids=self._context)
        self._waiting: list[int] = []  # no text yet

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that is now certain, "" inside a character."""
        self._waiting.append(token_id)
        try:
            piece: str | None = self._stream.step(self._backend, token_id)
        except Exception:  # a bare one: this id changed the text of those before it
            return self._cut(len(self._waiting))
        if piece is not None:
            self._context, self._waiting = self._waiting, []
            return piece
        return self._cut(self._seam()) if len(self._waiting) >= _PATIENCE else ""

    def finish(self) -> str:
        """No more ids: the text of those that wait, U+FFFD for part of a character."""
        text = self._after_context(self._waiting)
        self._context = self._waiting = []
        self._stream = DecodeStream()
        return text

    def _cut(self, at: int) -> str:
        """The text of the first `at` ids that wait; the others wait in a new stream."""
        first, rest = self._waiting[:at], self._waiting[at:]
        text = self._after_context(first)
        # A stream gives out again what ends inside a character: it begins without such ids.
        self._context, self._waiting = [] if text.endswith("\ufffd") else first, []
        self._stream = DecodeStream(ids=self._context)
        return text + "".join(map(self.push, rest))

    def _seam(self) -> int:
        """Returns how many waiting ids can be dropped without changing a character; else all."""
        ids = self._waiting
        whole = self._decode(ids)
        for at in range(len(ids) - 1, len(ids) - _CHARACTER, -1):
            if self._decode(ids[:at]) + self._decode(ids[at:]) == whole:
                return at
        return len(ids)

    def _after_context(self, ids: list[int]) -> str:
        before, after = self._decode(self._context), self._decode(self._context + ids)
        return after[len(before) :] if after.startswith(before) else self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def last_words(backend: Any, ids: Sequence[int]) -> list[int]:
    """The fewest of the last ids that are text by themselves; none, if they end inside a
    character."""
    for count in range(1, min(len(ids), LAST_TOKENS) + 1):
        last = [int(one) for one in ids[-count:]]
        text: str = backend.decode(last, skip_special_tokens=False)
        if text and "\ufffd" not in text:
            return last
    return []


class TextStream:
    """Turns one request's generated ids into text as they come.

    Pieces joined equal what all ids at once add to the text of the ids in `after`, the last of the
    prompt. Text is held back while it ends inside a character, or could be the start of a stop
    string; a stop string itself is never given out. Used by one thread.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), after: Sequence[int] = ()
    ) -> None:
        if any(not text for text in stop):
            raise ValueError("got an empty stop string, expected at least one character")
        self._detokenizer = tokenizer.detokenizer(after=after)
        self._stop = tuple(stop)
        self._held = ""
        self._text: list[str] = []
        self.stopped_by: str | None = None
        """The stop string that ended the text, once one has."""

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._text)

    def push(self, token_id: int, *, stops: bool = True) -> str:
        """Add one id; returns the text that is now certain, often empty or one word.

        `stops`: whether stop strings count yet.
        """
        if self.stopped_by is not None:
            return ""
        return self._release(self._detokenizer.push(token_id), self._stop if stops else ())

    def finish(self) -> str:
        """No more ids: the text that was held back, an incomplete character included."""
        if self.stopped_by is not None:
            return ""
        return self._release(self._detokenizer.finish(), self._stop, final=True)

    def _release(self, new: str, stop: Sequence[str], *, final: bool = False) -> str:
        pending = self._held + new
        found = [(pending.find(one), one) for one in stop if one in pending]
        if found:
            end, self.stopped_by = min(found)
            out, self._held = pending[:end], ""
        else:
            keep = 0 if final else max([overlap(pending, one) for one in stop], default=0)
            out, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        if out:
            self._text.append(out)
        return out


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    sizes = range(min(len(mark), len(text) + 1))
    return max(size for size in sizes if text.endswith(mark[:size]))
