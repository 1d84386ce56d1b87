"""Loader workers that ignore preemption signals.

A launcher (such as torchrun) may signal the whole process group, workers included. Training then saves after the current step
and needs its workers until then. A worker that the signal ended would turn this into an error.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence


def ignore_signals(signals: Sequence[str], worker_id: int) -> None:
    """Make this worker process ignore the named signals; called once in each worker, before it reads.

    The training process itself uses SIGTERM to end a worker that does not stop. So SIGTERM is obeyed if it comes from that
    process, and ignored if it comes from any other.
    """
    for name in signals:
        number = signal.Signals[name]
        if number == signal.SIGTERM:
            # Blocked in all threads. A separate thread waits for it, because sigwaitinfo, unlike a handler, shows the sender.
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
