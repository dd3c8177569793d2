"""Segments in a local folder: private modes, no symlinks, one rename to publish, and locks."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckv_jax.storage.errors import (
    ABSENT,
    SegmentDamaged,
    StoreError,
    StoreUnavailable,
    as_store_error,
    as_unavailable,
)
from ckv_jax.storage.place import marker
from ckv_jax.storage.place.disk import (
    FOLDER,
    NO_FILE,
    TRIES,
    close_descriptor,
    delete,
    exchange,
    found_at,
    is_gone,
    is_there,
    lock_entry,
    names_in,
    open_plain,
    progress,
    replace_file,
    sweep_entry,
    sync_folder,
    write_all,
)
from ckv_jax.storage.place.files import Claim
from ckv_jax.storage.place.holds import Hold, Holds
from ckv_jax.storage.segment import manifest as manifests

if TYPE_CHECKING:
    from ckv_jax.storage.encryption import StoreKey

_MADE_HERE = re.compile(r"[0-9a-f]{32}")
_LARGEST_PIN = 65536
_THERE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class LocalFiles:
    """`Files` under one folder.

    store.json                      what this folder is
    catalog.sqlite                  the index (`catalog.py`)
    segments/<2 hex>/<id>/          published segments
    pins/<prefix id>                what people want of prefixes
    tmp/<hex>/                      segments being written or removed
    holds                           locked by who reads or removes segments (`holds.py`)

    With `readonly` nothing is made, and nothing removed.
    """

    def __init__(self, root: Path, *, readonly: bool = False, key: StoreKey | None = None) -> None:
        self.root = root.absolute()
        self._key = key
        self.readonly = readonly
        self.make()
        self._holds = Holds(self.root, readonly=readonly)
        self._holds.require()
        self._pins: dict[str, tuple[object, bytes]] = {}
        self._segments = f"{self.root}/segments"

    def make(self) -> None:
        """Create whatever is missing of the store; refuse a folder that is something else."""
        try:
            if not self.readonly:
                self._make_root()
            ours = marker.check(self.root, self._key)
            self._device = os.stat(self.root).st_dev
            if self.readonly and not ours:
                raise StoreError(f"{self.root} is not a store: it has no {marker.FILE}")
            if self.readonly:
                return
            if not ours:
                marker.write(self.root, self._key)
            if any([self._make_folder(self.root / name) for name in marker.FOLDERS]):
                sync_folder(self.root.resolve())  # else a crash may take what is published in them
        except FileExistsError as e:
            raise StoreError(f"{e.filename}: is a file, expected a folder") from e
        except OSError as e:
            text = f"{self.root}: cannot be used as a store: {e.strerror}"
            if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                text += "; name another folder"
            raise (StoreError if e.errno in ABSENT else StoreUnavailable)(text) from e

    def require(self) -> None:
        try:
            if not is_gone(self.root / marker.FILE):
                return
            around = next(p for p in (self.root, *self.root.parents) if p.exists())
            device = os.stat(around).st_dev
        except OSError as e:
            raise as_unavailable(self.root, e) from e
        if device != self._device:  # else it was deleted, and it may be made again
            raise StoreUnavailable(f"{self.root}: the disk of this folder is no longer mounted")

    def _make_root(self) -> None:
        """The folder and those above it, whose names outlive a crash."""
        missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for made in missing:
            sync_folder(made.parent.resolve())

    @staticmethod
    def _make_folder(path: Path) -> bool:
        """Makes a folder; whether it was not there."""
        try:
            close_descriptor(os.open(path, FOLDER))
            return False
        except FileNotFoundError:
            path.mkdir(mode=0o700, exist_ok=True)
            return True
        except OSError as e:
            if e.errno in (errno.ENOTDIR, errno.ELOOP):
                raise StoreError(f"{path}: is a file, expected a folder") from e
            raise

    @property
    def catalog_path(self) -> Path | None:
        return self.root / "catalog.sqlite"

    @property
    def holding(self) -> bool:
        return True

    def _folder(self, segment_id: str) -> Path:
        return manifests.segment_folder(self.root, segment_id)

    # -- looking -----------------------------------------------------------------------------------

    def segment_ids(self) -> set[str]:
        self.require()
        found: set[str] = set()
        root = self.root / "segments"
        try:
            for fan in names_in(root):
                if len(fan) == 2 and not set(fan) - manifests.HEX:
                    found.update(n for n in names_in(root / fan) if n.startswith(fan))
        except OSError as e:
            raise as_unavailable(root, e) from e
        return {n for n in found if manifests.is_id(n)}

    def stamp(self, segment_id: str) -> object:
        return _stamp_of(self._folder(segment_id) / manifests.FILE)

    def manifest(self, segment_id: str) -> bytes:
        path = self._folder(segment_id) / manifests.FILE
        try:
            fd = self._open_manifest(segment_id)
            with os.fdopen(fd, "rb") as file:
                if os.fstat(fd).st_size > manifests.MAX_BYTES:
                    raise SegmentDamaged(f"segment {segment_id}: the manifest is too large")
                data = file.read(manifests.MAX_BYTES + 1)
        except OSError as e:
            if e.errno in ABSENT:
                raise SegmentDamaged(f"segment {segment_id}: no manifest: {e.strerror}") from e
            raise as_unavailable(path, e) from e
        progress()
        return data

    def _open_manifest(self, segment_id: str) -> int:
        """Open the manifest, one plain name at a time, so that no symlink is followed."""
        at = os.open(self.root, FOLDER & ~os.O_NOFOLLOW)
        try:
            for name in ("segments", segment_id[:2], self._folder(segment_id).name):
                above, at = at, os.open(name, FOLDER, dir_fd=at)
                close_descriptor(above)
            return open_plain(manifests.FILE, folder=at)
        finally:
            close_descriptor(at)

    def manifests(self, ids: Iterable[str]) -> Iterator[tuple[str, bytes | StoreError]]:
        for id_ in ids:
            try:
                yield id_, self.manifest(id_)
            except StoreError as e:
                yield id_, e

    def damaged(self, segment_id: str, sizes: Mapping[str, int]) -> set[str]:
        folder = str(self._folder(segment_id))
        parents = {os.path.dirname(folder), folder}
        parents.update(f"{folder}/{os.path.dirname(name)}" for name in sizes)
        if not all(is_there(stat.S_ISDIR, p) for p in parents):
            return set(sizes)
        return {n for n, size in sizes.items() if not is_there(stat.S_ISREG, f"{folder}/{n}", size)}

    # -- reading -----------------------------------------------------------------------------------

    def kvstore(self, segment_id: str, array: str) -> dict[str, Any]:
        return {"driver": "file", "path": f"{self._folder(segment_id)}/{array}/"}

    def open_direct(self, segment_id: str, name: str) -> int:
        # A string, as this runs for every read: `segment_folder` takes longer than `open`.
        path = f"{self._segments}/{segment_id[:2]}/{segment_id}/{name}"
        return open_plain(path, os.O_RDONLY | os.O_DIRECT)

    def read(self, segment_id: str, name: str, offset: int, count: int) -> bytes | None:
        path = self._folder(segment_id) / name
        try:
            fd = open_plain(path)
            try:
                data = b""
                while len(data) < count:
                    part = os.pread(fd, count - len(data), offset + len(data))
                    if not part:
                        return None
                    data += part
            finally:
                close_descriptor(fd)
        except OSError as e:
            if e.errno in ABSENT:
                return None
            raise as_unavailable(path, e) from e
        progress()
        return data

    # -- holding -----------------------------------------------------------------------------------

    def hold(self, segment_id: str) -> Hold:
        held = self._holds.hold(segment_id)
        if held is None:
            raise SegmentDamaged(f"segment {segment_id}: being removed")
        try:
            if self.stamp(segment_id) is None:
                raise SegmentDamaged(f"segment {segment_id}: gone")
        except StoreError:
            held.release()
            raise
        return held

    def claim(self, segment_id: str) -> Claim | None:
        held = self._holds.claim(segment_id)
        if held is None:
            return None
        try:
            there = self.stamp(segment_id)
        except StoreUnavailable:
            held.release()
            raise
        return Claim(lambda: self._hide(segment_id, there), held)

    def _hide(self, segment_id: str, there: object) -> Callable[[], None] | None:
        """Take a claimed segment out of sight; returns what deletes its bytes, or None where a
        writer, which claims nothing, has just replaced what was `there`."""
        folder = self._folder(segment_id)
        aside = self.root / "tmp" / secrets.token_hex(16)
        try:
            os.rename(folder, aside)
        except OSError as e:
            try:
                removed = e.errno == errno.ENOENT and is_gone(folder)
            except OSError:
                removed = False
            if not removed:
                raise as_unavailable(folder, e) from e
        else:
            with contextlib.suppress(OSError, StoreUnavailable):
                if _stamp_of(aside / manifests.FILE) != there:
                    os.rename(aside, folder)
                    return None
        return lambda: delete(aside)  # gigabytes: for when nothing is held

    def repairing(self, segment_id: str) -> Hold:
        held = self._holds.claim(segment_id, repairing=True)
        if held is None:
            raise StoreUnavailable(f"segment {segment_id}: another process is repairing it")
        return held

    # -- writing -----------------------------------------------------------------------------------

    def workspace(self) -> LocalWorkspace:
        if self.readonly:
            raise StoreError(f"{self.root} is open read-only and cannot be written")
        self.require()
        self.make()
        try:
            return LocalWorkspace(self.root)
        except OSError as e:
            raise as_store_error(self.root / "tmp", e) from e

    def dead(self, names: Iterable[str]) -> set[str]:
        found = set()
        for name in names:
            with contextlib.suppress(OSError):  # unknown: alive
                if is_gone(self.root / "tmp" / name):
                    found.add(name)
                elif (fd := lock_entry(self.root / "tmp" / name)) is not None:
                    close_descriptor(fd)
                    found.add(name)
        return found

    def overwrite(self, segment_id: str, name: str, size: int, parts: Mapping[int, bytes]) -> None:
        path = self._folder(segment_id) / name
        try:
            fd = open_plain(path, os.O_RDWR | os.O_CREAT)
            try:
                if os.fstat(fd).st_size != size:
                    os.ftruncate(fd, size)
                for offset, data in parts.items():
                    write_all(fd, data, offset)
                os.fsync(fd)
            finally:
                close_descriptor(fd)
            sync_folder(path.parent)
        except OSError as e:
            raise as_store_error(path, e) from e

    def put_manifest(self, segment_id: str, data: bytes) -> None:
        try:
            replace_file(self._folder(segment_id) / manifests.FILE, data, self.root / "tmp")
        except OSError as e:
            raise as_store_error(self._folder(segment_id), e) from e

    def pins(self) -> dict[str, bytes]:
        found: dict[str, tuple[object, bytes]] = {}
        for name in sorted(self.pinned_ids()):
            kept = self._pins.get(name)
            if kept is not None and kept[0] == _stamp_of(self.root / "pins" / name):
                found[name] = kept
            elif (read := self._read_pin(name)) is not None:
                found[name] = read
        self._pins = found
        return {name: data for name, (_, data) in found.items()}

    def pin(self, prefix_id: str) -> bytes | None:
        read = self._read_pin(prefix_id)
        return None if read is None else read[1]

    def pinned_ids(self) -> set[str]:
        folder = self.root / "pins"
        try:
            return {name for name in names_in(folder) if manifests.is_id(name)}
        except OSError as e:
            raise as_unavailable(folder, e) from e

    def _read_pin(self, prefix_id: str) -> tuple[object, bytes] | None:
        """What marks this version of the file, and its bytes; None where there is none."""
        path = self.root / "pins" / prefix_id
        try:
            with os.fdopen(open_plain(path), "rb") as file:
                return _stamp(os.fstat(file.fileno())), file.read(_LARGEST_PIN)
        except FileNotFoundError:
            return None
        except OSError as e:
            if e.errno in NO_FILE:  # says nothing, which is a pin: nothing else stays for it
                return None, b""
            raise as_unavailable(path, e) from e

    def pin_stamps(self) -> Mapping[str, object]:
        return {name: _stamp_of(self.root / "pins" / name) for name in self.pinned_ids()}

    def drop_pins(self, stamps: Mapping[str, object]) -> None:
        for prefix_id, stamp in stamps.items():
            path = self.root / "pins" / prefix_id
            try:
                if _stamp_of(path) == stamp:
                    path.unlink(missing_ok=True)
            except IsADirectoryError:
                continue  # nothing of ours
            except OSError as e:
                raise as_unavailable(path, e) from e

    def free_bytes(self) -> int | None:
        try:
            disk = os.statvfs(self.root)
        except OSError:
            return None
        return disk.f_bavail * disk.f_frsize

    def set_pin(self, prefix_id: str, record: bytes | None) -> None:
        if not manifests.is_id(prefix_id):
            raise ValueError(f"prefix id: got {prefix_id!r}, expected hex")
        path = self.root / "pins" / prefix_id
        try:
            if record is None:
                path.unlink(missing_ok=True)
                sync_folder(path.parent)
            else:
                replace_file(path, record, self.root / "tmp")
        except OSError as e:
            raise StoreUnavailable(f"{path}: cannot be written: {e.strerror}") from e

    def sweep(self) -> int:
        swept = 0
        if self.readonly:
            return swept
        with contextlib.suppress(OSError):
            for name in os.listdir(self.root / "tmp"):
                if _MADE_HERE.fullmatch(name):
                    with contextlib.suppress(OSError):
                        swept += sweep_entry(self.root / "tmp" / name)
        return swept

    def close(self) -> None:
        self._holds.close()


def _stamp_of(path: Path) -> object:
    """The stamp of a file; None where there is none."""
    found = found_at(path)
    return None if found is None else _stamp(found)


def _stamp(found: os.stat_result) -> object:
    """Changes when a file is replaced."""
    return found.st_ino, found.st_mtime_ns, found.st_size


class LocalWorkspace:
    """A folder in tmp/ whose flock shows sweepers that its writer lives. Raises OSError."""

    def __init__(self, root: Path) -> None:
        for _ in range(TRIES):
            self.name = secrets.token_hex(16)
            self.path = root / "tmp" / self.name
            self.path.mkdir(mode=0o700)
            try:
                fd = lock_entry(self.path)
            except BaseException:
                delete(self.path)
                raise
            if fd is not None:
                self._fd = fd
                return
            delete(self.path)  # a sweep was faster
        raise OSError(errno.EAGAIN, "swept away again and again", str(root / "tmp"))

    def publish(self, segment_id: str, keep: Callable[[], bool]) -> bool:
        root = self.path.parent.parent
        target = manifests.segment_folder(root, segment_id)
        for folder in (*(p for p in self.path.iterdir() if p.is_dir()), self.path):
            sync_folder(folder)
        if not target.parent.is_dir():
            target.parent.mkdir(mode=0o700, exist_ok=True)
            sync_folder(target.parent.parent)
        for last in (False, False, True):
            try:
                os.rename(self.path, target)  # of two writers, one finds what the other published
                self._close()
                break
            except OSError as e:
                if e.errno not in _THERE:
                    raise
            if keep():
                return False
            try:
                self._replace(target)
                break
            except FileNotFoundError:  # what was there has just been removed
                if last:
                    raise
        sync_folder(target.parent)
        return True

    def _replace(self, target: Path) -> None:
        """Be published in the place of `target`, which becomes this workspace, to be discarded."""
        try:
            exchange(self.path, target)
        except OSError as e:
            if e.errno not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
                raise
            aside = self.path.with_name(secrets.token_hex(16))  # a moment without either
            os.rename(target, aside)
            try:
                os.rename(self.path, target)
            except OSError:
                os.rename(aside, target)
                raise
            self._close()
            self.path = aside
            delete(aside)

    def discard(self) -> None:
        """Remove what is left of the folder, before or after `publish`; may be called twice."""
        delete(self.path)
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_descriptor(fd)
