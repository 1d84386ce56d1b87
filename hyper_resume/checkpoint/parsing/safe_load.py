"""Safe decoding of ``.metadata`` and of ``torch.save`` archives, and safe resolution of the paths that the metadata names.

No code from a checkpoint is run. Names in ``.metadata`` must be on a short list (see
:mod:`hyper_resume.checkpoint.parsing.metadata_pickle`), and ``torch.load(weights_only=True)`` gets only archives that were
checked before (see :mod:`hyper_resume.checkpoint.parsing.plain_pickle`). Memory and time are proportional to the file's size.
"""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata

from hyper_resume.checkpoint.parsing.metadata_pickle import MetadataPickle
from hyper_resume.checkpoint.parsing.metadata_structure import check_structure, path_complaint
from hyper_resume.checkpoint.parsing.pickle_subset import PickleRefused, shorten
from hyper_resume.checkpoint.parsing.plain_pickle import PlainPickle
from hyper_resume.errors import (
    CheckpointMismatchError,
    describe,
    insufficient_memory_error,
    is_lack_of_memory,
    may_pass,
)

MAX_METADATA_BYTES = 256 << 20
"""Largest pickle that is read, in bytes; enough for about 3 million chunks."""

_MAX_DIRECTORY_BYTES = 64 << 20
_END_OF_ARCHIVE = struct.Struct("<4s4H2LH")
_DO = "restore the file from a copy, or resume from another checkpoint"


def load_metadata(content: bytes, where: str) -> Metadata:
    """Decode DCP's ``.metadata`` and check that its parts are consistent.

    Args:
        content: the whole file.
        where: the path, for messages.

    Raises:
        CheckpointMismatchError: it holds anything but metadata of tensors and values; a path leads out of the checkpoint;
            chunks overlap or leave a hole.
    """
    try:
        if len(content) > MAX_METADATA_BYTES:
            raise PickleRefused(f"{len(content)} bytes; at most {MAX_METADATA_BYTES} are read")
        metadata: Metadata = MetadataPickle(content).read()
        check_structure(metadata)
    except MemoryError as error:
        raise insufficient_memory_error(where, error) from error
    except PickleRefused as error:
        raise CheckpointMismatchError(
            describe(
                "the checkpoint's metadata can't be read",
                where=where,
                expected="DCP's description of tensors and values, complete and without anything else",
                found=str(error) or type(error).__name__,
                do=_DO,
            )
        ) from error
    return metadata


def check_contained(directory: Path, name: str) -> Path:
    """Return ``directory / name`` if that is a regular file of the checkpoint and no part of the path is a link.

    Args:
        directory: the step directory.
        name: a path from the metadata: a file, or a file in a direct subdirectory.

    Raises:
        CheckpointMismatchError: it is outside the directory, missing, a link, or not a regular file.
        OSError: the system can't say so now.
    """
    complaint = path_complaint(name)
    if complaint:
        raise _not_contained(str(directory), f"{complaint}: {shorten(name)}")
    path, parts = directory, name.split("/")
    for depth, part in enumerate(parts, start=1):
        path = path / part
        try:
            mode = path.lstat().st_mode
        except OSError as error:
            if may_pass(error):
                raise
            raise _not_whole(path, "a file", _reason_of_missing(error)) from error
        is_last = depth == len(parts)
        if stat.S_ISLNK(mode):
            raise _not_contained(str(path), "a link")
        if not (stat.S_ISREG(mode) if is_last else stat.S_ISDIR(mode)):
            raise _not_contained(str(path), "not a regular file" if is_last else "not a directory")
    return path


def check_file_sizes(directory: Path, metadata: Metadata) -> None:
    """Compare the sizes of the files with the metadata, so that a truncated file is found before live tensors are written.

    Raises:
        CheckpointMismatchError: names the first file that is missing, too short, or not a file of the checkpoint.
        OSError: the system can't say so now.
    """
    needed: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        end = place.offset + place.length
        needed[place.relative_path] = max(end, needed.get(place.relative_path, 0))
    for name, size in sorted(needed.items()):
        path = check_contained(directory, name)
        found = path.lstat().st_size
        if found < size:
            raise _not_whole(path, f"at least {size} bytes", f"{found} bytes")


def load_plain(content: bytes | bytearray | memoryview | BinaryIO, where: str) -> Any:
    """Decode a ``torch.save`` archive of tensors and plain values; tensors are loaded to the CPU.

    Args:
        content: the archive, or a seekable file that holds only the archive.
        where: path and entry, for messages.

    Raises:
        CheckpointMismatchError: it is damaged, holds anything else, or would take far more memory than its size.
    """
    file: Any = io.BytesIO(content) if isinstance(content, (bytes, bytearray, memoryview)) else content
    try:
        PlainPickle(_read_pickle(file)).check(file.seek(0, io.SEEK_END))
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        if is_lack_of_memory(error):
            raise insufficient_memory_error(where, error) from error
        if may_pass(error):
            raise
        raise CheckpointMismatchError(
            describe(
                "a part of the checkpoint can't be read",
                where=where,
                expected="an archive of tensors and plain values",
                found=error_text(error),
                do=_DO,
            )
        ) from error


def error_text(error: BaseException) -> str:
    """Return class and message of a decoding error, shortened.

    torch's message for a refused file also advises ``weights_only=False``, which would run the code in it. That part is left
    out.
    """
    if isinstance(error, PickleRefused):
        return str(error)
    lines = str(error).splitlines()
    if lines and lines[0].startswith("Weights only load failed"):
        lines = [line.strip() for line in lines if line.strip() and "weights_only" not in line]
    return f"{type(error).__name__}: {' '.join(lines)}"[:500]


def _read_pickle(file: Any) -> bytes:
    """Return the archive's pickle, after checking that the archive is not compressed."""
    size = file.seek(0, io.SEEK_END)
    _check_end(file, size)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        _check_members(members, size)
        top = members[0].filename.split("/")[0]
        pickle = archive.getinfo(f"{top}/data.pkl")
        if pickle.file_size > MAX_METADATA_BYTES:
            raise PickleRefused(f"a pickle of {pickle.file_size} bytes; at most {MAX_METADATA_BYTES} are read")
        return archive.read(pickle)


def _check_end(file: Any, size: int) -> None:
    """Check that the archive has no comment and nothing before or after it, so that every zip reader finds the same files."""
    if size < _END_OF_ARCHIVE.size:
        raise PickleRefused(f"{size} bytes, too few for an archive")
    file.seek(size - _END_OF_ARCHIVE.size)
    magic, *_, directory_size, _, comment_size = _END_OF_ARCHIVE.unpack(file.read(_END_OF_ARCHIVE.size))
    if magic != b"PK\x05\x06" or comment_size:
        raise PickleRefused("no archive, or one that is cut off or has something behind it")
    if directory_size != 0xFFFFFFFF and directory_size > _MAX_DIRECTORY_BYTES:
        raise PickleRefused(f"an archive whose directory takes {directory_size} bytes")
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        raise PickleRefused("something before the archive")


def _check_members(members: list[zipfile.ZipInfo], size: int) -> None:
    if not members or min(member.header_offset for member in members) != 0:
        raise PickleRefused("an archive that does not begin with a file")
    if len({member.filename.casefold() for member in members}) != len(members):
        raise PickleRefused("an archive with two files of one name")
    top = members[0].filename.split("/")[0]
    for member in members:
        if not member.filename.startswith(f"{top}/"):
            raise PickleRefused("an archive with files outside its one folder")
        if (
            member.compress_type != zipfile.ZIP_STORED
            or member.compress_size != member.file_size
            or member.flag_bits & 1
        ):
            raise PickleRefused(f"an archive with a compressed or encrypted file {shorten(member.filename)}")
    total = sum(member.file_size for member in members)
    if total > size:
        raise PickleRefused(f"an archive of {size} bytes that unfolds to {total}")


def _not_contained(where: str, found: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        describe(
            "a path in the checkpoint's metadata is not a file of the checkpoint",
            where=where,
            expected="a regular file in the step directory, without links in its path",
            found=found,
            do="resume from another checkpoint, and find out who wrote this one",
        )
    )


def _not_whole(path: Path, expected: str, found: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        describe(
            "a shard file of the checkpoint is incomplete", where=str(path), expected=expected, found=found, do=_DO
        )
    )


def _reason_of_missing(error: OSError) -> str:
    return "no such file" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error.strerror}"
