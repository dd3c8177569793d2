"""The store's errors. Each is a `CkvError`; readers of KV turn most of them into a cache miss."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping, Sequence


class CkvError(Exception):
    """Base of all errors of this package, except `ValueError` and `TypeError` for bad input."""


class StoreError(CkvError):
    """A fault of the store: its folder, its index or its object store."""


class StoreClosed(StoreError):
    """The store, a reader or a writer was used after `close()`."""


class IndexDamaged(StoreError):
    """The index contradicts itself. Nothing was changed; a repair makes it again."""


class WrongKey(StoreError):
    """The store was opened with the wrong key: an encrypted one without its key or with another, or
    an unencrypted one with a key. Nothing was read or changed."""


class StoreUnavailable(StoreError):
    """The store did not answer: an I/O error, no file descriptors, a lock, or a deadline.

    Try again later. It proves nothing about the stored data, so nothing is marked, evicted or
    repaired because of it.
    """


class SegmentDamaged(StoreError):
    """A segment's manifest or files are proven to be missing, malformed or changed."""


class AssignmentDamaged(SegmentDamaged):
    """A segment's assignment of tokens to packs is lost; recomputed KV may restore it, see
    `PrefixReader.order_by`."""


class SegmentUnfinished(SegmentDamaged):
    """A segment of an object store has no manifest: it is being uploaded, or its writer was
    killed."""


class SegmentForeign(StoreError):
    """A segment of another format version or another key: it is not damaged, but not readable."""


class PrefixNotFound(StoreError):
    """No stored prefix, or more than one, matches an id.

    Attributes:
      prefix_id: the requested id.
      close: similar stored ids, best first; or the first ids that begin with `prefix_id`.
      several: how many stored ids begin with `prefix_id`, if more than one; else 0.
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
        """Words the message.

        Args:
          stored: a list of stored prefixes, for the message where no id is close.
          within: id of a longer prefix that contains this one, and whose tokens are stored in
            another order, so that no prefix can end there.
        """
        self.prefix_id = prefix_id
        self.close = tuple(close)
        self.several = several if several > 1 else 0
        listed = ", ".join(self.close)
        if self.several:
            said = f"{several} stored prefixes begin with {prefix_id!r}"
            if close:
                more = several - len(close)
                said += f": {listed}" + (f" and {more} more" if more > 0 else "")
        elif within:
            said = (
                f"prefix {prefix_id!r} ends inside of {within}, whose tokens are stored in another "
                f"order: use or pin {within} instead"
            )
        elif stored:
            said = f"no stored prefix has the name or id {prefix_id!r}; stored: {stored}"
        else:
            said = f"no stored prefix with id {prefix_id!r}" + (
                f"; close ids: {listed}" if close else ""
            )
        super().__init__(said)


class FingerprintMismatch(StoreError):
    """The stored KV was made by another model, tokenizer, dtype or version of the layout.

    Attributes:
      fields: names of the fields that differ.
    """

    def __init__(self, stored: Mapping[str, str], asked: Mapping[str, str]) -> None:
        names = sorted(stored.keys() | asked.keys())
        self.fields = tuple(n for n in names if stored.get(n) != asked.get(n))
        if self.fields == ("dtype",):
            said = (
                f"stored with dtype {stored.get('dtype')}, asked with dtype {asked.get('dtype')}; "
                "ask with the first, or ingest the text again"
            )
        else:
            theirs, yours = _model(stored), _model(asked)
            models = f" (stored: {theirs}; yours: {yours})" if theirs != yours else ""
            differ = []
            for name in self.fields:
                values = stored.get(name, "none"), asked.get(name, "none")
                short = max(map(len, values)) <= _SHORT
                differ.append(
                    f"{name} (stored {values[0]!r}, got {values[1]!r})" if short else name
                )
            said = (
                f"the text was stored with another model{models}; these differ: "
                f"{', '.join(differ)}. Ask with that model, or ingest the text again"
            )
        super().__init__(said)


_SHORT = 32  # letters of a value that a message has room for


def _model(fields: Mapping[str, str]) -> str:
    """Names a fingerprint's model by its family and layers; "unknown" without them."""
    try:
        config = json.loads(fields["config"])
        return f"{config['model_type']}, {config['num_layers']} layers"
    except (KeyError, TypeError, ValueError):
        return "unknown"


class ReadTimeout(StoreError):
    """A read did not return within its deadline and was abandoned.

    The read may still be running and write into the caller's buffer. Do not use the buffer again
    before `settled()` is true.
    """

    def __init__(self, what: str, deadline_s: float, settled: Callable[[], bool]) -> None:
        self.settled = settled
        super().__init__(f"{what} did not return within {deadline_s:g} s")


class StoreFull(StoreError):
    """The disk or quota is full, or pinned and busy segments take all of `max_bytes`. No partly
    written data is left, and the reserved bytes are free again."""


ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO))
"""Error codes that prove that a path is missing, or no regular file or folder."""


FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
"""Error codes of a full disk or quota."""


def as_store_error(where: object, error: OSError) -> StoreError:
    """Converts an error of a write, to the path `where` or in it: `StoreFull` for a full disk or
    quota, else `StoreUnavailable`."""
    what = error.strerror or error
    if error.errno in FULL:
        return StoreFull(f"{where}: no room on the disk: {what}")
    return StoreUnavailable(f"{where}: cannot be written: {what}")


def as_unavailable(what: object, error: OSError) -> StoreUnavailable:
    """Converts an error of a read that proves nothing; `what` names the path or segment."""
    return StoreUnavailable(f"{what}: cannot be read: {error.strerror or error}")


READ_ERRORS = (ValueError, OSError, RuntimeError, KeyError, IndexError, NotImplementedError)
"""Exceptions of TensorStore for damaged, short, missing or unreadable data."""
