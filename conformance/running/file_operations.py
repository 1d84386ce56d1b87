"""Reports every change that this process makes on disk below one folder, before it is made.

A change is a call to the kernel: ``create`` (open for writing), ``write`` (one write of bytes), ``fsync``,
``truncate``, ``rename``, ``remove``, ``make directory``, ``remove directory``, ``link``. Reading does not count. Python's own
functions are replaced, so every write through them is seen. A write from C is not (``torch.save`` to a path; to an open file it
writes through Python). An adapter whose trainer writes from C reports it by :meth:`FileOperations.report`: ``renameat2``, which
exchanges two names and has no Python function, as ``exchange``. Owner, mode and times do not count.

Standard library only.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

OnOperation = Callable[[str, str], None]
_WRITING = frozenset("wax+")


class FileOperations:
    """Calls ``on_operation(what, where)`` before every change below ``root``, in the thread that is about to make it."""

    def __init__(self, root: Path, on_operation: OnOperation) -> None:
        """Nothing is replaced before :meth:`install`. ``where`` is on_operation relative to ``root``."""
        self._root = os.path.realpath(root)
        self._on_operation = on_operation

    def install(self) -> None:
        """Replace the functions, for the rest of the process, which is a rank of a leg and ends with it."""
        opened = _opening(self)
        builtins.open = io.open = opened
        for name, what in (
            ("mkdir", "make directory"),
            ("rmdir", "remove directory"),
            ("unlink", "remove"),
            ("remove", "remove"),
            ("truncate", "truncate"),
        ):
            setattr(os, name, self._on_path(getattr(os, name), what))
        for name in ("rename", "replace"):
            setattr(os, name, self._on_target(getattr(os, name), "rename"))
        for name in ("link", "symlink"):
            setattr(os, name, self._on_target(getattr(os, name), "link"))
        for name in ("fsync", "fdatasync", "ftruncate", "write", "pwrite", "writev", "pwritev", "sendfile"):
            what = {"ftruncate": "truncate", "fsync": "fsync", "fdatasync": "fsync"}.get(name, "write")
            if hasattr(os, name):
                setattr(os, name, self._on_descriptor(getattr(os, name), what))
        os.open = self._os_open(os.open)

    def below(self, path: Any) -> str | None:
        """``path`` relative to the root; None where it is not below it, or is no path."""
        try:
            found = os.path.abspath(os.fsdecode(path))  # noqa: PTH100  no pathlib here: it calls what is replaced
        except TypeError:
            return None
        found = os.path.join(os.path.realpath(os.path.dirname(found)), os.path.basename(found))  # noqa: PTH118, PTH119, PTH120
        if found == self._root:
            return "."
        return found[len(self._root) + 1 :] if found.startswith(self._root + os.sep) else None

    def report(self, what: str, where: str | None) -> None:
        """Report a change, if it is below the root."""
        if where is not None:
            self._on_operation(what, where)

    def _on_path(self, original: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def instead(path: Any, *args: Any, **kwargs: Any) -> Any:
            # shutil.rmtree removes relative to a descriptor of the directory.
            self.report(what, self._relative(path, kwargs.get("dir_fd")))
            return original(path, *args, **kwargs)

        return instead

    def _relative(self, path: Any, dir_fd: int | None) -> str | None:
        if dir_fd is None:
            return self.below(path) if not isinstance(path, int) else self.of(path)
        directory = self.of(dir_fd)
        return None if directory is None else os.path.normpath(os.path.join(directory, os.fsdecode(path)))  # noqa: PTH118

    def _on_target(self, original: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def instead(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            where = self.below(dst)
            # A move out of the root changes the root too; a link from outside does not.
            self.report(what, self.below(src) if where is None and what == "rename" else where)
            return original(src, dst, *args, **kwargs)

        return instead

    def _on_descriptor(self, original: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def instead(fd: Any, *args: Any, **kwargs: Any) -> Any:
            self.report(what, self.of(fd if isinstance(fd, int) else fd.fileno()))
            return original(fd, *args, **kwargs)

        return instead

    def of(self, descriptor: int) -> str | None:
        """The path of an open descriptor, as :meth:`below`; read from the kernel."""
        try:
            return self.below(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115  no pathlib here: it calls what is replaced
        except OSError:
            return None

    def _os_open(self, original: Callable[..., int]) -> Callable[..., int]:
        writing = os.O_WRONLY | os.O_RDWR

        @functools.wraps(original)
        def instead(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & writing:
                self.report("create", self._relative(path, kwargs.get("dir_fd")))
            return original(path, flags, *args, **kwargs)

        return instead


class _ReportingFile(io.FileIO):
    """A file that reports every write that reaches the kernel. ``where`` None: the path of its descriptor."""

    def __init__(self, opened: Any, mode: str, operations: FileOperations, where: str | None, **how: Any) -> None:
        super().__init__(opened, mode, **how)
        self._operations = operations
        self._where = operations.of(self.fileno()) if where is None else where

    def write(self, data: Any) -> int:
        self._operations.report("write", self._where)
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        self._operations.report("truncate", self._where)
        return super().truncate(size)


def _opening(operations: FileOperations) -> Callable[..., Any]:
    original = io.open

    @functools.wraps(original)
    def opened(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        is_descriptor = isinstance(file, int)
        where = operations.of(file) if is_descriptor else operations.below(file)
        # An opener may open any path (a temporary file in this folder, for example).
        if not _WRITING & set(mode) or (where is None and opener is None):
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if opener is None and not is_descriptor:
            operations.report("create", where)
        plain = mode.replace("b", "").replace("t", "")
        raw = _ReportingFile(file, plain, operations, None if opener else where, closefd=closefd, opener=opener)
        return wrapped(raw, mode, buffering, encoding, errors, newline)

    return opened


def wrapped(
    raw: io.FileIO, mode: str, buffering: int, encoding: str | None, errors: str | None, newline: str | None
) -> Any:
    """Wrap a raw file that is written in the buffers that ``open`` would give it."""
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else max(os.fstat(raw.fileno()).st_blksize, io.DEFAULT_BUFFER_SIZE)
    buffered = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
    if "b" in mode:
        return buffered
    return io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
