"""What a checkpoint root holds: its step directories, and which one LATEST means. No file of a checkpoint is read whole."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.format.manifest import METADATA_NAME
from hyper_resume.checkpoint.history import lineage


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
    """Whether ``path`` holds step directories, and is none itself."""
    is_step = layout.manifest_or_none(path) is not None or (path / METADATA_NAME).exists()
    return not is_step and bool(layout.step_directories(path))


def list_root(path: Path) -> RootListing:
    """List the step directories of the root ``path``."""
    order = lineage.resume_order(path)
    return RootListing(
        path=str(path),
        steps=tuple(_entry(step, directory) for step, directory in layout.step_directories(path)),
        latest=str(order.readable[0]) if order.readable else None,
    )


def _entry(step: int, directory: Path) -> StepDirectory:
    files = [file for file in directory.rglob("*") if file.is_file()]
    return StepDirectory(
        step=step,
        path=str(directory),
        files=len(files),
        size_bytes=sum(file.stat().st_size for file in files),
        reason=layout.why_incomplete(directory),
    )
