"""The reader of trajectories accepts a torn last line and no other defect."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from conformance.records.trajectory import RecordError, read_trajectory
from tests.conformance.trajectories import line, write_rank_file


def test_every_rank_is_read_in_step_order(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_rank_file(tmp_path, rank, [line(rank, step) for step in (1, 2, 3)])
    found = read_trajectory(tmp_path, ranks=2)
    assert found.ranks == (0, 1)
    assert [record.global_step for record in found.records[1]] == [1, 2, 3]
    assert found.records[1][2].sample_ids == (7, 103)
    assert found.records[0][0].group_lrs == (1e-4, 2e-4)
    assert (found.first_step(0), found.last_step(0), found.torn_ranks) == (1, 3, ())


def test_floats_come_back_to_the_last_bit_and_nan_and_infinity_too(tmp_path: Path) -> None:
    loss = math.nextafter(0.1, 1.0)
    write_rank_file(tmp_path, 0, [line(0, 1, loss=loss, lr=math.inf, grad_norm=math.nan)])
    (record,) = read_trajectory(tmp_path).records[0]
    assert record.loss.hex() == loss.hex()
    assert record.lr == math.inf
    assert record.grad_norm is not None
    assert math.isnan(record.grad_norm)


def test_records_without_digests_and_without_gradient_norm_are_read(tmp_path: Path) -> None:
    record = line(0, 1, grad_norm=None)
    del record["digests"]
    write_rank_file(tmp_path, 0, [record])
    (found,) = read_trajectory(tmp_path).records[0]
    assert (found.digests, found.grad_norm) == (None, None)


@pytest.mark.parametrize("cut", [1, 60, -1])
def test_a_torn_last_line_is_left_out_and_told(tmp_path: Path, cut: int) -> None:
    torn = json.dumps(line(1, 3))[:cut]
    write_rank_file(tmp_path, 0, [line(0, step) for step in (1, 2, 3)])
    write_rank_file(tmp_path, 1, [line(1, step) for step in (1, 2)], end=torn)
    found = read_trajectory(tmp_path)
    assert (found.last_step(1), found.torn_ranks, found.last_common_step()) == (2, (1,), 2)


def test_a_rank_killed_before_its_first_record_has_no_steps(tmp_path: Path) -> None:
    write_rank_file(tmp_path, 0, [], end='{"global_st')
    found = read_trajectory(tmp_path)
    assert (found.first_step(0), found.last_step(0), found.last_common_step()) == (None, None, None)


def test_a_torn_line_in_the_middle_is_an_error_with_file_and_line(tmp_path: Path) -> None:
    path = write_rank_file(tmp_path, 0, [line(0, 1)], end='{"global_step": 2\n' + json.dumps(line(0, 3)) + "\n")
    with pytest.raises(RecordError, match="not a JSON record") as caught:
        read_trajectory(tmp_path)
    assert f"{path}:2:" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "5.5"}, "loss must be a number"),
        ({"loss": True}, "loss must be a number"),
        ({"global_step": 0}, "global_step must be a whole number from 1"),
        ({"epoch": 1.0}, "epoch must be a whole number from 0"),
        ({"sample_ids": [1.5]}, "sample_ids must be whole numbers"),
        ({"group_lrs": 0.1}, "group_lrs must be a list"),
        ({"digests": {"model": "a", "optimizer": "b"}}, "digests must hold model, optimizer and rng"),
        ({"digests": {"model": "", "optimizer": "b", "rng": {}}}, "digests.model must be hex text"),
        ({"digests": {"model": "a", "optimizer": "b", "rng": {"python": 7}}}, "digests.rng.python must be hex text"),
        ({"tokens": 5}, r"unknown keys \['tokens'\]"),
    ],
)
def test_a_malformed_value_is_an_error_that_names_it(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_rank_file(tmp_path, 0, [line(0, 1), line(0, 2, **changes) | changes])
    with pytest.raises(RecordError, match=message) as caught:
        read_trajectory(tmp_path)
    assert f"{path}:2:" in str(caught.value) or "global_step" in changes


def test_a_missing_key_is_an_error(tmp_path: Path) -> None:
    record = line(0, 1)
    del record["sample_ids"]
    write_rank_file(tmp_path, 0, [record])
    with pytest.raises(RecordError, match=r"missing keys \['sample_ids'\]"):
        read_trajectory(tmp_path)


def test_a_key_that_stands_twice_is_an_error(tmp_path: Path) -> None:
    text = json.dumps(line(0, 1))[:-1] + ', "loss": 1.0}\n'
    write_rank_file(tmp_path, 0, [], end=text)
    with pytest.raises(RecordError, match="a key stands twice"):
        read_trajectory(tmp_path)


@pytest.mark.parametrize("steps", [(1, 2, 2), (1, 3, 2)])
def test_a_repeated_or_backward_step_in_one_leg_is_an_error(tmp_path: Path, steps: tuple[int, ...]) -> None:
    path = write_rank_file(tmp_path, 0, [line(0, step) for step in steps])
    with pytest.raises(RecordError, match="neither repeat nor run backwards") as caught:
        read_trajectory(tmp_path)
    assert f"{path}:3:" in str(caught.value)


def test_a_missing_rank_file_is_an_error_when_the_world_size_is_known(tmp_path: Path) -> None:
    write_rank_file(tmp_path, 0, [line(0, 1)])
    write_rank_file(tmp_path, 2, [line(2, 1)])
    with pytest.raises(RecordError, match=r"trajectory_rank_1\.jsonl: rank 1's file is missing \(world of 3 ranks\)"):
        read_trajectory(tmp_path, ranks=3)
    with pytest.raises(RecordError, match="rank 2's file is there, though"):
        read_trajectory(tmp_path, ranks=1)


def test_an_empty_directory_is_an_error_not_an_empty_trajectory(tmp_path: Path) -> None:
    (tmp_path / "trajectory_rank_0.jsonl.bak").write_text("")
    with pytest.raises(RecordError, match=r"no trajectory_rank_R\.jsonl here"):
        read_trajectory(tmp_path)
    with pytest.raises(RecordError, match=r"no trajectory_rank_R\.jsonl here"):
        read_trajectory(tmp_path / "nowhere")
