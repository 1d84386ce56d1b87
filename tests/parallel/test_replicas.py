"""Copies that a checkpoint would merge: equal ones pass, others are named with their ranks, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hyper_resume.errors import ReplicaMismatchError
from hyper_resume.parallel import check_replicas
from tests.ranks import run_ranks


def _entries() -> dict[str, Tensor]:
    """Equal copies in every layout, dtype and odd shape that a checkpoint meets, on a 2 x 2 mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    whole = torch.arange(15.0).reshape(5, 3)
    over_dp = distribute_tensor(whole, mesh["dp_shard"], [Shard(0)])
    return {
        "sharded_twice": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
        "copied_over_tp": distribute_tensor(whole, mesh, [Shard(0), Replicate()]),
        "only_on_dp_mesh": over_dp,
        "short": distribute_tensor(torch.ones(1), mesh["dp_shard"], [Shard(0)]),
        "everywhere": distribute_tensor(whole.bfloat16(), mesh, [Replicate(), Replicate()]),
        "plain": whole.clone().t(),
        "step": torch.tensor(7.0),
        "flags": torch.tensor([True, False]),
        "nan": torch.tensor(float("nan")),
        "empty": torch.zeros(0),
    }


def _equal() -> int:
    entries = _entries()
    check_replicas(entries)
    return len(entries)


def _changed(name: str, rank: int) -> None:
    """One rank changes one element of what it holds of ``name``."""
    entries = _entries()
    if dist.get_rank() == rank:
        local = entries[name].to_local() if isinstance(entries[name], DTensor) else entries[name]  # type: ignore[attr-defined]
        with torch.no_grad():
            local[(-1,) * local.dim()].add_(1)
    check_replicas(entries)


def _sign_of_zero() -> None:
    check_replicas({"zero": torch.tensor(0.0 if dist.get_rank() == 0 else -0.0)})


def _many_changed() -> None:
    check_replicas({f"weight_{index}": torch.tensor(float(dist.get_rank())) for index in range(9)})


def _partial_sums() -> None:
    mesh = init_device_mesh("cpu", (2,))
    check_replicas({"sum": DTensor.from_local(torch.tensor([float(dist.get_rank())]), mesh, [Partial()])})


def _other_names() -> None:
    names = ["weight", "bias"] if dist.get_rank() != 2 else ["weight", "scale"]
    check_replicas({name: torch.ones(1) for name in names})


def _other_shape() -> None:
    check_replicas({"weight": torch.ones(2 if dist.get_rank() == 1 else 1)})


def _not_a_tensor_on_rank_1() -> None:
    value = "text" if dist.get_rank() == 1 else torch.ones(1)
    check_replicas({"weight": value})  # type: ignore[dict-item]


def _in_a_group() -> None:
    """Each half of the world agrees within itself, and is checked within itself."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    check_replicas({"weight": torch.tensor(float(half))}, halves[half])


def _errors(function: Callable[..., None], world_size: int, *args: object) -> list[str]:
    """The messages of all ranks, each of which must have raised, all the same."""
    errors = run_ranks(function, world_size, *args, expect_errors=True)
    assert [type(error) for error in errors] == [ReplicaMismatchError] * world_size
    assert len({str(error) for error in errors}) == 1
    return [str(error) for error in errors]


def test_equal_copies_pass_in_every_layout_and_dtype() -> None:
    assert run_ranks(_equal, 4) == [10] * 4


@pytest.mark.parametrize(
    ("name", "rank", "where"),
    [
        # Rank 3 is (dp 1, tp 1): its tp neighbour, rank 2, is the other holder of its shard.
        ("copied_over_tp", 3, "copied_over_tp (rank 2 != rank 3)"),
        ("only_on_dp_mesh", 1, "only_on_dp_mesh (rank 0 != rank 1)"),
        ("everywhere", 2, "everywhere (rank 0, 1, 3 != rank 2)"),
        ("plain", 0, "plain (rank 0 != rank 1, 2, 3)"),
        ("step", 1, "step (rank 0, 2, 3 != rank 1)"),
        ("short", 0, "short (rank 0 != rank 1)"),
    ],
)
def test_a_copy_that_differs_is_named_with_its_ranks_on_all_ranks(name: str, rank: int, where: str) -> None:
    message = _errors(_changed, 4, name, rank)[0]
    assert where in message
    assert "differ in 1 of 9 tensors" in message


def test_parts_without_copies_may_hold_anything() -> None:
    run_ranks(_changed, 4, "sharded_twice", 2)


def test_bytes_are_compared_so_the_sign_of_zero_counts() -> None:
    assert "zero (rank 0 != rank 1)" in _errors(_sign_of_zero, 2)[0]


def test_many_differences_are_counted_and_the_first_few_named() -> None:
    message = _errors(_many_changed, 2)[0]
    assert "differ in 9 of 9 tensors" in message
    assert "weight_4" in message
    assert "weight_5" not in message
    assert "and 4 more" in message


def test_partial_sums_are_not_taken_for_parts() -> None:
    assert "sum (rank 0 != rank 1)" in _errors(_partial_sums, 2)[0]


def test_ranks_with_other_names_are_told_which() -> None:
    message = _errors(_other_names, 3)[0]
    assert "ranks 0 and 2" in message
    assert "bias" in message
    assert "scale" in message


def test_ranks_with_another_shape_are_told_which() -> None:
    assert "ranks 0 and 1" in _errors(_other_shape, 2)[0]


def test_a_rank_that_cannot_read_its_entry_fails_all_ranks() -> None:
    errors = run_ranks(_not_a_tensor_on_rank_1, 2, expect_errors=True, timeout_seconds=20)
    assert all(isinstance(error, Exception) for error in errors)
    assert all("rank 1" in str(error) for error in errors)


def test_a_group_is_compared_within_itself() -> None:
    run_ranks(_in_a_group, 4)


def test_a_single_process_has_no_copies() -> None:
    check_replicas({"weight": torch.ones(1)})
