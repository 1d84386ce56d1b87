"""The step directory that was verified last, so that the load that follows does not read it once more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from hyper_resume import collective
from hyper_resume.checkpoint.format.manifest import Manifest
from hyper_resume.checkpoint.format.segments import VerifiedFile
from hyper_resume.checkpoint.loading import file_verification

Verified = tuple[Manifest | None, Metadata, Mapping[str, VerifiedFile]]


@dataclass
class _Known:
    directory: Path
    manifest: Manifest | None = None
    metadata: Metadata | None = None
    parts: set[file_verification.Part] = field(default_factory=set)
    verified_files: dict[str, VerifiedFile] = field(default_factory=dict)


class LastVerified:
    """Verifies step directories, and knows the last one. :meth:`forget` it where it may change: at a load's end, at a save."""

    def __init__(self, how: Literal["digest", "size"]) -> None:
        """Know none; ``how`` is what is checked of every file."""
        self._how: Literal["digest", "size"] = how
        self._last: _Known | None = None

    def verify(self, directory: Path, group: dist.ProcessGroup | None, *, training_state: bool) -> Verified:
        """Verify of a directory what this process has not just verified; every rank calls it.

        Returns:
            its manifest, its own description, and what is known of this rank's files now.

        Raises:
            CheckpointNotFoundError: files are missing; on every rank.
            CheckpointMismatchError: it is not as it was written; on every rank.
        """
        parts: set[file_verification.Part] = {"weights", "training state"} if training_state else {"weights"}
        known = self._last
        if known is None or known.directory != directory.absolute():
            known = _Known(directory=directory.absolute())
        if not parts <= known.parts:
            left = parts - known.parts
            known.manifest = file_verification.verify(
                directory, self._how, group, parts=left, verified_files=known.verified_files
            )
            known.parts |= parts
        if known.metadata is None:
            known.metadata = collective.on_all_ranks(
                lambda: file_verification.check_metadata(directory, known.manifest), group
            )
        self._last = known
        return known.manifest, known.metadata, known.verified_files

    def forget(self) -> None:
        """Verify anew the next time."""
        self._last = None
