"""Stored prefixes: `Prefix` (tokens and the segments of its KV), `PrefixRecord`, `ProbePages`."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from ckv_jax.storage import chain
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.layout import Layout

MOST_PRIORITY = 1000
MOST_LETTERS = 200
"""Maximum length of a name, a source and the first words."""
_FIRST_LETTERS = 60
MOST_AROUND = 2000
"""Maximum length of the template's text before a question or after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of chunks of one segment.

    Attributes:
      segment_id: hex id of the segment.
      first_chunk: first chunk of the run, counted within the segment.
      num_chunks: chunks in the run; only the last of a prefix may be partial.
      segment_chunks: all chunks of the segment.
      checksum: hex SHA-256 of the manifest that this span was resolved from.
    """

    segment_id: str
    first_chunk: int
    num_chunks: int
    segment_chunks: int
    checksum: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefix:
    """Handle of token ids whose KV is stored.

    Attributes:
      id: 32 hex digits; equal tokens of the same model, layout and salt have equal ids.
      tokens: token ids, int32 [T], read-only.
      spans: the runs of chunks in segments, in order; empty when nothing is stored.
      layout: layout of the KV.
      fingerprint: fingerprint of the model.
      salt: the tenant's salt; "" without one.
      provenance: "exact", or how the last part of the KV was made, such as "budget:0.25".
      exact_chunks: number of chunks before the first with another provenance than "exact".
    """

    id: str
    tokens: np.ndarray = field(repr=False)
    spans: tuple[Span, ...]
    layout: Layout
    fingerprint: Fingerprint
    salt: str = field(default="", repr=False)
    provenance: str = chain.EXACT
    exact_chunks: int = 0

    @classmethod
    def empty(cls, fingerprint: Fingerprint, layout: Layout, salt: str) -> Prefix:
        """Creates the prefix of no tokens."""
        return cls(
            id=chain.seed(fingerprint, layout, salt).hex(),
            tokens=chain.as_tokens(np.zeros(0, np.int32)),
            spans=(),
            layout=layout,
            fingerprint=fingerprint,
            salt=salt,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prefix) and (self.id, self.spans) == (other.id, other.spans)

    def __hash__(self) -> int:
        return hash((self.id, self.spans))

    def __str__(self) -> str:
        """Formats id, size and provenance as one line."""
        made = "" if self.provenance == chain.EXACT else f", made under {self.provenance}"
        tokens, chunks = (
            f"{count:,} {noun}{'' if count == 1 else 's'}"
            for count, noun in ((self.num_tokens, "token"), (self.num_chunks, "chunk"))
        )
        return f"prefix {self.id[:12]}: {tokens} in {chunks}{made}"

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens (T)."""
        return len(self.tokens)

    @cached_property
    def num_chunks(self) -> int:
        """Number of chunks (M); the last chunk may be partial."""
        return self.layout.num_chunks(len(self.tokens))

    def whole_chunks(self) -> Prefix:
        """Returns this prefix without a partial last chunk, so that another segment can continue
        it."""
        size = self.layout.chunk_tokens
        tokens = self.tokens[: len(self.tokens) // size * size]
        if len(tokens) == len(self.tokens):
            return self
        last = replace(self.spans[-1], num_chunks=self.spans[-1].num_chunks - 1)
        spans = (*self.spans[:-1], last) if last.num_chunks else self.spans[:-1]
        exact = self.exact_chunks if self.provenance != chain.EXACT else len(tokens) // size
        first = chain.seed(self.fingerprint, self.layout, self.salt)
        link = [first, *chain.links(first, tokens[: exact * size], size)][-1]
        shorter = replace(self, tokens=tokens, spans=spans)
        if len(tokens) <= exact * size:
            return replace(shorter, id=link.hex(), provenance=chain.EXACT, exact_chunks=0)
        *_, link = chain.links(chain.branch(link, self.provenance), tokens[exact * size :], size)
        return replace(shorter, id=link.hex())


class ProbePages:
    """The probe keys of a prefix as pages; the same in every probe layer.

    A page is a run of chunks of one segment, cut at every `most` of them and where the prefix's
    span begins and ends, so that prefixes that share a segment share its pages but for such ends.

    Args:
      prefix: whose.
      most: chunks of a page; default: `Layout.probe_page_chunks`, what a cache's slot holds.

    Attributes (N pages, M chunks of the prefix):
      span: int [N], the span of each page.
      first, chunks: int [N], its first chunk within the segment, and how many it has.
      tokens: int [N], its tokens.
      start: int [N], its first token in the prefix.
      place: int32 [M], where each chunk of the prefix is: page * `most` + place in it.
    """

    def __init__(self, prefix: Prefix, most: int | None = None) -> None:
        self.prefix = prefix
        layout = prefix.layout
        self.most = most = layout.probe_page_chunks if most is None else most
        size = layout.chunk_tokens
        cuts = []  # (span, first, chunks)
        for index, span in enumerate(prefix.spans):
            first, end = span.first_chunk, span.first_chunk + span.num_chunks
            inner = range((first // most + 1) * most, end, most)
            edges = [first, *inner, end]
            cuts += [(index, a, b - a) for a, b in itertools.pairwise(edges)]
        table = np.array(cuts, np.int64).reshape(-1, 3)
        self.span, self.first, self.chunks = table.T
        self.start = (np.cumsum(self.chunks) - self.chunks) * size
        self.tokens = np.minimum(self.chunks * size, prefix.num_tokens - self.start)
        page = np.repeat(np.arange(len(self)), self.chunks)
        self.place = (page * most + np.arange(len(page)) - (self.start // size)[page]).astype(
            np.int32
        )

    def __len__(self) -> int:
        """N."""
        return len(self.span)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one probe layer."""
        layout = self.prefix.layout
        return layout.probe_heads * layout.head_dim * layout.disk_dtype.itemsize

    def whole(self, page: int) -> bool:
        """Whether a page is cut by its segment alone, not by the prefix's span."""
        most = self.most
        first = int(self.first[page])
        end = first + int(self.chunks[page])
        last = self.prefix.spans[int(self.span[page])].segment_chunks
        return first % most == 0 and (end % most == 0 or end == last)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRecord:
    """Retention, name and origin of one stored prefix, in a file of its own that outlives the
    index.

    Attributes:
      pinned: whether the prefix is protected from eviction.
      retain_s: time to live in seconds after the last use. Expired prefixes are evicted first, and
        `prune_store(expired=True)` removes them. None: no limit.
      priority: eviction priority, -1000 to 1000: lower values are evicted first, whatever their
        score.
      name: a name for `find_prefix`; "" without one. Several prefixes may share a name.
      source: origin of the text, such as a file name.
      begins: the first words of the text.
      before, after: text of the chat template between the prefix and a question, and between the
        question and its answer; both "" for a prefix of plain text.
    """

    pinned: bool = False
    retain_s: float | None = None
    priority: int = 0
    name: str = ""
    source: str = ""
    begins: str = ""
    before: str = ""
    after: str = ""

    def __post_init__(self) -> None:
        seconds = self.retain_s
        if type(self.pinned) is not bool:
            raise ValueError(f"pinned: got {self.pinned!r}, expected a bool")
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (number and 0 <= seconds < math.inf):
            raise ValueError(f"retain_s: got {seconds!r}, expected None or at least 0 seconds")
        if type(self.priority) is not int or abs(self.priority) > MOST_PRIORITY:
            raise ValueError(
                f"priority: got {self.priority!r}, expected -{MOST_PRIORITY} to {MOST_PRIORITY}"
            )
        for what in ("name", "source", "begins"):
            text = getattr(self, what)
            if not isinstance(text, str) or len(text) > MOST_LETTERS or not text.isprintable():
                raise ValueError(
                    f"{what}: got {text!r}, expected one line of at most {MOST_LETTERS} characters"
                )
        for what in ("before", "after"):
            text = getattr(self, what)
            if not isinstance(text, str) or len(text) > MOST_AROUND:
                raise ValueError(
                    f"{what}: got {text!r}, expected a text of at most {MOST_AROUND} characters"
                )

    def encode(self) -> bytes | None:
        """Encodes the record as the bytes of its file; None for a default record."""
        return None if self == PrefixRecord() else json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> PrefixRecord:
        """Decodes a file; an unreadable file counts as a pin, so that nothing is evicted by
        mistake."""
        try:
            found = json.loads(data)
            later = {f.name: found.get(f.name, "") for f in fields(cls) if f.type == "str"}
            return cls(**{f.name: found[f.name] for f in fields(cls) if f.type != "str"} | later)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return cls(pinned=True)


def first_words(text: str) -> str:
    """Returns the beginning of a text as one line, cut between words where possible."""
    words = " ".join(text[: 4 * _FIRST_LETTERS].split())
    line = "".join(c if c.isprintable() else " " for c in words)
    if len(line) <= _FIRST_LETTERS:
        return line
    cut = line[:_FIRST_LETTERS].rsplit(" ", 1)[0]
    return f"{cut} …"
