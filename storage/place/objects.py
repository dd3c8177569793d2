"""Segments in an object store: uploaded whole, the manifest last, found by listing."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tensorstore as ts

from ckv_jax.storage.errors import SegmentDamaged, StoreError
from ckv_jax.storage.place.workspace import segment_folder
from ckv_jax.storage.segment import manifest as manifests
from ckv_jax.storage.segment.read_errors import READ_ERRORS

_ROOT = Path()
_AT_ONCE = 64  # requests for manifests in flight


class ObjectFiles:
    """`Files` behind any TensorStore kvstore: s3://, gs://, memory://.

    The same names as in a folder; a segment exists once its manifest does, as an object appears as
    a whole or not at all. Nothing can be held: who removes a segment that another process reads
    turns its reads into misses. The index is in memory, made from the manifests at every open.

    Args:
      url: where; s3 honours AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL and AWS_REGION.
      context: TensorStore's settings.
      deadline_s: for each request.
    """

    def __init__(self, url: str, context: Any, deadline_s: float) -> None:
        self._spec = kvstore_spec(url)
        self._deadline_s = deadline_s
        try:
            self._store = ts.KvStore.open(self._spec, context=context).result(deadline_s)
        except READ_ERRORS as e:
            raise StoreError(f"{url}: cannot be opened: {e}") from e

    @property
    def catalog_path(self) -> Path | None:
        return None

    def _name(self, segment_id: str, file: str = "") -> str:
        return f"{segment_folder(_ROOT, segment_id).as_posix()}/{file}"

    def _list(self, prefix: str) -> list[str]:
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        keys = ts.KvStore.KeyRange(prefix, end)
        try:
            found = self._store.list(keys).result(self._deadline_s)
        except READ_ERRORS as e:
            raise StoreError(f"{self._spec}: cannot be listed: {e}") from e
        return [key.decode() for key in found]

    def segment_ids(self) -> set[str]:
        names = (name.split("/") for name in self._list("segments/"))
        return {n[2] for n in names if len(n) > 3 and manifests.is_id(n[2])}

    def stamp(self, segment_id: str) -> object:
        return segment_id  # what was published never changes, and asking would cost a request

    def manifest(self, segment_id: str) -> bytes:
        return self._arrived(segment_id, self._ask(segment_id))

    def manifests(self, ids: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        rest = iter(ids)
        while some := list(itertools.islice(rest, _AT_ONCE)):
            for id_, future in [(id_, self._ask(id_)) for id_ in some]:
                with contextlib.suppress(SegmentDamaged):
                    yield id_, self._arrived(id_, future)

    def _ask(self, segment_id: str) -> Any:
        return self._store.read(self._name(segment_id, manifests.FILE))

    def _arrived(self, segment_id: str, future: Any) -> bytes:
        try:
            found = future.result(self._deadline_s)
        except READ_ERRORS as e:
            raise SegmentDamaged(f"segment {segment_id}: no manifest: {e}") from e
        if found.state != "value":
            raise SegmentDamaged(f"segment {segment_id}: no manifest")
        return bytes(found.value)

    def kvstore(self, segment_id: str, array: str) -> dict[str, Any]:
        return {
            **self._spec,
            "path": f"{self._spec.get('path', '')}{self._name(segment_id, array)}/",
        }

    def open_direct(self, segment_id: str, name: str) -> int:
        raise OSError(errno.ENOTSUP, "an object store has no direct reads")

    def hold(self, segment_id: str) -> NoHold:
        return NoHold()

    def damaged(self, segment_id: str, sizes: Mapping[str, int]) -> set[str]:
        return set()  # reads tell

    def workspace(self) -> ObjectWorkspace:
        return ObjectWorkspace(self._upload)

    def _upload(self, folder: Path, segment_id: str, keep: Callable[[], bool]) -> bool:
        """Upload all files of a folder, the manifest last; False when the segment is there."""
        if keep():
            return False
        files = [p for p in folder.rglob("*") if p.is_file()]
        files.sort(key=lambda p: p == folder / manifests.FILE)
        try:
            self.remove(segment_id)
            for path in files:
                name = self._name(segment_id, path.relative_to(folder).as_posix())
                self._store.write(name, path.read_bytes()).result()
        except READ_ERRORS as e:
            raise StoreError(f"segment {segment_id}: cannot be uploaded: {e}") from e
        return True

    def workspaces(self) -> set[str]:
        return set()

    def remove(self, segment_id: str) -> bool:
        names = self._list(self._name(segment_id))
        names.sort(key=lambda name: not name.endswith(f"/{manifests.FILE}"))
        try:
            for name in names:  # the manifest first: what is left is nothing
                self._store.write(name, None).result(self._deadline_s)
        except READ_ERRORS as e:
            raise StoreError(f"segment {segment_id}: cannot be removed: {e}") from e
        return True

    def pins(self) -> set[str]:
        return {n for name in self._list("pins/") if manifests.is_id(n := name[len("pins/") :])}

    def set_pin(self, prefix_id: str, pinned: bool) -> None:
        if not manifests.is_id(prefix_id):
            raise ValueError(f"prefix id: got {prefix_id!r}, expected hex")
        try:
            value = b"" if pinned else None
            self._store.write(f"pins/{prefix_id}", value).result(self._deadline_s)
        except READ_ERRORS as e:
            raise StoreError(f"pin {prefix_id}: cannot be written: {e}") from e

    def sweep(self) -> int:
        return 0  # what an upload left has no manifest; verify_store(repair=True) removes it

    def close(self) -> None:
        """Nothing is kept open."""


class NoHold:
    """Object stores have no locks."""

    def release(self) -> None:
        """Nothing to release."""


class ObjectWorkspace:
    """A folder on the local disk, in the place for temporary files, until it is uploaded."""

    def __init__(self, upload: Callable[..., bool]) -> None:
        self._upload = upload
        self.name = secrets.token_hex(16)
        try:
            self.path = Path(tempfile.mkdtemp(prefix="ckv-"))
        except OSError as e:
            raise StoreError(f"no folder for temporary files: {e}") from e

    def publish(self, segment_id: str, keep: Callable[[], bool]) -> bool:
        return self._upload(self.path, segment_id, keep)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def kvstore_spec(url: str) -> dict[str, Any]:
    """TensorStore's spec of the place that `url` names; raises ValueError for anything else."""
    scheme = urlsplit(url).scheme
    if scheme not in ("s3", "gs", "memory"):
        raise ValueError(f"url: got {url!r}, expected a folder, file://, s3://, gs:// or memory://")
    spec: dict[str, Any] = ts.KvStore.Spec(url).to_json()
    path = spec.get("path", "")
    spec["path"] = path if not path or path.endswith("/") else f"{path}/"
    if scheme == "s3":
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint:
            spec["endpoint"] = endpoint
        if region := os.environ.get("AWS_REGION"):
            spec["aws_region"] = region
    return spec
