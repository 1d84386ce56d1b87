"""What ``hyper-resume train`` shows on a terminal and in a file, and what Ctrl-C does: with real processes and a pty."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.processes.torchrun import free_port
from hyper_resume import cli
from hyper_resume.trainer.callbacks import progress
from hyper_resume.trainer.callbacks.progress import ProgressCallback
from tests.trainer.tiny_training import saved_steps
from tests.warm_commands import run_module, start_module

REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
WORDS = ("hyper_resume.cli", "train", "train.yaml")
LIMIT_SECONDS = 100.0
COLUMNS = 160
LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (\[rank \d\] )?(INFO|WARNING) [\w.]+: ")

TRAIN = """\
model: {preset: tiny-llama}
data: {paths: [text.txt], seq_length: 16}
accelerator: {device: cpu}
training: {max_steps: 6}
checkpoint: {save_steps: 2, save_epochs: 0}
"""
ENDLESS = ("--training.max_steps=100000", "--training.num_train_epochs=100000")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.yaml").write_text(TRAIN)
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a short text\n" for i in range(20)))
    return tmp_path


def on_a_terminal(
    folder: Path, *arguments: str, until: Callable[[str], bool] = lambda _: False, keys: bytes = b""
) -> tuple[int | None, str]:
    """Run the command on a pseudo terminal of its own; once ``until`` holds for the output, ``keys`` are typed."""
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    name = Path(os.ttyname(terminal))
    process = start_module(
        *WORDS, *arguments, cwd=folder, environment=ENVIRONMENT, stdout=name, stderr=name, before=_take_the_terminal
    )
    output, ends_at = b"", time.monotonic() + LIMIT_SECONDS
    try:
        while True:
            readable, _, _ = select.select([master], [], [], ends_at - time.monotonic())
            assert readable, output
            try:
                piece = os.read(master, 65536)
            except OSError:  # the last process has closed it
                break
            if not output:
                os.close(terminal)  # not before the process has opened it, or there would be nobody who writes
            output += piece
            if keys and until(output.decode(errors="replace")):
                os.write(master, keys)
                keys = b""
        process.join(LIMIT_SECONDS)
        return process.exitcode, output.decode()
    finally:
        process.kill()
        process.join()
        os.close(master)


def _take_the_terminal() -> None:
    """The terminal on standard error becomes that of this session, and its standard input."""
    # A job in the background of a script is started with Ctrl-C ignored, and so would the command be.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    terminal = os.open(os.ttyname(2), os.O_RDWR)
    os.dup2(terminal, 0)
    os.close(terminal)


def lines_of_the_screen(output: str) -> list[str]:
    """What stands on each line of the terminal at the end: a carriage return goes back to the line's start."""
    shown = []
    for line in output.replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        for piece in line.split("\r"):
            cells[: len(piece)] = piece
        shown.append("".join(cells).rstrip())
    return shown


def test_on_a_terminal_log_lines_stand_above_the_bar_and_whole(folder: Path) -> None:
    code, output = on_a_terminal(folder)
    assert code == 0
    lines = [line for line in lines_of_the_screen(output) if line]
    *logged, bar = lines
    assert [line for line in logged if not LOGGED.match(line)] == []
    assert len([line for line in logged if "Saving checkpoint: global_step=" in line]) == 3
    assert [line for line in logged if "Training:" in line] == []
    assert re.match(r"Training: 100%\|█+\| 6/6 .*loss=\d+\.\d{5}, lr=0\]$", bar)
    assert "Training:  50%|" in output


def test_in_a_file_progress_is_a_plain_line_at_the_start_and_at_the_end(folder: Path) -> None:
    ended = run_module(*WORDS, cwd=folder, environment=ENVIRONMENT)
    assert ended.returncode == 0
    assert "\r" not in ended.stderr
    lines = ended.stderr.splitlines()
    progress_lines = [line for line in lines if not LOGGED.match(line)]
    assert [re.sub(r"\[.*loss=\d+\.\d{5}", "[loss", line) for line in progress_lines] == [
        "Training:   0%|          | 0/6 [loss, lr=9.33e-05]",  # 1e-4 * (1 + cos(pi / 6)) / 2
        "Training: 100%|██████████| 6/6 [loss, lr=0]",
    ]


def test_in_a_file_there_is_a_line_every_so_many_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = progress._Lines(total=100, initial=10)
    for step in range(11, 61):
        now[0] += 1.0
        lines.show(step, f"loss={step}")
    lines.finish()
    shown = re.findall(r" (\d+)/100 .*loss=(\d+)\]", capsys.readouterr().err)
    # Step 11 comes at 1 s; 30 s after it step 41; the last one is step 60.
    assert shown == [("10", "11"), ("41", "41"), ("60", "60")]


def test_ctrl_c_ends_training_with_one_line_and_130_and_the_named_checkpoint_resumes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code, output = on_a_terminal(
        folder, *ENDLESS, "--data.num_workers=2", until=lambda text: "durable: global_step=4" in text, keys=b"\x03"
    )
    assert code == cli.EXIT_INTERRUPTED == 130
    assert "Traceback" not in output
    lines = lines_of_the_screen(output)
    (line,) = [line for line in lines if "interrupted" in line]
    found = re.fullmatch(
        r"hyper-resume: interrupted: training was stopped by Ctrl-C after global_step (\d+) of 100000; "
        r"found: the last checkpoint is (\S+/checkpoints/global_step_(\d+)); what to do: start the same command again with "
        r"(--checkpoint.restore_from=)LATEST \(or \2\)",
        line,
    )
    assert found, line
    last, path, step = int(found[1]), found[2], int(found[3])
    assert path == str(folder / "checkpoints" / f"global_step_{step}")
    assert last >= step >= 4
    assert step in saved_steps(folder / "checkpoints")
    monkeypatch.chdir(folder)
    with caplog.at_level("INFO"):
        assert cli.main(["train", "train.yaml", f"--training.max_steps={step + 1}", found[4] + path]) == 0
    loaded = f"Checkpoint loaded successfully: path={path}, global_step={step},"
    assert [message for message in caplog.messages if message.startswith(loaded)]


def test_ctrl_c_before_anything_is_saved_says_so(folder: Path) -> None:
    code, output = on_a_terminal(
        folder, *ENDLESS, "--checkpoint.save_steps=0", until=lambda text: "Training:" in text, keys=b"\x03"
    )
    assert code == 130
    assert "Traceback" not in output
    (line,) = [line for line in lines_of_the_screen(output) if "interrupted" in line]
    assert line.endswith("found: no checkpoint of this run; what to do: start the same command again")


# ---- several ranks


def _ranks(folder: Path, *arguments: str, before: Callable[[], object]) -> list[str]:
    """Run the command on two ranks and return the standard error of each."""
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        start_module(
            *WORDS,
            *arguments,
            cwd=folder,
            environment={**ENVIRONMENT, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=folder / f"stdout-{rank}",
            stderr=folder / f"stderr-{rank}",
            before=before,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            process.join(LIMIT_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.join()
    outputs = [(folder / f"stderr-{rank}").read_text() for rank in range(2)]
    assert [process.exitcode for process in processes] == [0, 0], outputs
    return outputs


def _warn_on_rank_1_after_step_2() -> None:
    original = ProgressCallback.on_step_end

    def on_step_end(self: ProgressCallback, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if os.environ["RANK"] == "1" and self.trainer.state.global_step == 2:
            logging.getLogger("mine").warning("only here")

    ProgressCallback.on_step_end = on_step_end  # type: ignore[method-assign]


def test_a_warning_of_all_ranks_is_printed_once_and_one_of_a_single_rank_with_its_rank(folder: Path) -> None:
    arguments = ("--checkpoint.staging_dir=elsewhere", "--training.max_steps=2")
    first, second = _ranks(folder, *arguments, before=_warn_on_rank_1_after_step_2)
    assert first.count("checkpoint.staging_dir is reserved") == 1
    assert "only here" not in first
    (line,) = second.splitlines()
    assert re.fullmatch(r"\[rank 1\] [\d-]+ [\d:,]+ WARNING mine: only here", line)
