"""Every change that this process makes on disk below one folder, numbered, and told before it is made.

What counts is what the kernel is asked for: ``create`` (open for writing), ``write`` (one write of bytes), ``fsync``,
``truncate``, ``rename``, ``remove``, ``make directory``, ``remove directory``, ``link``. Reading does not count. Python's own
functions are replaced, so whatever writes through them is seen; a library that writes from C by a name of its own
(``torch.save`` to a path, say; to an open file it does not) is not: an adapter whose trainer does so (``renameat2``, by which
two names change places, and which Python has no function for) tells of it by :meth:`FileOperations.tell`, as ``exchange``.
Owner, mode and times do not count.

Standard library only.
"""

from __future__ import annotations

import builtins
import fnmatch
import functools
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = (
    "create",
    "write",
    "fsync",
    "truncate",
    "rename",
    "remove",
    "make directory",
    "remove directory",
    "link",
    "exchange",
)
Told = Callable[[str, str], None]
_WRITING = frozenset("wax+")


def name_problem(text: str) -> str:
    """Say why ``text`` names no change: a kind, and a pattern of where. Empty for one that does."""
    kind = next((kind for kind in KINDS if text.startswith(f"{kind} ")), None)
    if kind is None or not text[len(kind) :].strip():
        return f"{text!r} is no name such as 'fsync *.distcp': one of {', '.join(KINDS)}, and a pattern of where"
    return ""


def is_asked_for(asked: int | str, number: int, change: str) -> bool:
    """True when ``asked`` is the change's number, or a name that ``change`` (its kind, and where) matches."""
    return fnmatch.fnmatchcase(change, asked) if isinstance(asked, str) else number == asked


class FileOperations:
    """Tells of every change below ``root``: ``told(what, where)`` is called first, in the thread that is about to make it."""

    def __init__(self, root: Path, told: Told) -> None:
        """Nothing is replaced before :meth:`install`. ``where`` is told relative to ``root``."""
        self._root = os.path.realpath(root)
        self._told = told

    def install(self) -> None:
        """Replace the functions, for good: a process that is watched is a leg's, and ends with it."""
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

    def tell(self, what: str, where: str | None) -> None:
        """Pass it on, where it is below the root."""
        if where is not None:
            self._told(what, where)

    def _on_path(self, original: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def instead(path: Any, *args: Any, **kwargs: Any) -> Any:
            # shutil.rmtree removes relative to a descriptor of the directory.
            self.tell(what, self._relative(path, kwargs.get("dir_fd")))
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
            # What is moved out of the root is a change in it too; a link from outside is none.
            self.tell(what, self.below(src) if where is None and what == "rename" else where)
            return original(src, dst, *args, **kwargs)

        return instead

    def _on_descriptor(self, original: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def instead(fd: Any, *args: Any, **kwargs: Any) -> Any:
            self.tell(what, self.of(fd if isinstance(fd, int) else fd.fileno()))
            return original(fd, *args, **kwargs)

        return instead

    def of(self, descriptor: int) -> str | None:
        """What a descriptor stands for, as :meth:`below`. Asked of the kernel, which knows them all."""
        try:
            return self.below(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115  no pathlib here: it calls what is replaced
        except OSError:
            return None

    def _os_open(self, original: Callable[..., int]) -> Callable[..., int]:
        writing = os.O_WRONLY | os.O_RDWR

        @functools.wraps(original)
        def instead(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & writing:
                self.tell("create", self._relative(path, kwargs.get("dir_fd")))
            return original(path, flags, *args, **kwargs)

        return instead


class _WatchedFile(io.FileIO):
    """A file that tells of every write that reaches the kernel. ``where`` None: of what its descriptor stands for."""

    def __init__(self, opened: Any, mode: str, watch: FileOperations, where: str | None, **how: Any) -> None:
        super().__init__(opened, mode, **how)
        self._watch = watch
        self._where = watch.of(self.fileno()) if where is None else where

    def write(self, data: Any) -> int:
        self._watch.tell("write", self._where)
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        self._watch.tell("truncate", self._where)
        return super().truncate(size)


def _opening(watch: FileOperations) -> Callable[..., Any]:
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
        where = watch.of(file) if is_descriptor else watch.below(file)
        # An opener may open what it likes (a temporary file in this folder, say).
        if not _WRITING & set(mode) or (where is None and opener is None):
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if opener is None and not is_descriptor:
            watch.tell("create", where)
        plain = mode.replace("b", "").replace("t", "")
        raw = _WatchedFile(file, plain, watch, None if opener else where, closefd=closefd, opener=opener)
        return wrapped(raw, mode, buffering, encoding, errors, newline)

    return opened


def wrapped(
    raw: io.FileIO, mode: str, buffering: int, encoding: str | None, errors: str | None, newline: str | None
) -> Any:
    """Put around a raw file that is written what ``open`` would put around it."""
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else max(os.fstat(raw.fileno()).st_blksize, io.DEFAULT_BUFFER_SIZE)
    buffered = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
    if "b" in mode:
        return buffered
    return io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
