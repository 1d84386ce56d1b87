"""Processes that a leg leaves behind are reported, however slowly they die."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.processes import leftovers
from conformance.records.evidence import JOB_NAME, JOB_VARIABLE


def test_a_process_that_dies_while_it_is_looked_at_once_more_is_still_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes its time: seen again after the kill, it may be on its way to be a zombie by the next look."""
    environment = {**os.environ, JOB_VARIABLE: str(tmp_path / JOB_NAME)}
    left = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], env=environment)
    original, looks = leftovers._belonging_to, []

    def seen_twice(folder: Path) -> list[int]:
        looks.append(original(folder))
        if len(looks) == 2:
            left.wait(10)
            return [left.pid]
        return looks[-1]

    monkeypatch.setattr(leftovers, "_belonging_to", seen_twice)
    try:
        assert leftovers.kill_leftovers(tmp_path) == [left.pid]
    finally:
        left.kill()
        left.wait(10)
