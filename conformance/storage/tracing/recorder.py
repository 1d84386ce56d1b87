"""Traces a program that writes below one folder: every operation with its bytes, numbered over all ranks.

:class:`Recorder` replaces Python's functions (``os.write``, ``open``, ``os.rename``, ...), so it records every call to the
kernel in its real order: an operation and its number are made under a lock that the ranks share. Collectives are recorded as
marks, which limit the possible orders of the ranks.

Writes from C are not recorded; so replaying the traced operations must give the tree on the disk, which is verified. An
operation that the library makes without going through ``hyper_resume.checkpoint.disk.operations`` is in ``around``.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.storage.tracing.history import Kind, Operation

_WRITING = os.O_WRONLY | os.O_RDWR
# Prefixes of a collective's marks; then follow group/number, which ranks wait, and the root rank.
ENTER, LEAVE = "enter ", "leave "


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """The operations of one rank, and those of them that were made outside the library's interface."""

    operations: tuple[Operation, ...]
    around: tuple[str, ...] = ()


class Recorder:
    """Records operations. Made before the ranks are forked (they share its counter); each rank calls ``hooks.install``."""

    def __init__(self, root: Path, on_operation: Callable[[Operation], None] | None = None) -> None:
        """Nothing is recorded before :meth:`begin`. ``on_operation`` is called with each operation at once."""
        self._on_operation = on_operation
        self._root = os.path.realpath(root)
        self._counter = multiprocessing.get_context("fork").Value("q", 0)
        self._rank = 0
        self._done: list[Operation] = []
        self._around: list[str] = []
        self._files: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._directories: dict[int, str] = {}
        self._collectives: dict[str, int] = {}
        self._inside = threading.local()
        self._wants_interface = False

    def begin(self, rank: int, *, wants_interface: bool) -> None:
        """Record as ``rank``. With ``wants_interface`` each operation that is made outside :meth:`inside` is listed."""
        self._rank = rank
        self._wants_interface = wants_interface

    def trace(self) -> RankTrace:
        """The recorded operations."""
        return RankTrace(operations=tuple(self._done), around=tuple(self._around))

    def mark(self, text: str) -> None:
        """Record that the program reported something."""
        with self.step():
            self.note("mark", text)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Make an operation and its number atomic: no other rank or thread records in between."""
        with self._counter.get_lock():
            yield

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Operations of this thread inside the block go through the library's interface."""
        before = getattr(self._inside, "depth", 0)
        self._inside.depth = before + 1
        try:
            yield
        finally:
            self._inside.depth = before

    def note(
        self, kind: Kind, path: str, *, target: str = "", data: bytes = b"", offset: int = 0, file: int = -1
    ) -> int:
        """Record one operation that has just succeeded; returns its number. Call it inside :meth:`step`."""
        number: int = self._counter.value
        self._counter.value = number + 1
        one = Operation(
            number=number, rank=self._rank, kind=kind, path=path, target=target, data=data, offset=offset, file=file
        )
        self._done.append(one)
        if kind != "mark" and self._wants_interface and not getattr(self._inside, "depth", 0):
            self._around.append(f"{kind} {path}{f' -> {target}' if target else ''}")
        if self._on_operation is not None:
            self._on_operation(one)
        return number

    # ---- paths and descriptors --------------------------------------------------------------------------------------

    def below(self, path: Any, dir_fd: int | None = None) -> str | None:
        """``path`` relative to the root ("." for itself); None if it is not below it."""
        if isinstance(path, int):
            return self.directory_of(path)
        try:
            text = os.fsdecode(path)
        except TypeError:
            return None
        if dir_fd is not None and not text.startswith(os.sep):
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)  # noqa: PTH115, PTH118  pathlib is traced
        found = os.path.abspath(text)  # noqa: PTH100
        found = os.path.join(os.path.realpath(os.path.dirname(found)), os.path.basename(found))  # noqa: PTH118, PTH119, PTH120
        if found == self._root:
            return "."
        return found[len(self._root) + 1 :] if found.startswith(self._root + os.sep) else None

    def is_open(self, descriptor: int) -> bool:
        """True for the descriptor of a traced file that is open for writing."""
        return descriptor in self._files

    def exists(self, where: str) -> bool:
        """True if that path exists below the root."""
        return os.path.lexists(os.path.join(self._root, where))  # noqa: PTH118

    def next_collective(self, group: str) -> int:
        """The number of the collective that begins in that group now."""
        self._collectives[group] = self._collectives.get(group, 0) + 1
        return self._collectives[group]

    def directory_of(self, descriptor: int) -> str | None:
        """The directory that a descriptor was opened for, if below the root."""
        return self._directories.get(descriptor)

    def opened(self, descriptor: int, where: str, *, existed: bool, flags: int) -> None:
        """Record that a descriptor was opened for ``where``."""
        self.closed(descriptor)
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            self._directories[descriptor] = where
        elif flags & _WRITING or not existed:
            number = self.note("open" if existed else "create", where)
            self._files[descriptor] = number
            self._ends[descriptor] = 0
            if existed and flags & os.O_TRUNC:
                self.note("truncate", where, file=number)

    def closed(self, descriptor: int) -> None:
        """Record that a descriptor was closed."""
        self._files.pop(descriptor, None)
        self._directories.pop(descriptor, None)

    def wrote(self, descriptor: int, data: Any, count: int, offset: int | None = None) -> None:
        """Record a write of ``count`` bytes, at ``offset`` or after the last write."""
        file = self._files.get(descriptor)
        if file is None:
            return
        start = self._ends[descriptor] if offset is None else offset
        self.note("write", self._path_of(file), data=bytes(memoryview(data).cast("B")[:count]), offset=start, file=file)
        if offset is None:
            self._ends[descriptor] = start + count

    def seeked(self, descriptor: int, position: int) -> None:
        """Record the position of the next write."""
        if descriptor in self._ends:
            self._ends[descriptor] = position

    def truncated(self, descriptor: int, size: int) -> None:
        """Record a truncation."""
        file = self._files.get(descriptor)
        if file is not None:
            self.note("truncate", self._path_of(file), offset=size, file=file)

    def synced(self, descriptor: int) -> None:
        """Record a sync."""
        file, directory = self._files.get(descriptor), self._directories.get(descriptor)
        if file is not None:
            self.note("sync", self._path_of(file), file=file)
        elif directory is not None:
            self.note("sync_directory", directory)

    def _path_of(self, number: int) -> str:
        return next(one.path for one in reversed(self._done) if one.number == number)
