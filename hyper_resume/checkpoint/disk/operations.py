"""Every change on disk goes through here: one small interface, so that each operation can be numbered, failed and reordered.

:func:`current` returns what is in use. The tests of the storage promises put a recording, a failing or a crashing one in its
place with :func:`use`; nothing else in this package opens a file for writing, renames or deletes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

Buffer = bytes | bytearray | memoryview

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
WRITE_BLOCK_BYTES = 8 << 20
"""A write ends at a multiple of this place in the file, and there the device is set to work, while the next is copied.

Linux keeps what is written so in large pages, which are mapped again in a fiftieth of the time that small ones take."""

# The kernel takes 1,024.
_MAX_PIECES = 512
_KEEP_SIZE, _WRITE = 1, 2
# Of a file system that can't; anything else is an error.
_NOT_KNOWN = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ESPIPE, errno.ENODEV, errno.EPERM)
# Linux 5.14: brings pages in now and tells of an error, where touching them would end the process with SIGBUS.
_POPULATE_READ = 22
# A file may be larger than memory; nothing will be written to its map, so none has to be kept for that. Linux's number.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


def _first(pieces: Iterable[memoryview], size: int) -> list[memoryview]:
    """Return at most ``size`` bytes of the beginning."""
    found: list[memoryview] = []
    for piece in pieces:
        found.append(piece[:size])
        size -= len(piece)
        if size <= 0 or len(found) == _MAX_PIECES:
            break
    return found


def _drop(pieces: deque[memoryview], size: int) -> None:
    """Take ``size`` bytes of the beginning away."""
    while pieces and size >= len(pieces[0]):
        size -= len(pieces.popleft())
    if size:
        pieces[0] = pieces[0][size:]


@cache
def _kernel_function(name: str) -> Any:
    """Return one of Linux's that takes a file and numbers; None where there is none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None) if sys.platform == "linux" else None
    if function is not None:
        function.argtypes = {
            "fallocate": (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
            "sync_file_range": (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint),
        }[name]
    return function


class OutputFile:
    """A new file, written from its start. Unbuffered: there is no flush that a sync could come before."""

    def __init__(self, descriptor: int, path: Path) -> None:
        """Own ``descriptor``; ``path`` is for messages."""
        self.path = path
        self._descriptor = descriptor
        self._size = 0
        self._on_its_way = 0
        self._is_open = True

    def reserve(self, size: int) -> None:
        """Have room for ``size`` bytes set aside, where the file system can (Linux); the file stays as long as it is.

        Raises:
            OSError: there is no room.
        """
        self._ask_kernel("fallocate", _KEEP_SIZE, 0, size)

    def write(self, *pieces: Buffer) -> int:
        """Write all of the pieces, in order, however many writes that takes; returns their size in bytes.

        Raises:
            OSError: the rest could not be written.
        """
        rest = deque(view for piece in pieces if (view := memoryview(piece).cast("B")))
        begin = self._size
        while rest:
            written = self._write_some(_first(rest, WRITE_BLOCK_BYTES - self._size % WRITE_BLOCK_BYTES))
            _drop(rest, written)
            self._size += written
            self._set_device_to_work(self._size)
        return self._size - begin

    def _set_device_to_work(self, size: int) -> None:
        """Begin to write out what has gathered; without it the device would wait for the sync."""
        if size - self._on_its_way >= WRITE_BLOCK_BYTES:
            # No more than advice: what fails of it fails again in the sync, which tells.
            with contextlib.suppress(OSError):
                self._ask_kernel("sync_file_range", self._on_its_way, size - self._on_its_way, _WRITE)
            self._on_its_way = size

    def _ask_kernel(self, name: str, *numbers: int) -> None:
        """Call a function of Linux's that Python does not have, with the file and numbers, of which one is small."""
        function = _kernel_function(name)
        while function is not None and function(self._descriptor, *numbers) != 0:
            number = ctypes.get_errno()
            if number in _NOT_KNOWN:
                return
            # A signal, of which Python's own functions try again by themselves: one may ask for this very save.
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number), str(self.path))

    def _write_some(self, pieces: Sequence[memoryview]) -> int:
        only = pieces[0] if len(pieces) == 1 else None
        written = os.writev(self._descriptor, pieces) if only is None else os.write(self._descriptor, only)
        if written == 0:
            # Never seen on a regular file, and it would loop here for ever.
            raise OSError(errno.EIO, "a write took no bytes", str(self.path))
        return written

    def sync(self) -> None:
        """Ask the kernel to bring the bytes to the device.

        After an error the file must be given up: the kernel may have dropped the bytes and called them clean, so that a second
        try would succeed over a hole (ATC'20, "Can applications recover from fsync failures?").
        """
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close; once is enough."""
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)

    def __enter__(self) -> OutputFile:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


class InputFile(io.FileIO):
    """A file to read, or to look into: :meth:`view` gives its bytes without a copy where the system can map it.

    :meth:`preload` tells of errors; what it brought is then in memory. A mapped file that somebody cuts off afterwards ends the
    process (SIGBUS) when its missing bytes are touched.
    """

    may_map = True

    def __init__(self, descriptor: int, path: Path) -> None:
        """Own ``descriptor``; ``path`` is for messages."""
        super().__init__(descriptor, "rb")
        self.path = path
        self.size_bytes = os.fstat(descriptor).st_size
        self._map = _mapped(descriptor, self.size_bytes) if self.may_map else None
        # A file that is read has one place where it is read next, and several threads.
        self._reading = threading.Lock()

    def preload(self, offset: int, length: int) -> None:
        """Have bytes read that will be looked at, where they are mapped.

        Raises:
            OSError: they can't be.
        """
        length = min(length, self.size_bytes - offset)
        if self._map is not None and length > 0:
            begin = offset - offset % mmap.PAGESIZE
            self._map.madvise(_POPULATE_READ, begin, offset + length - begin)

    def view(self, offset: int, length: int) -> memoryview:
        """Return bytes of the file, fewer where it ends before; writing to them does not change the file.

        Raises:
            OSError: they can't be read.
        """
        if self._map is not None:
            return memoryview(self._map)[offset : offset + length]
        content = memoryview(bytearray(max(0, min(length, self.size_bytes - offset))))
        with self._reading:
            self.seek(offset)
            done = 0
            while done < len(content) and (count := self.readinto(content[done:])):
                done += count
        return content[:done]

    def view_all(self) -> memoryview | None:
        """Return all of a mapped file, to be looked into also when this is closed; None where it is not mapped."""
        return None if self._map is None else memoryview(self._map)

    def close(self) -> None:
        """Close the file; a map lives as long as any part of it is in use."""
        self._map = None
        super().close()


def preload_mapped(content: memoryview, offset: int, length: int) -> None:
    """Have bytes of a file read that :meth:`InputFile.view_all` gave.

    Raises:
        OSError: they can't be.
    """
    mapped: Any = content.obj
    begin = offset - offset % mmap.PAGESIZE
    if 0 <= begin < len(content) and length > 0:
        mapped.madvise(_POPULATE_READ, begin, min(offset + length, len(content)) - begin)


def _mapped(descriptor: int, size: int) -> mmap.mmap | None:
    """Map a file copy-on-write; None where file system or kernel can't."""
    if not size:
        return None
    try:
        found = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE | _NO_RESERVE)
        found.madvise(_POPULATE_READ, 0, min(size, mmap.PAGESIZE))
    except (OSError, ValueError, AttributeError):
        # Too old a kernel, or no madvise; or the first page can't be read, and then reading it says so better.
        return None
    return found


class FileOperations:
    """The real ones, on a POSIX file system. All of them raise ``OSError``."""

    def make_directory(self, path: Path) -> None:
        """Make one directory below an existing one, for this user only.

        Raises:
            FileExistsError: the name is taken.
        """
        path.mkdir(mode=0o700)

    def create(self, path: Path) -> OutputFile:
        """Make a new file, for this user only, and open it for writing.

        Raises:
            FileExistsError: the name is taken; nothing is ever written over.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return OutputFile(os.open(path, flags, 0o600), path)

    def rename(self, source: Path, target: Path) -> None:
        """Move ``source`` to ``target`` in one step; a file takes the place of a file."""
        source.replace(target)

    def exchange(self, one: Path, other: Path) -> bool:
        """Let two paths change places in one step (Linux, ``renameat2``); False where kernel or file system can't."""
        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if renameat2 is None:
            return False
        if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
            return True
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            return False
        raise OSError(number, os.strerror(number), str(one), None, str(other))

    def remove(self, path: Path) -> None:
        """Delete a file or a link."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Delete an empty directory."""
        path.rmdir()

    def sync_directory(self, path: Path) -> None:
        """Bring the directory's names to the device: what was made in it, moved into it and moved out of it."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def open_read(self, path: Path) -> InputFile:
        """Open for reading; a link in the last place is refused (``OSError``)."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return InputFile(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise


_current: FileOperations = FileOperations()


def current() -> FileOperations:
    """Return the operations in use in this process. Asked at each operation, never kept."""
    return _current


@contextmanager
def use(operations: FileOperations) -> Iterator[FileOperations]:
    """Put other operations in place, for the whole process, while the context lasts."""
    global _current
    before, _current = _current, operations
    try:
        yield operations
    finally:
        _current = before


def read_bytes(path: Path, most: int) -> bytes:
    """Return a file's bytes.

    Raises:
        OSError: it can't be read; ``EFBIG`` when it has more than ``most`` bytes.
    """
    chunks: list[bytes] = []
    size = 0
    with current().open_read(path) as file:
        while chunk := file.read(min(1 << 20, most + 1 - size)):
            chunks.append(chunk)
            size += len(chunk)
            if size > most:
                raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
    return b"".join(chunks)


def read_head(path: Path, most: int) -> bytes:
    """Return at most the first ``most`` bytes of a file."""
    with current().open_read(path) as file:
        return file.read(most)


def write_file(path: Path, content: Buffer) -> None:
    """Make a new file with ``content`` and bring it to the device; its name still needs the directory's sync."""
    with current().create(path) as file:
        file.write(content)
        file.sync()


def make_directories(path: Path) -> None:
    """Make ``path`` and what is missing above it, and bring each new name to the device."""
    missing: list[Path] = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        try:
            current().make_directory(directory)
        except FileExistsError:
            # Another process of this run was faster; anything but a directory fails at its first use.
            continue
        current().sync_directory(directory.parent)


def remove_tree(path: Path) -> None:
    """Delete a file, a link, or a directory with all that is in it; links are not followed."""
    if path.is_symlink() or not path.is_dir():
        current().remove(path)
        return
    for entry in sorted(path.iterdir()):
        remove_tree(entry)
    current().remove_directory(path)
