"""What a checkpoint root holds: its step directories, and which one LATEST means. No file of a checkpoint is read whole."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyper_resume.checkpoint.disk import observing
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.format.manifest import METADATA_NAME
from hyper_resume.checkpoint.history import lineage
from hyper_resume.errors import explained


@dataclass(frozen=True, kw_only=True)
class StepDirectory:
    """One step directory; ``reason`` says why it is incomplete, and is empty for a complete one."""

    step: int
    path: str
    files: int
    size_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RootListing:
    """A root (``checkpoint_dir``): its step directories, lowest step first.

    ``latest`` is the step directory that LATEST tries first, None where there is no complete one; a load also verifies digests.
    """

    path: str
    steps: tuple[StepDirectory, ...]
    latest: str | None

    def as_plain(self) -> dict[str, Any]:
        """Return nested dicts and lists, for JSON."""
        return asdict(self)


def is_root(path: Path) -> bool:
    """Whether ``path`` holds step directories, and is none itself.

    Raises:
        CheckpointNotFoundError: it can't be read.
    """
    with explained("this can't be read", path):
        is_step = layout.manifest_or_none(path) is not None or (path / METADATA_NAME).exists()
        return not is_step and bool(layout.step_directories(path))


def list_root(path: Path) -> RootListing:
    """List the step directories of the root ``path``; one that a run deletes meanwhile is left out.

    Raises:
        CheckpointNotFoundError: it can't be read.
    """
    with explained("this can't be read", path):
        for _ in range(observing.MAX_LOOKS):
            before = layout.root_identity(path)
            order = lineage.resume_order(path)
            steps = [found for step, entry in layout.step_directories(path) if (found := _entry(step, entry))]
            listed = {step.path for step in steps}
            latest = next((str(one) for one in order.readable), None)
            if latest in listed or layout.root_identity(path) == before:
                break
    return RootListing(path=str(path), steps=tuple(steps), latest=latest)


def _entry(step: int, directory: Path) -> StepDirectory | None:
    def look() -> StepDirectory:
        sizes = observing.file_sizes(directory)
        return StepDirectory(
            step=step,
            path=str(directory),
            files=len(sizes),
            size_bytes=sum(sizes),
            reason=layout.why_incomplete(directory),
        )

    try:
        return observing.unchanged(directory, look)
    except observing.DirectoryVanishedError:
        return None
