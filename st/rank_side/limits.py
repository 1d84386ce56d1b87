"""Time limits inside one rank; each is for the case that the one before did not end it.

1. At the limit: an alarm raises in the main thread, again every second. Works while Python runs or a system call waits.
2. ``REPORT_AFTER`` later: this rank's stacks are printed, since the other ranks are about to end the run.
3. ``GRACE`` after the limit: the ranks that wait for this one end the run (see :mod:`st.rank_side.harness`).
4. ``HARD_AFTER``: this process ends, even if no thread of it can run Python any more; mpiexec then ends the others.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REPORT_AFTER = 2.0
GRACE = 5.0
HARD_AFTER = 15.0


class TimeLimitReached(BaseException):
    """No ``Exception``: the code under test may catch all of those and go on waiting."""


class Limits:
    """Applies the limits to one phase of a test after the other."""

    def __init__(self, rank: int, stderr: int) -> None:
        """Take a descriptor that pytest does not capture."""
        self._rank = rank
        self._stderr = stderr

    def say(self, text: str) -> None:
        """Write to the real standard error in one piece, so that the ranks' lines do not mix."""
        os.write(self._stderr, f"{text}\n".encode())

    def end_process_after(self, seconds: float) -> None:
        """Set the last limit; every call replaces the one before."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stderr)

    @contextmanager
    def phase(self, what: str, seconds: float) -> Iterator[None]:
        """Raise :class:`TimeLimitReached` in the body after ``seconds``; must be entered in the main thread."""

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            raise TimeLimitReached(f"{what} did not end within {seconds:g} s")

        def print_stacks() -> None:
            self.say(
                f"rank {self._rank}: {what} has not ended {REPORT_AFTER:g} s after its limit of {seconds:g} s, and is here:"
            )
            faulthandler.dump_traceback(file=self._stderr, all_threads=True)

        self.end_process_after(seconds + HARD_AFTER)
        stacks_timer = threading.Timer(seconds + REPORT_AFTER, print_stacks)
        stacks_timer.daemon = True
        before = signal.signal(signal.SIGALRM, interrupt)
        stacks_timer.start()
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            stacks_timer.cancel()
