"""What holds for all unit tests."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator

import pytest

# Until all tests are collected nothing is thrown away that is worth a search through all that is loaded.
gc.disable()

# A shell starts its background with SIGINT ignored, and what is ignored is inherited: no Ctrl-C would reach a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keep what is loaded, torch and thousands of tests, out of every later garbage collection: each took 0.2 s and more."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what can't be sent to pytest-xdist's main process: names on disk that are no UTF-8, in what a test logged."""
    report = yield
    report.sections = [(title, text.encode("utf-8", "backslashreplace").decode()) for title, text in report.sections]
    return report
