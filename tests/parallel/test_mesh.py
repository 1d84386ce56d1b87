"""Sizes of the mesh, ranks on it, and what a user reads when they do not fit."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist

from hyper_resume.config.schema import AcceleratorConfig
from hyper_resume.errors import ConfigError, UnsupportedError
from hyper_resume.parallel import build_mesh, mean_over_group
from hyper_resume.parallel.mesh import mesh_sizes
from tests.ranks import run_ranks


def _places() -> tuple[int, int, int, int, list[int], list[int]]:
    mesh = build_mesh(AcceleratorConfig(tp_size=2), "cpu", dist.get_world_size())
    assert mesh is not None
    assert mesh.device_mesh.mesh_dim_names == ("dp_shard", "tp")
    dp_peers, tp_peers = mesh.dp_mesh.mesh.tolist(), mesh.tp_mesh.mesh.tolist()
    return mesh.dp_rank, mesh.dp_size, mesh.tp_rank, mesh.tp_size, dp_peers, tp_peers


def _mean_of_ranks() -> tuple[float, float]:
    mesh = build_mesh(AcceleratorConfig(tp_size=2), "cpu", dist.get_world_size())
    assert mesh is not None
    value = torch.tensor(float(dist.get_rank()), requires_grad=True)
    mean = mean_over_group(value, mesh.dp_mesh.get_group())
    assert not mean.requires_grad
    return mean.item(), value.item()


def test_tp_groups_are_neighbouring_ranks_and_dp_takes_the_rest() -> None:
    assert run_ranks(_places, 4) == [
        (0, 2, 0, 2, [0, 2], [0, 1]),
        (0, 2, 1, 2, [1, 3], [0, 1]),
        (1, 2, 0, 2, [0, 2], [2, 3]),
        (1, 2, 1, 2, [1, 3], [2, 3]),
    ]


def test_the_mean_is_taken_over_the_dp_ranks_and_leaves_its_argument_alone() -> None:
    assert run_ranks(_mean_of_ranks, 4) == [(1.0, 0.0), (2.0, 1.0), (1.0, 2.0), (2.0, 3.0)]


def test_without_a_group_the_mean_is_the_value() -> None:
    assert mean_over_group(torch.tensor(3.0), None).item() == 3.0


def test_a_single_process_needs_no_mesh() -> None:
    assert build_mesh(AcceleratorConfig(), "cpu", 1) is None


@pytest.mark.parametrize(
    ("accelerator", "world_size", "message"),
    [
        (AcceleratorConfig(tp_size=2, dp_shard_size=4), 4, r"= 4.*dp_shard_size=4, tp_size=2: 8 places.*=2 \(or -1\)"),
        (AcceleratorConfig(tp_size=3), 4, r"tp_size=3: 3 places.*tp_size=1 and .*dp_shard_size=-1, or start 3 "),
        (AcceleratorConfig(tp_size=2), 1, r"tp_size=1 and .*dp_shard_size=-1, or start 2 processes"),
        (AcceleratorConfig(tp_size=0), 4, r"accelerator\.tp_size.*0"),
        (AcceleratorConfig(dp_shard_size=0), 4, r"accelerator\.dp_shard_size.*0"),
        (AcceleratorConfig(dp_shard_size=-2), 4, r"accelerator\.dp_shard_size.*-2"),
    ],
)
def test_sizes_that_do_not_fit_say_what_to_set(accelerator: AcceleratorConfig, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_mesh(accelerator, "cpu", world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4, 6, 8])
def test_the_advice_works_when_it_is_followed(world_size: int) -> None:
    followed = 0
    for tp_size in range(1, 7):
        for dp_shard_size in (-1, 1, 2, 3, 4, 6):
            given = AcceleratorConfig(tp_size=tp_size, dp_shard_size=dp_shard_size)
            try:
                mesh_sizes(given, world_size)
            except ConfigError as error:
                _follow(str(error), given, world_size)
                followed += 1
    assert followed > 10


def _follow(message: str, given: AcceleratorConfig, world_size: int) -> None:
    """Do each of the two things that the message says, alone."""
    advice = message.partition("what to do: ")[2]
    settings, start = advice.split(", or start ")
    changes = {name: int(value) for name, value in re.findall(r"accelerator\.(\w+)=(-?\d+)", settings)}
    assert changes
    mesh_sizes(dataclasses.replace(given, **changes), world_size)
    if "(or -1)" in settings:
        mesh_sizes(dataclasses.replace(given, dp_shard_size=-1), world_size)
    (processes,) = re.findall(r"^(\d+) processes", start)
    mesh_sizes(given, int(processes))


def test_pipeline_parallelism_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"accelerator\.pp_size=2"):
        build_mesh(AcceleratorConfig(pp_size=2), "cpu", 2)
