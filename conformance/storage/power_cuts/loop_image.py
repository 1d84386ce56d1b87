"""A small ext4 file system in a file, mounted through a loop device, in a mount namespace of its own (Linux, root).

The namespace guarantees the clean-up: when its last process has ended, the kernel unmounts everything in it, and a loop device
that ``mount`` made is released with its mount.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_SIZE_BYTES = 8 << 20
_NEW_MOUNTS, _RECURSIVE, _PRIVATE = 0x00020000, 16384, 1 << 18  # CLONE_NEWNS, MS_REC, MS_PRIVATE
_TOOLS = ("mkfs.ext4", "mount", "umount")
_TOOL_SECONDS = 30.0


def why_not() -> str:
    """Why this machine allows no loop-mounted image; "" if it seems to allow one."""
    if sys.platform != "linux":
        return f"loop devices are Linux's, this is {sys.platform}"
    if os.geteuid() != 0:
        return "mounting needs root"
    lacking = [name for name in _TOOLS if shutil.which(name, path=_search_path()) is None]
    if lacking:
        return f"no {', '.join(lacking)} here"
    return "" if Path("/dev/loop-control").exists() else "no /dev/loop-control here"


def _search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def own_mounts() -> None:
    """Move this process into a mount namespace of its own.

    Raises:
        OSError: not permitted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) != 0 or libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"a mount namespace of its own: {os.strerror(number)}")


def make(path: Path) -> None:
    """Make an empty file system; the file is sparse.

    Raises:
        OSError: ``mkfs.ext4`` refused.
    """
    with path.open("wb") as file:
        file.truncate(_SIZE_BYTES)
    _tool("mkfs.ext4", "-q", "-F", "-b", "1024", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(path))


@contextlib.contextmanager
def mounted(image: Path, at: Path) -> Iterator[Path]:
    """Mount the image; a journal that was not finished is replayed first, as after a power cut.

    Raises:
        OSError: it can't be mounted.
    """
    at.mkdir(exist_ok=True)
    _tool("mount", "-t", "ext4", "-o", "loop", str(image), str(at))
    try:
        yield at
    finally:
        _tool("umount", str(at))


def copy_image(source: Path, target: Path) -> None:
    """Copy the current content of the device. Holes stay holes."""
    reader = os.open(source, os.O_RDONLY)
    writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        end = os.fstat(reader).st_size
        os.ftruncate(writer, end)
        start = 0
        with contextlib.suppress(OSError):  # ENXIO: only a hole is left
            while start < end:
                start = os.lseek(reader, start, os.SEEK_DATA)
                stop = os.lseek(reader, start, os.SEEK_HOLE)
                _copy_range(reader, writer, start, stop)
                start = stop
    finally:
        os.close(reader)
        os.close(writer)


def _copy_range(reader: int, writer: int, start: int, stop: int) -> None:
    while start < stop:
        start += os.pwrite(writer, os.pread(reader, min(stop - start, 1 << 20), start), start)


def flush(folder: Path) -> None:
    """Flush a file system to its device."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ctypes.CDLL(None).syncfs(descriptor)
    finally:
        os.close(descriptor)


def _tool(name: str, *arguments: str) -> None:
    command = [shutil.which(name, path=_search_path()) or name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False)
    if done.returncode != 0:
        raise OSError(f"{name}: exit code {done.returncode}: {done.stderr.strip()}")
