"""The notice to a run that starts anew in a root where another run has saved."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.format.manifest import MANIFEST_NAME, METADATA_NAME
from hyper_resume.errors import CheckpointExistsError, describe

logger = logging.getLogger(__name__)

_SHOWN = 5


def steps_of_others(checkpoint_dir: Path) -> list[int]:
    """Return the steps that stand in a root, of this library or of another tool; what is no checkpoint is left out."""
    found = layout.step_directories(checkpoint_dir) + layout.replaced_directories(checkpoint_dir)
    return sorted(
        step for step, path in found if any((path / name).exists() for name in (MANIFEST_NAME, METADATA_NAME))
    )


def notice(checkpoint_dir: Path, how: Literal["warn", "error"]) -> None:
    """Warn or raise if ``checkpoint_dir``, where a run begins that continues none of its saves, holds checkpoints.

    Raises:
        CheckpointExistsError: ``how`` is "error". Nothing was changed.
    """
    steps = steps_of_others(checkpoint_dir)
    if not steps:
        return
    shown = ", ".join(layout.step_directory_name(step) for step in steps[-_SHOWN:])
    message = describe(
        "this run starts anew in a checkpoint_dir that holds checkpoints of another run",
        where=str(checkpoint_dir),
        expected="a checkpoint_dir of its own, or a resume",
        found=shown if len(steps) <= _SHOWN else f"{len(steps)} step directories, the last of them {shown}",
        do="to continue that run, set checkpoint.restore_from=LATEST; otherwise set another checkpoint.checkpoint_dir. "
        "Retention does not delete that run's checkpoints, but a step that this run saves takes the place of the same step of "
        "that run, and LATEST means this run from its first save on",
    )
    if how == "error":
        raise CheckpointExistsError(message)
    logger.warning("%s; checkpoint.on_other_run=error refuses such a start", message)
