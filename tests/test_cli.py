"""The command line: what it prints, how it exits, and how soon a mistake is reported."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hyper_resume
from hyper_resume import cli
from hyper_resume.checkpoint.disk import operations
from tests.trainer.tiny_training import disk_listing, saved_steps
from tests.warm_commands import run_module, start_module

pytestmark = pytest.mark.xdist_group("cli")

REPOSITORY = Path(__file__).resolve().parent.parent
# A mistake in the configuration must not wait for torch to be imported, which takes a second or two; twenty times as
# much as it takes on an idle machine.
QUICKLY_SECONDS = 10.0

TRAIN = """\
model: {preset: tiny-llama}
data: {paths: [text.txt], seq_length: 16}
accelerator: {device: cpu}
training: {max_steps: 2, progress_bar: false}
"""


def _folder(tmp_path: Path, text: str = TRAIN) -> Path:
    (tmp_path / "train.yaml").write_text(text)
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a short text\n" for i in range(20)))
    return tmp_path


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def _start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in ``folder``, in an interpreter of its own."""
    command = [sys.executable, "-m", "hyper_resume.cli", *arguments]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=False
    )


def _train(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Train in ``folder``, in a process of its own with torch loaded."""
    words = ("train", "train.yaml", *arguments)
    return run_module("hyper_resume.cli", *words, cwd=folder, environment=ENVIRONMENT, **options)


def _allow_small_files_only() -> None:
    # Like a full disk: the shards of this model are some 600 kB.
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))


# ---- train: mistakes


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        (TRAIN + "checkpoint: {save_stps: 3}\n", [], ["train.yaml:5", "checkpoint.save_stps", "save_steps"]),
        (TRAIN + "chekpoint: {}\n", [], ["train.yaml:5", "chekpoint", "checkpoint"]),
        (TRAIN + "checkpoint:\n  save_steps: often\n", [], ["train.yaml:6", "checkpoint.save_steps", "often"]),
        (TRAIN, ["--checkpoint.save_step=3"], ["--checkpoint.save_step", "save_steps"]),
        (TRAIN, ["--checkpoint.save_steps=x"], ["--checkpoint.save_steps", "x"]),
        (TRAIN, ["--trainng.max_steps=3"], ["trainng", "training"]),
        (TRAIN, ["-checkpoint.save_steps=3"], ["-checkpoint.save_steps=3"]),
        (TRAIN, ["--json"], ["--json"]),
        (TRAIN, ["more.yaml"], ["more.yaml"]),
    ],
)
def test_a_wrong_configuration_exits_with_2_and_names_place_and_field(
    tmp_path: Path, text: str, arguments: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _folder(tmp_path, text)
    listing = disk_listing(folder)
    assert cli.main(["train", str(folder / "train.yaml"), *arguments]) == cli.EXIT_USAGE
    output = capsys.readouterr()
    for part in expected:
        assert part in output.err
    assert output.err.startswith("hyper-resume: error: ")
    assert output.out == ""
    assert disk_listing(folder) == listing


@pytest.mark.parametrize("arguments", [["--checkpoint.save_step=3"], ["--checkpoint.save_steps=x", "--no.such=1"]])
def test_a_wrong_option_is_reported_within_seconds_without_a_traceback(tmp_path: Path, arguments: list[str]) -> None:
    folder = _folder(tmp_path)
    listing = disk_listing(folder)
    started = time.monotonic()
    ended = _start(folder, "train", "train.yaml", *arguments)
    assert time.monotonic() - started < QUICKLY_SECONDS
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    for argument in arguments:
        assert argument.split("=")[0] in ended.stderr
    assert disk_listing(folder) == listing


def test_a_missing_configuration_file_exits_with_2_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", str(tmp_path / "absent.yaml")]) == cli.EXIT_USAGE
    assert str(tmp_path / "absent.yaml") in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [[], ["train"], ["inspect"], ["nonsense", "x"], ["inspect", "a", "b"], ["inspect", "a", "--jso"]]
)
def test_a_wrong_command_line_exits_with_2_and_shows_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == cli.EXIT_USAGE
    assert "usage: hyper-resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("inspct", "did you mean 'inspect'?"),
        ("docter", "did you mean 'doctor'?"),
        ("demo.yaml", "did you mean 'train demo.yaml'?"),
        ("xyz", "the commands are train, inspect, verify, diff, prune, doctor"),
    ],
)
def test_an_unknown_command_names_the_nearest_one(word: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([word, "x"])
    assert caught.value.code == cli.EXIT_USAGE
    assert capsys.readouterr().err.splitlines()[-1] == f"hyper-resume: error: unknown command {word!r}; {advice}"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"hyper-resume {hyper_resume.__version__}\n"


def test_a_path_to_restore_that_does_not_exist_exits_with_1_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _folder(tmp_path)
    monkeypatch.chdir(folder)
    listing = disk_listing(folder)
    arguments = ["--checkpoint.restore_from=gone/global_step_3", "--trajectory.dir=trajectory"]
    assert cli.main(["train", "train.yaml", *arguments]) == cli.EXIT_ERROR
    lines = capsys.readouterr().err.splitlines()
    (error,) = [line for line in lines if line.startswith("hyper-resume: error: ")]
    assert "gone/global_step_3" in error
    assert disk_listing(folder) == listing


# ---- train: runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Two steps trained by the command in a process of its own."""
    folder = _folder(tmp_path_factory.mktemp("trained"))
    return folder, _start(folder, "train", "train.yaml", "--trajectory.dir=trajectory")


def test_a_reader_that_goes_away_leaves_no_traceback(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "hyper_resume.cli", "verify", str(trained[0] / "checkpoints")]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (cli.EXIT_ERROR, "")


def test_a_preempted_training_exits_with_75_in_one_line_and_goes_on(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    endless = ["--training.max_steps=100000", "--training.num_train_epochs=100000", "--checkpoint.save_epochs=0"]
    words = ("train", "train.yaml", "--trajectory.dir=trajectory", *endless)
    stdout, stderr = tmp_path / "stdout", tmp_path / "stderr"
    process = start_module(
        "hyper_resume.cli", *words, cwd=folder, environment=ENVIRONMENT, stdout=stdout, stderr=stderr
    )
    records = folder / "trajectory" / "trajectory_rank_0.jsonl"
    try:
        while not records.exists():
            assert process.is_alive()
            time.sleep(0.01)
        process.terminate()
        process.join(100)
    finally:
        process.kill()
        process.join()
    errors = stderr.read_text()
    assert process.exitcode == cli.EXIT_PREEMPTED == os.EX_TEMPFAIL
    assert "Traceback" not in errors
    (line,) = [line for line in errors.splitlines() if line.startswith("hyper-resume: ")]
    (step,) = saved_steps(folder / "checkpoints")
    assert line.startswith(
        f"hyper-resume: preempted: training was preempted by SIGTERM after global_step {step} of 100000"
    )
    assert len(records.read_text().splitlines()) == step
    ended = _train(folder, f"--training.max_steps={step + 1}", "--checkpoint.restore_from=LATEST")
    assert ended.returncode == 0
    assert f"global_step={step}, start_epoch=" in ended.stderr


def test_train_exits_with_0_and_leaves_checkpoint_and_records(
    trained: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, ended = trained
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "Rank0 Start training. Start step: 0. Train steps: 2. Start epoch: 0. Train epochs: 1." in ended.stderr
    assert saved_steps(folder / "checkpoints") == [2]
    lines = (folder / "trajectory" / "trajectory_rank_0.jsonl").read_text().splitlines()
    assert [json.loads(line)["global_step"] for line in lines] == [1, 2]


def test_resuming_a_finished_run_exits_with_0_and_writes_nothing(
    trained: tuple[Path, subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = trained
    monkeypatch.chdir(folder)
    listing = _work_of(folder)
    assert cli.main(["train", "train.yaml", "--checkpoint.restore_from=LATEST", "--trajectory.dir=trajectory"]) == 0
    assert _work_of(folder) == listing
    assert len(list((folder / "checkpoints" / "certificates").iterdir())) == 1


def _work_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Files of checkpoints and records: all but the certificates of restores and the name of who saves there."""
    return {
        path: entry
        for path, entry in disk_listing(folder).items()
        if (folder / path).is_file() and "certificates" not in path and not path.endswith(".writer.lock")
    }


def test_a_background_save_that_fails_makes_the_command_exit_with_1(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    words = ("--checkpoint.is_async=true", "--checkpoint.save_steps=2")
    ended = _train(folder, *words, before=_allow_small_files_only)
    assert ended.returncode == 1
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("hyper-resume: error: ")]
    assert "the checkpoint was not saved" in error
    assert saved_steps(folder / "checkpoints") == []


def test_data_that_ends_early_makes_the_command_exit_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(_folder(tmp_path))
    arguments = ["--training.max_steps=5", "--data.max_samples=4", "--checkpoint.save_ckpt=false"]
    assert cli.main(["train", "train.yaml", *arguments]) == cli.EXIT_ERROR
    assert "found: 2 steps after 1 epochs" in capsys.readouterr().err


# ---- train: Ctrl-C in a save


class _InterruptedAt(operations.FileOperations):
    """A real SIGINT when a save of step 2 creates a file of this name, once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create(self, path: Path) -> operations.OutputFile:
        if path.name == self.name and "global_step_2." in str(path):
            self.name = ""
            signal.raise_signal(signal.SIGINT)
        return super().create(path)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "extra_state_rank_0.pt"])
def test_ctrl_c_in_any_part_of_a_save_exits_with_130_and_names_the_checkpoint_before(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(_folder(tmp_path))
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with operations.use(_InterruptedAt(name)) as interrupting:
            code = cli.main(["train", "train.yaml", "--training.max_steps=3", "--checkpoint.save_steps=1"])
    finally:
        torch.use_deterministic_algorithms(is_deterministic)
    assert isinstance(interrupting, _InterruptedAt)
    assert interrupting.name == "", "the signal was sent"
    assert code == 130
    error = capsys.readouterr().err
    root = tmp_path / "checkpoints"
    assert "interrupted: training was stopped by Ctrl-C after global_step 2 of 3" in error
    assert f"the last checkpoint is {root}/global_step_1" in error
    assert saved_steps(root) == [1]
    assert list((root / ".staging").iterdir()) == []
