"""One run a platform for all scenarios of a pytest process; with xdist each worker has runs of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import pytest

from conformance.matrix.platforms import Platform
from conformance.running.session import Session
from st import running


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the system tests."""
    group = parser.getgroup("system tests")
    group.addoption("--st-results", type=Path, help="folder of the runs; default results/st-TIME")
    group.addoption("--launcher", choices=["torchrun", "warm"], help="start every scenario so, whatever it says itself")
    group.addoption(
        "--require",
        action="append",
        default=[],
        choices=[platform.id for platform in running.platforms()],
        help="a platform that must be there: its scenarios fail where it is not, instead of being skipped; repeatable",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register a marker for each platform and class; make SIGTERM end the running legs, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _raise_interrupt)
    for platform in running.platforms():
        config.addinivalue_line("markers", f"{platform.id}: {platform.title}")
    for letter in sorted({case.id[0] for case in running.scenarios()}):
        config.addinivalue_line("markers", f"class_{letter.lower()}: scenarios of class {letter}")


# Hooks get no fixtures.
_running: list[Session] = []


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="session")
def st_session(request: pytest.FixtureRequest) -> Iterator[Callable[[Platform], Session]]:
    """Returns the run of a platform, which starts with its first scenario; footers are written at the end."""
    folder = request.config.getoption("st_results") or Path("results") / time.strftime("st-%Y%m%d-%H%M%S")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    begun: dict[str, Session] = {}
    with ExitStack() as stack:

        def of(platform: Platform) -> Session:
            if platform.id not in begun:
                made = running.session(folder / f"{platform.id}{'-' if worker else ''}{worker}", platform)
                begun[platform.id] = stack.enter_context(made)
                _running.append(made)
            return begun[platform.id]

        yield of
        for session in begun.values():
            session.finish()


def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """An interrupted run gets no footer, also when it is interrupted between two scenarios."""
    for session in _running:
        session.stop()
