"""A missing platform is reported: what was looked for and found, one line per scenario, and the exit code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from conformance.matrix.platforms import Platform, find_platform, load_platforms
from st.hardware import missing_hardware
from tests.warm_commands import run_module

CHECKOUT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def platform(device: str, ranks: int = 4000) -> Platform:
    cpu4 = find_platform("cpu4", load_platforms(HERE / "platforms.yaml"))
    return Platform(**{**vars(cpu4), "id": f"{device}9", "device": device, "ranks": ranks})


def test_a_cpu_is_always_there() -> None:
    assert missing_hardware(platform("cpu")) is None


def test_a_platform_that_lacks_says_what_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = missing_hardware(platform("npu"))
    assert reason is not None
    assert reason.startswith("npu9 needs 4000 NPU devices; looked for npu-smi: not found, CANN: ")
    assert ", torch.npu.device_count(): " in reason
    assert "\n" not in reason


def test_what_is_there_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "npu-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    reason = missing_hardware(platform("npu"))
    assert reason is not None
    assert "looked for npu-smi: found, CANN: by ASCEND_HOME_PATH, torch.npu" in reason


def pytest_of(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["-p", "tests.st.run_scenarios", "st/test_scenarios.py"]
    words = ["-m", "npu4", "--st-results", str(folder / "results"), *options]
    # Wide, because pytest cuts its summary to the terminal's width.
    return run_module("pytest", *command, *words, cwd=CHECKOUT, environment={**os.environ, "COLUMNS": "1000"})


def test_scenarios_of_a_platform_that_is_not_there_are_skipped_with_a_line_each_and_exit_code_0(tmp_path: Path) -> None:
    done = pytest_of(tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert [line.partition(" unsupported: ")[2].partition(";")[0] for line in lines] == [
        "S1: npu4 needs 4000 NPU devices",
        "S2: npu4 needs 4000 NPU devices",
    ]
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert not (tmp_path / "results").exists()


def test_a_required_platform_that_is_not_there_fails_every_scenario_and_the_run(tmp_path: Path) -> None:
    done = pytest_of(tmp_path, "--require", "npu4")
    lines = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert len(lines) == 2
    assert "--require npu4: unsupported: S1: npu4 needs 4000 NPU devices; looked for npu-smi: " in lines[0]
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout


def test_the_command_line_says_it_once_and_exits_1(tmp_path: Path) -> None:
    words = ["run", "--platform", "npu4", "--results", str(tmp_path / "r")]
    done = run_module("tests.st.run_scenarios", *words, cwd=CHECKOUT)
    assert done.returncode == 1
    assert done.stderr.startswith("unsupported: npu4 needs 4000 NPU devices; looked for npu-smi: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "r").exists()
