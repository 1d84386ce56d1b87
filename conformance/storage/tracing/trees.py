"""File trees on the disk: write a state, read a folder, compare two."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from conformance.processes import forked_ranks
from conformance.storage.tracing.history import Tree


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder, in memory if possible."""
    folder = Path(tempfile.mkdtemp(prefix="crash-", dir=forked_ranks.scratch()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_tree(root: Path, tree: Tree) -> None:
    """Write a state to the disk."""
    for path in sorted(tree):
        content = tree[path]
        if content is None:
            (root / path).mkdir()
            continue
        descriptor = os.open(root / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)


def read_tree(root: Path) -> dict[str, bytes | None]:
    """The tree on the disk below ``root``."""
    return {
        path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in sorted(root.rglob("*"))
    }


def difference(found: Tree, wanted: Tree) -> str:
    """The first path in which two trees differ; "" if they are equal."""
    for path in sorted(found.keys() | wanted.keys()):
        if path not in found or path not in wanted:
            return f"{path} is only in one of them"
        if found[path] != wanted[path]:
            return f"{path} differs"
    return ""
