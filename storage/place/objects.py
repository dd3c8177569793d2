"""Segments in an object store: uploads them whole, the manifest last, and finds them by listing."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tensorstore as ts

from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.errors import (
    READ_ERRORS,
    SegmentDamaged,
    SegmentUnfinished,
    StoreError,
    StoreUnavailable,
)
from ckv_jax.storage.place import marker
from ckv_jax.storage.place.disk import (
    close_descriptor,
    delete,
    lock_entry,
    progress,
    sweep_entry,
)
from ckv_jax.storage.place.files import Claim, Files
from ckv_jax.storage.place.holds import Hold
from ckv_jax.storage.segment import manifest as manifests

_ROOT = Path()
_AT_ONCE = 64  # requests for manifests in flight
_UPLOAD = re.compile(r"ckv-upload-[a-z0-9_]{8}")
_YOUNG_S = 60.0  # in which a folder that was just made is locked


class ObjectFiles(Files):
    """`Files` behind any TensorStore kvstore: s3://, gs://, memory://.

    The same names as in a folder; a segment exists once its manifest does, as an object appears as
    a whole or not at all. Nothing can be held: who removes a segment that another process reads
    turns its reads into misses. The index is in memory, made from the manifests at every open.

    What a dead upload left there looks like one that goes on: none of it is swept, and
    `verify_store` lists both. What it left on the local disk is swept.

    `store.json` says what the place is; the first write makes it, unless another process was first.
    A place without it is ours if nothing but segments and pins is there; one of an encrypted store
    (`key_check`, see `marker.data_of`) if it is empty. Of `config`, a request has `deadline_s`, and
    one for a file of a segment `write_s`.
    """

    def __init__(
        self,
        url: str,
        context: Any,
        config: StoreConfig,
        *,
        readonly: bool = False,
        key_check: str = "",
    ) -> None:
        self._url = url
        self._key_check = key_check
        self._spec = kvstore_spec(url)
        self._config = config
        self._readonly = readonly
        try:
            self._store = ts.KvStore.open(self._spec, context=context).result(config.deadline_s)
        except READ_ERRORS as e:
            raise StoreUnavailable(f"{url}: cannot be opened: {e}") from e
        self._absent = self._check(url)

    def _check(self, url: str) -> bytes | None:
        """The generation of an absent marker, None where there is one; raises StoreError where the
        place is not ours."""
        found = self._wait(self._store.read(marker.FILE), url)
        if found.state == "value":
            try:
                marker.judge(url, bytes(found.value), self._key_check)
            except ValueError as e:
                raise StoreError(f"{url} is not a store: its {marker.FILE} is damaged") from e
            return None
        besides = [("", "pins/"), ("pins0", "segments/"), ("segments0", "")]
        between = [("", "")] if self._key_check else besides
        if any(self._keys(low, high) for low, high in between):
            raise StoreError(f"{url} is not a store and is not empty: name a store or an empty URL")
        return bytes(found.stamp.generation)

    def _mark(self) -> None:
        """Make the place ours, before the first write; raises as `_check` where another process was
        first."""
        if self._readonly:
            raise StoreError(f"{self._url} is open read-only and cannot be written")
        if self._absent is None:
            return
        data = marker.data_of(self._key_check)
        written = self._store.write(marker.FILE, data, if_equal=self._absent)
        first = self._wait(written, marker.FILE).generation != b""
        self._absent = None if first else self._check(self._url)

    def _name(self, segment_id: str, file: str = "") -> str:
        return f"{manifests.segment_folder(_ROOT, segment_id).as_posix()}/{file}"

    def _wait(self, future: Any, what: str, seconds: float | None = None) -> Any:
        try:
            found = future.result(self._config.deadline_s if seconds is None else seconds)
        except READ_ERRORS as e:
            raise StoreUnavailable(f"{what}: cannot be reached: {e}") from e
        progress()
        return found

    def _keys(self, low: str, high: str) -> list[str]:
        keys = self._wait(self._store.list(ts.KvStore.KeyRange(low, high)), f"listing {low}")
        return [key.decode() for key in keys]

    def sweep(self) -> int:
        swept = 0
        with contextlib.suppress(OSError):
            for entry in () if self._readonly else os.scandir(tempfile.gettempdir()):
                with contextlib.suppress(OSError):
                    if _UPLOAD.fullmatch(entry.name) and _abandoned(entry):
                        swept += sweep_entry(Path(entry.path))
        return swept

    def _list(self, prefix: str) -> list[str]:
        return self._keys(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))

    def segment_ids(self) -> set[str]:
        names = (name.split("/") for name in self._list("segments/"))
        return {n[2] for n in names if len(n) > 3 and manifests.is_id(n[2])}

    def stamp(self, segment_id: str) -> object:
        return segment_id  # what was published never changes, and asking would cost a request

    def manifest(self, segment_id: str) -> bytes:
        return self._arrived(segment_id, self._ask(segment_id))

    def manifests(self, ids: Iterable[str]) -> Iterator[tuple[str, bytes | StoreError]]:
        rest = iter(ids)
        while some := list(itertools.islice(rest, _AT_ONCE)):
            for id_, future in [(id_, self._ask(id_)) for id_ in some]:
                try:
                    yield id_, self._arrived(id_, future)
                except StoreError as e:
                    yield id_, e

    def _ask(self, segment_id: str) -> Any:
        return self._store.read(self._name(segment_id, manifests.FILE))

    def _arrived(self, segment_id: str, future: Any) -> bytes:
        found = self._wait(future, f"segment {segment_id}")
        if found.state != "value":
            raise SegmentUnfinished(f"segment {segment_id}: no manifest")
        if len(found.value) > manifests.MAX_BYTES:
            raise SegmentDamaged(f"segment {segment_id}: the manifest is too large")
        return bytes(found.value)

    def kvstore(self, segment_id: str, array: str) -> dict[str, Any]:
        return {
            **self._spec,
            "path": f"{self._spec.get('path', '')}{self._name(segment_id, array)}/",
        }

    def read(self, segment_id: str, name: str, offset: int, count: int) -> bytes | None:
        key, span = self._name(segment_id, name), slice(offset, offset + count)
        try:
            found = self._store.read(key, byte_range=span).result(self._config.deadline_s)
        except READ_ERRORS as e:
            if "OUT_OF_RANGE" in str(e):
                return None
            raise StoreUnavailable(f"{key}: the object store did not answer: {e}") from e
        return bytes(found.value) if found.state == "value" else None

    def claim(self, segment_id: str) -> Claim:
        return Claim(lambda: self._hide(segment_id), Hold())  # there are no locks

    def workspace(self) -> ObjectWorkspace:
        self._mark()
        return ObjectWorkspace(self._upload)

    def _upload(self, folder: Path, segment_id: str, keep: Callable[[], bool]) -> bool:
        """Upload all files of a folder, the manifest last; False when the segment is there.

        Over a damaged segment, each object takes the place of the one of its name: until the
        manifest comes, the packs that differ fail their checksums.
        """
        if self._list(self._name(segment_id)) and keep():
            return False
        files = [p for p in folder.rglob("*") if p.is_file()]
        files.sort(key=lambda p: p == folder / manifests.FILE)
        for path in files:
            name = self._name(segment_id, path.relative_to(folder).as_posix())
            self._wait(self._store.write(name, path.read_bytes()), name, self._config.write_s)
        return True

    def overwrite(self, segment_id: str, name: str, size: int, parts: Mapping[int, bytes]) -> None:
        self._mark()
        key = self._name(segment_id, name)
        found = self._wait(self._store.read(key), key, self._config.write_s)
        data = bytearray(found.value[:size] if found.state == "value" else b"")
        data += bytes(size - len(data))
        for offset, part in parts.items():
            data[offset : offset + len(part)] = part
        self._wait(self._store.write(key, bytes(data)), key, self._config.write_s)

    def put_manifest(self, segment_id: str, data: bytes) -> None:
        name = self._name(segment_id, manifests.FILE)
        self._wait(self._store.write(name, data), name, self._config.write_s)

    def _hide(self, segment_id: str) -> Callable[[], None]:
        self._mark()
        names = self._list(self._name(segment_id))
        first = self._name(segment_id, manifests.FILE)
        self._wait(self._store.write(first, None), first)  # what is left is nothing

        def delete() -> None:
            for name in names:
                with contextlib.suppress(StoreUnavailable):
                    self._wait(self._store.write(name, None), name)

        return delete

    def pins(self) -> dict[str, bytes]:
        pins = {id_: self.pin(id_) for id_ in sorted(self.pinned_ids())}
        return {id_: data for id_, data in pins.items() if data is not None}

    def pin(self, prefix_id: str) -> bytes | None:
        value = self._wait(self._store.read(f"pins/{prefix_id}"), f"pin {prefix_id}")
        return bytes(value.value) if value.state == "value" else None

    def pinned_ids(self) -> set[str]:
        names = (key.removeprefix("pins/") for key in self._list("pins/"))
        return {name for name in names if manifests.is_id(name)}

    def drop_pins(self, stamps: Mapping[str, object]) -> None:
        for prefix_id in stamps:
            self.set_pin(prefix_id, None)

    def set_pin(self, prefix_id: str, record: bytes | None) -> None:
        if not manifests.is_id(prefix_id):
            raise ValueError(f"prefix id: got {prefix_id!r}, expected hex")
        self._mark()
        self._wait(self._store.write(f"pins/{prefix_id}", record), f"pin {prefix_id}")


def _abandoned(entry: os.DirEntry[str]) -> bool:
    """Whether an entry of the place for temporary files is of this user, and too old to be locked
    only in a moment."""
    found = entry.stat(follow_symlinks=False)
    return found.st_uid == os.getuid() and found.st_mtime < time.time() - _YOUNG_S


class ObjectWorkspace:
    """A folder on the local disk, in the place for temporary files, until it is uploaded. Its flock
    shows sweepers that its writer lives."""

    def __init__(self, upload: Callable[..., bool]) -> None:
        self._upload = upload
        self.name = secrets.token_hex(16)
        try:
            self.path = Path(tempfile.mkdtemp(prefix="ckv-upload-"))
            try:
                self._fd = lock_entry(self.path)
            except BaseException:
                delete(self.path)
                raise
        except OSError as e:
            raise StoreUnavailable(f"cannot create a folder for temporary files: {e}") from e

    def publish(self, segment_id: str, keep: Callable[[], bool]) -> bool:
        return self._upload(self.path, segment_id, keep)

    def discard(self) -> None:
        delete(self.path)
        fd, self._fd = self._fd, None
        if fd is not None:
            close_descriptor(fd)


def kvstore_spec(url: str) -> dict[str, Any]:
    """TensorStore's spec of the place that `url` names; raises ValueError for anything else. s3
    honours AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL and AWS_REGION."""
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
