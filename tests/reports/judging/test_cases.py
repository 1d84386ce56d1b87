"""What a case's entry says of its legs: lost steps, samples, restored buckets, distances; hidden is what must be hidden."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.plain_data.serial import SerialError
from conformance.records.comparison import Divergence
from conformance.records.results import LegRecord
from reports.contents.document import CaseEntry
from reports.judging.assemble import assemble
from reports.judging.differences import distance, grid, ulps
from reports.output.timeline import draw_timeline, lanes
from reports.reading.read import read_run
from reports.reading.redact import redact, redact_command, redact_environment
from tests.reports.formulas import samples
from tests.reports.run_folder import RunFolder, wrong_stream


def entry(run: RunFolder, key: str = "C9") -> CaseEntry:
    report = assemble(read_run([run.finish()])).report
    (found,) = (case for case in report.cases if case.key == key)
    return found


def test_lost_steps_and_the_time_to_the_next_step_are_reported(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.resumed_case("C9", kill=8, resume=5)
    (resume,) = entry(run).resumes
    assert (resume.killed_after, resume.resumed_at, resume.lost_steps) == (8, 5, 3)
    assert resume.seconds == 0.75  # schema 1 does not tell when legs began: from the new process's start only
    assert resume.measured == "restart"


def test_with_the_legs_starts_the_whole_outage_is_reported(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", suite="st", platform="cpu4")
    run.resumed_case("C9")
    report = assemble(read_run([run.finish()])).report
    (case,) = report.cases
    assert case.resumes[0].measured == "outage"
    assert case.resumes[0].seconds == 1.5 + 0.75
    assert {leg.launcher for leg in case.legs} == {"torchrun"}


def test_a_header_records_commit_machine_and_settings_and_no_secret(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", suite="st", platform="cpu4")
    run.case("A6", suite="st")
    (part,) = assemble(read_run([run.finish()])).report.parts
    assert (part.suite, part.missing) == ("st", ())
    assert part.machine == {"cpu": "A CPU", "cores": "2", "memory_bytes": "3221225472", "file_system": "ext4"}
    assert part.facts == {
        "commit": "0123456789ab",
        "dirty": "yes",
        "packages_digest": "feedfacefeedface",
        "environment HF_TOKEN": "(hidden)",
        "environment OMP_NUM_THREADS": "1",
    }


def test_what_a_header_of_schema_1_lacks_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.case("A6")
    (part,) = assemble(read_run([run.finish()])).report.parts
    assert (part.suite, part.machine, part.facts) == ("", {}, {})
    assert part.missing == ("source", "machine", "packages_digest", "environment")


@pytest.mark.parametrize(("outcome", "state"), [("pass", "incomplete"), ("fail", "refused"), ("error", "incomplete")])
def test_a_kill_that_its_soak_does_not_tell_of_counts_all_the_same(tmp_path: Path, outcome: str, state: str) -> None:
    run = RunFolder(tmp_path / "run", suite="soak", platform="cpu4")
    run.soak("soak.demo", [{}, {"operation": 12, "rank": 1, "outcome": outcome, "reason": "lost a step"}])
    report = assemble(read_run([run.finish()])).report
    assert [(kill.number, kill.operation, kill.lost_steps) for kill in report.kills] == [(1, None, 2), (2, 12, 2)]
    assert report.verdict.state == state
    reported = [one for one in report.verdict.findings if one.kind.startswith("kill")]
    assert [one.anchor for one in reported] == ([] if outcome == "pass" else ["kill-cpu4-soak.demo-2"])


def test_paths_of_a_machine_stay_out_of_kills(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", suite="sweep", platform="cpu4")
    run.soak("sweep.sync", [{"what": "rename /data/secret/place/of/this/machine/a to b"}])
    (kill,) = assemble(read_run([run.finish()])).report.kills
    assert kill.what == "rename …/machine/a to b"


CONFIGURED: dict[str, list[Any]] = {
    "training.max_steps": [25, "examples/demo.yaml:9"],
    "checkpoint.restore_from": [None, "default"],
    "checkpoint.checkpoint_dir": ["/home/me/some/where/run-7/checkpoints", "override --checkpoint.checkpoint_dir"],
    "data.api_key": ["s3cret", "default"],
}


def test_the_whole_configuration_is_shown_once_and_of_later_legs_only_differences(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", suite="st", platform="cpu4")
    later = {**CONFIGURED, "checkpoint.restore_from": ["LATEST", "override --checkpoint.restore_from"]}
    run.resumed_case("D1", ranks=2, configured={"reference": CONFIGURED, "interrupted": CONFIGURED, "resumed": later})
    first, second, third = entry(run, "D1").configurations
    assert (first.leg, first.base) == ("reference", None)
    assert first.rows == (
        ("training.max_steps", "25", "examples/demo.yaml:9"),
        ("checkpoint.restore_from", "null", "default"),
        ("checkpoint.checkpoint_dir", '"…/run-7/checkpoints"', "override --checkpoint.checkpoint_dir"),
        ("data.api_key", '"(hidden)"', "default"),
    )
    assert (second.leg, second.base, second.rows) == ("interrupted", "reference", ())
    assert third.rows == (("checkpoint.restore_from", '"LATEST"', "override --checkpoint.restore_from"),)


@pytest.mark.parametrize(
    ("tensor", "layout"),
    [(None, "4 ranks, examples/demo.yaml"), (1, "4 ranks, FSDP2"), (2, "4 ranks, TP 2 × FSDP2 2")],
)
def test_the_layout_of_a_configured_program_is_what_that_reported(
    tmp_path: Path, tensor: int | None, layout: str
) -> None:
    run = RunFolder(tmp_path / "run", suite="st", platform="cpu4")
    reported = {"reference": {"accelerator.tp_size": [tensor, "examples/demo.yaml:9"]}} if tensor else None
    run.resumed_case("D1", ranks=4, given={"world_size": 4, "config": "examples/demo.yaml"}, configured=reported)
    assert entry(run, "D1").layout == layout


@pytest.mark.parametrize("values", [None, {"a": 1}, {"a": {"value": 1}}])
def test_a_configuration_of_another_form_is_refused(tmp_path: Path, values: Any) -> None:
    run = RunFolder(tmp_path / "run", suite="st", platform="cpu4")
    run.resumed_case("D1", configured={"resumed": CONFIGURED})
    path = run.folder / "D1/legs/resumed/events_rank_0.jsonl"
    start, reported, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(start + json.dumps({**json.loads(reported), "values": values}) + "\n" + "".join(rest))
    with pytest.raises(SerialError, match="D1/legs/resumed"):
        entry(run, "D1")


def replayed(row: dict[str, Any], rank: int) -> None:
    """Step 8 trains on step 7's samples again, so step 8's never come."""
    if row["global_step"] == 8:
        row["sample_ids"] = samples(7)


def swapped(row: dict[str, Any], rank: int) -> None:
    if row["global_step"] == 8:
        row["sample_ids"] = samples(8)[::-1]


@pytest.mark.parametrize(
    ("change", "duplicated", "skipped", "misplaced"),
    [(None, (), (), None), (replayed, (0, 1, 2, 3), (4, 5, 6, 7), 4), (swapped, (), (), 4)],
)
def test_the_ledger_names_samples_that_came_twice_never_or_out_of_order(
    tmp_path: Path,
    change: Callable[[dict[str, Any], int], None] | None,
    duplicated: tuple[int, ...],
    skipped: tuple[int, ...],
    misplaced: int | None,
) -> None:
    run = RunFolder(tmp_path / "run")
    run.resumed_case("C9", change=change)
    epochs = entry(run).epochs
    assert [(one.epoch, one.seen, one.expected) for one in epochs] == [(0, 24, 24), (1, 24, 24)]
    assert epochs[0].duplicated == epochs[0].skipped == ()
    assert (epochs[1].duplicated, epochs[1].skipped, epochs[1].out_of_order_at) == (duplicated, skipped, misplaced)


def test_a_restore_that_brought_everything_back_is_exact_in_every_bucket(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.resumed_case("C9", ranks=2)
    (certificate,) = entry(run).certificates
    assert certificate.step == 5
    assert {cell.state for cell in certificate.cells} == {"exact"}
    assert len(certificate.cells) == 6 * 2


def spoil(buckets: dict[str, Any], rank: int) -> None:
    if rank == 1:
        buckets["optimizer"]["weight.exp_avg"] = "float32[2] zero"
        del buckets["lr_scheduler"]
        buckets["rng_state"]["numpy"] = "ee"


def test_a_restore_that_lost_something_says_what_on_which_rank(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.resumed_case("C9", ranks=2, restored=spoil)
    (certificate,) = entry(run).certificates
    bad = {(cell.bucket, cell.rank): cell for cell in certificate.cells if cell.state != "exact"}
    assert set(bad) == {("optimizer", 1), ("lr_scheduler", 1), ("rng_state", 1)}
    assert bad["optimizer", 1].different == (("weight.exp_avg", "float32[2] 0000000c", "float32[2] zero"),)
    assert bad["lr_scheduler", 1].state == "absent"
    assert bad["rng_state", 1].different == (("numpy", "-", "ee"),)


def test_the_grid_names_the_first_step_of_every_column_and_rank(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.resumed_case("D1", ranks=4, change=wrong_stream)
    (part,) = read_run([run.finish()]).parts
    table = grid(part.trajectories["D1/legs/reference"], part.trajectories["D1/legs/resumed"])
    differing = {
        (row.column, cell.rank): (cell.first_step, cell.part) for row in table for cell in row.cells if cell.different
    }
    assert differing == {("rng", 2): (6, "rng.torch_cpu"), ("loss", 2): (6, "loss")}
    assert {cell.compared for row in table for cell in row.cells} == {7}


def test_the_distance_of_two_floats_is_counted_in_floats() -> None:
    assert ulps(1.0, math.nextafter(1.0, 2.0)) == 1
    assert ulps(1.0, 1.0 - 2**-53) == -1
    assert ulps(-0.0, 0.0) == 0
    assert ulps(-5e-324, 5e-324) == 2
    assert ulps(1.0, 1.0 + 2**-23, single=True) == 1
    assert ulps(1.0, 2.0, single=True) == 2**23


def divergence(column: str, reference: str, resumed: str) -> Divergence:
    return Divergence(step=1, rank=0, bucket="model", column=column, reference=reference, resumed=resumed)


def test_a_distance_is_given_in_the_type_that_both_values_have() -> None:
    one, other = float(np.float32(0.3)), float(np.nextafter(np.float32(0.3), np.float32(1)))
    found = distance(divergence("loss", repr(one), repr(other)))
    assert found is not None
    assert (found.ulp, found.ulp_type) == (1, "float32")
    assert found.reference_hex == one.hex()
    double = distance(divergence("lr", "0.1", repr(math.nextafter(0.1, 0))))
    assert double is not None
    assert (double.ulp, double.ulp_type) == (-1, "float64")


@pytest.mark.parametrize(
    ("column", "reference", "resumed"), [("model", "abc", "abd"), ("loss", "nan", "1.0"), ("loss", "absent", "1.0")]
)
def test_what_is_no_number_has_no_distance(column: str, reference: str, resumed: str) -> None:
    assert distance(divergence(column, reference, resumed)) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("FileNotFoundError: /no/such/dir", "FileNotFoundError: /no/such/dir"),
        ("in /data/me/runs/run-7/C9/disk/x.pt", "in …/disk/x.pt"),
        ("/opt/a/b/c/lib/python3.11/site-packages/torch/x.py:3", "site-packages/torch/x.py:3"),
        ("checkpoints/global_step_4/.metadata", "checkpoints/global_step_4/.metadata"),
        ("../../disk/checkpoints/global_step_10", "../../disk/checkpoints/global_step_10"),
        ("MY_API_TOKEN=abc123 x", "MY_API_TOKEN=(hidden) x"),
        ("password: hunter2", "password: (hidden)"),
        ("https://me:pw@host.example/x", "https://host.example/x"),
        ("the token of a step", "the token of a step"),
        ("tokenizer=bpe", "tokenizer=bpe"),
        ("data.token_noise=0.05, max_tokens: 9", "data.token_noise=0.05, max_tokens: 9"),
        ("auth.token=abc TOKEN_2=def", "auth.token=(hidden) TOKEN_2=(hidden)"),
    ],
)
def test_paths_of_a_machine_and_secrets_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_the_value_behind_a_secret_option_is_hidden() -> None:
    assert redact_command(["run", "--hub-token", "abc", "--results", "/tmp/x/y"]) == (
        "run --hub-token (hidden) --results …/x/y"
    )


def test_of_the_environment_only_what_is_known_is_shown() -> None:
    environment = {"OMP_NUM_THREADS": "1", "HF_TOKEN": "abc", "AWS_THING": "x", "RANK": "0", "HOME": "/home/me"}
    assert redact_environment(environment) == {"HF_TOKEN": "(hidden)", "OMP_NUM_THREADS": "1", "RANK": "0"}


def test_step_numbers_above_saves_never_write_over_each_other(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.case("C9")
    run.leg("C9", "saving", 1, 12, saves=range(1, 13))
    (part,) = read_run([run.finish()]).parts
    rows = lanes(part, part.of(LegRecord, "C9"))
    assert len(rows[0].saves) == 12
    drawn = draw_timeline(rows, title="t", name="n", words={"seconds": "s", "rank": "rank"})
    places = [float(x) for x in re.findall(r'class="save-name" x="([0-9.]+)"', drawn)]
    assert len(places) == 2
    assert all(other - one > 12 for one, other in itertools.pairwise(places))
