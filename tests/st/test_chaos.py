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


def _point(work: Path, name: str, *, newest: int, resumed: int | None, event: str, raised: str | None = None) -> None:
    outcome = {"raised": raised, "resumed_from_step": resumed, "newest_complete_step": newest, "weights_diff": 0.0}
    folder = work / f"pt_{name}"
    folder.mkdir()
    found = {"label": name, "outcome": outcome, "event": ["open", event]}
    (folder / "result.json").write_text(json.dumps(found))


def test_only_a_kill_between_commit_and_pointer_may_lose_one_save(tmp_path: Path) -> None:
    pointer = "latest_checkpoint_iteration.txt.0123456789ab"
    _point(tmp_path, "same", newest=2, resumed=2, event="manifest.json")
    _point(tmp_path, "none yet", newest=0, resumed=None, event="manifest.json")
    _point(tmp_path, "known", newest=2, resumed=1, event=pointer)
    _point(tmp_path, "raised", newest=2, resumed=None, event="manifest.json", raised="ExitCode1")
    assert chaos.lost_work(tmp_path) == []
    _point(tmp_path, "two behind", newest=3, resumed=1, event=pointer)
    _point(tmp_path, "from scratch", newest=2, resumed=None, event="manifest.json")
    assert [line.partition(":")[0] for line in chaos.lost_work(tmp_path)] == ["from scratch", "two behind"]


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


def test_without_the_tester_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ckpt_chaos", None)
    assert main(["chaos"]) == chaos.USAGE
    assert "pip install 'hyper_resume[chaos]'" in capsys.readouterr().err
