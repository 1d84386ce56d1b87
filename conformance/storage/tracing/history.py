"""The history of a traced sequence of operations: what each changes, and the state of the disk at any point.

Names are resolved to numbers of files and directories, like the inodes of a file system. So a file that was renamed while its
first name was not yet durable ends in one place, not in two.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "make_directory", "create", "open", "write", "truncate", "sync", "rename", "exchange", "remove", "remove_directory",
    "sync_directory", "mark",
]  # fmt: skip
_MOST_CUTS = 6
_ROOT = 0

Place = tuple[int, str]
# Path to content; None for a directory. The root itself is not listed.
Tree = Mapping[str, bytes | None]


class TraceError(ValueError):
    """A sequence of operations that no file system would have answered with success."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One call to the kernel, or (``mark``) an event that the program reported.

    ``path`` and ``target`` are relative to the root; a mark's text is in ``path``. ``file`` is the number of the operation
    that opened what is written, truncated or synced. ``offset`` counts bytes; for ``truncate`` it is the size.
    """

    number: int
    rank: int
    kind: Kind
    path: str = ""
    target: str = ""
    data: bytes = b""
    offset: int = 0
    file: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class NameChange:
    """A change of names. ``link``: inode at place. ``move``: inode to place. ``swap``: inode to place, other to other_place."""

    position: int
    kind: Literal["link", "move", "swap", "unlink"]
    place: Place
    inode: int = -1
    other: int = -1
    other_place: Place = (-1, "")
    kept_by: frozenset[int] = frozenset()
    touches: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change of a file's bytes; without ``data`` it is cut or grown to ``offset``."""

    position: int
    offset: int
    data: bytes | None


class History:
    """One order of operations, resolved to inodes, with the state at any point."""

    def __init__(self, base: Tree, operations: Sequence[Operation]) -> None:
        """Follow ``operations`` from the tree ``base``, all of which is on the disk already.

        Raises:
            TraceError: an operation has no target (a rename of a missing file), so this order is impossible.
        """
        self.operations = tuple(operations)
        self._links: dict[Place, int] = {}
        self._is_directory = {_ROOT}
        self._base_bytes: dict[int, bytes] = {}
        self._names: list[NameChange] = []
        self._bytes: dict[int, list[Change]] = {}
        self._file_syncs: list[tuple[int, int]] = []
        self._directory_syncs: list[tuple[int, int]] = []
        self._opened: dict[int, int] = {}
        self._next = _ROOT + 1
        for path in sorted(base):
            self._add_base(path, base[path])
        self._base_links = dict(self._links)
        for position, operation in enumerate(self.operations):
            if operation.kind != "mark":
                self._follow(position, operation)
        self._name_positions = [name.position for name in self._names]

    def __len__(self) -> int:
        """The number of operations, marks among them."""
        return len(self.operations)

    def tree(self) -> dict[str, bytes | None]:
        """The tree after all operations, if all are kept."""
        return self.assemble(self._names, self.contents(len(self)))

    # ---- following the operations -------------------------------------------------------------------------------------

    def _add_base(self, path: str, content: bytes | None) -> None:
        inode = self._new()
        self._links[self._place(path)] = inode
        if content is None:
            self._is_directory.add(inode)
        else:
            self._base_bytes[inode] = content

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    def _place(self, path: str) -> Place:
        inode = _ROOT
        *parents, name = path.split("/")
        for part in parents:
            found = self._links.get((inode, part))
            if found is None or found not in self._is_directory:
                raise TraceError(f"{path}: {part} is no directory here")
            inode = found
        return inode, name

    def _at(self, path: str) -> int:
        if path in ("", "."):
            return _ROOT
        found = self._links.get(self._place(path))
        if found is None:
            raise TraceError(f"{path}: does not exist")
        return found

    def _follow(self, position: int, operation: Operation) -> None:
        follow: Callable[[int, Operation], None] = getattr(self, f"_follow_{operation.kind}")
        try:
            follow(position, operation)
        except TraceError as error:
            raise TraceError(
                f"operation {operation.number} ({operation.kind}) of rank {operation.rank}: {error}"
            ) from None

    def _named(self, name: NameChange) -> None:
        self._names.append(name)
        _apply(self._links, {inode: place for place, inode in self._links.items()}, name)

    def _follow_make_directory(self, position: int, operation: Operation) -> None:
        if self._links.get(self._place(operation.path)) in self._is_directory:
            return  # another rank made it first
        self._is_directory.add(self._follow_create(position, operation))

    def _follow_create(self, position: int, operation: Operation) -> int:
        place = self._place(operation.path)
        if place in self._links:
            raise TraceError(f"{operation.path}: exists already")
        inode = self._new()
        kept = frozenset({place[0]})
        self._named(
            NameChange(position=position, kind="link", place=place, inode=inode, kept_by=kept, touches=kept | {inode})
        )
        self._opened[operation.number] = inode
        return inode

    def _follow_open(self, position: int, operation: Operation) -> None:
        self._opened[operation.number] = self._at(operation.path)

    def _follow_write(self, position: int, operation: Operation) -> None:
        change = Change(position=position, offset=operation.offset, data=operation.data)
        self._bytes.setdefault(self._open_file(operation), []).append(change)

    def _follow_truncate(self, position: int, operation: Operation) -> None:
        change = Change(position=position, offset=operation.offset, data=None)
        self._bytes.setdefault(self._open_file(operation), []).append(change)

    def _follow_sync(self, position: int, operation: Operation) -> None:
        self._file_syncs.append((position, self._open_file(operation)))

    def _open_file(self, operation: Operation) -> int:
        inode = self._opened.get(operation.file)
        if inode is None:
            raise TraceError("the file was never opened")
        return inode

    def _follow_sync_directory(self, position: int, operation: Operation) -> None:
        self._directory_syncs.append((position, self._at(operation.path)))

    def _follow_rename(self, position: int, operation: Operation) -> None:
        inode, source, place = self._at(operation.path), self._place(operation.path), self._place(operation.target)
        touches = frozenset({source[0], place[0], inode})
        self._named(
            NameChange(
                position=position, kind="move", place=place, inode=inode, kept_by=touches - {inode}, touches=touches
            )
        )

    def _follow_exchange(self, position: int, operation: Operation) -> None:
        one, other = self._at(operation.path), self._at(operation.target)
        place, other_place = self._place(operation.target), self._place(operation.path)
        directories = frozenset({place[0], other_place[0]})
        self._named(
            NameChange(
                position=position, kind="swap", place=place, inode=one, other=other, other_place=other_place,
                kept_by=directories, touches=directories | {one, other},
            )
        )  # fmt: skip

    def _follow_remove(self, position: int, operation: Operation) -> None:
        self._at(operation.path)
        place = self._place(operation.path)
        kept = frozenset({place[0]})
        self._named(NameChange(position=position, kind="unlink", place=place, kept_by=kept, touches=kept))

    _follow_remove_directory = _follow_remove

    # ---- the state at a point -----------------------------------------------------------------------------------------

    def names(self, point: int) -> list[NameChange]:
        """The changes of names among the first ``point`` operations."""
        return self._names[: bisect.bisect_left(self._name_positions, point)]

    def synced_at(self, inode: int, point: int) -> int:
        """The position of the last sync of the file's bytes; -1 if there is none."""
        return max((position for position, one in self._file_syncs if one == inode and position < point), default=-1)

    def dirty(self, point: int) -> list[int]:
        """The files with bytes that no sync has covered."""
        return [
            inode
            for inode, changes in self._bytes.items()
            if any(self.synced_at(inode, point) < change.position < point for change in changes)
        ]

    def content(self, inode: int, point: int) -> bytes:
        """A file's bytes after the first ``point`` operations."""
        changes = [change for change in self._bytes.get(inode, ()) if change.position < point]
        return changed(self._base_bytes.get(inode, b""), changes)

    def contents(self, point: int) -> dict[int, bytes]:
        """The bytes of every file that is ever written to, by inode."""
        return {inode: self.content(inode, point) for inode in self._bytes}

    def file_of(self, operation: Operation) -> int:
        """The inode that an operation on an open file concerns."""
        return self._opened[operation.file]

    def variants(self, inode: int, point: int) -> dict[str, bytes]:
        """The possible contents of a file with unsynced bytes, by name; equal contents are given once."""
        synced = self.synced_at(inode, point)
        kept = self.content(inode, synced + 1)
        changes = [one for one in self._bytes[inode] if synced < one.position < point]
        whole = changed(kept, changes)
        found = {"all": whole, "none": kept}
        shorter = min(len(kept), len(whole)) if whole.startswith(kept) else 0
        found["half"] = whole[: shorter + (len(whole) - shorter) // 2]
        found["zeros"] = whole[:shorter] + bytes(len(whole) - shorter)
        cuts = range(1, len(changes))
        for cut in cuts if len(cuts) <= _MOST_CUTS else sorted({1, *cuts[:: len(cuts) // _MOST_CUTS], len(cuts)}):
            found[f"cut{cut}"] = changed(kept, changes[:cut])
        return {name: found[name] for name in _first_of_each(found)}

    def kept_names(self, point: int) -> tuple[int, set[int]]:
        """(length of the prefix of names that a journal keeps, indices of the names that POSIX guarantees) at ``point``."""
        names = self.names(point)
        prefix, promised = 0, set[int]()
        for position, inode in [*self._file_syncs, *self._directory_syncs]:
            if position >= point:
                continue
            for index, name in enumerate(names):
                if name.position < position and inode in name.touches:
                    prefix = max(prefix, index + 1)
        for position, inode in self._directory_syncs:
            if position < point:
                promised |= {i for i, name in enumerate(names) if name.position < position and inode in name.kept_by}
        return prefix, promised

    def assemble(self, names: Sequence[NameChange], contents: Mapping[int, bytes]) -> dict[str, bytes | None]:
        """The tree if only these names are kept; ``contents`` are those of written files, others are unchanged."""
        links = dict(self._base_links)
        where = {inode: place for place, inode in links.items()}
        for name in names:
            _apply(links, where, name)
        below: dict[int, list[tuple[str, int]]] = {}
        for (directory, entry), inode in links.items():
            below.setdefault(directory, []).append((entry, inode))
        tree: dict[str, bytes | None] = {}
        self._walk(_ROOT, "", below, contents, tree)
        return tree

    def _walk(
        self,
        directory: int,
        path: str,
        below: Mapping[int, list[tuple[str, int]]],
        contents: Mapping[int, bytes],
        tree: dict[str, bytes | None],
    ) -> None:
        for name, inode in below.get(directory, ()):
            if inode in self._is_directory:
                tree[path + name] = None
                self._walk(inode, f"{path}{name}/", below, contents, tree)
            else:
                content = contents.get(inode)
                tree[path + name] = self._base_bytes.get(inode, b"") if content is None else content


def _apply(links: dict[Place, int], where: dict[int, Place], name: NameChange) -> None:
    if name.kind == "unlink":
        where.pop(links.pop(name.place, -1), None)
        return
    for inode in (name.inode, name.other):
        present = where.pop(inode, None)
        if present is not None and links.get(present) == inode:
            del links[present]
    for inode, place in ((name.inode, name.place), (name.other, name.other_place)):
        if inode >= 0:
            where.pop(links.get(place, -1), None)
            links[place] = inode
            where[inode] = place


def changed(content: bytes, changes: Sequence[Change]) -> bytes:
    """A file's bytes after some changes."""
    for change in changes:
        if change.data is None:
            content = content[: change.offset].ljust(change.offset, b"\0")
        else:
            before = content[: change.offset].ljust(change.offset, b"\0")
            content = before + change.data + content[change.offset + len(change.data) :]
    return content


def _first_of_each(found: Mapping[str, bytes]) -> list[str]:
    seen: dict[bytes, str] = {}
    for name, content in found.items():
        seen.setdefault(content, name)
    return list(seen.values())
