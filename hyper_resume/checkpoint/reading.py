"""Reading a step directory through DCP: its metadata, the sizes of its files, its entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from hyper_resume.checkpoint import layout, safe_load
from hyper_resume.checkpoint.filesystem import SafeReader, read_metadata_file
from hyper_resume.checkpoint.manifest import METADATA_NAME, Manifest
from hyper_resume.checkpoint.planner import _ModelStrictLoadPlanner
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError, HyperResumeError, describe


def load_entries(
    state: dict[str, Any],
    directory: Path,
    *,
    strict_model: bool = True,
    metadata: Metadata | None = None,
    **distribution: Any,
) -> None:
    """Fill ``state`` in place through DCP.

    Args:
        state: what to fill.
        directory: the step directory.
        strict_model: a model entry that the checkpoint lacks is an error.
        metadata: the directory's, where it was read already.
        distribution: passed on (``process_group``, ``no_dist``).

    Raises:
        CheckpointMismatchError: on every rank, when any rank could not read its part.
    """
    planner = _ModelStrictLoadPlanner(strict_model=strict_model, where=str(directory))
    try:
        dcp_load(state, storage_reader=SafeReader(directory, metadata), planner=planner, **distribution)
    except CheckpointException as error:
        # Derives from BaseException, so it would pass every `except Exception` on its way up.
        first = error.failures[min(error.failures)][0]
        if isinstance(first, HyperResumeError):
            raise first from error
        raise CheckpointMismatchError(
            describe(
                "the checkpoint can't be read",
                where=f"{directory}, rank {min(error.failures)}",
                found=safe_load.reason_of(first),
                do="verify the files, or resume from another checkpoint",
            )
        ) from error


def read_metadata(directory: Path, manifest: Manifest | None = None) -> Metadata:
    """Read a step directory's own description; with its ``manifest``, which was verified, nothing else is asked of it.

    Raises:
        CheckpointNotFoundError: it is missing or incomplete.
        CheckpointMismatchError: it can't be decoded.
    """
    incomplete = "" if manifest is not None else layout.why_incomplete(directory)
    if incomplete:
        root_hint = (directory / layout.POINTER_NAME).exists()
        raise CheckpointNotFoundError(
            describe(
                "not a complete checkpoint",
                where=str(directory),
                expected=f"a step directory with its {METADATA_NAME}",
                found="no such directory" if not directory.is_dir() else incomplete,
                do="name one global_step_N of this directory, or use LATEST with checkpoint.checkpoint_dir"
                if root_hint
                else "name a complete global_step_N directory",
            )
        )
    return read_metadata_file(directory)
