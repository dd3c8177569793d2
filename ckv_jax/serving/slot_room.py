"""Whether there is room: for one more batch beside what runs, in bytes and in device slots."""

from __future__ import annotations

from collections.abc import Sequence as Several

from ckv_jax.budget import Budget
from ckv_jax.config import SystemConfig
from ckv_jax.decode.decoder import rows_bucket
from ckv_jax.pipeline.plan import Plan
from ckv_jax.prefix.memory import Memory
from ckv_jax.serving.running import Running
from ckv_jax.serving.segments import most_buffered
from ckv_jax.serving.sequence import Sequence
from ckv_jax.storage.chain import EXACT
from ckv_jax.storage.layout import Layout


class SlotRoom:
    """What batches need and what running texts hold. Engine thread only."""

    def __init__(
        self,
        memory: Memory,
        running: Running,
        *,
        system: SystemConfig,
        plan: Plan,
        layout: Layout,
        max_bytes: int,
        segment_tokens: int,
    ) -> None:
        """`segment_tokens`: of the segments that texts become; 0: they stay in their buffers."""
        self._memory = memory
        self._running = running
        self._system = system
        self._layout = layout
        self._max_bytes = max_bytes
        self._segment_tokens = segment_tokens
        self._step = max(len(step.groups) for step in plan.steps)

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, all layers."""
        layout = self._layout
        row = layout.num_kv_heads * layout.head_dim * layout.numpy_dtype.itemsize
        return 2 * row * layout.num_layers

    def fits(self, batch: Several[Sequence], job_bytes: int) -> bool:
        """Whether a batch fits beside all that runs and jobs of so many bytes: bytes in all, slots
        of one step, slots that stay."""
        if self._num_bytes(batch) + job_bytes > self._max_bytes:
            return False
        if not self._system.own.generates:  # it gets by with the slots there are
            return True
        if self._chunks(batch) * self._step > self._memory.step_slots + self._running.excess:
            return False
        return batch[0].sampling is None or self.held(batch)

    def held(self, batch: Several[Sequence]) -> bool:
        """Whether one choice of every text of a batch and of those running may stay in its slots.

        Windows keep more than that only while nobody else needs the slots.
        """
        chunks = self._chunks([*self._running.holding, *batch])
        return chunks * self._layout.groups <= self._memory.hold_slots

    def make_way(self, batch: Several[Sequence], *, hold: bool) -> None:
        """Ends what running texts read between tokens; where the batch needs slots in which their
        windows keep more than a choice, takes them back."""
        self._running.rest()
        slots = self._chunks(batch) * (self._layout.groups if hold else self._step)
        if self._system.own.generates and slots > self._memory.step_slots:
            self._running.narrow()

    def _new(self, sequence: Sequence) -> int:
        """Generated tokens that a sequence's buffers hold at most."""
        if sequence.sampling is None:
            return 0
        most, prefix = sequence.sampling.max_tokens, sequence.prefix
        segments = (
            self._segment_tokens and sparse(sequence, self._system) and prefix.provenance == EXACT
        )
        if not segments or Budget.of(sequence.budget).exact:  # it may find no slots to move onto
            return most
        return min(most, most_buffered(self._segment_tokens, prefix.layout.chunk_tokens))

    def _chunks(self, sequences: Several[Sequence]) -> int:
        """Chunks that sequences select at most, those of one prefix in common at best."""
        most: dict[str, list[int]] = {}
        for sequence in sequences:
            if sparse(sequence, self._system):
                prefix = sequence.prefix
                count = Budget.of(sequence.budget).chunks(prefix.num_chunks)
                count += self._system.always.most(prefix.layout, prefix.num_tokens)
                most.setdefault(sequence.prefix.id, [sequence.prefix.num_chunks]).append(count)
        grown = sum(sequence.grown for sequence in sequences)
        return grown + sum(min(total, sum(counts)) for total, *counts in most.values())

    def _num_bytes(self, batch: Several[Sequence]) -> int:
        """Device bytes of a batch and of all that runs: packs, and the keys and values of suffixes
        and of what is generated."""
        rows = 0
        for sequence in [*self._running.sequences, *batch]:
            own = len(sequence.suffix) if sparse(sequence, self._system) else len(sequence.tokens)
            rows += rows_bucket(own + self._new(sequence))
        texts = [*self._running.holding, *(s for s in batch if s.sampling is not None)]
        others = [sequence for sequence in batch if sequence.sampling is None]
        packs = self._chunks(texts) * self._layout.groups + self._chunks(others) * self._step
        return packs * self._layout.pack_bytes + rows * self.token_bytes


def sparse(sequence: Sequence, system: SystemConfig) -> bool:
    """Whether a sequence stands on something stored."""
    return sequence.prefix.num_tokens > 0 and not system.computes_all
