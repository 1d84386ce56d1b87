"""A sequential stream into a file that computes digests as it writes: small pieces are collected, large ones are not copied."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from hyper_resume import digest
from hyper_resume.checkpoint.disk.operations import WRITE_BLOCK_BYTES, Buffer, OutputFile
from hyper_resume.checkpoint.format import segments
from hyper_resume.checkpoint.format.segments import Segment
from hyper_resume.checkpoint.tensors.threads import submit_or_run

SMALL_BYTES = 64 << 10
# Small pieces are collected up to this size.
_BLOCK_BYTES = 4 << 20
_WORTH_A_THREAD_BYTES = 1 << 20


class HashingStream:
    """Writes to ``file`` and digests the content. Buffers must not change until :meth:`finish`. A context manager."""

    def __init__(self, file: OutputFile, *, with_table: bool = False) -> None:
        """Begin at the start of the file.

        Args:
            file: the new, empty file.
            with_table: end the file with a table of the digests of its segments; a large buffer makes one or more segments.
        """
        self._file = file
        self._hasher = None if with_table else digest.FileHasher()
        self._segments: dict[int, Segment] = {}
        self._hashed_bytes = 0
        self._gathered = bytearray()
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._hashed: Future[None] = Future()
        self._hashed.set_result(None)
        # One thread only, so that the pieces are digested in order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hyper_resume-digest")
        self.size_bytes = 0

    def __enter__(self) -> HashingStream:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down the digest thread."""
        self._thread.shutdown()

    def align(self, alignment: int) -> int:
        """Pad with zeros to a multiple of ``alignment`` bytes; return the current size."""
        room = -self.size_bytes % alignment
        if room:
            self.write(bytes(room))
        return self.size_bytes

    def write(self, content: Buffer) -> None:
        """Append bytes.

        Raises:
            OSError: the write failed.
        """
        size = len(content)
        self.size_bytes += size
        if size < SMALL_BYTES:
            self._gathered += content
            if len(self._gathered) >= _BLOCK_BYTES:
                self._take_gathered()
            return
        self._take_gathered()
        view = memoryview(content)
        for begin in range(0, size, digest.BLOCK_BYTES):
            self._take(view[begin : begin + digest.BLOCK_BYTES])

    def _take_gathered(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._take(gathered)

    def _take(self, content: Buffer) -> None:
        """Start to digest a piece, and write the collected pieces if they fill a block."""
        if len(content) >= _WORTH_A_THREAD_BYTES or not self._hashed.done():
            self._hashed = submit_or_run(self._thread, self._hash_next, (self._hashed, content))
        else:
            # While a training loop holds the interpreter lock, each switch between threads costs milliseconds.
            self._hash(content)
        self._waiting.append(memoryview(content))
        self._waiting_bytes += len(content)
        if self._waiting_bytes >= WRITE_BLOCK_BYTES:
            self._put(self._waiting_bytes - self._waiting_bytes % WRITE_BLOCK_BYTES)

    def _put(self, size: int) -> None:
        """Write the first ``size`` of the waiting bytes."""
        pieces: list[memoryview] = []
        self._waiting_bytes -= size
        while size:
            piece = self._waiting.popleft()
            if len(piece) > size:
                self._waiting.appendleft(piece[size:])
                piece = piece[:size]
            pieces.append(piece)
            size -= len(piece)
        self._file.write(*pieces)
        # Wait for the digests of all pieces, so that no more of them are held in memory.
        self._hashed.result()

    def _hash_next(self, after: tuple[Future[None], Buffer]) -> None:
        before, content = after
        # Normally done. If no thread could be started, this runs in the caller, while the digest thread may still be busy.
        before.result()
        self._hash(content)

    def _hash(self, content: Buffer) -> None:
        if self._hasher is not None:
            self._hasher.update(content)
        else:
            self._segments[self._hashed_bytes] = Segment(self._hashed_bytes, len(content), digest.data_digest(content))
            self._hashed_bytes += len(content)

    def data_digest(self, begin: int, length: int) -> bytes | None:
        """Return the digest of the bytes that one call of :meth:`write` wrote; call it after :meth:`finish`.

        None if these bytes have no digest of their own: they are too few, or the file has no table.
        """
        return segments.data_digest(self._segments, begin, length)

    def finish(self) -> str:
        """Write the rest and return the digest of the file, as text.

        Raises:
            OSError: the write failed.
        """
        self._take_gathered()
        self._put(self._waiting_bytes)
        if self._hasher is not None:
            return self._hasher.text()
        table = segments.encode(self._segments.values())
        self.size_bytes += self._file.write(table)
        return digest.table_digest_text(table)
