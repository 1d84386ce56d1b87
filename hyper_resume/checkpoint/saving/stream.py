"""One sequential stream into a file, hashed on its way: small pieces together, large ones without a copy."""

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
# Of what is gathered.
_BLOCK_BYTES = 4 << 20
_WORTH_A_THREAD_BYTES = 1 << 20


class HashingStream:
    """Writes to ``file``. What it takes must not change until :meth:`finish`. Use as a context."""

    def __init__(self, file: OutputFile, *, with_table: bool = False) -> None:
        """Begin at the file's start.

        Args:
            file: where to write.
            with_table: end the file with the digests of its segments; a large buffer is one, or several.
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
        # One thread, so that the pieces are hashed in order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hyper_resume-digest")
        self.size_bytes = 0

    def __enter__(self) -> HashingStream:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread."""
        self._thread.shutdown()

    def align(self, alignment: int) -> int:
        """Fill up with zeros to a multiple of ``alignment`` bytes; return where the stream stands."""
        room = -self.size_bytes % alignment
        if room:
            self.write(bytes(room))
        return self.size_bytes

    def write(self, content: Buffer) -> None:
        """Append bytes.

        Raises:
            OSError: they could not be written.
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
        """Have a piece hashed, and write what has come together when it is enough."""
        if len(content) >= _WORTH_A_THREAD_BYTES or not self._hashed.done():
            self._hashed = submit_or_run(self._thread, self._hash_next, (self._hashed, content))
        else:
            # Beside a training loop that holds the interpreter, each word between threads costs milliseconds.
            self._hash(content)
        self._waiting.append(memoryview(content))
        self._waiting_bytes += len(content)
        if self._waiting_bytes >= WRITE_BLOCK_BYTES:
            self._put(self._waiting_bytes - self._waiting_bytes % WRITE_BLOCK_BYTES)

    def _put(self, size: int) -> None:
        """Write the first bytes of what waits; all of them end where the file system likes a write to end."""
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
        # What was hashed meanwhile is all that was taken, so that no more than that is held.
        self._hashed.result()

    def _hash_next(self, after: tuple[Future[None], Buffer]) -> None:
        before, content = after
        # It has ended, but where no thread is to be had any more, and this one hashes beside one that still does.
        before.result()
        self._hash(content)

    def _hash(self, content: Buffer) -> None:
        if self._hasher is not None:
            self._hasher.update(content)
        else:
            self._segments[self._hashed_bytes] = Segment(self._hashed_bytes, len(content), digest.data_digest(content))
            self._hashed_bytes += len(content)

    def data_digest(self, begin: int, length: int) -> bytes | None:
        """Return the digest of bytes that were written by one call, once :meth:`finish` is over.

        None where none was taken of just them: they are few, or the file has no table.
        """
        return segments.data_digest(self._segments, begin, length)

    def finish(self) -> str:
        """Write what is left and return the digest of all of it, as text.

        Raises:
            OSError: it could not be written.
        """
        self._take_gathered()
        self._put(self._waiting_bytes)
        if self._hasher is not None:
            return self._hasher.text()
        table = segments.encode(self._segments.values())
        self.size_bytes += self._file.write(table)
        return digest.table_digest_text(table)
