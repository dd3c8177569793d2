"""Placement: turns requests into sequences, encodes texts, and looks tokens up in the store."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import asdict, dataclass, replace
from itertools import repeat

import numpy as np

from ckv_jax.config import EngineConfig, SystemConfig
from ckv_jax.documents.loading import check_rotates
from ckv_jax.errors import CkvError, ContextOverflow
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.pipeline.layers import Layers
from ckv_jax.request import Request
from ckv_jax.serving.sequence import Listener, Sequence
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.codec import codec_of
from ckv_jax.storage.errors import PrefixNotFound
from ckv_jax.storage.layout import PLAIN, Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore
from ckv_jax.storage.tools.inspect import find_prefix
from ckv_jax.systems import GROUP, loadable_systems

_QUICK_TOKENS = 1024
Options = tuple[SamplingParams | None, bool]
"""`sampling` of a request, which ends at its first token without any, and `keep_kv`."""


def several(requests: Several[Request]) -> list[Request]:
    """The requests of one call; refuses an empty call and what is no list."""
    if not isinstance(requests, Several):
        raise TypeError(f"got {type(requests).__name__}, expected a list of Requests")
    if len(requests) == 0:
        raise ValueError("got an empty batch, expected at least one request")
    return list(requests)


def sampled(
    requests: Request | Several[Request],
    sampling: SamplingParams | Several[SamplingParams] | None,
    default: SamplingParams,
    keep_kv: bool | Several[bool],
) -> tuple[list[Request], Several[Options]]:
    """Each request of a `generate` call with its options."""
    asked = [requests] if isinstance(requests, Request) else several(requests)
    if sampling is None or isinstance(sampling, SamplingParams):
        sampling = [sampling or default] * len(asked)
    if len(sampling) != len(asked):
        raise ValueError(f"got {len(sampling)} samplings, expected {len(asked)}, one per request")
    kept = [keep_kv] * len(asked) if isinstance(keep_kv, bool) else keep_kv
    return asked, list(zip(sampling, kept, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """What one engine is made for, and where its requests belong. Thread-safe: it only looks things
    up."""

    model: ModelConfig
    tokenizer: Tokenizer | None
    store: ChunkStore
    fingerprint: Fingerprint
    layout: Layout
    system: SystemConfig
    config: EngineConfig

    def encode(self, text: str | Several[int] | np.ndarray, *, begins: bool = False) -> np.ndarray:
        """Token ids int32 [n] of a text; ids are checked and passed through.

        `begins`: whether the text is the first of a sequence (see `Tokenizer.encode`).
        """
        if isinstance(text, str):
            if self.tokenizer is None:
                raise ValueError("got text, expected token ids: this engine has no tokenizer")
            return self.tokenizer.encode(text, begins=begins)
        if not isinstance(text, (Several, np.ndarray)):
            raise TypeError(f"got {type(text).__name__}, expected a text or token ids")
        try:
            tokens = np.asarray(text)
        except ValueError as error:
            raise ValueError("got tokens of several shapes, expected integers [n]") from error
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise ValueError(f"got tokens {tokens.dtype}{tokens.shape}, expected integers [n]")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.model.vocab_size:
            raise ValueError(
                f"got token ids from {tokens.min()} to {tokens.max()}, "
                f"expected [0, {self.model.vocab_size})"
            )
        return tokens.astype(np.int32)

    def sequences(
        self,
        requests: Several[Request],
        options: Iterable[Options] | None = None,
        *,
        listener: Listener | None = None,
        under_way: dict[str, Sequence] | None = None,
        first: int = 0,
    ) -> list[Sequence]:
        """One placed sequence for each request of a call; a bad one has failed alone.

        `under_way`: sequences by id, to which these are added; `first`: how many requests
        the call has had before. Raises `TypeError` for what is no request.
        """
        under_way = {} if under_way is None else under_way
        sequences: list[Sequence] = []
        for request, (sampling, keep_kv) in zip(requests, options or repeat((None, False))):  # noqa: B905 - endless
            if not isinstance(request, Request):
                raise TypeError(f"got {type(request).__name__}, expected a Request")
            sequence = Sequence(
                request,
                index=first + len(sequences),
                sampling=sampling,
                keep_kv=keep_kv,
                listener=listener,
            )
            try:
                if request.id is not None and request.id in under_way:
                    raise ValueError(
                        f"got id {request.id!r} twice, expected one request of each id"
                    )
                self.place(sequence)
            except (CkvError, ValueError) as error:
                sequence.fail(error)
            if request.id is not None:
                under_way.setdefault(request.id, sequence)
            sequences.append(sequence)
        return sequences

    def dense(self, request: Request) -> Sequence:
        """A sequence that reads nothing of the store. Raises as `place`."""
        sequence = Sequence(request)
        self.place(sequence)
        nothing = Prefix.empty(self.fingerprint, self.layout, sequence.prefix.salt)
        sequence.place(nothing, sequence.tokens, 1.0)
        return sequence

    def place(self, sequence: Sequence) -> None:
        """Finds the stored prefix of a request, and the tokens to compute after it.

        Raises `ValueError` for ids that are no tokens and stop strings without a tokenizer,
        `ContextOverflow` if prefix, suffix and new tokens do not fit the model, and a
        `StoreError` for a prefix that is not stored or is another model's.
        """
        request, sampling = sequence.request, sequence.sampling
        if sampling is not None and sampling.stop and self.tokenizer is None:
            raise ValueError(f"got stop={sampling.stop!r}, but this engine has no tokenizer")
        new_tokens = 0
        if sampling is not None:
            new_tokens = sampling.max_tokens
            self.encode(sampling.forced_ids)
        salt = self.config.salt if request.salt is None else request.salt
        documents = request.documents or ()
        asked = documents[0] if len(documents) == 1 else request.prefix  # one is where it stands
        begins = isinstance(asked, np.ndarray | list | tuple) and not len(asked)
        suffix = self.encode(request.suffix, begins=begins)
        if not len(suffix):
            raise ValueError("got an empty suffix, expected a text or at least one token")
        if len(documents) > 1:
            self._place_documents(sequence, documents, suffix, salt, new_tokens)
            return
        if isinstance(asked, str):
            prefix = find_prefix(self.store, asked, salt=salt)
        elif isinstance(asked, Prefix):
            prefix = asked
        else:
            assert asked is not None  # `Request` sees to it
            tokens = self.encode(asked)  # ids, not a text
            prefix = self.longest(tokens, salt)
            suffix = np.concatenate([tokens[prefix.num_tokens :], suffix])
        self.check_prefix(prefix, salt)
        self.check_context(prefix.num_tokens, len(suffix), new_tokens)
        sequence.place(prefix, suffix, self.budget(request))
        if sequence.parsed_budget.mass is not None and self.system.own.selects == "token":
            raise ValueError(
                f"got budget={sequence.budget!r}, expected a share such as 0.25: system "
                f"{self.system.name!r} selects tokens"
            )

    def _place_documents(
        self,
        sequence: Sequence,
        documents: Several[Prefix | str],
        suffix: np.ndarray,
        salt: str,
        new_tokens: int,
    ) -> None:
        """The same over several stored documents, one after the other."""
        found = []
        for document in documents:
            if isinstance(document, str):
                document = find_prefix(self.store, document, salt=salt)
            self.check_prefix(document, salt)
            if not document.num_tokens:
                raise ValueError("got an empty document, expected at least one token")
            found.append(document)
        self.check_context(sum(one.num_tokens for one in found), len(suffix), new_tokens)
        budget = self.budget(sequence.request)
        nothing = Prefix.empty(self.fingerprint, self.layout, salt)
        if self.system.computes_all:
            sequence.place(nothing, np.concatenate([*(p.tokens for p in found), suffix]), 1.0)
            return
        if sequence.keep_kv:
            raise ValueError("got keep_kv with documents, expected one prefix: their KV is blended")
        system, apart = self.system, self.layout.pack_heads < self.layout.num_kv_heads
        if system.own.executor is not None or system.reprefill.score is not None or apart:
            raise ValueError(
                f"got documents, but system {system.name!r} does not select chunks of all heads by "
                "attention; ckv does"
            )
        check_rotates(self.model)
        sequence.place(nothing, suffix, budget, tuple(found))

    def budget(self, request: Request) -> float | str:
        """The one that a request is answered with."""
        return self.config.budget if request.budget is None else request.budget

    def shorten(self, sequence: Sequence) -> None:
        """Places a sequence on as much of its prefix as is stored now."""
        prefix = self.longest(sequence.prefix.tokens, sequence.prefix.salt)
        rest = sequence.prefix.tokens[prefix.num_tokens :]
        suffix = np.concatenate([rest, sequence.suffix])
        sequence.place(prefix, suffix, sequence.budget)

    def longest(self, tokens: np.ndarray, salt: str) -> Prefix:
        """The longest stored prefix of `tokens` int32 [n]."""
        return self.store.longest_prefix(
            tokens, fingerprint=self.fingerprint, layout=self.layout, salt=salt
        )

    def check_prefix(self, prefix: Prefix, salt: str) -> None:
        """Refuses a prefix that is not this engine's to use; says what differs.

        Raises `FingerprintMismatch` where another model, tokenizer or dtype made it,
        `PrefixNotFound` where it is another tenant's, `ValueError` where another system laid it
        out; a system that computes everything uses its tokens alone.
        """
        if prefix.fingerprint is not self.fingerprint:
            prefix.fingerprint.require(self.fingerprint)
        if prefix.salt != salt:
            raise PrefixNotFound(prefix.id)
        if self.system.computes_all or not prefix.num_tokens:
            return
        if prefix.layout == self.layout:  # as every request's but a mistaken one's
            return
        if prefix.layout.codec != self.layout.codec:
            codec_of(prefix.layout)  # refuses one that no system has
        stored, asked = asdict(prefix.layout), asdict(self.layout)
        differ = [field for field in asked if stored[field] != asked[field]]
        fields = ", ".join(
            f"{f} (stored {stored[f]!r}, got {asked[f]!r})" for f in differ if f != "short_last"
        )  # which follows from others
        if differ == ["short_last"]:
            raise ValueError(
                "stored by an older version, whose last packs are padded with zeros; ingest the "
                f"text again with --system {self.system.name}"
            )
        name, by = self.system.name, self._stored_by(prefix.layout)
        if by:
            by = f"with --system {by}"
            what = f"Ask with the system that stored it, or ingest the text with --system {name}"
        else:
            by = "by another system or version"
            what = (
                f"If a package of yours has that system, install it (entry point group {GROUP}) or "
                "ask with --system package.module:NAME. If the layout of a system has changed, "
                f"ingest the text again with --system {name}"
            )
        raise ValueError(f"stored {by}, asked with --system {name}; these differ: {fields}. {what}")

    def _stored_by(self, layout: Layout) -> str:
        """The systems that lay a prefix out so, whatever its codec; "" if none does."""
        plain = replace(layout, codec=PLAIN, codec_bytes=0)
        plain = replace(plain, short_last=plain.uneven)
        return " or ".join(
            system.name
            for system in loadable_systems()
            if plain
            == system.layout(
                num_layers=layout.num_layers,
                num_heads=self.model.num_heads,
                num_kv_heads=layout.num_kv_heads,
                head_dim=layout.head_dim,
                dtype=layout.dtype,
            )
        )

    def check_context(self, prefix: int, suffix: int, new_tokens: int = 0) -> None:
        """Raises `ContextOverflow` unless so many tokens fit the model's context together."""
        limit = self.model.max_position_embeddings
        if prefix + suffix + new_tokens > limit:
            more = f" and {new_tokens} new ones" if new_tokens else ""
            raise ContextOverflow(
                f"got {prefix} prefix and {suffix} suffix tokens{more}, "
                f"expected at most {limit} together (the model's context)"
            )


def placed_quickly(request: object) -> bool:
    """Whether a request is placed in less time than a thread takes to start: nothing has to be
    looked up or encoded."""
    return (
        isinstance(request, Request)
        and isinstance(request.prefix, Prefix)
        and not isinstance(request.suffix, str)
        and len(request.suffix) <= _QUICK_TOKENS
    )


def check_loaded(config: EngineConfig, layers: Layers) -> None:
    """Raises `ValueError` for a configuration that is not that of the loaded model."""
    if config.tensor_parallel != layers.shardings.size:
        raise ValueError(
            f"got tensor_parallel={config.tensor_parallel}, expected "
            f"{layers.shardings.size}, the number of devices that the model is split over"
        )
    if (config.weights == "int8") != layers.int8:
        has = "int8" if layers.int8 else None
        raise ValueError(f"got weights={config.weights!r}, expected {has!r} as in the model")
