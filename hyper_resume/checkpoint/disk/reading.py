"""Reads that are tried again: what can't be read now is not damaged, and says nothing about the checkpoint.

A network file system, or a medium with a bad connection, returns errors that pass (``EIO``, ``ESTALE``, ``EACCES`` of an
expired ticket). Only an error that shows what is there, such as a missing file, is a statement about the checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hyper_resume.checkpoint.disk import operations
from hyper_resume.errors import CheckpointUnreadableError, describe, may_pass

T = TypeVar("T")
logger = logging.getLogger(__name__)

WAITS_SECONDS = (0.1, 0.4, 1.5)
"""How long to wait before each further try of a read; after the last one it is given up."""
OUTAGE_SECONDS = 10.0
"""How long nothing is waited for after a read was given up: what fails in that time, fails of the same outage."""


def again(read: Callable[[], T], where: Path | str) -> T:
    """Return ``read()``; after an error that may pass, wait and call it again, at most ``len(WAITS_SECONDS)`` times.

    Args:
        read: reads something, and changes nothing. It is called from its beginning each time.
        where: the path, for messages.

    Raises:
        CheckpointUnreadableError: every try failed with an error that may pass.
        OSError: another error of the system, at once: what it says is true of the file.
    """
    disk = operations.current()
    # A root may hold a thousand files that can't be read: a command waits for the first, not for each.
    is_outage = time.monotonic() - disk.gave_up_at < OUTAGE_SECONDS
    for seconds in () if is_outage else WAITS_SECONDS:
        try:
            return read()
        except OSError as error:
            if not may_pass(error):
                raise
            logger.warning("%s can't be read (%s); trying again in %s s", where, error.strerror, seconds)
        disk.pause(seconds)
    try:
        return read()
    except OSError as error:
        if not may_pass(error):
            raise
        if not is_outage:
            disk.gave_up_at = time.monotonic()
        raise unreadable(where, error) from error


def unreadable(where: Path | str, error: OSError) -> CheckpointUnreadableError:
    """Return the error for what could not be read although it was tried again."""
    return CheckpointUnreadableError(
        describe(
            "the checkpoint can't be read now; that does not mean that it is damaged",
            where=str(where),
            expected="a file that can be read",
            found=f"{type(error).__name__}: {error}, also when it was tried again",
            do="check the file system and its permissions, and start again; to use another checkpoint all the same, name it in "
            "checkpoint.restore_from, and move this one out of checkpoint_dir",
        )
    )
