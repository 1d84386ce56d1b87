"""Loader workers that outlive a signal that asks training to stop.

A launcher signals the whole process group, workers included (torchrun does). Training then saves at the next step edge and
needs its workers until there; a worker that dies of the signal turns that into an error.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence


def ignore_signals(signals: Sequence[str], worker_id: int) -> None:
    """Make this worker process ignore ``signals``, by name; runs once in it, before it reads.

    SIGTERM is also how the training process ends a worker that it waits for in vain, so it is taken from that process and
    ignored from any other.
    """
    for name in signals:
        number = signal.Signals[name]
        if number == signal.SIGTERM:
            # Blocked here and in the thread, which takes it and can see who sent it; a handler could not.
            signal.pthread_sigmask(signal.SIG_BLOCK, {number})
            threading.Thread(
                target=_obey_parent, args=(os.getppid(),), name="hyper_resume-sigterm", daemon=True
            ).start()
        else:
            signal.signal(number, signal.SIG_IGN)


def _obey_parent(parent: int) -> None:
    while True:
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        if sender == parent or os.getppid() != parent:
            os._exit(0)
