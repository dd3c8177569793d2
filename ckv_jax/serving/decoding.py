"""How texts go on from their first token: what each then holds, chooses by and is decoded with."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several

from ckv_jax.config import SystemConfig
from ckv_jax.decode.decoder import Decoder, KvRows, Row, Streaming
from ckv_jax.decode.scoring import Scoring
from ckv_jax.decode.selection import DecodeContext, DecodeSelection, DecodeSelections
from ckv_jax.decode.window import Window
from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.pipeline.executor import FirstToken
from ckv_jax.pipeline.layers import Layers
from ckv_jax.pipeline.plan import Plan
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.memory import Memory
from ckv_jax.prefix.open_prefix import OpenPrefix, Source
from ckv_jax.prefix.open_prefixes import OpenPrefixes
from ckv_jax.prefix.packs import Packs
from ckv_jax.serving.going import Going
from ckv_jax.serving.segments import Segments
from ckv_jax.serving.sequence import Sequence
from ckv_jax.serving.text import Text
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.store import ChunkStore
from ckv_jax.trace import Trace


class Decoding:
    """Makes what running texts of one engine need. Engine thread only, except `close`."""

    def __init__(
        self,
        layers: Layers,
        memory: Memory,
        plan: Plan,
        system: SystemConfig,
        *,
        store: ChunkStore,
        prefixes: OpenPrefixes,
        fingerprint: Fingerprint,
        tokenizer: Tokenizer | None,
        segment_tokens: int,
        open_packs: Callable[[Several[Source], Trace], Packs],
    ) -> None:
        """`segment_tokens`: of a segment of what a text generates, where texts have such (0: no);
        `open_packs`: the packs of some prefixes, for one use."""
        self._layers = layers
        self._memory = memory
        self._plan = plan
        self._tokenizer = tokenizer
        self._open_packs = open_packs
        self._rows = KvRows(layers)
        self.selections: DecodeSelections | None = None
        """What selects for each token, where the system does."""
        self.segments: Segments | None = None
        """What moves texts onto what they generated, where texts choose at all."""
        if system.decode is not None:
            context = DecodeContext(
                Scoring(layers), plan, system, prefixes, memory, fingerprint, open_packs
            )
            self.selections = (system.own.decoding or DecodeSelections)(context)
        if self.selections is not None and segment_tokens:
            self.segments = Segments(
                store, prefixes, plan, system.coder, tokens=segment_tokens,
                open_packs=open_packs, selector=self.selections.row,
            )  # fmt: skip

    def begin(self, sequence: Sequence, trace: Trace) -> None:
        """A sequence's first token is about to be chosen."""
        assert sequence.sampling is not None
        text = Text(
            self._tokenizer,
            sequence.sampling,
            self._layers.config.eos_token_ids,
            after=sequence.last_tokens,
        )
        sequence.begin_text(text, trace)

    def going(
        self,
        sequence: Sequence,
        opened: OpenPrefix,
        probes: Digest,
        first: FirstToken,
        row: int,
        trace: Trace,
        *,
        hold: bool,
    ) -> Going:
        """A sequence that goes on after row `row` of `first`, with its packs pinned if they may
        stay (`hold`) and all are there."""
        chosen = [ids[row][ids[row] >= 0] for ids in first.selections]
        window = Window(opened, self._memory, self._plan, held=False)
        window.held = hold and all(window.cached(choice, ids) for choice, ids in enumerate(chosen))
        for choice, ids in enumerate(chosen):
            window.choose(choice, ids)
        limit = max(map(len, chosen))  # as attention decided, or the whole budget
        selector = None
        if self.selections is not None and limit < opened.num_chunks:
            selector = self.selections.row(limit, probes, window, apart=sequence.apart)
        self.begin(sequence, trace)
        return Going(
            sequence=sequence,
            row=Row(start=opened.prefix.num_tokens, length=len(sequence.suffix), window=window),
            opened=opened.share(),
            window=window,
            selector=selector,
            tail=None if self.segments is None else self.segments.tail(sequence, window, limit),
        )

    def decoder(self, streams: OpenPrefix | None) -> Decoder:
        """An empty batch; with a prefix, one for a single row whose packs stream."""
        streaming = None
        if streams is not None:
            streaming = Streaming(
                self._layers, self._memory, self._plan,
                lambda: self._open_packs([streams], Trace()),
            )  # fmt: skip
        return Decoder(self._layers, self._memory, self._plan, self._rows, streaming=streaming)

    def selection(self) -> DecodeSelection | None:
        """Selects for a batch's rows; None where the system does not."""
        return None if self.selections is None else self.selections.batch()

    def close(self) -> None:
        """Ends what is being written. All texts have ended."""
        if self.segments is not None:
            self.segments.close()
