"""The comparison finds every single-bit difference, names the right bucket, and never passes without comparing."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest

from conformance.checks.compare import COLUMNS, VERDICT_COLUMNS, ComparisonError, compare_trajectories
from conformance.records.comparison import Divergence
from conformance.records.trajectory import Trajectory
from tests.conformance.trajectories import RANKS, Change, trajectory

REFERENCE = trajectory(range(1, 26))


def first_difference(change: Change) -> Divergence | None:
    return compare_trajectories(REFERENCE, trajectory(range(11, 26), change), 11, 25).divergence


def set_at(key: str, value: Any, *, step: int = 15, rank: int = 1) -> Change:
    """A change of one value, ``digests.rng.python`` style, at one step of one rank."""

    def change(record: dict[str, Any], at_rank: int, at_step: int) -> None:
        if (at_rank, at_step) == (rank, step):
            *path, last = key.split(".")
            for name in path:
                record = record[name]
            record[last] = value

    return change


def test_equal_trajectories_are_identical_and_every_cell_was_compared() -> None:
    comparison = compare_trajectories(REFERENCE, trajectory(range(11, 26)), 11, 25)
    assert comparison.divergence is None
    assert (comparison.first_step, comparison.last_step, comparison.ranks) == (11, 25, RANKS)
    assert [(column.name, column.compared, column.different) for column in comparison.columns] == [
        (name, 15 * RANKS, 0) for name in COLUMNS
    ]
    assert comparison.unmoved_streams == ()
    assert sorted(VERDICT_COLUMNS) == sorted(COLUMNS)


@pytest.mark.parametrize(
    ("key", "value", "bucket", "column"),
    [
        ("sample_ids", [31, 116], "train_dataloader", "samples"),
        ("batch_index", 3, "train_dataloader", "samples.batch_index"),
        ("epoch", 0, "progress", "samples.epoch"),
        ("lr", math.nextafter(1e-4 / 15, 1.0), "lr_scheduler", "lr"),
        ("group_lrs", [1e-4 / 15, 3e-4], "lr_scheduler", "lr.group_lrs"),
        ("digests.rng.torch_cpu", "other", "rng_state", "rng.torch_cpu"),
        ("digests.rng.python", "other", "rng_state", "rng.python"),
        ("digests.rng.numpy", "other", "rng_state", "rng.numpy"),
        ("digests.rng.torch_device", "new", "rng_state", "rng.torch_device"),
        ("loss", math.nextafter(6.0 / math.sqrt(15), 0.0), "model", "loss"),
        ("loss", math.nan, "model", "loss"),
        ("grad_norm", math.nextafter(1.0 + 1.0 / 15, 2.0), "model", "grad_norm"),
        ("digests.optimizer", "other", "optimizer", "optimizer"),
        ("digests.model", "other", "model", "model"),
    ],
)
def test_one_value_on_one_rank_at_one_step_is_found_and_its_bucket_blamed(
    key: str, value: Any, bucket: str, column: str
) -> None:
    found = first_difference(set_at(key, value))
    assert found is not None
    assert (found.step, found.rank, found.bucket, found.column) == (15, 1, bucket, column)


def test_both_values_are_told_in_full() -> None:
    loss = 6.0 / math.sqrt(15)
    found = first_difference(set_at("loss", math.nextafter(loss, 0.0)))
    assert found is not None
    assert (float(found.reference), float(found.resumed)) == (loss, math.nextafter(loss, 0.0))
    found = first_difference(set_at("sample_ids", [31, 999]))
    assert found is not None
    assert (found.reference, found.resumed) == ("[31, 115]", "[31, 999]")
    found = first_difference(set_at("digests.rng.torch_device", "new"))
    assert found is not None
    assert (found.reference, found.resumed) == ("absent", "new")


@pytest.mark.parametrize(("reference", "resumed", "is_equal"), [(0.0, -0.0, False), (math.nan, math.nan, True)])
def test_floats_are_compared_by_their_bits(reference: float, resumed: float, is_equal: bool) -> None:
    assert (struct.pack("d", reference) == struct.pack("d", resumed)) is is_equal
    first = trajectory(range(1, 26), set_at("loss", reference))
    second = trajectory(range(1, 26), set_at("loss", resumed))
    assert (compare_trajectories(first, second, 1, 25).divergence is None) is is_equal


def test_the_first_difference_is_the_earliest_step_then_the_cause_then_the_lowest_rank() -> None:
    def rng_lost_at_12_and_sample_at_20(record: dict[str, Any], rank: int, step: int) -> None:
        if step >= 12:
            record["digests"]["rng"]["torch_cpu"] = f"wrong {rank} {step}"
            record["loss"] += 0.5
            record["digests"]["model"] += "x"
        if step == 20:
            record["sample_ids"] = [0, 0]

    comparison = compare_trajectories(REFERENCE, trajectory(range(11, 26), rng_lost_at_12_and_sample_at_20), 11, 25)
    found = comparison.divergence
    assert found is not None
    assert (found.step, found.column, found.rank) == (12, "rng.torch_cpu", 0)
    assert {column.name: column.different for column in comparison.columns} == {
        "samples": RANKS,
        "lr": 0,
        "rng": 14 * RANKS,
        "loss": 14 * RANKS,
        "grad_norm": 0,
        "optimizer": 0,
        "model": 14 * RANKS,
    }


def test_lost_moments_are_blamed_on_the_optimizer_though_the_weights_differ_too() -> None:
    def lost(record: dict[str, Any], rank: int, step: int) -> None:
        record["digests"]["optimizer"] += "x"
        record["digests"]["model"] += "x"
        if step > 11:
            record["loss"] += 0.5

    found = first_difference(lost)
    assert found is not None
    assert (found.step, found.bucket, found.column) == (11, "optimizer", "optimizer")


def test_an_empty_range_is_an_error() -> None:
    with pytest.raises(ComparisonError, match=r"no step to compare: 11\.\.10 is empty"):
        compare_trajectories(REFERENCE, REFERENCE, 11, 10)


def test_a_missing_step_or_rank_is_an_error_on_either_side() -> None:
    gap = trajectory([step for step in range(1, 26) if step not in (14, 15)])
    with pytest.raises(ComparisonError, match=r"resumed, rank 0: no record of steps 14\.\.15"):
        compare_trajectories(REFERENCE, gap, 11, 25)
    with pytest.raises(ComparisonError, match=r"reference, rank 0: no record of steps 14\.\.15"):
        compare_trajectories(gap, REFERENCE, 11, 25)
    with pytest.raises(ComparisonError, match=r"ranks differ: reference has \[0, 1\], resumed \[0, 1, 2\]"):
        compare_trajectories(REFERENCE, trajectory(range(1, 26), ranks=3), 11, 25)
    with pytest.raises(ComparisonError, match="ranks differ"):
        compare_trajectories(Trajectory(records={}), Trajectory(records={}), 1, 1)


def test_missing_digests_are_an_error() -> None:
    def without(record: dict[str, Any], rank: int, step: int) -> None:
        if step == 20:
            del record["digests"]

    with pytest.raises(ComparisonError, match="resumed, rank 0: no digests at steps 20"):
        compare_trajectories(REFERENCE, trajectory(range(1, 26), without), 11, 25)


@pytest.mark.parametrize(
    ("column", "constants"),
    [
        ("samples", {"sample_ids": [1, 2]}),
        ("lr", {"lr": 1e-4, "group_lrs": [1e-4]}),
        ("loss", {"loss": 5.5}),
        ("grad_norm", {"grad_norm": None}),
    ],
)
def test_a_column_that_never_varies_proves_nothing_unless_it_may(column: str, constants: dict[str, Any]) -> None:
    still = trajectory(range(1, 26), lambda record, rank, step: record.update(constants))
    with pytest.raises(ComparisonError, match=f"the reference's {column} is constant over steps 11..25 on rank 0"):
        compare_trajectories(still, still, 11, 25)
    assert compare_trajectories(still, still, 11, 25, may_be_constant=[column]).divergence is None


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_a_state_that_never_moves_proves_nothing(name: str) -> None:
    still = trajectory(range(1, 26), lambda record, rank, step: record["digests"].update({name: "same"}))
    with pytest.raises(ComparisonError, match=f"the reference's {name} is constant"):
        compare_trajectories(still, still, 11, 25)


def test_a_single_step_is_compared_when_the_whole_reference_varies() -> None:
    assert compare_trajectories(REFERENCE, trajectory([14]), 14, 14).divergence is None
    still = trajectory(range(1, 26), lambda record, rank, step: record.update(loss=5.5))
    with pytest.raises(ComparisonError, match=r"loss is constant over steps 1\.\.25"):
        compare_trajectories(still, still, 14, 14)


def test_ranks_that_share_one_python_stream_prove_nothing() -> None:
    def shared(record: dict[str, Any], rank: int, step: int) -> None:
        record["digests"]["rng"]["python"] = f"shared {step}"

    same = trajectory(range(1, 26), shared)
    with pytest.raises(ComparisonError, match="all ranks of the reference have the same Python random stream"):
        compare_trajectories(same, same, 11, 25)


def test_a_stream_that_never_moves_is_named() -> None:
    def still(record: dict[str, Any], rank: int, step: int) -> None:
        record["digests"]["rng"]["numpy"] = f"still {rank}"

    reference = trajectory(range(1, 26), still)
    assert compare_trajectories(reference, reference, 11, 25).unmoved_streams == ("rng.numpy",)


def test_a_stream_that_only_one_side_has_is_a_difference() -> None:
    def more(record: dict[str, Any], rank: int, step: int) -> None:
        record["digests"]["rng"]["extra"] = f"extra {step}"

    richer = trajectory(range(1, 26), more)
    for reference, resumed, values in (
        (REFERENCE, richer, ("absent", "extra 11")),
        (richer, REFERENCE, ("extra 11", "absent")),
    ):
        found = compare_trajectories(reference, resumed, 11, 25).divergence
        assert found is not None
        assert (found.column, found.reference, found.resumed) == ("rng.extra", *values)
