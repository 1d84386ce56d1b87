"""``python -m MODULE`` in a process that is forked from the server of the ranks, with torch and this library loaded.

For commands whose start is not what a test is about: a cold one imports for seconds.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.ranks import server_context


def run_module(
    module: str,
    *arguments: str,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 100.0,
    before: Callable[[], object] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the module as the main program and wait for its end; see :func:`start_module`.

    Returns:
        Exit code (a negative one is the signal), standard output and standard error.

    Raises:
        subprocess.TimeoutExpired: it was killed after ``timeout_seconds``.
    """
    with tempfile.TemporaryDirectory(prefix="command-") as folder:
        stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
        process = start_module(
            module, *arguments, cwd=cwd, environment=environment, stdout=stdout, stderr=stderr, before=before
        )
        try:
            process.join(timeout_seconds)
            if process.is_alive():
                raise subprocess.TimeoutExpired([module, *arguments], timeout_seconds)
        finally:
            process.kill()
            process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(
            [module, *arguments], process.exitcode, stdout.read_text(), stderr.read_text()
        )


def start_module(
    module: str,
    *arguments: str,
    cwd: Path,
    stdout: Path,
    stderr: Path,
    environment: Mapping[str, str] | None = None,
    before: Callable[[], object] | None = None,
) -> BaseProcess:
    """Run the module as the main program of a new process, in a session of its own.

    Args:
        module: as ``python -m`` takes it.
        arguments: of the command.
        cwd: where it runs.
        stdout: the file that it writes to.
        stderr: likewise; standard input is empty.
        environment: None is the environment of this process.
        before: module-level; called in the new process before the module runs.
    """
    variables = dict(os.environ if environment is None else environment)
    process = server_context.Process(target=_run, args=(module, arguments, cwd, variables, (stdout, stderr), before))
    process.start()
    return process


def _run(
    module: str,
    arguments: tuple[str, ...],
    cwd: Path,
    environment: Mapping[str, str],
    streams: Sequence[Path],
    before: Callable[[], object] | None,
) -> None:
    os.setsid()
    for number, path in enumerate(streams, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
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
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        # As an interpreter ends; a process of multiprocessing leaves the second out.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
