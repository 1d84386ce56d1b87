"""The rule of four: each reason of a certificate answers one question, and the certificates by which all hold are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from hyper_resume.state.certificate import BucketCertificate, Certificate
from hyper_resume.state.certificate import certify_bucket as certify
from hyper_resume.trainer.run.differences import Difference
from hyper_resume.trainer.uncovered import reasons_of
from reports.contents.document import QUESTIONS, FourAnswers, Question
from reports.judging.assemble import Assembled, assemble
from reports.judging.rule_of_four import summarise
from reports.output.machine_files import make_summary
from reports.output.page import render
from reports.reading.read import read_run
from tests.reports.html import Page
from tests.reports.run_folder import RunFolder

MESH = (
    "the mesh changed: random streams start from the seed, the step and the data-parallel coordinate "
    "(the mesh was dp_shard 4 x tp 1, is dp_shard 2 x tp 2)"
)
LR = Difference(name="optimizer.lr", saved=0.1, now=0.2, bucket="optimizer", paths=()).text("saved")
HORIZON = Difference(name="lr_scheduler.T_max", saved=15, now=25, bucket="lr_scheduler", paths=()).text("saved")
SCHEDULE = (
    f"{HORIZON}; the next step has "
    "lr 0.01, as saved; planned by this run's configuration it has lr 0.02; to take this run's schedule, set "
    "checkpoint.override_on_restore=[lr_scheduler]"
)
BASE = Difference(
    name="model.frozen", saved="ab12", now="cd34; 2 of 6 parameters and buffers that are not saved have other values: a, b",
    bucket="model", paths=(),
).text("now")  # fmt: skip
PLACE = "global_step 4 at 8 steps per epoch is epoch 0, step 4, but the data position is epoch 0, step 2"
(UNCOVERED,) = reasons_of(["trainer.ema.0"]).values()
MOVED = "iter() of a DataLoader draws from the torch_cpu stream, also in the middle of an epoch: make it resumable"
DATA = "the data has changed since the checkpoint (dp_world_size saved 4, current 2; batch_size saved 1, current 2)"


def certificate(*parts: BucketCertificate, ranks: int = 1) -> str:
    """The text that a trainer logs."""
    made = Certificate(
        path="x/global_step_5", global_step=5, start_epoch=0, start_step=5, world_size=ranks, verified="digest",
        created_at="2026-01-01T00:00:00.000000+00:00", parts=parts,
    )  # fmt: skip
    return f"Restore certificate of {made.path}:\n  " + "\n  ".join(made.lines())


def part(bucket: str = "model", *reasons: str, rank: int = 0, **more: Any) -> BucketCertificate:
    return certify(
        bucket=bucket, rank=rank, reasons=reasons, saved=("a", "a"), loaded="a", live=more.pop("live", "a"), **more
    )


def run_with(folder: Path, text: str, *, checks: list[dict[str, Any]] | None = None, suite: str = "st") -> Assembled:
    """A run whose resumed leg logs this certificate."""
    run = RunFolder(folder, suite=suite, platform="cpu4")
    key = run.resumed_case("C9")
    path = folder / key / "legs" / "resumed" / "events_rank_0.jsonl"
    lines = path.read_text().splitlines()
    lines.insert(1, json.dumps({"kind": "log", "at": 0.1, "level": "INFO", "logger": "x", "message": text}))
    path.write_text("".join(f"{line}\n" for line in lines))
    run.lines[-1]["checks"] += checks or []
    return assemble(read_run([run.finish()]))


def answers(made: Assembled) -> dict[str, FourAnswers]:
    (case,) = made.report.cases
    (one,) = case.certificates
    return {row.bucket: row for row in one.four}


def broken(row: FourAnswers) -> dict[str, tuple[str, ...]]:
    return {name: getattr(row, name).reasons for name in QUESTIONS if getattr(row, name).state == "broken"}


def test_the_questions_are_those_of_the_type() -> None:
    assert get_args(Question) == QUESTIONS


REASONS = [
    ("the live state after the restore differs from what was read", "came_back"),
    ("the checkpoint holds no state of ema; it keeps its initial state", "came_back"),
    ("the checkpoint holds no data position: this epoch is replayed from its start", "came_back"),
    ("something that no version has said so far", "came_back"),
    (UNCOVERED, "complete"),
    (LR, "same_thing"),
    (SCHEDULE, "same_thing"),
    (DATA, "same_thing"),
    (BASE, "same_thing"),
    (PLACE, "same_thing"),
    (MESH, "same_thing"),
    ("and 3 more differences of this kind", "same_thing"),
    ("the checkpoint holds model entries that this model does not have; not restored: model.x", "same_thing"),
    (MOVED, "still_there"),
    ("the random streams moved between the restore and the first forward pass (torch_cpu): draw before", "still_there"),
    ("the python stream is drawn from by the data loader and by training in turn", "still_there"),
]


@pytest.mark.parametrize(("reason", "question"), REASONS)
def test_a_reason_answers_one_question_and_the_others_hold(tmp_path: Path, reason: str, question: str) -> None:
    found = answers(run_with(tmp_path / "run", certificate(part("rng_state", reason), part("model"))))
    assert broken(found["rng_state"]) == {question: (reason,)}
    assert broken(found["model"]) == {}


def test_reasons_of_one_bucket_are_told_apart_and_semicolons_within_one_are_not(tmp_path: Path) -> None:
    (row,) = answers(
        run_with(tmp_path / "run", certificate(part("optimizer", SCHEDULE, UNCOVERED, DATA, MOVED)))
    ).values()
    assert broken(row) == {"complete": (UNCOVERED,), "same_thing": (SCHEDULE, DATA), "still_there": (MOVED,)}


def test_a_bucket_that_is_not_exact_on_one_rank_names_it(tmp_path: Path) -> None:
    parts = [part("rng_state"), part("rng_state", MESH, rank=1)]
    found = answers(run_with(tmp_path / "run", certificate(*parts, ranks=2)))
    assert broken(found["rng_state"]) == {"same_thing": (f"{MESH} (rank 1)",)}


def test_a_declared_difference_is_none_that_is_broken(tmp_path: Path) -> None:
    declared = part("optimizer", overridden=["optimizer.lr: 0.1 -> 0.2"])
    both = part("lr_scheduler", UNCOVERED, overridden=["lr_scheduler.T_max: 15 -> 25"])
    made = run_with(tmp_path / "run", certificate(declared, both))
    found = answers(made)
    assert (found["optimizer"].same_thing.state, broken(found["optimizer"])) == ("declared", {})
    assert found["optimizer"].same_thing.reasons == ("optimizer.lr: 0.1 -> 0.2",)
    assert broken(found["lr_scheduler"]) == {"complete": (UNCOVERED,)}
    assert found["lr_scheduler"].same_thing.reasons == ("lr_scheduler.T_max: 15 -> 25",)
    assert summarise(made.report.cases).declared == 1


def test_what_was_not_asked_for_is_told_and_what_neither_side_has_is_left_out(tmp_path: Path) -> None:
    parts = [
        certify(bucket="optimizer", rank=0, absent="not asked for"),
        certify(bucket="stateful", rank=0, absent="neither the checkpoint nor this trainer has any"),
    ]
    made = run_with(tmp_path / "run", certificate(part("model"), *parts))
    found = answers(made)
    assert set(found) == {"model", "optimizer"}
    assert {getattr(found["optimizer"], name).state for name in QUESTIONS} == {"not_asked"}
    assert found["optimizer"].came_back.reasons == ("not asked for",)
    counted = summarise(made.report.cases)
    assert (counted.total, counted.hold, counted.not_asked, counted.rows) == (1, 1, 1, ())


def compared(status: str, blames: str | None) -> dict[str, Any]:
    return {
        "check": "certified_exact", "parameters": {"leg": "resumed", "against": "reference"}, "status": status,
        "expected": "as before", "observed": "step 6, rank 0, loss: 1 instead of 2", "divergence": None, "blames": blames,
    }  # fmt: skip


def test_training_that_differs_although_it_is_certified_was_not_still_there(tmp_path: Path) -> None:
    made = run_with(tmp_path / "run", certificate(part("model")), checks=[compared("failed", "model")])
    assert broken(answers(made)["model"]) == {"still_there": ("step 6, rank 0, loss: 1 instead of 2",)}
    fine = run_with(tmp_path / "fine", certificate(part("model")), checks=[compared("passed", None)])
    assert broken(answers(fine)["model"]) == {}
    assert fine.report.cases[0].certificates[0].compared_with == ("reference",)


def test_page_and_summary_count_the_certificates_and_show_the_reasons_in_both_languages(tmp_path: Path) -> None:
    made = run_with(tmp_path / "run", certificate(part("model"), part("rng_state", MESH), part("stateful", UNCOVERED)))
    page = Page(render(made))
    assert page.text.count("The rule of four") >= 2  # in the contents and as a heading
    assert "0 / 1 restores with a certificate by which all four hold for every bucket" in page.text
    assert "same thing : does not hold in this many certificates: 1" in page.text
    assert "came back : holds in every certificate" in page.text
    assert "rng_state holds holds does not hold the mesh changed" in page.text
    assert "All four hold : model" in page.text
    assert "四项准则" in render(made)
    told = "by which all four of the rule hold: 0 of 1; by the others does not hold: complete 1, same thing 1."
    assert told in make_summary(made.report)


def test_a_run_without_certificates_has_no_such_section(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", suite="st", platform="cpu4")
    run.resumed_case("C9")
    made = assemble(read_run([run.finish()]), profile="selection")
    assert 'id="rule_of_four"' not in render(made)
    assert "rule hold" not in make_summary(made.report)
