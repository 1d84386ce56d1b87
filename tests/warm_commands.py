"""``python -m MODULE`` in a process that is forked from the server of the ranks, with torch and this library loaded.

For commands whose start is not what a test is about: a cold one imports for seconds.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.ranks import server_context


def run_module(
    module: str,
    *arguments: str,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 100.0,
    before: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the module as the main program and wait for its end.

    Args:
        module: as ``python -m`` takes it.
        arguments: of the command.
        cwd: where it runs.
        environment: None is the environment of this process.
        timeout_seconds: it is killed when it has not ended by then.
        before: module-level; called in the new process before the module runs.

    Returns:
        Exit code (a negative one is the signal), standard output and standard error.

    Raises:
        subprocess.TimeoutExpired: it was killed at the limit.
    """
    with tempfile.TemporaryDirectory(prefix="command-") as folder:
        variables = dict(os.environ if environment is None else environment)
        process = server_context.Process(target=_become, args=(module, arguments, cwd, variables, folder, before))
        process.start()
        try:
            process.join(timeout_seconds)
            if process.is_alive():
                raise subprocess.TimeoutExpired([module, *arguments], timeout_seconds)
        finally:
            process.kill()
            process.join()
        stdout, stderr = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
    assert process.exitcode is not None
    return subprocess.CompletedProcess([module, *arguments], process.exitcode, stdout, stderr)


def _become(
    module: str,
    arguments: tuple[str, ...],
    cwd: Path,
    environment: Mapping[str, str],
    folder: str,
    before: Callable[[], None] | None,
) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    sys.argv = [module, *arguments]
    # The server may have imported it under its own name.
    sys.modules.pop(module, None)
    if before is not None:
        before()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
