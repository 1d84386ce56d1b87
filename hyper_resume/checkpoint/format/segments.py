"""The table of segment digests at the end of a shard file, and the verification of the file against it.

A shard ends with the length and the digest of each of its segments, in order; together they cover every byte before the table.
The manifest has the digest of the table. The bytes of a large tensor are separate segments, so verifying a file yields the
digest of each large tensor in it, which a load then need not compute. Stock ``torch.distributed.checkpoint`` reads entries by
offset and length and ignores the table.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyper_resume import digest
from hyper_resume.checkpoint.disk.operations import InputFile
from hyper_resume.checkpoint.tensors.threads import map_in_threads

_SEGMENT = struct.Struct("<Q16s")
_END = struct.Struct("<Q8s")
_MAGIC = b"hrsegm01"
# How many bytes a thread verifies at a time.
_RUN_BYTES = 8 << 20
_MAX_SHOWN = 3
_SEGMENTS_AT_LEAST = 10_000


@dataclass(frozen=True)
class Segment:
    """One segment: its offset in the file and its length, both in bytes, and its digest."""

    begin: int
    length: int
    digest: bytes


def encode(written: Iterable[Segment]) -> bytes:
    """Return the table of all segments of a file, in order."""
    parts = [_SEGMENT.pack(segment.length, segment.digest) for segment in written]
    return b"".join([*parts, _END.pack(len(parts), _MAGIC)])


def read_table(file: InputFile) -> memoryview | None:
    """Return the bytes of the table at the end of a file; None for a file without one.

    Raises:
        OSError: it can't be read.
    """
    size = file.size_bytes
    if size < _END.size:
        return None
    file.preload(size - _END.size, _END.size)
    end = file.view(size - _END.size, _END.size)
    if len(end) != _END.size:
        return None
    count, magic = _END.unpack(end)
    table_bytes = count * _SEGMENT.size + _END.size
    if magic != _MAGIC or table_bytes > size or count > _most_segments(size - table_bytes):
        return None
    file.preload(size - table_bytes, table_bytes)
    return file.view(size - table_bytes, table_bytes)


def _most_segments(body_bytes: int) -> int:
    """Return more segments than a writer makes of so many bytes; a file with a hole may claim any number at no cost.

    A writer makes two or three for each large buffer, of 64 KiB at least, and what is collected between them.
    """
    return 3 * (body_bytes // (64 << 10)) + _SEGMENTS_AT_LEAST


def decode(table: memoryview, file_bytes: int) -> list[Segment] | None:
    """Return the segments of a table; None if they do not cover exactly the bytes before the table."""
    found: list[Segment] = []
    begin = 0
    for length, segment_digest in _SEGMENT.iter_unpack(table[: -_END.size]):
        found.append(Segment(begin, length, segment_digest))
        begin += length
    return found if begin + len(table) == file_bytes else None


@dataclass
class VerifiedFile:
    """A file that was verified, still mapped into memory.

    Attributes:
        content: the mapped file.
        expected: the digest that it was compared with, as text.
        identity: the result of :func:`file_identity` before the verification.
        segments: offset -> segment.
    """

    content: memoryview
    expected: str
    identity: tuple[int, ...]
    segments: dict[int, Segment]

    def is_unchanged(self, path: Path) -> bool:
        """True if ``path`` is still the file that was verified, and was not written to since.

        Raises:
            OSError: the file does not exist or can't be accessed.
        """
        return file_identity(path.lstat()) == self.identity

    def data_digest(self, begin: int, length: int) -> bytes | None:
        """Return :func:`digest.data_digest` of a range of the file; None if it does not consist of whole segments."""
        return data_digest(self.segments, begin, length)


def data_digest(segments: Mapping[int, Segment], begin: int, length: int) -> bytes | None:
    """Return :func:`digest.data_digest` of a range of a file; None if it does not consist of whole segments.

    Args:
        segments: offset -> segment, for the whole file.
        begin: offset of the range, in bytes.
        length: length of the range, in bytes.
    """
    blocks: list[bytes] = []
    for at in range(begin, begin + length, digest.BLOCK_BYTES):
        segment = segments.get(at)
        if segment is None or segment.length != min(digest.BLOCK_BYTES, begin + length - at):
            return None
        blocks.append(segment.digest)
    return digest.combine_block_digests(blocks) if blocks else None


def file_identity(status: os.stat_result) -> tuple[int, ...]:
    """Return device, inode, size and times of a file: they change when the file is replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def verify(file: InputFile, expected: str) -> tuple[str, VerifiedFile | None]:
    """Verify a file with a table: the table against the expected digest, and the segments against the table.

    Args:
        file: the opened file.
        expected: the table's digest, as text.

    Returns:
        a complaint ("" if there is none), and the verified file if it is mapped into memory.

    Raises:
        OSError: it can't be read.
    """
    before = file_identity(os.fstat(file.fileno()))
    table = read_table(file)
    found = "no table of digests" if table is None else digest.table_digest_text(table)
    if table is None or found != expected:
        return f"expected digest {expected}, found {found}", None
    segments = decode(table, file.size_bytes)
    if segments is None:
        return f"its table of digests does not cover its {file.size_bytes} bytes", None
    damaged = [
        segment for of_run in map_in_threads(lambda run: _damaged(file, run), _runs(segments)) for segment in of_run
    ]
    if damaged:
        spans = [f"{segment.begin} to {segment.begin + segment.length}" for segment in damaged[:_MAX_SHOWN]]
        more = f" and {len(damaged) - _MAX_SHOWN} more" if len(damaged) > _MAX_SHOWN else ""
        return f"expected digest {expected}, found other bytes at {', '.join(spans)}{more}", None
    content = file.view_all()
    return "", None if content is None else VerifiedFile(
        content, expected, before, {segment.begin: segment for segment in segments}
    )


def _runs(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Return lists of consecutive segments, each for one thread at a time."""
    runs: list[list[Segment]] = []
    size = 0
    for segment in segments:
        if not runs or size + segment.length > _RUN_BYTES:
            runs.append([])
            size = 0
        runs[-1].append(segment)
        size += segment.length
    return runs


def _damaged(file: InputFile, run: Sequence[Segment]) -> list[Segment]:
    begin, length = run[0].begin, sum(segment.length for segment in run)
    file.preload(begin, length)
    content = file.view(begin, length)
    return [
        segment
        for segment in run
        if digest.data_digest(content[segment.begin - begin :][: segment.length]) != segment.digest
    ]
