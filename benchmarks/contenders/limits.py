"""The limits of the hardware: reading, writing and copying the same bytes, and nothing more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.contenders.states import State
from benchmarks.protocol import BenchmarkError

# One system call takes at most 1,024 pieces and 2 GiB.
_MOST_PIECES = 512
_MOST_BYTES = 1 << 28


def write(views: Sequence[memoryview], folder: Path, other_files: Sequence[int]) -> None:
    """Write ``views`` into one file and zeros into further files of the sizes ``other_files``; fsync each, and ``folder``."""
    folder.mkdir()
    _write_file(folder / "payload", views)
    for number, size in enumerate(other_files):
        _write_file(folder / f"other_{number}", [memoryview(bytes(size))])
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path, views: Sequence[memoryview]) -> None:
    """Fill ``views`` in order with the content of the file.

    Raises:
        BenchmarkError: the file is too short.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        for pieces in _pieces(views):
            _whole(lambda rest: os.readv(handle, rest), pieces)
    finally:
        os.close(handle)


def copy(source: State, target: State) -> None:
    """Copy every tensor into an existing one, with torch and the threads of this process."""
    for name, tensor in source.items():
        target[name].copy_(tensor)


def page_in(path: Path) -> None:
    """Read all files of a directory (or one file) into the page cache."""
    room = memoryview(bytearray(1 << 22))
    for file in [path] if path.is_file() else sorted(found for found in path.rglob("*") if found.is_file()):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(room):
                pass


def _write_file(path: Path, views: Sequence[memoryview]) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for pieces in _pieces(views):
            _whole(lambda rest: os.writev(handle, rest), pieces)
        os.fsync(handle)
    finally:
        os.close(handle)


def _whole(move: Callable[[list[memoryview]], int], pieces: list[memoryview]) -> None:
    """Call ``move`` until all pieces are done; one call may do only some of them."""
    rest = [piece for piece in pieces if len(piece)]
    while rest:
        done = move(rest)
        if done == 0:
            raise BenchmarkError("the file is too short")
        while rest and done >= len(rest[0]):
            done -= len(rest[0])
            rest = rest[1:]
        if done:
            rest = [rest[0][done:], *rest[1:]]


def _pieces(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    found: list[memoryview] = []
    size = 0
    for view in views:
        for start in range(0, len(view), _MOST_BYTES):
            piece = view[start : start + _MOST_BYTES]
            if found and (len(found) == _MOST_PIECES or size + len(piece) > _MOST_BYTES):
                yield found
                found, size = [], 0
            found.append(piece)
            size += len(piece)
    if found:
        yield found
