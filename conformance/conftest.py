"""pytest fixtures of the matrix: one run for all tests of a pytest process; with xdist one run per worker."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.matrix.case import load_cases
from conformance.matrix.platforms import Platform, find_platform, load_platforms
from conformance.running.adapter import build_adapter
from conformance.running.session import Session


def marker_of(platform: Platform) -> str:
    """A platform's id as a marker."""
    return platform.id.replace("-", "_")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the matrix."""
    group = parser.getgroup("conformance")
    group.addoption("--conformance-results", type=Path, help="folder of the run; default results/pytest-TIME")
    group.addoption("--conformance-platform", default=None, help="run on this platform of platforms.yaml")


def pytest_configure(config: pytest.Config) -> None:
    """Register a marker for each class and platform."""
    for platform in load_platforms():
        config.addinivalue_line("markers", f"{marker_of(platform)}: {platform.title}")
    for letter in sorted({case.id[0] for case in load_cases()}):
        config.addinivalue_line("markers", f"class_{letter.lower()}: cases of class {letter}")


@pytest.fixture(scope="session")
def conformance_session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """The run that all cases of this process go into; its footer is written at the end."""
    name = request.config.getoption("conformance_platform")
    platform = find_platform(name, load_platforms()) if name else None
    folder = request.config.getoption("conformance_results") or Path("results") / time.strftime("pytest-%Y%m%d-%H%M%S")
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    session = Session(build_adapter("hyper_resume"), folder / worker if worker else folder, platform=platform, jobs=1)
    with session:
        yield session
        session.finish()
