"""``python -m st`` in pytest's own process, on a warm server that all its runs share: to start one takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.processes.launching import LegOrder, RunningLeg
from conformance.processes.local import LocalLauncher
from conformance.processes.torchrun import Torchrun
from st import __main__, running


@dataclass(frozen=True, kw_only=True)
class Done:
    """How one command ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class SharedLauncher:
    """A launcher that outlives the runs that use it. One that was stopped starts anew."""

    def __init__(self, folder: Path) -> None:
        """``folder`` gets the server's log."""
        self._folder = folder
        self._launcher = LocalLauncher(folder)

    def start(self, order: LegOrder) -> RunningLeg:
        return self._launcher.start(order)

    def wait(self) -> None:
        self._launcher.wait()

    def stop(self) -> None:
        self.end()
        self._launcher = LocalLauncher(self._folder)

    def close(self) -> None:
        """The end of a run, not of the server."""

    def end(self) -> None:
        self._launcher.stop()
        self._launcher.close()


@pytest.fixture(scope="session")
def shared_launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedLauncher]:
    launcher = SharedLauncher(tmp_path_factory.mktemp("warm"))
    yield launcher
    launcher.end()


@pytest.fixture
def st_command(
    shared_launcher: SharedLauncher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Runs ``python -m st`` with these arguments."""
    monkeypatch.setattr(running, "launchers", lambda folder: {"warm": shared_launcher, "torchrun": Torchrun()})

    def run(*arguments: str) -> Done:
        code = __main__.main(list(arguments))
        printed = capsys.readouterr()
        return Done(returncode=code, stdout=printed.out, stderr=printed.err)

    return run
