"""Admission: decides whether another batch fits in memory and device slots."""

from __future__ import annotations

from collections.abc import Sequence as Several

from ckv_jax.decode.decoder import rows_bucket
from ckv_jax.pipeline.executor import Runtime
from ckv_jax.serving.decode_batch import DecodeBatches
from ckv_jax.serving.offload import most_buffered
from ckv_jax.serving.sequence import Sequence
from ckv_jax.storage.chain import EXACT


class Admission:
    """Accounts for the memory of batches and running sequences. Engine thread only."""

    def __init__(
        self, runtime: Runtime, running: DecodeBatches, *, max_bytes: int, segment_tokens: int
    ) -> None:
        """`segment_tokens`: of offloaded segments; 0: generated tokens stay in their buffers."""
        self._runtime = runtime
        self._memory = runtime.memory
        self._system = runtime.system
        self._layout = runtime.layout
        self._running = running
        self._max_bytes = max_bytes
        self._segment_tokens = segment_tokens
        self._step = max(len(step.groups) for step in runtime.plan.steps)

    def fits(self, batch: Several[Sequence], job_bytes: int) -> bool:
        """Whether a batch fits beside all that runs and jobs of so many bytes: bytes in all, slots
        of one step, slots that stay."""
        if self._num_bytes(batch) + job_bytes > self._max_bytes:
            return False
        if self.slots(batch, hold=False) > self._memory.step_slots + self._running.excess:
            return False
        return batch[0].sampling is None or self.held(batch)

    def held(self, batch: Several[Sequence]) -> bool:
        """Whether one selection of every sequence of a batch and of those running may stay in its
        slots.

        Windows keep more than that only while no other sequence needs the slots.
        """
        chunks = self._chunks([*self._running.holding, *batch])
        return chunks * self._layout.groups <= self._memory.hold_slots

    def slots(self, batch: Several[Sequence], *, hold: bool) -> int:
        """Device slots that a batch needs: for all layer groups where its packs stay (`hold`), else
        for those of one step; 0 where the system's own executor makes do with any."""
        if not self._system.own.generates:
            return 0
        return self._chunks(batch) * (self._layout.groups if hold else self._step)

    def _new(self, sequence: Sequence) -> int:
        """Generated tokens that a sequence's buffers hold at most."""
        if sequence.sampling is None:
            return 0
        most, prefix = sequence.sampling.max_tokens, sequence.prefix
        segments = (
            self._segment_tokens and sequence.sparse(self._system) and prefix.provenance == EXACT
        )
        if not segments or sequence.parsed_budget.exact:  # it may find no slots to move onto
            return most
        return min(most, most_buffered(self._segment_tokens, prefix.layout.chunk_tokens))

    def _chunks(self, sequences: Several[Sequence]) -> int:
        """Chunks that sequences select at most, those of one prefix in common at best."""
        most: dict[str, list[int]] = {}
        for sequence in sequences:
            if sequence.sparse(self._system):
                prefix = sequence.prefix
                count = sequence.parsed_budget.chunks(prefix.num_chunks)
                count += self._system.always.most(prefix.layout, prefix.num_tokens)
                most.setdefault(sequence.prefix.id, [sequence.prefix.num_chunks]).append(count)
        offloaded = sum(sequence.offloaded_chunks for sequence in sequences)
        return offloaded + sum(min(total, sum(counts)) for total, *counts in most.values())

    def _num_bytes(self, batch: Several[Sequence]) -> int:
        """Device bytes of a batch and of all that runs: packs, and the keys and values of suffixes
        and of what is generated."""
        rows = 0
        for sequence in [*self._running.sequences, *batch]:
            own = len(sequence.suffix) if sequence.sparse(self._system) else len(sequence.tokens)
            rows += rows_bucket(own + self._new(sequence))
        generating = [*self._running.holding, *(s for s in batch if s.sampling is not None)]
        others = [sequence for sequence in batch if sequence.sampling is None]
        packs = self._chunks(generating) * self._layout.groups + self._chunks(others) * self._step
        return packs * self._layout.pack_bytes + rows * self._runtime.token_bytes
