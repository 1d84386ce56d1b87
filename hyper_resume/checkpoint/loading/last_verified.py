"""Remembers the step directory that was verified last, so that the load which follows does not verify it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from hyper_resume import collective
from hyper_resume.checkpoint.disk import observing
from hyper_resume.checkpoint.format.manifest import Manifest
from hyper_resume.checkpoint.format.segments import VerifiedFile
from hyper_resume.checkpoint.loading import file_verification
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError

Verified = tuple[Manifest | None, Metadata, Mapping[str, VerifiedFile]]


@dataclass
class _VerifiedDirectory:
    directory: Path
    manifest: Manifest | None = None
    metadata: Metadata | None = None
    parts: set[file_verification.Part] = field(default_factory=set)
    verified_files: dict[str, VerifiedFile] = field(default_factory=dict)


class LastVerified:
    """Verifies step directories and remembers the last result. Call :meth:`forget` before the directory may change."""

    def __init__(self, method: Literal["digest", "size"]) -> None:
        """Remember nothing yet; ``method`` says whether digests are compared, or sizes only."""
        self._method: Literal["digest", "size"] = method
        self._last: _VerifiedDirectory | None = None

    def verify(self, directory: Path, group: dist.ProcessGroup | None, *, training_state: bool) -> Verified:
        """Verify the parts of a directory that the last call did not verify; every rank calls it.

        Args:
            directory: the step directory.
            group: the process group of all ranks.
            training_state: verify the files of the training state too.

        Returns:
            the manifest, the metadata, and this rank's verified files by name.

        Raises:
            CheckpointNotFoundError: files are missing; on every rank.
            CheckpointMismatchError: a file is not as it was written; on every rank.
        """
        parts: set[file_verification.Part] = {"weights", "training state"} if training_state else {"weights"}
        known = self._last
        if known is None or known.directory != directory.absolute():
            known = _VerifiedDirectory(directory=directory.absolute())
        if not parts <= known.parts:
            left = parts - known.parts
            known.manifest = file_verification.verify(
                directory, self._method, group, parts=left, verified_files=known.verified_files
            )
            known.parts |= parts
        if known.metadata is None:
            try:
                known.metadata = collective.on_all_ranks(
                    lambda: file_verification.check_metadata(directory, known.manifest), group
                )
            except (CheckpointMismatchError, CheckpointNotFoundError) as error:
                # Its manifest was read, so it was there.
                if known.manifest is None or collective.on_rank_zero(directory.is_dir, group):
                    raise
                raise observing.vanished_error(directory) from error
        self._last = known
        return known.manifest, known.metadata, known.verified_files

    def forget(self) -> None:
        """Forget the last result, so that the next call verifies everything."""
        self._last = None
