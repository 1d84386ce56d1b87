"""What is not whole is refused, with the place named; a refused run leaves no file behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.records.trajectory import RecordError, read_rank_file
from reports.__main__ import main
from reports.judging.assemble import assemble
from reports.reading.fast_trajectory import read_rank_quickly
from reports.reading.read import read_run
from tests.reports.formulas import record
from tests.reports.run_folder import RunFolder


def small_run(folder: Path) -> RunFolder:
    run = RunFolder(folder)
    run.resumed_case("C9", ranks=2)
    run.case("A6")
    return run


def remove_footer(run: RunFolder) -> None:
    run.lines.pop()
    run.write()


def add_unknown_field(run: RunFolder) -> None:
    run.lines[1]["surprise"] = 1
    run.write()


def drop_leg(run: RunFolder) -> None:
    run.lines = [line for line in run.lines if line.get("leg") != "reference"]
    run.write()


def drop_case(run: RunFolder) -> None:
    run.lines = [line for line in run.lines if not (line["record"] == "case" and line["key"] == "A6")]
    run.write()


def repeat_result(run: RunFolder) -> None:
    run.lines.insert(-1, run.lines[-2])
    run.write()


def tear_last_line(run: RunFolder) -> None:
    path = run.folder / "results.jsonl"
    path.write_text(path.read_text()[:-5])


def other_schema(run: RunFolder) -> None:
    run.lines[0]["schema"] = "hyper_resume.results/99"
    run.write()


def lose_trajectory(run: RunFolder) -> None:
    (run.folder / "C9/legs/resumed/trajectory_rank_1.jsonl").unlink()


def lose_leg_folder(run: RunFolder) -> None:
    for path in (run.folder / "C9/legs/interrupted").iterdir():
        path.unlink()
    (run.folder / "C9/legs/interrupted").rmdir()


def shorten_trajectory(run: RunFolder) -> None:
    path = run.folder / "C9/legs/reference/trajectory_rank_0.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def break_event(run: RunFolder) -> None:
    (run.folder / "C9/legs/resumed/events_rank_0.jsonl").write_text('{"kind": "dance", "at": 1}\n')


def climb_out(run: RunFolder) -> None:
    for line in run.lines:
        if line.get("leg") == "resumed":
            line["folder"] = "../../etc"
    run.write()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (remove_footer, "no footer"),
        (add_unknown_field, "unknown key 'surprise'"),
        (drop_leg, "judges leg reference, which has no record"),
        (drop_case, "A6 has 0 case records"),
        (repeat_result, "two results are called A6"),
        (tear_last_line, "torn"),
        (other_schema, "results/99"),
        (lose_trajectory, "trajectory_rank_1.jsonl: missing, though the rank finished steps 6..12"),
        (lose_leg_folder, "leg interrupted of C9 is missing"),
        (shorten_trajectory, "steps 1..11, the leg's record says 1..12"),
        (break_event, "no event is called 'dance'"),
        (climb_out, "lies outside of the run"),
    ],
)
def test_broken_records_are_refused_by_name_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[RunFolder], None], expected: str
) -> None:
    run = small_run(tmp_path / "run")
    run.finish()
    damage(run)
    output = tmp_path / "report"
    assert main(["build", str(tmp_path / "run"), "-o", str(output)]) == 2
    assert expected in capsys.readouterr().err
    assert not output.exists()


def test_a_folder_without_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", str(tmp_path)]) == 2
    assert "this is no results folder" in capsys.readouterr().err


def test_one_unfinished_part_refuses_the_whole_run(tmp_path: Path) -> None:
    small_run(tmp_path / "a").finish()
    second = small_run(tmp_path / "b")
    second.write()
    with pytest.raises(RecordError, match="no footer"):
        read_run([tmp_path])


def test_two_parts_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        small_run(tmp_path / name).finish()
    with pytest.raises(RecordError, match="'run-1' is there twice"):
        read_run([tmp_path / "a", tmp_path / "b"])


def test_a_leg_that_died_before_its_first_step_needs_no_trajectory(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    for line in run.lines:
        if line.get("leg") == "resumed":
            line |= {"first_steps": [None, None], "last_steps": [None, None]}
    for rank in (0, 1):
        (run.folder / f"C9/legs/resumed/trajectory_rank_{rank}.jsonl").unlink()
    (part,) = read_run([run.finish()]).parts
    assert part.trajectories["C9/legs/resumed"].records == {}


def test_a_soak_has_no_case_and_is_read_all_the_same(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", suite="soak", platform="cpu4")
    run.soak("soak.tiny", [{}])
    report = assemble(read_run([run.finish()])).report
    assert [(case.case, case.outcome) for case in report.cases] == [("soak.tiny", "pass")]
    assert [row.group for row in report.rows if row.id == "soak"] == [""]


LINE = json.dumps(record(3))


@pytest.mark.parametrize(
    "line",
    [
        LINE,
        LINE.replace('"loss": ', '"loss": NaN, "x": ').replace(', "x": ' + repr(record(3)["loss"]), ""),
        json.dumps({**record(3), "grad_norm": None}),
        json.dumps({**record(3), "lr": 1, "group_lrs": [1, 0.5]}),
        json.dumps({**record(3), "digests": None}),
        json.dumps({key: value for key, value in record(3).items() if key != "digests"}),
        json.dumps({**record(3), "digests": {**record(3)["digests"], "extras": {"ema": "ff"}}}),
        json.dumps(record(3), separators=(",", ":")),
        LINE + "\n" + json.dumps(record(4)) + "\n" + LINE[:20],
    ],
)
def test_the_quick_reader_reads_what_the_strict_one_reads(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trajectory_rank_0.jsonl"
    path.write_text(line if line.endswith(LINE[:20]) else line + "\n")
    assert repr(read_rank_quickly(path, 0)) == repr(read_rank_file(path, 0))


@pytest.mark.parametrize(
    "line",
    [
        LINE.replace('"epoch": 0', '"epoch": 0, "epoch": 1'),
        LINE.replace('"global_step": 3', '"global_step": 0'),
        LINE.replace('"global_step": 3', '"global_step": true'),
        LINE.replace('"loss"', '"lost"'),
        LINE.replace('"sample_ids": [', '"sample_ids": [1.5, '),
        LINE.replace('"model": "', '"model": "", "x": "'),
        LINE + "\n" + LINE,
        LINE + "," + LINE,
        "[]",
        "{",
    ],
)
def test_the_quick_reader_refuses_what_the_strict_one_refuses_in_the_same_words(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trajectory_rank_0.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(RecordError) as strict:
        read_rank_file(path, 0)
    with pytest.raises(RecordError) as quick:
        read_rank_quickly(path, 0)
    assert str(quick.value) == str(strict.value)
