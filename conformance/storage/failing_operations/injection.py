"""File operations of the library of which one fails: the N-th that can return the error, once or from then on.

Writes and reads are counted one by one, below the loops that handle short ones. The disk is left as a real error leaves it: a
full disk takes half of a write.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_resume.checkpoint.disk.operations import FileOperations, InputFile, OutputFile

_CHANGING = frozenset(
    ("make_directory", "create", "write", "sync", "rename", "exchange", "remove", "remove_directory", "sync_directory")
)
_ALL = _CHANGING | {"open_read", "read"}
_BY_NAME = frozenset(
    ("make_directory", "create", "rename", "exchange", "remove", "remove_directory", "sync_directory", "open_read")
)
_GROWING = frozenset(("make_directory", "create", "write", "sync", "rename", "exchange", "sync_directory"))
SHORT_WRITE, SHORT_READ = "short write", "short read"
# The operations that can return an error.
OPERATIONS_OF: Mapping[str, frozenset[str]] = {
    "EIO": _ALL,
    "ENOSPC": _GROWING,
    "EDQUOT": _GROWING,
    "EROFS": _CHANGING - {"sync", "sync_directory"},
    "EACCES": _BY_NAME,
    "ESTALE": _ALL,
    "EMFILE": frozenset(("create", "open_read", "sync_directory")),
    "EINTR": _ALL,
    SHORT_WRITE: frozenset(("write",)),
    SHORT_READ: frozenset(("read",)),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``error`` at the ``at``-th operation (from 1) that can return it; with ``persistent`` at all later ones too.

    ``only`` names one kind of operation; then only that kind is counted.
    """

    error: str
    at: int
    persistent: bool
    only: str = ""

    def applies_to(self, operation: str) -> bool:
        """True if the operation is counted."""
        return operation in OPERATIONS_OF[self.error] and self.only in ("", operation)


class FailingOperations(FileOperations):
    """Counts operations, and fails at the fault. ``fault`` None only counts.

    Attributes:
        reached: operations so far that can return the error.
        struck: the first failed operation and its path; "" if none failed.
        failed_sync: the file whose sync failed first; "" for none.
        synced_again: a file that was synced again after its sync had failed; "" for none.
        unsynced: names that were created or moved, and whose directory was not synced since.
        removed_early: what was deleted in the trash before its rename was durable (neither directory of the rename was
            synced); "" for none.
    """

    def __init__(self, fault: Fault | None) -> None:
        """Start counting."""
        self._fault = fault
        self._lock = threading.Lock()
        self.reached = 0
        self.struck = ""
        self.failed_sync = ""
        self.synced_again = ""
        self.unsynced: set[Path] = set()
        self.removed_early = ""
        self._half_moved: dict[Path, Path] = {}

    @property
    def error(self) -> str:
        """The name of the error; "" without a fault."""
        return "" if self._fault is None else self._fault.error

    def mend(self) -> None:
        """Stop failing."""
        self._fault = None

    def meet(self, operation: str, path: Path) -> str:
        """Count one operation. Returns "" if it succeeds, otherwise the fault's ``error``."""
        with self._lock:
            if self._fault is None or not self._fault.applies_to(operation):
                return ""
            self.reached += 1
            if self.reached < self._fault.at or (self.reached > self._fault.at and not self._fault.persistent):
                return ""
            self.struck = self.struck or f"{operation} {path.name}"
            return self._fault.error

    def pause(self, seconds: float) -> None:
        """Between two tries of a read, nothing passes here."""

    def _try(self, operation: str, path: Path) -> None:
        error = self.meet(operation, path)
        if error:
            raise os_error(error, path)

    def make_directory(self, path: Path) -> None:
        """As the real operation."""
        self._try("make_directory", path)
        super().make_directory(path)
        self.unsynced.add(path)

    def create(self, path: Path) -> OutputFile:
        """As the real operation; operations on the returned file are counted too."""
        self._try("create", path)
        with super().create(path) as file:
            self.unsynced.add(path)
            return _FailingFile(os.dup(file._descriptor), path, self)

    def rename(self, source: Path, target: Path) -> None:
        """As the real operation."""
        self._try("rename", source)
        super().rename(source, target)
        self.unsynced = {_moved(name, source, target) for name in self.unsynced} | {target}
        self._half_moved[target] = source.parent

    def exchange(self, one: Path, other: Path) -> bool:
        """As the real operation."""
        self._try("exchange", one)
        if not super().exchange(one, other):
            return False
        swapped = {
            _moved(name, one, other) if name.is_relative_to(one) else _moved(name, other, one) for name in self.unsynced
        }
        self.unsynced = swapped | {one, other}
        return True

    def remove(self, path: Path) -> None:
        """As the real operation."""
        self._try("remove", path)
        super().remove(path)
        if any(path.is_relative_to(moved) for moved in self._half_moved if moved.parent.name == ".trash"):
            self.removed_early = self.removed_early or str(path)
        self.unsynced.discard(path)

    def remove_directory(self, path: Path) -> None:
        """As the real operation."""
        self._try("remove_directory", path)
        super().remove_directory(path)
        self.unsynced.discard(path)

    def sync_directory(self, path: Path) -> None:
        """As the real operation."""
        self._try("sync_directory", path)
        super().sync_directory(path)
        self.unsynced = {name for name in self.unsynced if name.parent != path}
        self._half_moved = {
            moved: source for moved, source in self._half_moved.items() if path not in (source, moved.parent)
        }

    def open_read(self, path: Path) -> InputFile:
        """As the real operation; operations on the returned file are counted too."""
        self._try("open_read", path)
        with super().open_read(path) as file:
            return _FailingReader(os.dup(file.fileno()), path, self)


def _moved(name: Path, source: Path, target: Path) -> Path:
    return target / name.relative_to(source) if name.is_relative_to(source) else name


class _FailingFile(OutputFile):
    def __init__(self, descriptor: int, path: Path, operations: FailingOperations) -> None:
        super().__init__(descriptor, path)
        self._operations = operations

    def reserve(self, size: int) -> None:
        error = self._operations.meet("write", self.path)
        if error and error != SHORT_WRITE:
            raise os_error(error, self.path)
        super().reserve(size)

    def _write_some(self, pieces: Sequence[memoryview]) -> int:
        error = self._operations.meet("write", self.path)
        if not error:
            return super()._write_some(pieces)
        whole = b"".join(pieces)
        half = [memoryview(whole[: max(1, len(whole) // 2)])]
        if error == SHORT_WRITE:
            return super()._write_some(half)
        if error in ("ENOSPC", "EDQUOT"):
            super()._write_some(half)
        raise os_error(error, self.path)

    def sync(self) -> None:
        known = self._operations
        if known.failed_sync == str(self.path):
            known.synced_again = known.failed_sync
        error = known.meet("sync", self.path)
        if error:
            known.failed_sync = known.failed_sync or str(self.path)
            raise os_error(error, self.path)
        super().sync()


class _FailingReader(InputFile):
    def __init__(self, descriptor: int, path: Path, operations: FailingOperations) -> None:
        # Short reads need a file that is read; a mapped file has no reads.
        self.may_map = operations.error != SHORT_READ
        super().__init__(descriptor, path)
        self._operations = operations

    def preload(self, offset: int, length: int) -> None:
        error = "" if self._map is None else self._operations.meet("read", self.path)
        if error:
            raise os_error(error, self.path)
        super().preload(offset, length)

    def read(self, size: int | None = -1, /) -> Any:
        return self._limited(-1 if size is None else size, super().read)

    def readall(self) -> Any:
        return self._limited(-1, lambda size: super(_FailingReader, self).readall())

    def readinto(self, buffer: Any, /) -> Any:
        view = memoryview(buffer).cast("B")
        return self._limited(len(view), lambda size: super(_FailingReader, self).readinto(view[:size]))

    def _limited(self, size: int, read: Any) -> Any:
        error = self._operations.meet("read", self.path)
        if error == SHORT_READ:
            left = max(0, os.fstat(self.fileno()).st_size - self.tell())
            wanted = left if size < 0 else min(size, left)
            # 0 would mean the end of the file.
            return read(max(1, wanted // 2)) if wanted else read(size)
        if error:
            raise os_error(error, self.path)
        return read(size)


def os_error(name: str, path: Path) -> OSError:
    """The error as Python raises it for the kernel's."""
    number = getattr(errno, name)
    return OSError(number, os.strerror(number), str(path))
