"""What holds for all unit tests."""

from __future__ import annotations

import gc

# Until all tests are collected nothing is thrown away that is worth a search through all that is loaded.
gc.disable()


def pytest_collection_finish() -> None:
    """Keep what is loaded, torch and thousands of tests, out of every later garbage collection: each took 0.2 s and more."""
    gc.collect()
    gc.freeze()
    gc.enable()
