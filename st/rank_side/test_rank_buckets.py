"""Each rank gets ITS streams, training state and shard back, not another rank's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.state.model import apply_model, collect_model
from hyper_resume.state.names import parameter_names
from hyper_resume.state.optimizer import apply_optimizers, collect_optimizers, optimizer_template
from hyper_resume.state.rng import apply_rng, collect_rng
from st.rank_side.observing import RANKS, own_state

pytestmark = pytest.mark.mpi(min_size=4)
LAYOUTS = pytest.mark.parametrize("per_rank", [True, False], ids=["per-rank", "embedded"])
ROWS, COLUMNS = 10, 3  # four ranks do not divide ten rows: 3, 3, 3, 1
BETA = 0.9


def seed(rank: int) -> None:
    torch.manual_seed(11 + rank)
    random.seed(22 + rank)
    np.random.seed(33 + rank)


def draw() -> tuple[list[float], list[float], list[float]]:
    """The next numbers of this process's three streams."""
    return torch.rand(3).tolist(), [random.random() for _ in range(3)], np.random.random(3).tolist()


def expected_draws(rank: int, skip: int) -> tuple[list[float], list[float], list[float]]:
    """The same numbers from generators of its own, which the streams of the process do not touch."""
    tensors, numbers, arrays = (
        torch.Generator().manual_seed(11 + rank),
        random.Random(22 + rank),
        np.random.RandomState(33 + rank),
    )
    for _ in range(skip):
        torch.rand(3, generator=tensors)
        [numbers.random() for _ in range(3)]
        arrays.random_sample(3)
    return (
        torch.rand(3, generator=tensors).tolist(),
        [numbers.random() for _ in range(3)],
        arrays.random_sample(3).tolist(),
    )


@LAYOUTS
def test_every_rank_goes_on_with_its_own_random_numbers(shared_folder: Path, per_rank: bool) -> None:
    rank, path = dist.get_rank(), str(shared_folder / "global_step_4")
    seed(rank)
    for _ in range(rank + 1):
        draw()
    saved = {"model": {}, "extra_state": {"rng_state": collect_rng("cpu")}}
    DistributedCheckpointer(extra_state_per_rank=per_rank).save(path, saved, global_step=4)
    seed(99)
    state = DistributedCheckpointer().load(path, {}, extra_state_skeleton={"rng_state": None})
    apply_rng(state["rng_state"], "cpu")
    expected = [expected_draws(other, skip=other + 1) for other in range(RANKS)]
    assert draw() == expected[rank]
    assert len({str(numbers) for numbers in expected}) == RANKS, "equal streams would prove nothing"


@LAYOUTS
def test_every_rank_gets_its_own_training_state_back(shared_folder: Path, per_rank: bool) -> None:
    rank, path = dist.get_rank(), str(shared_folder / "global_step_7")
    extra = {"train_dataloader": {"batches_consumed": 50 + rank}, "stateful": {"mean": torch.full((2,), rank + 0.5)}}
    DistributedCheckpointer(extra_state_per_rank=per_rank).save(
        path, {"model": {}, "extra_state": extra}, global_step=7
    )
    state = DistributedCheckpointer().load(path, {}, extra_state_skeleton=dict.fromkeys(extra))
    assert (state["rank"], state["world_size"], state["global_step"]) == (rank, RANKS, 7)
    assert state["train_dataloader"] == {"batches_consumed": 50 + rank}
    assert state["stateful"]["mean"].tolist() == [rank + 0.5] * 2


def test_every_ranks_file_is_there_for_every_rank_and_holds_that_ranks_state(shared_folder: Path) -> None:
    directory = shared_folder / "global_step_2"
    DistributedCheckpointer().save(str(directory), own_state(2), global_step=2)
    found = [
        torch.load(directory / "extra_state" / f"extra_state_rank_{rank}.pt", weights_only=True)
        for rank in range(RANKS)
    ]
    assert [state["rank"] for state in found] == [0, 1, 2, 3]
    assert [state["value"] for state in found] == [2000, 2001, 2002, 2003]
    assert {state["global_step"] for state in found} == {2}
    assert len({state["save_id"] for state in found}) == 1


def weights() -> torch.Tensor:
    """What the model holds in full, by arithmetic."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) / 8


def own_rows(full: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that FSDP2 splits along its first dimension."""
    return full.chunk(RANKS)[dist.get_rank()]


def sharded(fill: torch.Tensor) -> nn.Module:
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    with torch.no_grad():
        model.weight.copy_(fill)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    return model


def local(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


def test_every_rank_gets_its_own_shard_of_an_fsdp2_model_back(shared_folder: Path) -> None:
    path = str(shared_folder / "global_step_1")
    DistributedCheckpointer().save(path, {"model": collect_model(sharded(weights()))}, global_step=1)
    model = sharded(torch.full((ROWS, COLUMNS), -1.0))
    loaded = {"model": collect_model(model)}
    DistributedCheckpointer().load(path, loaded)
    apply_model(model, loaded["model"], strict=True)
    assert torch.equal(local(model.weight), own_rows(weights()))
    assert local(model.weight).shape == ((1, COLUMNS) if dist.get_rank() == 3 else (3, COLUMNS))


def test_the_shards_on_disk_are_the_whole_model_for_stock_dcp(shared_folder: Path) -> None:
    path = str(shared_folder / "global_step_1")
    DistributedCheckpointer().save(path, {"model": collect_model(sharded(weights()))}, global_step=1)
    whole = {"model": {"weight": torch.zeros(ROWS, COLUMNS)}}
    stock_load(whole, checkpoint_id=path, no_dist=True)
    assert torch.equal(whole["model"]["weight"], weights())


def test_every_rank_gets_its_own_part_of_the_optimizer_state_back(shared_folder: Path) -> None:
    path = str(shared_folder / "global_step_1")
    model = sharded(weights())
    optimizer = torch.optim.AdamW(model.parameters(), betas=(BETA, 0.99))
    # The gradient of this sum is the input's, and the same in every row; all ranks have the same input.
    model(torch.tensor([[2.0, 4.0, 8.0]])).sum().backward()
    optimizer.step()
    names = parameter_names(model)
    DistributedCheckpointer().save(path, {"optimizer": collect_optimizers([optimizer], names)}, global_step=1)

    model = sharded(weights())
    optimizer = torch.optim.AdamW(model.parameters(), betas=(BETA, 0.99))
    names, checkpointer = parameter_names(model), DistributedCheckpointer()
    loaded = {"optimizer": optimizer_template([optimizer], names, checkpointer.describe(path))}
    checkpointer.load(path, loaded)
    apply_optimizers([optimizer], names, loaded["optimizer"])
    entries = optimizer.state[next(model.parameters())]
    rows = 1 if dist.get_rank() == 3 else 3
    expected = (torch.tensor([2.0, 4.0, 8.0]) * torch.tensor(1 - BETA, dtype=torch.float64).float()).expand(
        rows, COLUMNS
    )
    torch.testing.assert_close(local(entries["exp_avg"]), expected, rtol=1e-6, atol=0)
    assert entries["step"].item() == 1.0
