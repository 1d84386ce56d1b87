"""How the ranks of one command share a terminal or a file: a warning that rank 0 logs too is not repeated by other ranks.

The ranks compare what they log through the process group's store, which needs no collective: rank 0 puts a mark there for each
of its warnings, and another rank holds a warning of its own for :data:`HOLD_SECONDS` before it looks for that mark.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import threading
import time
from typing import Any

HOLD_SECONDS = 2.0
_POLL_SECONDS = 0.05
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
    handler.setFormatter(logging.Formatter(_FORMAT if rank == 0 else f"[rank {rank}] {_FORMAT}"))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, handlers=[handler])
    logging.captureWarnings(True)


class RankHandler(logging.StreamHandler[Any]):
    """Writes this rank's log lines to standard error, without the warnings that rank 0 logs too."""

    def __init__(self, rank: int) -> None:
        """Write for the rank with this number."""
        super().__init__()
        self._rank = rank
        self._store: Any = None
        self._held: dict[int, tuple[float, logging.LogRecord]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record now, or hold it until it is known whether rank 0 logs it too."""
        self._store = _default_store() or self._store
        if record.levelno != logging.WARNING:
            self._write(record)
        elif self._rank == 0:
            self._write(record)
            self._mark(record)
        else:
            self._held[id(record)] = (time.monotonic() + HOLD_SECONDS, record)
            timer = threading.Timer(HOLD_SECONDS, self._release, [id(record)])
            timer.daemon = True
            timer.start()

    def close(self) -> None:
        """Write what is still held and rank 0 does not log; called at the end of the process."""
        for key, (deadline, record) in list(self._held.items()):
            while time.monotonic() < deadline and not self._is_marked(record):
                time.sleep(_POLL_SECONDS)
            self._release(key)
        super().close()

    def _release(self, key: int) -> None:
        self.acquire()
        try:
            _, record = self._held.pop(key, (0.0, None))
            if record is not None and not self._is_marked(record):
                self._write(record)
        finally:
            self.release()

    def _write(self, record: logging.LogRecord) -> None:
        if self._rank != 0 and self.stream.isatty():
            self.stream.write(_CLEAR_LINE)
        super().emit(record)

    def _mark(self, record: logging.LogRecord) -> None:
        if self._store is not None:
            try:
                self._store.set(_key(record), b"1")
            except RuntimeError:
                # The other ranks then repeat it.
                self._store = None

    def _is_marked(self, record: logging.LogRecord) -> bool:
        self._store = _default_store() or self._store
        try:
            return self._store is not None and bool(self._store.check([_key(record)]))
        except RuntimeError:
            # The process that kept the store is gone.
            return False


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
