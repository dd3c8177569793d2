"""Manifests that were read and checked, kept in memory while their files do not change."""

from __future__ import annotations

import threading
from collections import OrderedDict

from ckv_jax.storage.errors import SegmentDamaged
from ckv_jax.storage.place.files import Files
from ckv_jax.storage.segment.manifest import Manifest

_MAX_BYTES = 32 << 20


class ManifestCache:
    """A bounded cache of checked manifests; thread-safe."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[object, Manifest, str, int]] = OrderedDict()
        self._bytes = 0

    def load(self, segment_id: str) -> tuple[Manifest, str]:
        """The manifest and its checksum; raises SegmentDamaged when it is gone or not whole."""
        stamp = self._files.stamp(segment_id)
        with self._lock:
            kept = self._kept.get(segment_id)
            if kept is not None and kept[0] == stamp:
                self._kept.move_to_end(segment_id)
                return kept[1], kept[2]
        if stamp is None:
            self.forget(segment_id)
            raise SegmentDamaged(f"segment {segment_id}: gone")
        data = self._files.manifest(segment_id)
        manifest, checksum = Manifest.decode(data, segment_id)
        self.forget(segment_id)
        with self._lock:
            if segment_id not in self._kept:
                self._kept[segment_id] = (stamp, manifest, checksum, len(data))
                self._bytes += len(data)
            while self._bytes > _MAX_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1][3]
        return manifest, checksum

    def forget(self, segment_id: str) -> None:
        """Drop a manifest from memory."""
        with self._lock:
            kept = self._kept.pop(segment_id, None)
            self._bytes -= kept[3] if kept else 0
