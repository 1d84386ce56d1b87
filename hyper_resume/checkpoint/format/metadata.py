"""The metadata of a step directory (its entries, their shapes, dtypes and locations), from the index or from ``.metadata``."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from hyper_resume.checkpoint.disk import operations, reading
from hyper_resume.checkpoint.format import foreign, index, layout
from hyper_resume.checkpoint.format.index import INDEX_NAME
from hyper_resume.checkpoint.format.manifest import METADATA_NAME, Manifest
from hyper_resume.checkpoint.parsing import safe_load
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError, CheckpointUnreadableError, describe


def read_metadata(directory: Path, manifest: Manifest | None = None) -> Metadata:
    """Read the metadata of a step directory: from the index if its ``manifest`` lists one, otherwise from ``.metadata``.

    Without a manifest, the directory is checked for completeness first.

    Raises:
        CheckpointNotFoundError: the directory is missing or incomplete.
        CheckpointMismatchError: the metadata can't be decoded.
        CheckpointUnreadableError: it can't be read now.
    """
    if manifest is None:
        require_complete(directory)
    if manifest is not None and INDEX_NAME in manifest.files:
        return index.decode(_content(directory / INDEX_NAME), str(directory / INDEX_NAME))
    path = directory / METADATA_NAME
    return safe_load.load_metadata(_content(path), str(path))


def require_complete(directory: Path) -> None:
    """Check by names and sizes that a step directory is complete.

    Raises:
        CheckpointNotFoundError: it is not a step directory, or a file is missing or has another size.
    """
    incomplete = layout.why_incomplete(directory)
    if incomplete:
        found = "no such directory" if not directory.is_dir() else incomplete
        do = "name a complete global_step_N directory"
        if (directory / layout.POINTER_NAME).exists():
            do = "name one global_step_N of this directory, or use LATEST with checkpoint.checkpoint_dir"
        elif other := foreign.recognise(directory):
            found, do = other.what, other.do
        raise CheckpointNotFoundError(
            describe(
                "not a complete checkpoint",
                where=str(directory),
                expected=f"a step directory with its {METADATA_NAME}",
                found=found,
                do=do,
            )
        )


def _content(path: Path) -> bytes:
    try:
        return reading.again(lambda: operations.read_bytes(path, safe_load.MAX_METADATA_BYTES), path)
    except CheckpointUnreadableError:
        raise
    except OSError as error:
        raise CheckpointMismatchError(
            describe(
                "the checkpoint's metadata can't be read",
                where=str(path),
                found=f"{type(error).__name__}: {error}",
                do="restore the file from a copy, or resume from another checkpoint",
            )
        ) from error
