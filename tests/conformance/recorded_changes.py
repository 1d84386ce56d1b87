"""Runs Python code in a process of its own, and returns its changes on disk with the state before each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[2]

# It writes through a descriptor, with functions saved before they are replaced.
_BEFORE = """
import json, os, sys
from conformance.running.file_operations import FileOperations
root, log = sys.argv[1], os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
write, isdir, lexists, size = os.write, os.path.isdir, os.path.lexists, os.path.getsize
def report(what, where):
    path = os.path.join(root, where)
    there = "directory" if isdir(path) else size(path) if lexists(path) else None
    write(log, json.dumps([what, where, there]).encode() + b"\\n")
FileOperations(root, report).install()
"""


def operations_of(folder: Path, code: str, *, imports: str = "") -> list[list[Any]]:
    """[what, where, what was there before: bytes, ``directory`` or None] of each change below ``folder / root``.

    ``code`` runs in ``folder``, with ``root`` (absolute) as a name. ``imports`` run before the functions are
    replaced, as in a leg; without any there are no site packages.
    """
    (folder / "root").mkdir(exist_ok=True)
    log = folder / "log.jsonl"
    text = f"import sys; sys.path.insert(0, {str(CHECKOUT)!r})\n{imports}\n{_BEFORE}\n{code}"
    command = [sys.executable, *([] if imports else ["-S"]), "-c", text, str(folder / "root"), str(log)]
    subprocess.run(command, cwd=folder, check=True, timeout=100)
    return [json.loads(line) for line in log.read_text().splitlines()]
