"""The mark that a run leaves when it goes back to an earlier save, and which saves it abandons by that.

A pointer that names an earlier save than the newest one can mean two things: a run was told to go back to it, or a run was
killed after a commit and before the pointer moved. Only the first leaves a mark. It names the save that the run went back to,
and the highest ordinal at that time: what descends from that save and is not newer than the mark was left behind.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hyper_resume.checkpoint.disk import operations, reading
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.parsing.strict_json import JsonFormatError, JsonObject, parse_json
from hyper_resume.errors import CheckpointUnreadableError

FORMAT = "hyper_resume.went_back"
FORMAT_VERSION = 1
_MAX_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A run went back to save ``attempt`` of ``step``; the highest ordinal of the root was ``ordinal``."""

    step: int
    attempt: str
    ordinal: int


def write(checkpoint_dir: Path, mark: Mark) -> None:
    """Replace the mark of a root, atomically and durably. Only the last going back counts, so there is one.

    Raises:
        OSError: it could not be written; the earlier mark is unchanged.
    """
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(mark)}
    layout.replace_file(checkpoint_dir, layout.WENT_BACK_NAME, json.dumps(content, sort_keys=True).encode() + b"\n")


def read(checkpoint_dir: Path) -> tuple[Mark | None, str]:
    """Return the mark of a root, and what is wrong with it ("" if nothing is, or if there is none).

    Raises:
        CheckpointUnreadableError: it can't be read now.
    """
    path = checkpoint_dir / layout.WENT_BACK_NAME
    try:
        form = JsonObject(parse_json(reading.again(lambda: operations.read_bytes(path, _MAX_BYTES), path)))
        if (form.text("format"), form.integer("format_version")) != (FORMAT, FORMAT_VERSION):
            raise JsonFormatError("another format")
        form.refuse_unknown_keys("format", "format_version", *Mark.__dataclass_fields__)
        step, ordinal = form.integer("step", least=0), form.integer("ordinal", least=0)
        return Mark(step=step, attempt=form.text("attempt"), ordinal=ordinal), ""
    except FileNotFoundError:
        return None, ""
    except CheckpointUnreadableError:
        raise
    except (JsonFormatError, RecursionError, OSError) as error:
        return None, f"{path} is not as it was written ({error})"
