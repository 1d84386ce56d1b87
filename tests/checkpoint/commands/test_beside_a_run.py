"""What looks at a root while a run saves and deletes there: a step that goes is gone, and the root is healthy all the time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.storage import observers
from hyper_resume import cli
from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.disk import lock, operations
from hyper_resume.errors import CheckpointNotFoundError
from tests.checkpoint.directories import point_to
from tests.checkpoint.single_value import damage, save, value_of


class _Run(operations.FileOperations):
    """Publishes step 3 and deletes steps 1 and 2 as the file with number ``at`` is opened for reading."""

    def __init__(self, root: Path, prepared: Path, at: int) -> None:
        self._root, self._prepared, self._at = root, prepared, at
        self.has_moved = False

    def open_read(self, path: Path) -> operations.InputFile:
        self._at -= 1
        if self._at < 0 and not self.has_moved:
            self.has_moved = True
            self._prepared.rename(self._root / "global_step_3")
            point_to(self._root, "3\n")
            for step in (1, 2):
                trashed = self._root / ".trash" / f"global_step_{step}.x"
                trashed.parent.mkdir(exist_ok=True)
                (self._root / f"global_step_{step}").rename(trashed)
                shutil.rmtree(trashed)
        return super().open_read(path)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with steps 1, 2 and 3."""
    root = tmp_path_factory.mktemp("template")
    checkpointer = DistributedCheckpointer()
    for step in (1, 2, 3):
        save(root, step, float(step), by=checkpointer)
    return root


def _is_gone(said: str) -> bool:
    return "was deleted while it was read" in said or "no such directory" in said


def _verify(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_good"]
    assert found["latest"] in {str(root / f"global_step_{step}") for step in (2, 3)}


def _inspect(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {step["reason"] for step in found["steps"]} == {""}
    assert found["latest"] in {step["path"] for step in found["steps"]}


def _doctor(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(root)]) == 0
    assert "problem" not in capsys.readouterr().out


def _find_latest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = DistributedCheckpointer().find_latest_checkpoint(str(root))
    assert found in {str(root / f"global_step_{step}") for step in (2, 3)}


def _load_step(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        value = value_of(root / "global_step_2")
    except CheckpointNotFoundError as error:
        said = str(error)
    else:
        assert value == 2.0
        return
    assert _is_gone(said)


def _inspect_step(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["inspect", str(root / "global_step_2")])
    assert code == 0 or _is_gone(capsys.readouterr().err)


def _verify_step(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["verify", str(root / "global_step_2")])
    said = capsys.readouterr()
    assert "DAMAGED" not in said.out
    assert code == 0 or _is_gone(said.err)


def _diff(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["diff", str(root / "global_step_2"), str(root / "global_step_2")])
    assert code == 0 or _is_gone(capsys.readouterr().err)


LOOKS: dict[str, Callable[[Path, pytest.CaptureFixture[str]], None]] = {
    "verify": _verify,
    "inspect": _inspect,
    "doctor": _doctor,
    "LATEST": _find_latest,
    "load of a step": _load_step,
    "inspect of a step": _inspect_step,
    "verify of a step": _verify_step,
    "diff of a step": _diff,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_whenever_the_run_goes_on_the_root_is_healthy(
    template: Path,
    tmp_path: Path,
    look: Callable[[Path, pytest.CaptureFixture[str]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for at in range(100):
        root = shutil.copytree(template, tmp_path / str(at))
        prepared = (root / "global_step_3").rename(tmp_path / f"prepared {at}")
        point_to(root, "2\n")
        with operations.use(_Run(root, prepared, at)) as run:
            look(root, capsys)
        assert isinstance(run, _Run)
        if not run.has_moved:
            break
    assert 3 <= at < 99, "the run went on at every file that was read, and once after all of them"


def test_damage_that_stays_is_damage_though_a_run_goes_on(
    template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(template, tmp_path / "root")
    prepared = (root / "global_step_3").rename(tmp_path / "prepared")
    damage(prepared)
    point_to(root, "2\n")
    with operations.use(_Run(root, prepared, 4)):
        assert cli.main(["verify", str(root)]) == 1
    out = capsys.readouterr().out
    assert "DAMAGED" in out
    assert "LATEST: nothing that is good" in out


def test_a_look_at_the_lock_does_not_refuse_a_run_that_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / lock.LOCK_NAME).touch()
    pauses: list[float] = []
    # Another open file of this process stands for another process: a flock belongs to the open file.
    descriptor = lock._open(tmp_path / lock.LOCK_NAME, 0)
    lock.fcntl.flock(descriptor, lock.fcntl.LOCK_SH)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        lock.fcntl.flock(descriptor, lock.fcntl.LOCK_UN)

    monkeypatch.setattr(lock.time, "sleep", pause)
    lock.acquire(tmp_path)
    assert len(pauses) == 1
    lock.os.close(descriptor)


def test_no_observer_finds_anything_wrong_beside_a_run_that_saves_and_deletes() -> None:
    found = observers.observe(4)
    assert found.bad == ()
    assert found.saves > 0, "nothing was saved meanwhile: nothing is shown"


@pytest.mark.parametrize(
    "said", ["DAMAGED  global_step_3: 5 files", "Traceback (most recent", "LATEST: nothing that is good", "exit 1"]
)
def test_what_is_wrong_of_a_healthy_root_is_found(said: str) -> None:
    assert observers._wrong(f"something\n{said}")
    assert not observers._wrong("good  global_step_1\nLATEST: global_step_1")
