"""Whole proofs of the stand-in trainer: sound ones, and broken ones with the exact verdict each must get."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conformance.proof_record import read_proof
from conformance.record import read_trajectory
from st.__main__ import main
from st.judge import NotJudgedError, judge, require_pointer
from st.proof import Proof, load_proof
from tests.st import stand_in
from tests.st.legs import fault_after_step, processes_naming, run_stand_in
from tests.st.run_prove import STAND_IN

IDENTICAL = "identical, steps 11..25, 4 ranks: loss, lr, grad_norm, samples, model, optimizer, rng"
CHECKOUT = Path(__file__).parents[2]


def write_proof_file(folder: Path, *, resumed: str = "", hold: bool = True) -> Path:
    (folder / "stand_in.yaml").write_text("trainer: stand-in\n")
    path = folder / "proof.yaml"
    overrides = "overrides: [--hold-after=13], " if hold else ""
    path.write_text(
        f"""
id: stand-in
title: a trainer without a model
config: stand_in.yaml
ranks: 4
script:
  - {{leg: reference}}
  - {{leg: interrupted, {overrides}fault: {{kind: kill, after_step: 13}}}}
  - {{leg: resumed, restore_from: LATEST, resumes_at: 10, overrides: [{resumed}]}}
"""
    )
    return path


def results_of(folder: Path) -> Path:
    (found,) = (folder / "results").iterdir()
    return found


def prove(folder: Path, path: Path, *options: str) -> int:
    return main(["prove", str(path), "--results", str(folder / "results"), *options], program=STAND_IN)


def test_a_sound_trainer_is_proved_identical_and_gets_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prove(tmp_path, write_proof_file(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert IDENTICAL in lines
    folder = results_of(tmp_path)
    record = read_proof(folder)
    assert (record.outcome, record.verdict, record.divergence) == ("identical", IDENTICAL, None)
    assert [leg.label for leg in record.legs] == ["reference", "interrupted", "resumed"]
    assert "<!doctype html>" in (folder / "index.html").read_text().lower()
    assert not (folder / "checkpoints").exists()
    assert processes_naming(tmp_path) == []


def test_a_broken_resume_exits_1_and_keeps_the_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_proof_file(tmp_path, resumed="--defect=rng-of-another-rank")
    assert prove(tmp_path, path, "--no-page") == 1
    expected, found = (stand_in.values(rank, 11)["digests"]["rng"]["python"] for rank in (2, 1))
    verdict = (
        f"DIFFERENT: first at step 11, rank 2, bucket rng_state (column rng.python): "
        f"reference {expected}, resumed {found}"
    )
    assert verdict in capsys.readouterr().out.splitlines()
    record = read_proof(results_of(tmp_path))
    assert (record.outcome, record.verdict) == ("different", verdict)
    assert (results_of(tmp_path) / "checkpoints" / "run" / "latest_checkpoint_iteration.txt").exists()


def test_repeats_of_a_failing_leg_exit_4_and_print_each_verdict_and_that_all_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_proof_file(tmp_path)
    path.write_text(path.read_text().replace("leg: reference", "leg: reference, overrides: [--defect=dies-early]"))
    assert prove(tmp_path, path, "--no-page", "--repeat", "2") == 4
    output = capsys.readouterr().out
    verdict = "ERROR: leg reference: failed: torchrun ended with exit code 1"
    assert "rank 3 meets its end" in output
    assert output.splitlines().count(verdict) == 2
    summary = [f"stand-in: {verdict}", f"stand-in: {verdict}", "stand-in: all 2 verdicts are the same"]
    assert output.splitlines()[-3:] == summary
    for folder in (tmp_path / "results").iterdir():
        record = read_proof(folder)
        assert (record.outcome, record.verdict, len(record.legs)) == ("error", verdict, 1)


def test_an_empty_folder_of_proofs_is_an_error_not_a_pass(tmp_path: Path) -> None:
    assert main(["prove", "--all", str(tmp_path)], program=STAND_IN) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_a_polite_kill_leave_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    path = write_proof_file(tmp_path)
    path.write_text(path.read_text().replace("leg: reference", "leg: reference, overrides: [--defect=never-ends]"))
    command = [sys.executable, "-m", "tests.st.run_prove", "prove", str(path), "--results", str(tmp_path / "results")]
    runner = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        wait_for_step(tmp_path, 25, runner)
        runner.send_signal(number)
        _, errors = runner.communicate(timeout=60)
    finally:
        runner.kill()
    assert runner.returncode == 130, errors
    assert b"interrupted; every process of the running legs is dead" in errors
    assert processes_naming(tmp_path) == []


def wait_for_step(folder: Path, step: int, runner: subprocess.Popen[bytes]) -> None:
    pattern = "results/*/legs/0-reference/trajectory_rank_2.jsonl"
    while not any(file.read_bytes().count(b"\n") == step for file in folder.glob(pattern)):
        assert runner.poll() is None, "the runner ended before it was interrupted"
        time.sleep(0.01)


class Ran:
    """A reference and an interrupted leg that several resumed legs, each broken otherwise, are held against."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proof: Proof = load_proof(write_proof_file(folder))
        run_stand_in(folder / "first", "reference")
        self.killed = run_stand_in(folder / "second", "interrupted", "--hold-after=13", fault=fault_after_step(13))
        self.checkpoints = folder / "second" / "checkpoints"

    def verdict(self, folder: Path, *options: str) -> str:
        run_stand_in(folder, "resumed", *options, checkpoints=self.checkpoints)
        legs = {
            "reference": self.folder / "first" / "legs" / "reference",
            "interrupted": self.folder / "second" / "legs" / "interrupted",
            "resumed": folder / "legs" / "resumed",
        }
        return judge(self.proof, {label: read_trajectory(path, ranks=4) for label, path in legs.items()}).verdict


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(tmp_path_factory.mktemp("ran"))


def test_a_loss_that_differs_in_its_last_bit_is_found(ran: Ran, tmp_path: Path) -> None:
    loss = 6.0 / math.sqrt(17)
    assert ran.verdict(tmp_path, "--defect=last-bit-of-loss") == (
        "DIFFERENT: first at step 17, rank 0, bucket model (column loss): "
        f"reference {loss!r}, resumed {math.nextafter(loss, math.inf)!r}"
    )


def test_a_resume_one_step_late_is_found(ran: Ran, tmp_path: Path) -> None:
    assert ran.verdict(tmp_path, "--defect=one-step-late") == (
        "DIFFERENT: first at step 11, rank 0, bucket progress (column global_step): reference 11, resumed 12"
    )


def test_a_resume_that_stops_one_step_early_is_found(ran: Ran, tmp_path: Path) -> None:
    assert ran.verdict(tmp_path, "--defect=stops-early") == (
        "DIFFERENT: first at step 25, rank 0, bucket progress (column global_step): reference 25, resumed absent"
    )


def test_an_interrupted_leg_that_differs_means_that_the_reference_does_not_repeat(ran: Ran, tmp_path: Path) -> None:
    options = ("--defect=rng-of-another-rank", "--hold-after=13")
    run_stand_in(tmp_path, "interrupted", *options, fault=fault_after_step(13))
    reference = read_trajectory(ran.folder / "first" / "legs" / "reference")
    interrupted = read_trajectory(tmp_path / "legs" / "interrupted")
    with pytest.raises(
        NotJudgedError, match="reference not reproducible: the interrupted leg differs at step 1, rank 2"
    ):
        judge(ran.proof, {"reference": reference, "interrupted": interrupted, "resumed": reference})


def test_a_pointer_that_is_not_where_the_proof_resumes_is_not_judged(ran: Ran) -> None:
    require_pointer(ran.killed, 10)
    with pytest.raises(NotJudgedError, match="the pointer said 10, but the proof resumes at 12"):
        require_pointer(ran.killed, 12)
