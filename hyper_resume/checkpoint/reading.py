"""Reading a step directory through DCP: its metadata, the sizes of its files, its entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from hyper_resume.checkpoint import layout
from hyper_resume.checkpoint.planner import _ModelStrictLoadPlanner
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError, HyperResumeError, describe


def load_entries(state: dict[str, Any], directory: Path, *, strict_model: bool = True, **distribution: Any) -> None:
    """Fill ``state`` in place through DCP; ``distribution`` is passed on (``process_group``, ``no_dist``).

    Raises:
        CheckpointMismatchError: on every rank, when any rank could not read its part.
    """
    planner = _ModelStrictLoadPlanner(strict_model=strict_model, where=str(directory))
    try:
        dcp_load(state, checkpoint_id=directory, planner=planner, **distribution)
    except CheckpointException as error:
        # Derives from BaseException, so it would pass every `except Exception` on its way up.
        first = error.failures[min(error.failures)][0]
        if isinstance(first, HyperResumeError):
            raise first from error
        raise CheckpointMismatchError(
            describe(
                "the checkpoint can't be read",
                where=f"{directory}, rank {min(error.failures)}",
                found=reason_of(first),
                do="verify the files, or resume from another checkpoint",
            )
        ) from error


def reason_of(error: BaseException) -> str:
    """Return the class and message of a failed decoding.

    Of torch's refusal to run code only the reason is kept: its message also advises ``weights_only=False``, which is exactly
    what nobody should do with a file that was refused.
    """
    lines = str(error).splitlines()
    if lines and lines[0].startswith("Weights only load failed"):
        lines = [line.strip() for line in lines if line.strip() and "weights_only" not in line]
    return f"{type(error).__name__}: {' '.join(lines)}"


def read_metadata(directory: Path) -> Metadata:
    """Read a step directory's own description.

    Raises:
        CheckpointNotFoundError: it is missing or incomplete.
        CheckpointMismatchError: it can't be decoded.
    """
    if not layout.is_complete(directory):
        root_hint = (directory / layout.POINTER_NAME).exists()
        raise CheckpointNotFoundError(
            describe(
                "not a complete checkpoint",
                where=str(directory),
                expected=f"a step directory with its {layout.METADATA_NAME}",
                found="no such directory" if not directory.is_dir() else "no usable .metadata",
                do="name one global_step_N of this directory, or use LATEST with checkpoint.checkpoint_dir"
                if root_hint
                else "name a complete global_step_N directory",
            )
        )
    try:
        return FileSystemReader(directory).read_metadata()
    except Exception as error:
        raise CheckpointMismatchError(
            describe(
                "the checkpoint's metadata can't be read",
                where=str(directory / layout.METADATA_NAME),
                found=reason_of(error),
                do="resume from another checkpoint",
            )
        ) from error


def check_shards(directory: Path, metadata: Metadata) -> None:
    """Hold the sizes of the shard files against the metadata, so that a torn file is found before live tensors are written.

    Raises:
        CheckpointMismatchError: names the first file that is missing or too short.
    """
    needed: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        end = place.offset + place.length
        needed[place.relative_path] = max(end, needed.get(place.relative_path, 0))
    for name, size in sorted(needed.items()):
        file = directory / name
        found = file.stat().st_size if file.is_file() else None
        if found is None or found < size:
            raise CheckpointMismatchError(
                describe(
                    "a shard file of the checkpoint is not whole",
                    where=str(file),
                    expected=f"at least {size} bytes",
                    found="no such file" if found is None else f"{found} bytes",
                    do="restore the file from a copy, or resume from another checkpoint",
                )
            )
