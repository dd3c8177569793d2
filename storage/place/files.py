"""What the store needs of the place its segments live in: a local folder or an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol


class Hold(Protocol):
    """A claim on one published segment; while it is held, no process removes the segment."""

    def release(self) -> None:
        """Give the claim up; may be called twice."""


class Workspace(Protocol):
    """A private folder on a local disk where one segment is written before it is published."""

    @property
    def path(self) -> Path:
        """The folder."""

    @property
    def name(self) -> str:
        """Its hex name, unique in the store."""

    def publish(self, segment_id: str, keep: Callable[[], bool]) -> bool:
        """Make the folder the segment `segment_id`, at once and durably.

        Where that segment exists already, `keep` says whether it is good: then it stays, False is
        returned, and the workspace is left as it is. Else it is replaced.
        """

    def discard(self) -> None:
        """Remove everything; may be called twice, and after `publish`."""


class Files(Protocol):
    """Segments as folders of files; names are hex ids, never anything read from a file."""

    @property
    def catalog_path(self) -> Path | None:
        """Where the index lives; None: in memory, made from the manifests at every open."""

    def segment_ids(self) -> set[str]:
        """Ids of everything published."""

    def stamp(self, segment_id: str) -> object:
        """Changes when the segment's manifest does; None when it is gone."""

    def manifest(self, segment_id: str) -> bytes:
        """The manifest's bytes; raises SegmentDamaged when it is not there or not a plain file."""

    def manifests(self, ids: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """(id, manifest) of many segments, without those that have none."""

    def kvstore(self, segment_id: str, array: str) -> dict[str, Any]:
        """TensorStore's kvstore spec of one array of a segment."""

    def open_direct(self, segment_id: str, name: str) -> int:
        """A descriptor of a segment's file for direct reads; raises OSError where there is none."""

    def hold(self, segment_id: str) -> Hold:
        """Keep the segment from being removed; raises SegmentDamaged when it is gone."""

    def damaged(self, segment_id: str, sizes: Mapping[str, int]) -> set[str]:
        """Those of `sizes` that are missing, not plain files, or of another size."""

    def workspace(self) -> Workspace:
        """A new private folder."""

    def workspaces(self) -> set[str]:
        """Names of the workspaces that exist, of this process and others."""

    def remove(self, segment_id: str) -> bool:
        """Remove a segment; False when somebody holds it."""

    def pins(self) -> set[str]:
        """Ids of the pinned prefixes."""

    def set_pin(self, prefix_id: str, pinned: bool) -> None:
        """Mark a prefix as pinned, durably, or not."""

    def sweep(self) -> int:
        """Remove what killed writers left; returns how many folders that were."""

    def close(self) -> None:
        """Release everything; may be called twice."""
