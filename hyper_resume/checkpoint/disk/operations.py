"""All file operations of this package, behind one small interface that tests can replace.

:func:`current` returns the operations in use. The storage tests replace them with :func:`use`, to record operations, to let
them fail, or to simulate a crash. Nothing else in this package opens a file for writing, renames or deletes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import math
import mmap
import os
import stat
import sys
import threading
import time
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
"""Writes end at multiples of this offset, and there the kernel starts to write the data to the device.

Linux keeps such writes in large pages of its page cache. Mapping these takes a fiftieth of the time of small pages."""

# The kernel's limit is 1,024.
_MAX_PIECES = 512
_KEEP_SIZE, _WRITE = 1, 2
# Error numbers of a file system that does not support the call; any other number is an error.
_NOT_KNOWN = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ESPIPE, errno.ENODEV, errno.EPERM)
# Linux 5.14: reads pages now and reports errors. Touching pages that can't be read would end the process with SIGBUS.
_POPULATE_READ = 22
# The map is never written to, so the kernel need not reserve memory for it; a file may be larger than memory. Linux only.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


def _first(pieces: Iterable[memoryview], size: int) -> list[memoryview]:
    """Return the first pieces, at most ``size`` bytes."""
    found: list[memoryview] = []
    for piece in pieces:
        found.append(piece[:size])
        size -= len(piece)
        if size <= 0 or len(found) == _MAX_PIECES:
            break
    return found


def _drop(pieces: deque[memoryview], size: int) -> None:
    """Remove the first ``size`` bytes."""
    while pieces and size >= len(pieces[0]):
        size -= len(pieces.popleft())
    if size:
        pieces[0] = pieces[0][size:]


@cache
def _kernel_function(name: str) -> Any:
    """Return a Linux function that takes a file descriptor and integers; None if it does not exist."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None) if sys.platform == "linux" else None
    if function is not None:
        function.argtypes = {
            "fallocate": (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
            "sync_file_range": (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint),
        }[name]
    return function


class OutputFile:
    """A new file that is written sequentially. It is unbuffered, so a sync can't come before a flush."""

    def __init__(self, descriptor: int, path: Path) -> None:
        """Own ``descriptor``; ``path`` is for messages."""
        self.path = path
        self._descriptor = descriptor
        self._size = 0
        self._writeback_bytes = 0
        self._is_open = True

    def reserve(self, size: int) -> None:
        """Reserve disk space for ``size`` bytes, if the file system supports it (Linux). The file's size does not change.

        Raises:
            OSError: there is not enough space.
        """
        self._call_kernel("fallocate", _KEEP_SIZE, 0, size)

    def write(self, *pieces: Buffer) -> int:
        """Write all pieces in order, with as many calls as it takes; return their total size in bytes.

        Raises:
            OSError: the rest could not be written.
        """
        rest = deque(view for piece in pieces if (view := memoryview(piece).cast("B")))
        begin = self._size
        while rest:
            written = self._write_some(_first(rest, WRITE_BLOCK_BYTES - self._size % WRITE_BLOCK_BYTES))
            _drop(rest, written)
            self._size += written
            self._start_writeback(self._size)
        return self._size - begin

    def _start_writeback(self, size: int) -> None:
        """Let the kernel start to write full blocks to the device; otherwise it would wait for the sync."""
        if size - self._writeback_bytes >= WRITE_BLOCK_BYTES:
            # Only a hint: an error here occurs again in the sync, which raises it.
            with contextlib.suppress(OSError):
                self._call_kernel("sync_file_range", self._writeback_bytes, size - self._writeback_bytes, _WRITE)
            self._writeback_bytes = size

    def _call_kernel(self, name: str, *numbers: int) -> None:
        """Call a Linux function that Python does not offer, with the file descriptor and integers."""
        function = _kernel_function(name)
        while function is not None and function(self._descriptor, *numbers) != 0:
            number = ctypes.get_errno()
            if number in _NOT_KNOWN:
                return
            # Try again after a signal, as Python's own functions do: a preemption signal may have requested this save.
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number), str(self.path))

    def _write_some(self, pieces: Sequence[memoryview]) -> int:
        only = pieces[0] if len(pieces) == 1 else None
        written = os.writev(self._descriptor, pieces) if only is None else os.write(self._descriptor, only)
        if written == 0:
            # Never seen on a regular file, but it would cause an endless loop.
            raise OSError(errno.EIO, "a write wrote no bytes", str(self.path))
        return written

    def sync(self) -> None:
        """Write the file's bytes to the device (``fsync``).

        After an error the file must be abandoned: the kernel may have dropped the bytes and marked them as clean, so that a
        second call would succeed although data is missing (ATC'20, "Can applications recover from fsync failures?").
        """
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; later calls do nothing."""
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
    """A file to read. It is mapped into memory if possible; then :meth:`view` returns its bytes without a copy.

    :meth:`preload` reads bytes into memory and raises read errors. If another process truncates a mapped file afterwards,
    touching the missing bytes ends this process (SIGBUS).
    """

    may_map = True

    def __init__(self, descriptor: int, path: Path) -> None:
        """Own ``descriptor``, unless it is refused; ``path`` is for messages.

        Raises:
            OSError: it is not a regular file (``EINVAL``).
        """
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        super().__init__(descriptor, "rb")
        self.path = path
        self.size_bytes = status.st_size
        self._map = _mapped(descriptor, self.size_bytes) if self.may_map else None
        # Several threads may read, but the file has only one position.
        self._reading = threading.Lock()

    def preload(self, offset: int, length: int) -> None:
        """Read bytes of a mapped file into memory; does nothing if the file is not mapped.

        Raises:
            OSError: they can't be read.
        """
        length = min(length, self.size_bytes - offset)
        if self._map is not None and length > 0:
            begin = offset - offset % mmap.PAGESIZE
            self._map.madvise(_POPULATE_READ, begin, offset + length - begin)

    def view(self, offset: int, length: int) -> memoryview:
        """Return a range of the file, shorter at its end; writing to it does not change the file.

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
        """Return the whole mapped file, which stays valid after :meth:`close`; None if it is not mapped."""
        return None if self._map is None else memoryview(self._map)

    def close(self) -> None:
        """Close the file; the map stays valid as long as any view of it is in use."""
        self._map = None
        super().close()


def preload_mapped(content: memoryview, offset: int, length: int) -> None:
    """Read a range of a mapped file into memory; ``content`` is the result of :meth:`InputFile.view_all`.

    Raises:
        OSError: the range can't be read.
    """
    mapped: Any = content.obj
    begin = offset - offset % mmap.PAGESIZE
    if 0 <= begin < len(content) and length > 0:
        mapped.madvise(_POPULATE_READ, begin, min(offset + length, len(content)) - begin)


def _mapped(descriptor: int, size: int) -> mmap.mmap | None:
    """Map a file copy-on-write; None if the file system or the kernel does not support it."""
    if not size:
        return None
    try:
        found = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE | _NO_RESERVE)
        found.madvise(_POPULATE_READ, 0, min(size, mmap.PAGESIZE))
    except (OSError, ValueError, AttributeError):
        # The kernel is too old or has no madvise; or the first page can't be read, and a plain read reports that better.
        return None
    return found


class FileOperations:
    """The real operations, on a POSIX file system. All of them raise ``OSError``.

    Attributes:
        gave_up_at: when a read was last given up (see :mod:`~hyper_resume.checkpoint.disk.reading`), by ``time.monotonic``.
    """

    gave_up_at: float = -math.inf

    def make_directory(self, path: Path) -> None:
        """Create a directory in an existing one, accessible to this user only.

        Raises:
            FileExistsError: the name is taken.
        """
        path.mkdir(mode=0o700)

    def create(self, path: Path) -> OutputFile:
        """Create a new file, accessible to this user only, and open it for writing.

        Raises:
            FileExistsError: the name is taken; a file is never overwritten.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return OutputFile(os.open(path, flags, 0o600), path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target`` atomically; an existing target file is replaced."""
        source.replace(target)

    def exchange(self, one: Path, other: Path) -> bool:
        """Exchange two names atomically (Linux, ``renameat2``); False if kernel or file system do not support it."""
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
        """Write the directory's entries to the device: files that were created in it, moved into it or moved out of it."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def open_read(self, path: Path) -> InputFile:
        """Open a regular file for reading; anything else is refused (``OSError``), and so is a link as the path's last part."""
        # Without O_NONBLOCK, the open of a FIFO waits for a writer, perhaps for ever. It changes nothing for a regular file.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return InputFile(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise

    def pause(self, seconds: float) -> None:
        """Wait before a read is tried again."""
        time.sleep(seconds)


_current: FileOperations = FileOperations()


def current() -> FileOperations:
    """Return the operations in use in this process. Call it for each operation; do not keep the result."""
    return _current


@contextmanager
def use(operations: FileOperations) -> Iterator[FileOperations]:
    """Use other operations in the whole process while the context lasts."""
    global _current
    before, _current = _current, operations
    try:
        yield operations
    finally:
        _current = before


def read_bytes(path: Path, most: int) -> bytes:
    """Return a file's bytes.

    Raises:
        OSError: it can't be read; ``EFBIG`` if it has more than ``most`` bytes.
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
    """Create a new file with ``content`` and sync it. Its name is durable only after a sync of the directory."""
    with current().create(path) as file:
        file.write(content)
        file.sync()


def make_directories(path: Path) -> None:
    """Create ``path`` and its missing parents, and sync the directory of each new name."""
    missing: list[Path] = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        try:
            current().make_directory(directory)
        except FileExistsError:
            # Another process of this run has created it. If it is not a directory, its first use fails.
            continue
        current().sync_directory(directory.parent)


def remove_tree(path: Path) -> None:
    """Delete a file, a link, or a directory with its content; links are not followed."""
    if path.is_symlink() or not path.is_dir():
        current().remove(path)
        return
    for entry in sorted(path.iterdir()):
        remove_tree(entry)
    current().remove_directory(path)
