"""The interface of a storage backend: a local folder or an object store."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from ckv_jax.storage.errors import StoreError
from ckv_jax.storage.place.holds import Hold


class Claim:
    """A segment that no other process reads, removes or repairs while it is held, where the place
    has locks."""

    def __init__(self, hide: Callable[[], Callable[[], None] | None], hold: Hold) -> None:
        """`hide` takes the segment out of sight, and returns what deletes its bytes; None: it was
        replaced since it was claimed, and stays."""
        self._hide = hide
        self._hold = hold

    def remove(self) -> Callable[[], None] | None:
        """Take the segment out of sight and give the claim up; returns what `hide` does."""
        try:
            return self._hide()
        finally:
            self.release()

    def release(self) -> None:
        """Give it up; may be called twice."""
        self._hold.release()


class Workspace(Protocol):
    """A private folder on a local disk where one segment is written before it is published."""

    path: Path
    name: str  # of the folder: hex, unique in the store

    def publish(self, segment_id: str, keep: Callable[[], bool]) -> bool:
        """Make the folder the segment `segment_id`, at once and durably.

        Where that segment exists already, `keep` says whether it is good: then it stays, False is
        returned, and the workspace is left as it is. Else it is replaced.
        """

    def discard(self) -> None:
        """Remove everything; may be called twice, and after `publish`."""


class Files(Protocol):
    """Segments as folders of files; names are hex ids, never anything read from a file.

    Only proof counts: what could not be looked at raises StoreUnavailable, and is never taken for
    missing, damaged, dead or not held. Methods with a body are right for a place without locks,
    and without files that can be looked at one by one.
    """

    @property
    def catalog_path(self) -> Path | None:
        """Path of the index; None: in memory, rebuilt from the manifests at every open."""
        return None

    @property
    def holding(self) -> bool:
        """Whether no claim of a segment succeeds that a reader of another process holds."""
        return False

    def require(self) -> None:
        """Raise StoreUnavailable where what was opened is not there any more."""
        return

    def segment_ids(self) -> set[str]:
        """Ids of everything published."""

    def stamp(self, segment_id: str) -> object:
        """Changes when the segment's manifest does; None when it is gone."""

    def manifest(self, segment_id: str) -> bytes:
        """The manifest's bytes; raises SegmentDamaged when it is not there or not a plain file."""

    def manifests(self, ids: Iterable[str]) -> Iterator[tuple[str, bytes | StoreError]]:
        """(id, manifest or what `manifest` raises) of many segments."""

    def kvstore(self, segment_id: str, array: str) -> dict[str, Any]:
        """TensorStore's kvstore spec of one array of a segment."""

    def open_direct(self, segment_id: str, name: str) -> int:
        """A descriptor of a segment's file for direct reads; raises OSError where there is none."""
        raise OSError(errno.ENOTSUP, "no direct reads here")

    def read(self, segment_id: str, name: str, offset: int, count: int) -> bytes | None:
        """Bytes of a segment's file; None when it is missing, too short, or no plain file."""

    def hold(self, segment_id: str) -> Hold:
        """Keep the segment from being removed; raises SegmentDamaged when it is gone."""
        return Hold()

    def claim(self, segment_id: str) -> Claim | None:
        """Take a segment for oneself; None while it is held."""

    def repairing(self, segment_id: str) -> Hold:
        """Be the only one who repairs a segment, beside its readers; raises StoreUnavailable."""
        return Hold()

    def damaged(self, segment_id: str, sizes: Mapping[str, int]) -> set[str]:
        """Those of `sizes` that are missing, not plain files, or of another size."""
        return set()

    def workspace(self) -> Workspace:
        """A new private folder."""

    def dead(self, names: Iterable[str]) -> set[str]:
        """Those of the named workspaces that are gone, or whose writers are."""
        return set()

    def overwrite(self, segment_id: str, name: str, size: int, parts: Mapping[int, bytes]) -> None:
        """Give a segment's file its size and some of its bytes, by offset, durably."""

    def put_manifest(self, segment_id: str, data: bytes) -> None:
        """Replace a segment's manifest, at once and durably."""

    def pins(self) -> dict[str, bytes]:
        """Returns the records of prefixes, by id, see `PrefixRecord`."""

    def pin(self, prefix_id: str) -> bytes | None:
        """The same of one prefix; None: nothing."""

    def pinned_ids(self) -> set[str]:
        """The ids in `pins`, without reading any."""

    def pin_stamps(self) -> Mapping[str, object]:
        """Of each of these ids what changes when its record is written; None where unknown."""
        return dict.fromkeys(self.pinned_ids())

    def drop_pins(self, stamps: Mapping[str, object]) -> None:
        """Remove records with these stamps, by prefix id; a crash may bring some back."""

    def free_bytes(self) -> int | None:
        """Room on the disk; None where nothing is known of it."""
        return None

    def set_pin(self, prefix_id: str, record: bytes | None) -> None:
        """Note what is wanted of a prefix, durably; None: nothing."""

    def sweep(self) -> int:
        """Remove what killed writers left; returns how many entries that were."""
        return 0

    def close(self) -> None:
        """Release everything; may be called twice."""
        return
