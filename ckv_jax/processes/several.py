"""What leading and following have in common: agreeing on what each process found out by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from ckv_jax.peers import Agreed, Peers


class Several(Peers, ABC):
    """One of several processes."""

    @contextmanager
    def local(self) -> Iterator[Agreed]:
        """See `Peers`."""
        agreed, failure = Agreed(), None
        try:
            yield agreed
        except Exception as error:  # every process has to know, whatever it is
            failure = error
        agreed.fits = bool(self._round(int(agreed.fits), failure))

    def least(self, value: int) -> int:
        """See `Peers`."""
        return self._round(value, None)

    @abstractmethod
    def _round(self, value: int, failure: Exception | None) -> int:
        """The least value of all processes; raises `ProcessFailed` if one of them has failed."""
