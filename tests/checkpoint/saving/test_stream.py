"""What goes through a stream is in the file byte for byte, has the digest of the whole, and an error of the file comes out."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import xxhash

from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.disk.operations import Buffer, OutputFile
from hyper_resume.checkpoint.saving.stream import HashingStream

SMALL, BLOCK = 64 << 10, 4 << 20
EDGES = (0, 1, 63, 64, 65, SMALL - 1, SMALL, SMALL + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3)


def made(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def written(path: Path, pieces: Sequence[Buffer]) -> tuple[int, str]:
    with operations.current().create(path) as file:
        stream = HashingStream(file)
        for piece in pieces:
            stream.write(piece)
        return stream.size_bytes, stream.finish()


def check(path: Path, pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    size, found = written(path, pieces)
    assert size == len(whole)
    assert path.read_bytes() == whole
    assert found == f"xxh3_128:{xxhash.xxh3_128_hexdigest(whole)}"
    path.unlink()


@pytest.mark.parametrize("first", EDGES)
def test_two_pieces_of_every_size_around_the_thresholds_are_all_there(tmp_path: Path, first: int) -> None:
    for number, second in enumerate(EDGES):
        check(tmp_path / "file", [made(first, number), made(second, 99)])


def test_small_pieces_that_fill_more_than_one_block_keep_their_order(tmp_path: Path) -> None:
    check(tmp_path / "file", [made(SMALL - 1, number) for number in range(140)])
    check(tmp_path / "file", [bytes([number % 256]) * (number % 50) for number in range(20_000)])


def test_small_and_large_pieces_in_turn_keep_their_order(tmp_path: Path) -> None:
    sizes = [3, SMALL, 5, BLOCK + 7, 0, SMALL - 1, 1, 2 * BLOCK, 9]
    check(tmp_path / "file", [made(size, number) for number, size in enumerate(sizes)])


def test_nothing_gives_an_empty_file_with_the_digest_of_nothing(tmp_path: Path) -> None:
    check(tmp_path / "file", [])
    check(tmp_path / "file", [b""])


def test_buffers_of_every_kind_are_taken(tmp_path: Path) -> None:
    content = made(BLOCK + 100, 1)
    pieces: list[Buffer] = [bytearray(content), memoryview(content)[7:], memoryview(bytearray(content)), content[:50]]
    size, found = written(tmp_path / "file", pieces)
    whole = b"".join(bytes(piece) for piece in pieces)
    assert (size, (tmp_path / "file").read_bytes()) == (len(whole), whole)
    assert found == f"xxh3_128:{xxhash.xxh3_128_hexdigest(whole)}"


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_what_is_aligned_begins_at_a_multiple_with_zeros_before(tmp_path: Path, alignment: int) -> None:
    sizes = [0, 1, alignment - 1, alignment, alignment + 1, SMALL + 5, BLOCK, BLOCK - 1, 3]
    expected = b""
    with operations.current().create(tmp_path / "file") as file:
        stream = HashingStream(file)
        for number, size in enumerate(sizes):
            piece = made(size, number)
            expected += bytes(-len(expected) % alignment)
            assert stream.align(alignment) == len(expected)
            stream.write(piece)
            expected += piece
        found = stream.finish()
    assert (tmp_path / "file").read_bytes() == expected
    assert stream.size_bytes == len(expected)
    assert found == f"xxh3_128:{xxhash.xxh3_128_hexdigest(expected)}"


class Full(OutputFile):
    """A file that takes so many bytes and then no more."""

    room = 0

    def _write_some(self, pieces: Sequence[memoryview]) -> int:
        if sum(map(len, pieces)) > self.room - os.fstat(self._descriptor).st_size:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        return super()._write_some(pieces)


def full(path: Path, room: int) -> Full:
    real = operations.current().create(path)
    file = Full(real._descriptor, path)
    file.room = room
    return file


@pytest.mark.parametrize("room", [0, 10, SMALL, BLOCK, 3 * BLOCK])
def test_an_error_of_the_file_is_raised_and_leaves_no_thread_behind(tmp_path: Path, room: int) -> None:
    pieces = [b"abc", made(2 * BLOCK + 5, 1), b"def", made(SMALL, 2), made(2 * BLOCK, 3), b"end"]
    before = threading.active_count()

    def write() -> None:
        stream = HashingStream(file)
        for piece in pieces:
            stream.write(piece)
        stream.finish()

    with full(tmp_path / "file", room) as file, pytest.raises(OSError, match="No space left"):
        write()
    # An idle thread ends once nothing refers to its pool.
    for thread in [one for one in threading.enumerate() if one.name.startswith("hyper_resume-digest")]:
        thread.join(timeout=10)
    assert threading.active_count() == before


def test_an_error_that_comes_with_the_last_bytes_is_raised_by_finish(tmp_path: Path) -> None:
    with full(tmp_path / "file", 2) as file:
        stream = HashingStream(file)
        stream.write(b"abc")
        with pytest.raises(OSError, match="No space left"):
            stream.finish()


def test_many_streams_at_a_time_do_not_meet(tmp_path: Path) -> None:
    contents = [made(size, seed) for seed, size in enumerate((BLOCK * 2, SMALL * 3, BLOCK + 1))]
    with (
        operations.current().create(tmp_path / "0") as one,
        operations.current().create(tmp_path / "1") as two,
        operations.current().create(tmp_path / "2") as three,
    ):
        streams = [HashingStream(file) for file in (one, two, three)]
        cuts = [[content[begin : begin + 50_000] for begin in range(0, len(content), 50_000)] for content in contents]
        for row in itertools.zip_longest(*cuts, fillvalue=b""):
            for stream, piece in zip(streams, row, strict=True):
                stream.write(piece)
        found = [stream.finish() for stream in streams]
    for number, content in enumerate(contents):
        assert (tmp_path / str(number)).read_bytes() == content
        assert found[number] == f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}"


def test_pieces_are_hashed_in_order_where_no_thread_is_to_be_had_any_more(tmp_path: Path) -> None:
    """As when the interpreter ends: the thread still hashes what it has, and takes nothing new."""
    pieces = [made(60 << 20, 1), made(SMALL, 2), made(2 << 20, 3), b"end"]
    with operations.current().create(tmp_path / "file") as file:
        stream = HashingStream(file)
        stream.write(pieces[0][: 8 << 20])
        begun = threading.Event()
        stream._thread.submit(begun.wait)
        stream._hashed = stream._thread.submit(stream._hash, pieces[0][8 << 20 :])
        stream._thread.shutdown(wait=False)
        threading.Timer(0.05, begun.set).start()
        stream._waiting.append(memoryview(pieces[0])[8 << 20 :])
        stream._waiting_bytes += len(pieces[0]) - (8 << 20)
        for piece in pieces[1:]:
            stream.write(piece)
        found = stream.finish()
    whole = b"".join(pieces)
    assert (tmp_path / "file").read_bytes() == whole
    assert found == f"xxh3_128:{xxhash.xxh3_128_hexdigest(whole)}"
