"""The packs that one sequence's decode keeps in their device slots between tokens."""

from __future__ import annotations

import numpy as np

from ckv_jax.cache.window import FREE
from ckv_jax.memory.memory import Memory
from ckv_jax.pipeline.plan import Plan
from ckv_jax.reads.residents import Resident


class _Kept:
    """What was chosen last, and what its window holds: slot by slot, as the device has it."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids
        self.chunk = ids.astype(np.int32)
        self.last = np.zeros(len(ids), np.int32)
        self.uses = np.ones(len(ids), np.int32)


class Window:
    """Pins of one sequence on cached packs, choice by choice (`Plan.choices`: one of each period,
    or of each of its KV heads). Engine thread only.

    Every chunk of a choice that is in the window is pinned in all its layer groups, so
    sequences over one prefix share packs, and what leaves goes back to the caches. A window that
    is not `held` only knows what was chosen: its packs come through the pool anew for every token
    (`Streaming`).
    """

    def __init__(self, resident: Resident, memory: Memory, plan: Plan, *, held: bool) -> None:
        self.resident = resident
        self.held = held
        self._memory = memory
        self._plan = plan
        self._kept: dict[int, _Kept] = {}

    def choose(self, choice: int, ids: np.ndarray) -> None:
        """Begins a choice with these chunks (ascending), which must be cached."""
        assert not self.held or choice not in self._kept
        self._kept[choice] = _Kept(ids)
        self._pin(choice, ids)

    def cached(self, choice: int, ids: np.ndarray) -> bool:
        """Whether all packs of these chunks are in device slots now."""
        return all(
            bool((self.lookup(group, ids)[0] >= 0).all()) for group in self._plan.groups(choice)
        )

    @property
    def widest(self) -> int:
        """Chunks of the choice that has most."""
        return max((len(kept.ids) for kept in self._kept.values()), default=0)

    @property
    def excess(self) -> int:
        """Device slots of what is kept beside the latest choices."""
        return sum(
            (int((kept.chunk >= 0).sum()) - len(kept.ids)) * len(self._plan.groups(choice))
            for choice, kept in self._kept.items()
            if self.held
        )

    @property
    def slots_held(self) -> int:
        """Device slots of all that is kept."""
        return sum(
            int((kept.chunk >= 0).sum()) * len(self._plan.groups(choice))
            for choice, kept in self._kept.items()
        )

    def ids(self, choice: int) -> np.ndarray:
        """Chunks int [n] of a choice, ascending."""
        return self._kept[choice].ids

    def lengths(self, choice: int) -> np.ndarray:
        """Valid tokens int32 [n] of each of them."""
        lengths: np.ndarray = self.resident.chunk_lengths[self.ids(choice)]
        return lengths

    def lookup(self, group: int, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Device slot and host slot of a layer group's packs, int32 [n] each; -1: not there."""
        return self._memory.tiers.lookup(self.resident.pages(group, chunks))

    def state(self, choice: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What each slot of the window holds (FREE: nothing), the step that chose it last and how
        often it was chosen, int32 [W] each."""
        kept = self._kept[choice]
        return kept.chunk, kept.last, kept.uses

    def resize(self, widths: np.ndarray) -> None:
        """Gives each choice so many slots int [P], at least those of its latest choice; what was
        chosen longest ago leaves first."""
        for choice, kept in self._kept.items() if self.held else ():
            size = max(int(widths[choice]), len(kept.ids))
            if size == len(kept.chunk):
                continue
            age = np.where(np.isin(kept.chunk, kept.ids), np.iinfo(np.int32).max, kept.last)
            order = np.argsort(np.where(kept.chunk < 0, -1, age), kind="stable")[::-1]
            self._unpin(choice, kept.chunk[order[size:]])
            more = max(0, size - len(kept.chunk))
            for name, empty in (("chunk", FREE), ("last", -1), ("uses", 0)):
                held = getattr(kept, name)[order[:size]]
                setattr(kept, name, np.append(held, np.full(more, empty, np.int32)))

    def make_way(self, choice: int, table: np.ndarray, misses: np.ndarray) -> None:
        """Lets go of what stands where a choice's misses are to go (`cache.window.Moves`)."""
        kept, places = self._kept[choice], table[misses >= 0]
        self._unpin(choice, kept.chunk[places])
        kept.chunk[places] = FREE

    def move(
        self, choice: int, ids: np.ndarray, table: np.ndarray, misses: np.ndarray, step: int
    ) -> None:
        """A choice `ids` (-1 past its end) is complete: all its packs are in device slots."""
        kept, taken = self._kept[choice], ids >= 0
        places = table[taken]
        came = misses[misses >= 0]
        self._pin(choice, came)
        kept.ids = ids[taken]
        kept.chunk[places] = kept.ids
        kept.last[places] = step
        kept.uses[places] = np.where(misses[taken] >= 0, 1, kept.uses[places] + 1)

    def absent(self, resident: Resident) -> np.ndarray:
        """Chunks int [n] of a longer prefix that a window which holds all of its own lacks: new
        ones, and the last of its own where that lies elsewhere now."""
        new = np.arange(self.resident.num_chunks, resident.num_chunks)
        return np.append(self._moved(resident), new)

    def onto(self, resident: Resident) -> None:
        """Its prefix continues: chunks are those of `resident` from now on, under the same numbers.
        What was partial lies elsewhere now, and is let go."""
        moved = self._moved(resident)
        for choice, kept in self._kept.items():
            gone = np.isin(kept.chunk, moved)
            self._unpin(choice, kept.chunk[gone])
            kept.chunk[gone] = FREE
            kept.ids = np.setdiff1d(kept.ids, moved)
        self.resident = resident

    def _moved(self, resident: Resident) -> np.ndarray:
        """Chunks int [n] of its prefix that lie elsewhere in this one, which continues it."""
        own = np.arange(self.resident.num_chunks)
        moved: np.ndarray = own[self.resident.pages(0, own) != resident.pages(0, own)]
        return moved

    def add(self, choice: int, chunks: np.ndarray) -> None:
        """All of these are attended to as well; they must be cached, and nothing chosen anew."""
        kept = self._kept[choice]
        self._pin(choice, chunks)
        self._kept[choice] = _Kept(np.union1d(kept.ids, chunks))

    def forget(self) -> None:
        """Lets go of all that is kept; no call may be reading it."""
        for choice, kept in self._kept.items():
            self._unpin(choice, kept.chunk)
            kept.chunk[:] = FREE
        self._memory.trim()

    def rechoose(self, choice: int, ids: np.ndarray) -> None:
        """What a window that is not held attends to from now on."""
        assert not self.held
        self._kept[choice] = _Kept(ids)

    def close(self) -> None:
        """Unpins everything. Idempotent."""
        for choice, kept in self._kept.items():
            self._unpin(choice, kept.chunk)
        self._kept.clear()
        self._memory.trim()

    def _pin(self, choice: int, chunks: np.ndarray) -> None:
        for group in self._plan.groups(choice) if self.held else ():
            self._memory.tiers.pin(self.resident.pages(group, chunks))

    def _unpin(self, choice: int, chunks: np.ndarray) -> None:
        chunks = chunks[chunks >= 0]
        for group in self._plan.groups(choice) if self.held else ():
            self._memory.tiers.unpin(self.resident.pages(group, chunks))
