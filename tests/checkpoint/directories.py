"""What is on disk, to hold two moments against each other, and step directories made by hand."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from hyper_resume.checkpoint import DistributedCheckpointer


def listing(root: Path) -> dict[str, str]:
    """Every file, link and folder under ``root`` with its size and digest."""
    found = {}
    for entry in sorted(root.rglob("*")):
        name = str(entry.relative_to(root))
        if entry.is_symlink():
            found[name] = f"link to {entry.readlink()}"
        elif entry.is_dir():
            found[name] = "folder"
        else:
            content = entry.read_bytes()
            found[name] = f"{len(content)} bytes, {hashlib.sha256(content).hexdigest()}"
    return found


# A description of nothing, which can be read.
_EMPTY = pickle.dumps(Metadata({}, storage_data={}, storage_meta=StorageMeta()))


def make_step(root: Path, name: str | int, *, metadata: bytes | None = _EMPTY) -> Path:
    """A step directory that looks complete, or one without or with another ``.metadata``."""
    directory = root / (f"global_step_{name}" if isinstance(name, int) else name)
    directory.mkdir(parents=True)
    (directory / "__0_0.distcp").write_bytes(b"shard")
    if metadata is not None:
        (directory / ".metadata").write_bytes(metadata)
    return directory


def forget_manifest(directory: Path) -> Path:
    """Take away the manifest and the mark that there was one: the directory counts as another tool's, and what is behind the
    manifest is reached.
    """
    (directory / "manifest.json").unlink()
    unmark(directory)
    return directory


def unmark(directory: Path) -> None:
    """Take away the mark that there was a manifest."""
    path = directory / ".metadata"
    try:
        metadata = pickle.loads(path.read_bytes())
    except (pickle.UnpicklingError, EOFError, FileNotFoundError):
        return
    metadata.storage_meta = StorageMeta(checkpoint_id=metadata.storage_meta.checkpoint_id)
    path.write_bytes(pickle.dumps(metadata))


def latest(root: Path) -> Path | None:
    """What LATEST means there."""
    found = DistributedCheckpointer().find_latest_checkpoint(str(root))
    return None if found is None else Path(found)


def point_to(root: Path, text: str | bytes) -> Path:
    """Write the pointer."""
    pointer = root / "latest_checkpoint_iteration.txt"
    pointer.write_bytes(text if isinstance(text, bytes) else text.encode())
    return pointer
