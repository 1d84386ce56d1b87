"""Reading entries of a step directory, and a rank's training state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hyper_resume.checkpoint import extra_state as extra
from hyper_resume.checkpoint import safe_load
from hyper_resume.checkpoint.entries import Entries
from hyper_resume.errors import CheckpointMismatchError, HyperResumeError, describe


def load_entries(wanted: Mapping[str, Any], directory: Path, metadata: Metadata) -> dict[str, Any]:
    """Read entries, in this process alone.

    Args:
        wanted: names of entries; to each a tensor or sharded tensor of its type and shape, whose part is read, or anything else
            for all of the entry.
        directory: the step directory.
        metadata: its own description.

    Returns:
        name -> what was read. Tensors are on the CPU, may be views of the file, and are not to be written to.

    Raises:
        CheckpointMismatchError: something could not be read.
    """
    described = metadata.state_dict_metadata
    try:
        with Entries(directory, metadata) as entries:
            entries.bring(wanted)
            return {
                name: entries.tensor(name, live if isinstance(live, torch.Tensor) else None)
                if isinstance(described[name], TensorStorageMetadata)
                else entries.value(name)
                for name, live in wanted.items()
            }
    except HyperResumeError:
        raise
    except Exception as error:
        raise CheckpointMismatchError(
            describe(
                "the checkpoint can't be read",
                where=str(directory),
                found=safe_load.reason_of(error),
                do="verify the files, or resume from another checkpoint",
            )
        ) from error


def read_training_state(
    directory: Path, metadata: Metadata, layout: extra.ExtraStateLayout, rank: int
) -> dict[str, Any]:
    """Read the training state that ``rank`` saved, in whichever layout, in this process alone.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointMismatchError: it can't be decoded, is of a newer format, or was written by another rank.
    """
    if layout.kind == "per_rank":
        return extra.read_file(directory, rank)
    names = extra.embedded_names(metadata, rank)
    values = load_entries(dict.fromkeys(names.values()), directory, metadata)
    return extra.unwrap_embedded({key: values[name] for key, name in names.items()}, rank, str(directory))
