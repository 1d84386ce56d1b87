"""Records of a run's saves, next to the trajectory, and of its restore, next to the checkpoints too."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from hyper_resume import collective
from hyper_resume.checkpoint.base import SaveEvent
from hyper_resume.state.certificate import Certificate, encode

logger = logging.getLogger(__name__)

CERTIFICATES = "certificates"


class SaveRecords:
    """Appends one JSON line per event to ``<directory>/saves_rank_{R}.jsonl``; events may come from any thread.

    A line has the fields of :class:`~hyper_resume.checkpoint.base.SaveEvent`: ``state`` (staged, written, durable, failed),
    ``global_step``, ``path``, ``seconds`` since the call and ``at`` (UTC).
    """

    def __init__(self, directory: Path) -> None:
        """Create nothing yet: a run that saves nothing leaves no file."""
        self._path = directory / f"saves_rank_{collective.rank()}.jsonl"
        self._lock = threading.Lock()
        self._prepared = False

    def __call__(self, event: SaveEvent) -> None:
        """Append the event with one write."""
        line = (json.dumps(dataclasses.asdict(event)) + "\n").encode()
        with self._lock:
            if not self._prepared:
                prepare_lines(self._path)
                self._prepared = True
            with self._path.open("ab", buffering=0) as file:
                file.write(line)


def prepare_lines(path: Path) -> None:
    """Create the directory, and drop an incomplete last line, left by a process that was killed while it wrote."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            os.truncate(path, whole)


def store_certificate(certificate: Certificate, directories: Iterable[Path]) -> None:
    """Write ``<directory>/certificates/global_step_N.<UTC stamp>.json`` for each of ``directories``.

    A failure to write is logged only: the restore itself has succeeded.
    """
    stamp = "".join(letter for letter in certificate.created_at.removesuffix("+00:00") if letter.isalnum()) + "Z"
    name = f"global_step_{certificate.global_step}.{stamp}.json"
    for directory in directories:
        target = directory / CERTIFICATES / name
        temporary = target.with_suffix(".writing")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # A half-written certificate must never have the name of one.
            temporary.write_text(encode(certificate), encoding="utf-8")
            temporary.replace(target)
        except OSError as error:
            logger.warning("the restore certificate could not be stored as %s: %s", target, error)
