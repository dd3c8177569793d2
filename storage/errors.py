"""The store's errors. Every one is a `CkvError`; readers of KV turn most of them into a miss."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence


class CkvError(Exception):
    """Base of all errors raised on purpose here, besides `ValueError` for bad input."""


class StoreError(CkvError):
    """A fault of the store: its folder, its catalog, its object store."""


class StoreClosed(StoreError):
    """The store, a reader or a writer was used after `close()`."""


class WrongKey(StoreError):
    """The store is encrypted and was opened without its key, or with another; or it is in clear and
    was opened with one. Nothing was read or changed."""


class StoreUnavailable(StoreError):
    """The store could not be asked just now: an I/O error, no descriptors, a lock or deadline.

    It says nothing about what is stored: nothing is marked, evicted or repaired because of it.
    """


class SegmentDamaged(StoreError):
    """Proof that a segment's manifest or files are missing, malformed, or not as written."""


class AssignmentDamaged(SegmentDamaged):
    """It is lost which tokens are in the packs of a segment that is there: KV that is computed
    again may tell, see `PrefixReader.order_by`."""


class SegmentUnfinished(SegmentDamaged):
    """Objects without a manifest: being uploaded, or left by one who was killed."""


class SegmentForeign(StoreError):
    """A whole segment of another version of the format, or of another key: not damaged, and not
    readable here."""


class PrefixNotFound(StoreError):
    """No stored prefix has this id.

    Attributes:
      prefix_id: the id that was asked for.
      close: stored ids that look like it, best first; if several begin so, the first of those.
      several: how many stored ids begin so, if more than one.
    """

    def __init__(
        self,
        prefix_id: str,
        close: Sequence[str] = (),
        *,
        several: int = 0,
        stored: str = "",
        within: str = "",
    ) -> None:
        """`several`: how many ids begin with what was asked for. `stored`: what there is, to be
        said where no id is close. `within`: the id of a longer prefix, whose tokens are stored in
        another order, so that none can end where this one would."""
        self.prefix_id = prefix_id
        self.close = tuple(close)
        self.several = several if several > 1 else 0
        if several > 1:
            more = f" and {several - len(self.close)} more" if several > len(self.close) else ""
            said = f"{several} stored prefixes begin with {prefix_id!r}"
            super().__init__(f"{said}: {', '.join(self.close)}{more}" if self.close else said)
            return
        if within:
            super().__init__(
                f"prefix {prefix_id!r} ends inside of {within}, whose tokens are stored in another "
                "order: it cannot be used or pinned by itself, only the whole"
            )
            return
        hint = f"; close ids: {', '.join(self.close)}" if self.close else ""
        if stored:
            super().__init__(f"no stored prefix has the name or id {prefix_id!r}; stored: {stored}")
            return
        super().__init__(f"no stored prefix with id {prefix_id!r}{hint}")


class FingerprintMismatch(StoreError):
    """The stored KV was made by another model, tokenizer, dtype or layout.

    Attributes:
      fields: names of the fields that differ.
    """

    def __init__(self, stored: Mapping[str, str], asked: Mapping[str, str]) -> None:
        names = sorted(stored.keys() | asked.keys())
        self.fields = tuple(n for n in names if stored.get(n) != asked.get(n))
        lines = [f"{n} (stored {stored.get(n)!r}, got {asked.get(n)!r})" for n in self.fields]
        if self.fields == ("dtype",):
            said = f"stored with dtype {stored.get('dtype')}, asked with dtype {asked.get('dtype')}"
        else:
            said = f"stored KV belongs to another model; these differ: {', '.join(lines)}"
        super().__init__(said)


class ReadTimeout(StoreError):
    """A read did not return within its deadline and was abandoned.

    The read may still be running and may still write into the caller's buffer: the buffer must not
    be used again before `settled()` is true.
    """

    def __init__(self, what: str, deadline_s: float, settled: Callable[[], bool]) -> None:
        self.settled = settled
        super().__init__(f"{what} did not return within {deadline_s:g} s")


class StoreFull(StoreError):
    """No room: the disk or quota is full, or `max_bytes` is held by pinned or busy segments.

    Nothing half-written is left, and the reserved bytes are free again.
    """


ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO))
"""What the kernel says of a name that is not there, or is no plain file or folder: proof."""


FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
"""What the kernel says of a disk or a quota that has no room."""


def as_store_error(where: object, error: OSError) -> StoreError:
    """`StoreFull` for a full disk or quota, `StoreUnavailable` for any other fault of the disk.

    `where` is the path that was to be written, or the folder that it lies in.
    """
    what = error.strerror or error
    if error.errno in FULL:
        return StoreFull(f"{where}: no room on the disk: {what}")
    return StoreUnavailable(f"{where}: cannot be written: {what}")


def as_unavailable(what: object, error: OSError) -> StoreUnavailable:
    """For a fault that proves nothing; `what` names the path or segment that was asked for."""
    return StoreUnavailable(f"{what}: cannot be looked at: {error.strerror or error}")


READ_ERRORS = (ValueError, OSError, RuntimeError, KeyError, IndexError, NotImplementedError)
"""What TensorStore raises for damaged, short, missing or unreadable data."""
