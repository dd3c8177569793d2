"""What a batch or a generation has open of one stored prefix: reader, resident, probes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from contextlib import ExitStack
from functools import partial

import numpy as np
from jax import Array

from ckv_jax.config import SystemConfig
from ckv_jax.model.shardings import Shardings
from ckv_jax.pipeline.executor import ReprefillExecutor
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.probe_keys import ProbeKeys
from ckv_jax.pipeline.probes import OpenPacks, Probes
from ckv_jax.pipeline.recovery import Recovered, Recoveries
from ckv_jax.reads.resident import Resident
from ckv_jax.reads.residents import Residents
from ckv_jax.reads.source import Source
from ckv_jax.storage.errors import SegmentDamaged
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.store import ChunkStore
from ckv_jax.trace import Trace


class Leases:
    """Opens prefixes of one store for one engine."""

    def __init__(
        self,
        *,
        store: ChunkStore,
        residents: Residents,
        recoveries: Recoveries,
        executor: ReprefillExecutor,
        plan: Plan,
        system: SystemConfig,
        deadline_s: float,
        shardings: Shardings,
        open_packs: OpenPacks,
        keys: ProbeKeys,
        pool: Callable[[], Array],
    ) -> None:
        """`executor`: says which form of a prefix is read; `open_packs`: of probe keys; `pool`: the
        page pool as it is now."""
        self.residents = residents
        self._shardings = shardings
        self._store = store
        self._recoveries = recoveries
        self._executor = executor
        self._plan = plan
        self._system = system
        self._deadline_s = deadline_s
        self._open_packs = open_packs
        self._keys = keys
        self._pool = pool

    def open_all(
        self, prefixes: Several[Prefix], stack: ExitStack, *, lazily: bool
    ) -> tuple[list[Lease], list[int]]:
        """A lease of each of these prefixes, in the form to be served, and which of the leases each
        prefix has. They are closed with `stack`. `lazily`: nothing is asked of the store before
        something has to be read. Raises a `StoreError` if one is gone."""
        places: dict[str, int] = {}
        leases: list[Lease] = []
        which = []
        for prefix in prefixes:
            name = self._executor.served(prefix).id
            if name not in places:
                leases.append(self._open_served(prefix, lazily))
                stack.callback(leases[-1].close)
                name = leases[-1].resident.prefix.id
                places[name] = len(leases) - 1
            which.append(places[name])
        return leases, which

    def _open_served(self, prefix: Prefix, lazily: bool) -> Lease:
        served = self._executor.served(prefix)
        try:
            return self.open(served, lazily=lazily)
        except SegmentDamaged:
            self._executor.forget(prefix)  # another engine of this store may have a newer form
            again = self._executor.served(prefix)
            if again is served:
                raise
            return self.open(again, lazily=lazily)

    def open(self, prefix: Prefix, *, room: int = 0, lazily: bool = False) -> Lease:
        """`room`: chunks that its digest is to have room for; `lazily`: see `open_all`. Raises a
        `StoreError` if the prefix is gone."""
        exit_ = ExitStack()
        try:
            exit_.callback(self._store.touch, prefix)
            reader = self._store.reader(prefix, deadline_s=self._deadline_s, lazily=lazily)
            exit_.callback(reader.close)
            resident = exit_.enter_context(self.residents.using(prefix, room))
            order = reader.order if prefix.layout.reordered else None
            recovered = self._recoveries.of(
                prefix, partial(self.order_of, prefix) if prefix.layout.alike else lambda _: order
            )
            return Lease(reader, resident, recovered, exit_, order)
        except BaseException:
            exit_.close()
            raise

    def order_of(self, prefix: Prefix, kv: np.ndarray | None = None) -> np.ndarray | None:
        """The order of a prefix, as a lease has it, or of alike tokens, found again by `kv`
        [L, 2, T, K, D]. Raises a `StoreError` if it is gone."""
        layout = prefix.layout
        if not (layout.reordered or layout.alike):
            return None
        with self._store.reader(prefix, deadline_s=self._deadline_s) as reader:
            if kv is None:
                return reader.order

            def keys(group: int, start: int, end: int) -> np.ndarray:
                layer, head = layout.group_layers(group)[0], layout.group_heads(group).start
                found: np.ndarray = kv[layer, 0, start:end, head]
                return found

            return reader.order_by(keys)

    def probes(self, lease: Lease, trace: Trace) -> Probes:
        """The probes of a lease; `Probes.cancel` ends their reads.

        Raises `RecoveryNeeded` where the digest has to be computed again.
        """
        return Probes(
            resident=lease.resident,
            residents=self.residents,
            reader=lease.reader,
            plan=self._plan,
            system=self._system,
            open_packs=self._open_packs,
            keys=self._keys,
            pool=self._pool,
            recovered=lease.recovered,
            trace=trace,
            shardings=self._shardings,
        )

    def close(self) -> None:
        """Persists what prefixes are worth."""
        self.residents.save_scores()


class Lease:
    """One prefix, open: until `close` its segments stay on disk, its pages keep their numbers."""

    def __init__(
        self,
        reader: PrefixReader,
        resident: Resident,
        recovered: Recovered,
        exit_: ExitStack,
        order: np.ndarray | None,
    ) -> None:
        """`order` int [L, T]: the position of each token as stored; None: as it is."""
        self.order = order
        self.reader = reader
        self.resident = resident
        self.recovered = recovered
        self._exit = exit_
        self._users = 1

    def shared(self) -> Lease:
        """The same lease for one more user, who closes it too."""
        self._users += 1
        return self

    @property
    def source(self) -> Source:
        """Where its packs come from."""
        return Source(self.resident, self.reader, self.recovered)

    def close(self) -> None:
        """One user less; the last one lets the prefix go."""
        self._users -= 1
        if not self._users:
            self._exit.close()
