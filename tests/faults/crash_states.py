"""What a disk may hold after the power went: every order and loss that fsync did not forbid.

The rules are POSIX's, harsher than any one file system's: data is on the disk once its file was
synced, a name once its folder was; anything else may be there, be lost or, data, be torn. Only a
rename is taken to happen as a whole, as on every journalling file system.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_INDEX = "catalog.sqlite"


@dataclass(eq=False, slots=True)
class Node:
    """A file or a folder; `source` is where a file's bytes were before anything was recorded."""

    folder: bool
    source: Path | None = None
    entries: dict[str, Node] = field(default_factory=dict)


@dataclass(slots=True)
class Event:
    """Something that was done.

    Attributes:
      kind: "name", "data", "sync", or "index": the state of SQLite's files after a commit.
      nodes: the folders whose names change, or the file that is written, or what is synced.
      changes: of "name": (folder, name, node or None).
      at, data: of "data": `data` at offset `at`; None: cut there.
      files: of "index": name → bytes.
    """

    kind: str
    nodes: tuple[Node, ...] = ()
    changes: tuple[tuple[Node, str, Node | None], ...] = ()
    at: int = 0
    data: bytes | None = None
    files: dict[str, bytes] = field(default_factory=dict)


class Recorder:
    """Listens to calls (`Calls.note`) on one folder and keeps what they did; thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._busy = False
        self._open: dict[int, Node] = {}
        self.root = Node(True)
        self.events: list[Event] = []

    def begin(self) -> None:
        """Take what is in the folder for durable."""
        if self._folder.exists():
            _scan(self._folder, self.root)
        self.events.append(Event("index", files=_index(self._folder)))
        self._now = _copy_names(self.root)

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """See `Calls.note`."""
        handler = getattr(self, f"_on_{name}", None)
        with self._lock:
            if handler is None or self._busy:  # a call of the recorder's own
                return
            self._busy = True
            handler(args, kwargs, result)
            self._busy = False

    # -- calls -----------------------------------------------------------------------------------

    def _on_open(self, args: Any, kwargs: Any, fd: int) -> None:
        place = self._place(args[0], kwargs.get("dir_fd"))
        if place is None:
            return
        folder, name = place
        node = self._now[folder].get(name) if name else folder
        flags = args[1] if len(args) > 1 else 0
        if node is None and flags & os.O_CREAT:
            node = Node(False)
            self._name((folder, name, node))
        elif node is not None and flags & os.O_TRUNC:
            self.events.append(Event("data", (node,)))
        if node is not None:
            self._open[fd] = node

    def _on_close(self, args: Any, kwargs: Any, _: Any) -> None:
        self._open.pop(args[0], None)

    def _on_pwrite(self, args: Any, kwargs: Any, done: int) -> None:
        if (node := self._open.get(args[0])) is not None:
            self.events.append(Event("data", (node,), at=args[2], data=bytes(args[1])[:done]))

    def _on_write(self, args: Any, kwargs: Any, done: int) -> None:
        if (node := self._open.get(args[0])) is not None:  # files are written from their start
            at = sum(
                len(e.data or b"") for e in self.events if e.kind == "data" and node in e.nodes
            )
            self.events.append(Event("data", (node,), at=at, data=bytes(args[1])[:done]))

    def _on_ftruncate(self, args: Any, kwargs: Any, _: Any) -> None:
        if (node := self._open.get(args[0])) is not None:
            self.events.append(Event("data", (node,), at=args[1]))

    def _on_fsync(self, args: Any, kwargs: Any, _: Any) -> None:
        if (node := self._open.get(args[0])) is not None:
            self.events.append(Event("sync", (node,)))

    _on_fdatasync = _on_fsync

    def _on_mkdir(self, args: Any, kwargs: Any, _: Any) -> None:
        place = self._place(args[0], kwargs.get("dir_fd"))
        if place is not None and place[1]:
            self._name((*place, Node(True)))

    def _on_unlink(self, args: Any, kwargs: Any, _: Any) -> None:
        place = self._place(args[0], kwargs.get("dir_fd"))
        if place is not None and place[1] in self._now[place[0]]:
            self._name((*place, None))

    _on_rmdir = _on_remove = _on_unlink

    def _on_rename(self, args: Any, kwargs: Any, _: Any) -> None:
        old = self._place(args[0], kwargs.get("src_dir_fd"))
        new = self._place(args[1], kwargs.get("dst_dir_fd"))
        if new is not None and new[1].startswith(_INDEX):
            self._on_commit((), {}, None)
        if old is None or new is None or old[1].startswith(_INDEX):
            return
        node = self._now[old[0]].get(old[1])
        self._name((*old, None), (*new, node))

    _on_replace = _on_rename

    def _on_exchange(self, args: Any, kwargs: Any, _: Any) -> None:
        one, other = (self._place(path, None) for path in args[:2])
        if one is not None and other is not None:
            first, second = (self._now[folder].get(name) for folder, name in (one, other))
            self._name((*one, second), (*other, first))

    def _on_link(self, args: Any, kwargs: Any, _: Any) -> None:
        old, new = (self._place(path, None) for path in args[:2])
        if old is not None and new is not None:
            self._name((*new, self._now[old[0]].get(old[1])))

    def _on_commit(self, args: Any, kwargs: Any, _: Any) -> None:
        self.events.append(Event("index", files=_index(self._folder)))

    # -- names -----------------------------------------------------------------------------------

    def _name(self, *changes: tuple[Node, str, Node | None]) -> None:
        if any(name.startswith(_INDEX) for _, name, _ in changes):
            return  # SQLite's own; what it makes of them is in "index"
        _apply(self._now, changes)
        self.events.append(Event("name", tuple(c[0] for c in changes), changes))

    def _place(self, path: Any, dir_fd: int | None) -> tuple[Node, str] | None:
        """(folder, name) of a path, by the names as they are now; ("", the root) for the root."""
        if isinstance(path, int):
            return None
        text, node = os.fspath(path), self.root
        if dir_fd is not None:
            if dir_fd not in self._open:
                return None
            node, parts = self._open[dir_fd], Path(text).parts
        elif text == str(self._folder):
            return node, ""
        elif text.startswith(f"{self._folder}/"):
            parts = Path(text).relative_to(self._folder).parts
        else:
            return None
        for part in parts[:-1]:
            below = self._now[node].get(part)
            if below is None:
                return None
            node = below
            self._now.setdefault(node, {})
        self._now.setdefault(node, {})
        return node, parts[-1]


Names = dict[Node, dict[str, Node]]


def _scan(folder: Path, node: Node) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            node.entries[entry.name] = below = Node(True)
            _scan(Path(entry.path), below)
        elif not entry.name.startswith(_INDEX):
            node.entries[entry.name] = Node(False, Path(entry.path))


def _index(folder: Path) -> dict[str, bytes]:
    found = {}
    for suffix in ("", "-wal"):
        path = folder / f"{_INDEX}{suffix}"
        try:
            if stat.S_ISREG(os.lstat(path).st_mode):
                fd = os.open(path, os.O_RDONLY)
                found[path.name] = os.pread(fd, 1 << 26, 0)
                os.close(fd)
        except OSError:
            continue
    return found


def _copy_names(root: Node) -> Names:
    names: Names = {}
    todo = [root]
    while todo:
        node = todo.pop()
        names[node] = dict(node.entries)
        todo += [below for below in node.entries.values() if below.folder]
    return names


def _apply(names: Names, changes: tuple[tuple[Node, str, Node | None], ...]) -> None:
    for folder, name, node in changes:
        entries = names.setdefault(folder, {})
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node
            if node.folder:
                names.setdefault(node, {})


# -- what may be left --------------------------------------------------------------------------

Tree = dict[str, bytes | Path | None]
"""Path → bytes, or the file that has them; None for a folder."""


def crash_states(recorder: Recorder) -> Iterator[tuple[int, str, Tree]]:
    """(events before the crash, what was lost, what is left), each tree once before the end."""
    seen: set[int] = set()
    for end in range(1, len(recorder.events) + 1):
        if recorder.events[end - 1].kind == "sync" and end < len(recorder.events):
            continue  # it takes possibilities away, and adds none
        for what, tree in _trees(recorder, end):
            over = end == len(recorder.events)  # by then, what was said must be so
            key = hash((over, *sorted((k, hash(v)) for k, v in tree.items())))
            if key not in seen:
                seen.add(key)
                yield end, what, tree


def _trees(recorder: Recorder, end: int) -> Iterator[tuple[str, Tree]]:
    events = recorder.events[:end]
    synced: set[Node] = set()
    loose_names: list[int] = []
    loose_data: list[int] = []
    for i in range(end - 1, -1, -1):
        event = events[i]
        if event.kind == "sync":
            synced.update(event.nodes)
        elif event.kind == "name" and synced.isdisjoint(event.nodes):
            loose_names.insert(0, i)
        elif event.kind == "data" and synced.isdisjoint(event.nodes):
            loose_data.insert(0, i)
    snapshots = [e.files for e in events if e.kind == "index"]
    newest = snapshots[-1]

    def tree(without: list[int], data: str = "kept", index: dict[str, bytes] = newest) -> Tree:
        return _build(recorder.root, events, set(without), set(loose_data), data, index)

    yield "nothing", tree([])
    yield "data dropped", tree([], "dropped")
    yield "data torn", tree([], "torn")
    yield "data blank", tree([], "blank")
    yield "names lost", tree(loose_names)
    yield "names and data lost", tree(loose_names, "dropped")
    for number, i in enumerate(loose_names):
        yield f"name {number} of {len(loose_names)} lost", tree([i])
        yield f"names from {number} on lost", tree(loose_names[number:])
        others = [n for n in loose_names if n != i]
        yield f"names but {number} lost, data torn", tree(others, "torn")
    yield "index as before", tree([], index=snapshots[0])
    torn = {n: d[: len(d) // 2] if n.endswith("-wal") else d for n, d in newest.items()}
    yield "index torn", tree([], index=torn)
    yield "index lost, names lost", tree(loose_names, index={})


def _build(
    root: Node,
    events: list[Event],
    without: set[int],
    loose: set[int],
    data: str,
    index: dict[str, bytes],
) -> Tree:
    names = _copy_names(root)
    files: dict[Node, bytearray] = {}
    for i, event in enumerate(events):
        if event.kind == "name" and i not in without:
            _apply(names, event.changes)
        elif event.kind == "data":
            node = event.nodes[0]
            file = files.setdefault(
                node, bytearray(node.source.read_bytes() if node.source else b"")
            )
            _write(file, event, data if i in loose else "kept")
    tree: Tree = dict(index)

    def walk(node: Node, path: str) -> None:
        for name, below in names.get(node, {}).items():
            if below.folder:
                tree[f"{path}{name}"] = None
                walk(below, f"{path}{name}/")
            else:
                changed = files.get(below)
                tree[f"{path}{name}"] = bytes(changed or b"") if not below.source else below.source
                if changed is not None and below.source:
                    tree[f"{path}{name}"] = bytes(changed)

    walk(root, "")
    return tree


def _write(file: bytearray, event: Event, how: str) -> None:
    if how == "dropped":
        return
    if event.data is None:
        del file[event.at :]
        return
    written = event.data
    if how == "torn":
        written = written[: len(written) // 2]
    elif how == "blank":
        written = bytes(len(written))
    end = event.at + len(written)
    if len(file) < end:
        file.extend(bytes(end - len(file)))
    file[event.at : end] = written


def lay_out(tree: Tree, folder: Path) -> None:
    """Make a folder that holds `tree`."""
    folder.mkdir()
    for path in sorted(tree):
        found = tree[path]
        if found is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        elif isinstance(found, bytes):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(found)
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(found, folder / path)
