"""What the crash tester's results mean, and what it compares; the tester itself runs at night."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hyper_resume.checkpoint import DistributedCheckpointer
from st import chaos
from st.__main__ import main
from tests.checkpoint.single_value import state


def test_equal_trainings_have_equal_results_and_others_have_others(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("same", 1.0), ("other", 2.0)):
        DistributedCheckpointer().save(str(tmp_path / name / "global_step_3"), state(value), global_step=3)
    one, same, other = (chaos.result_of(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same != other
    assert set(json.loads(one)["buckets"]["0"]) == {"model", "progress", "value"}


def test_the_training_is_the_command_of_the_library_on_a_folder_of_the_tester(tmp_path: Path) -> None:
    words = chaos.command(tmp_path, 5, "before", 1)
    training = words[words.index("--") + 1 :]
    assert training[1:4] == ["-m", "hyper_resume.cli", "train"]
    assert training[-1] == "--checkpoint.checkpoint_dir={out}"
    assert set(words[words.index("--fail-on") + 1].split(",")) >= {"HARD_FAIL", "SILENT_DIVERGENCE", "LOST_WORK"}


def test_without_the_tester_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ckpt_chaos", None)
    assert main(["chaos"]) == chaos.USAGE
    assert "pip install 'hyper_resume[chaos]'" in capsys.readouterr().err
