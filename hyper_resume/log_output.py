"""How the ranks of one command share a terminal or a file: a warning that rank 0 logs too is not repeated by other ranks.

The ranks compare what they log through the process group's store, which needs no collective: rank 0 puts a mark there for each
of its warnings, and another rank holds a warning of its own, for :data:`HOLD_SECONDS` at most, while it looks for that mark.

The store may never answer: its host was stopped, or the network to it is gone, and torch waits for it without a limit. So only
a thread of its own talks to it, never one that logs, and never with a lock held.
"""

from __future__ import annotations

import atexit
import collections
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hyper_resume.errors import printable

HOLD_SECONDS = 4.0
# How long the end of the process waits for the store's answers.
ANSWER_SECONDS = 1.0
_POLL_SECONDS = 0.1
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Back to the start of the line, and clear it: rank 0's progress bar may stand there.
_CLEAR_LINE = "\r\x1b[K"


def configure_logging() -> None:
    """Log to standard error: rank 0 from INFO, other ranks from WARNING, with their rank; Python's warnings are logged too.

    A line without a rank is rank 0's. Nothing happens where the program has configured logging before.
    """
    if logging.getLogger().handlers:
        return
    rank = int(text) if (text := os.environ.get("RANK", "0")).isdigit() else 0
    handler = RankHandler(rank)
    handler.setFormatter(_PlainFormatter(_FORMAT if rank == 0 else f"[rank {rank}] {_FORMAT}"))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, handlers=[handler])
    logging.captureWarnings(True)


class _PlainFormatter(logging.Formatter):
    """Shows control characters as escapes: names out of a checkpoint may be forged, and must not move a terminal's cursor."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


class RankHandler(logging.StreamHandler[Any]):
    """Writes this rank's log lines to standard error, without the warnings that rank 0 logs too."""

    def __init__(self, rank: int) -> None:
        """Write for the rank with this number."""
        super().__init__()
        self._rank = rank
        self._pid = os.getpid()
        self._comparison = _Comparison(rank, self._write)
        # Registered after logging.shutdown, so it runs before it: that one closes a handler with the handler's lock held.
        atexit.register(self._comparison.finish)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record now, or hold it until it is known whether rank 0 logs it too."""
        # A forked process, such as a loader's worker, has no thread that compares, and says what it has to say at once.
        is_compared = record.levelno == logging.WARNING and os.getpid() == self._pid
        if self._rank == 0 or not is_compared:
            self._write(record)
        if is_compared:
            self._comparison.add(record)

    def _write(self, record: logging.LogRecord) -> None:
        self.acquire()
        try:
            if self._rank != 0 and self.stream.isatty():
                self.stream.write(_CLEAR_LINE)
            super().emit(record)
        finally:
            self.release()


class _Comparison:
    """The thread through which this rank marks its warnings (rank 0), or looks for the marks of rank 0 (the others)."""

    def __init__(self, rank: int, write: Callable[[logging.LogRecord], None]) -> None:
        self._rank = rank
        self._write = write
        self._changed = threading.Condition()
        # Each with the time until which its mark may appear; the thread compares the first one.
        self._waiting: collections.deque[tuple[float, logging.LogRecord]] = collections.deque()
        self._thread: threading.Thread | None = None
        self._is_writing = False
        self._is_finishing = False
        self._store: Any = None

    def add(self, record: logging.LogRecord) -> None:
        """Compare this warning with those of rank 0; does not wait."""
        with self._changed:
            self._store = _default_store() or self._store
            self._waiting.append((time.monotonic() + HOLD_SECONDS, record))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hyper_resume-warnings", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until each warning that is held was asked for once, 1 s at most; those without an answer are written."""
        with self._changed:
            self._is_finishing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting and not self._is_writing, ANSWER_SECONDS)
            unanswered = [] if self._rank == 0 else [record for _, record in self._waiting]
            self._waiting.clear()
        for record in unanswered:
            self._write(record)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                deadline, record = self._waiting[0]
            must_be_written = self._compare(record, deadline)
            with self._changed:
                if not self._waiting:
                    # The process ends, and did not wait for this answer.
                    return
                self._waiting.popleft()
                self._is_writing = must_be_written
                self._changed.notify_all()
            if must_be_written:
                self._write(record)
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()

    def _compare(self, record: logging.LogRecord, deadline: float) -> bool:
        """Whether the record has to be written still."""
        if self._rank == 0:
            self._ask(lambda: self._store.set(_key(record), b"1"))
            return False
        while not (is_marked := bool(self._ask(lambda: self._store.check([_key(record)])))):
            left = deadline - time.monotonic()
            with self._changed:
                # At the end of the process it was asked once; rank 0, which may keep the store, ends as well.
                if left <= 0 or self._changed.wait_for(lambda: self._is_finishing, min(left, _POLL_SECONDS)):
                    break
        return not is_marked

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call() if self._store is not None else None
        except RuntimeError:
            # The process that kept the store is gone; the other ranks then repeat what this one logs.
            self._store = None
            return None


def _key(record: logging.LogRecord) -> str:
    text = f"{record.levelno} {record.name} {record.getMessage()}"
    return f"hyper_resume/logged/{hashlib.sha256(text.encode(errors='replace')).hexdigest()}"


def _default_store() -> Any:
    """The store of the default process group; None without one. Torch is not imported for it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
