"""The optimizer bucket: state by parameter name, exactly what was saved, nothing invented and nothing lost."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import zeros as dtensor_zeros

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.errors import CheckpointMismatchError, UnsupportedError
from hyper_resume.optim import ChainedOptimizer
from hyper_resume.state.model import collect_model
from hyper_resume.state.names import parameter_names
from hyper_resume.state.optimizer import (
    apply_optimizers,
    collect_optimizers,
    flatten_optimizers,
    optimizer_template,
    saved_optimizer_count,
)
from tests.ranks import run_ranks
from tests.state.disk import Net, everything, moments_by_name, read, same_bits, steps, write

AdamW = torch.optim.AdamW


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return AdamW(model.parameters(), lr=0.01, **options)


def test_state_is_filed_under_names_so_the_order_of_groups_does_not_matter(tmp_path: Path) -> None:
    def groups(model: Net, order: tuple[int, ...]) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [
            {"params": [model.first], "lr": 0.01, "weight_decay": 0.1},
            {"params": [model.second, model.unused], "lr": 0.02, "weight_decay": 0.2},
            {"params": [model.bias], "lr": 0.03, "weight_decay": 0.0},
        ]
        return [parts[index] for index in order]

    model, fresh = Net(), Net(seed=1)
    optimizer = AdamW(groups(model, (0, 1, 2)))
    fresh_groups = groups(fresh, (2, 0, 1))
    fresh_groups[2]["params"].reverse()
    fresh_optimizer = AdamW(fresh_groups)
    steps(model, [optimizer], range(3))
    for group, lr in zip(optimizer.param_groups, (0.001, 0.002, 0.003), strict=True):
        group["lr"] = lr
    read(write(tmp_path, model, [optimizer]), fresh, [fresh_optimizer])
    assert [group["lr"] for group in fresh_optimizer.param_groups] == [0.003, 0.001, 0.002]
    assert [group["weight_decay"] for group in fresh_optimizer.param_groups] == [0.0, 0.1, 0.2]
    assert same_bits(moments_by_name(fresh, fresh_optimizer), moments_by_name(model, optimizer))
    assert steps(fresh, [fresh_optimizer], range(3, 6)) == steps(model, [optimizer], range(3, 6))


def test_moments_keep_the_type_that_they_were_saved_with(tmp_path: Path) -> None:
    model, fresh = Net(), Net(seed=1)
    optimizer, fresh_optimizer = adamw(model), adamw(fresh)
    steps(model, [optimizer], range(2))
    for entries in optimizer.state.values():
        entries["exp_avg"] = entries["exp_avg"].to(torch.bfloat16)
        entries["exp_avg_sq"] = entries["exp_avg_sq"].to(torch.float64)
    read(write(tmp_path, model, [optimizer]), fresh, [fresh_optimizer])
    restored = moments_by_name(fresh, fresh_optimizer)
    assert same_bits(restored, moments_by_name(model, optimizer))
    types = {key: restored["first"][key].dtype for key in restored["first"]}
    assert types == {"step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.float64}


def test_float32_moments_of_a_bfloat16_model_stay_float32(tmp_path: Path) -> None:
    model, fresh = Net().to(torch.bfloat16), Net(seed=1).to(torch.bfloat16)
    optimizer, fresh_optimizer = adamw(model), adamw(fresh)
    for module, its in ((model, optimizer), (fresh, fresh_optimizer)):
        for parameter in module.parameters():
            its.state[parameter] = {"step": torch.tensor(1.0), "master": parameter.detach().float() * 1.0001}
    read(write(tmp_path, model, [optimizer]), fresh, [fresh_optimizer])
    assert same_bits(moments_by_name(fresh, fresh_optimizer), moments_by_name(model, optimizer))


def test_a_parameter_that_never_had_a_gradient_has_no_state_before_and_after(tmp_path: Path) -> None:
    model, fresh = Net(), Net(seed=1)
    optimizer, fresh_optimizer = adamw(model), adamw(fresh)
    steps(model, [optimizer], range(2))
    fresh_optimizer.state[fresh.unused] = {"step": torch.tensor(9.0)}
    read(write(tmp_path, model, [optimizer]), fresh, [fresh_optimizer])
    assert model.unused not in optimizer.state
    assert fresh.unused not in fresh_optimizer.state
    assert set(moments_by_name(fresh, fresh_optimizer)) == {"first", "second", "bias"}


def test_a_parameter_that_is_unfrozen_after_the_resume_starts_with_no_state(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[Net, AdamW]:
        model = Net(seed)
        model.first.requires_grad_(False)
        return model, adamw(model)

    model, optimizer = make(0)
    steps(model, [optimizer], range(2))
    fresh, fresh_optimizer = make(1)
    read(write(tmp_path, model, [optimizer]), fresh, [fresh_optimizer])
    for module in (model, fresh):
        module.first.requires_grad_(True)
    assert steps(fresh, [fresh_optimizer], range(2, 5)) == steps(model, [optimizer], range(2, 5))
    assert same_bits(everything(fresh, [fresh_optimizer]), everything(model, [optimizer]))


@pytest.mark.parametrize("lost", ["exp_avg_sq", "step"])
def test_state_of_which_one_entry_is_lost_is_an_error(tmp_path: Path, lost: str) -> None:
    model, fresh = Net(), Net(seed=1)
    optimizer = adamw(model)
    steps(model, [optimizer], range(2))
    bucket = collect_optimizers([optimizer], parameter_names(model))
    del bucket["0"]["state"]["second"][lost]
    path = str(tmp_path / "global_step_1")
    DistributedCheckpointer().save(path, {"model": collect_model(model), "optimizer": bucket}, global_step=1)
    with pytest.raises(CheckpointMismatchError, match="optimizer state of second is incomplete") as caught:
        read(path, fresh, [adamw(fresh)])
    assert "expected: exp_avg, exp_avg_sq, step" in str(caught.value)


def test_an_empty_group_keeps_its_options(tmp_path: Path) -> None:
    def make(model: Net, lr: float) -> AdamW:
        groups: list[dict[str, Any]] = [{"params": [model.first]}, {"params": []}]
        optimizer = AdamW(groups, lr=lr)
        optimizer.add_param_group({"params": [model.second, model.bias], "lr": lr})
        return optimizer

    model, fresh = Net(), Net(seed=1)
    optimizer, fresh_optimizer = make(model, 0.01), make(fresh, 0.5)
    optimizer.param_groups[1]["betas"] = (0.1, 0.2)
    steps(model, [optimizer], range(2))
    read(write(tmp_path, model, [optimizer]), fresh, [fresh_optimizer])
    assert fresh_optimizer.param_groups[1]["betas"] == (0.1, 0.2)
    assert [group["lr"] for group in fresh_optimizer.param_groups] == [0.01, 0.01, 0.01]
    assert steps(fresh, [fresh_optimizer], range(2, 4)) == steps(model, [optimizer], range(2, 4))


def test_a_tensor_lr_stays_the_same_tensor_with_the_saved_value(tmp_path: Path) -> None:
    model, fresh = Net(), Net(seed=1)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.01))
    fresh_optimizer = AdamW(fresh.parameters(), lr=torch.tensor(0.5))
    held = fresh_optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"].fill_(0.125)
    read(write(tmp_path, model, [optimizer]), fresh, [fresh_optimizer])
    assert fresh_optimizer.param_groups[0]["lr"] is held
    assert held.item() == 0.125


def test_a_tensor_lr_becomes_a_number_where_the_running_lr_is_one_and_the_reverse(tmp_path: Path) -> None:
    model, fresh = Net(), Net(seed=1)
    as_number, as_tensor = adamw(fresh), AdamW(fresh.parameters(), lr=torch.tensor(0.5))
    read(write(tmp_path / "tensor", model, [AdamW(model.parameters(), lr=torch.tensor(0.25))]), fresh, [as_number])
    assert same_bits(as_number.param_groups[0]["lr"], 0.25)
    read(write(tmp_path / "number", model, [AdamW(model.parameters(), lr=0.25)]), fresh, [as_tensor])
    assert same_bits(as_tensor.param_groups[0]["lr"], torch.tensor(0.25))


def test_an_option_that_the_file_does_not_have_keeps_this_runs_value(tmp_path: Path) -> None:
    model, fresh = Net(), Net(seed=1)
    optimizer, fresh_optimizer = adamw(model), adamw(fresh, amsgrad=False)
    del optimizer.param_groups[0]["maximize"]
    fresh_optimizer.param_groups[0]["maximize"] = True
    fresh_optimizer.param_groups[0]["invented later"] = 7
    read(write(tmp_path, model, [optimizer]), fresh, [fresh_optimizer])
    assert fresh_optimizer.param_groups[0]["maximize"] is True
    assert fresh_optimizer.param_groups[0]["invented later"] == 7


def test_a_checkpoint_of_two_optimizers_gives_the_first_its_moments(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(model: Net) -> list[Any]:
        return [AdamW([model.first], lr=0.01), AdamW([model.second, model.bias], lr=0.02)]

    model, fresh = Net(), Net(seed=1)
    optimizers = make(model)
    steps(model, optimizers, range(2))
    path = write(tmp_path, model, optimizers)
    only = AdamW([fresh.first, fresh.second], lr=0.5)
    read(path, fresh, [only])
    assert same_bits(moments_by_name(fresh, only), {"first": moments_by_name(model, optimizers[0])["first"]})
    assert only.param_groups[0]["lr"] == 0.01


def test_a_checkpoint_of_one_optimizer_leaves_the_second_as_it_is(tmp_path: Path) -> None:
    model, fresh = Net(), Net(seed=1)
    optimizer = AdamW([model.first], lr=0.01)
    steps(model, [optimizer], range(2))
    path = write(tmp_path, model, [optimizer])
    first, second = AdamW([fresh.first], lr=0.5), AdamW([fresh.second, fresh.bias], lr=0.25)
    steps(fresh, [second], range(1))
    kept = everything(fresh, [second])
    read(path, fresh, [first, second])
    assert same_bits(moments_by_name(fresh, first), moments_by_name(model, optimizer))
    assert same_bits(
        {name: value for name, value in everything(fresh, [second]).items() if name.startswith("0/")},
        {name: value for name, value in kept.items() if name.startswith("0/")},
    )


def test_the_number_of_saved_optimizers_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    model = Net()
    for count in (0, 1, 3):
        optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in list(model.parameters())[:count]]
        path = write(tmp_path / str(count), model, optimizers)
        assert saved_optimizer_count(DistributedCheckpointer().describe(path)) == count


def test_state_of_none_of_this_optimizers_parameters_is_an_error(tmp_path: Path) -> None:
    model, fresh = Net(), Net(seed=1)
    optimizer = AdamW([model.first, model.second])
    steps(model, [optimizer], range(1))
    path = write(tmp_path, model, [optimizer])
    with pytest.raises(CheckpointMismatchError, match="belongs to none of this optimizer's parameters") as caught:
        read(path, fresh, [AdamW([fresh.bias])])
    assert "state of first, second" in str(caught.value)


def test_state_of_parameters_that_are_gone_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, fresh = Net(), Net(seed=1)
    optimizer = adamw(model)
    steps(model, [optimizer], range(1))
    path = write(tmp_path, model, [optimizer])
    with caplog.at_level(logging.WARNING):
        read(path, fresh, [AdamW([fresh.first, fresh.bias])])
    assert "is not restored: second" in caplog.text


def test_a_group_of_new_parameters_keeps_its_configured_options(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, fresh = Net(), Net(seed=1)
    optimizer = AdamW([model.first], lr=0.01)
    steps(model, [optimizer], range(1))
    path = write(tmp_path, model, [optimizer])
    groups: list[dict[str, Any]] = [{"params": [fresh.first]}, {"params": [fresh.bias], "lr": 0.75}]
    grown = AdamW(groups, lr=0.5)
    with caplog.at_level(logging.WARNING):
        read(path, fresh, [grown])
    assert [group["lr"] for group in grown.param_groups] == [0.01, 0.75]
    assert "no saved parameter group contains bias" in caplog.text


def test_parameters_outside_the_model_are_filed_by_their_place(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[Net, nn.Parameter, AdamW]:
        model = Net(seed)
        scale = nn.Parameter(torch.tensor(float(seed)))
        return model, scale, AdamW([{"params": list(model.parameters())}, {"params": [scale]}])

    model, scale, optimizer = make(0)
    fresh, fresh_scale, fresh_optimizer = make(1)
    scale.grad = torch.tensor(0.5)
    optimizer.step()
    read(write(tmp_path, model, [optimizer]), fresh, [fresh_optimizer])
    assert same_bits(dict(fresh_optimizer.state[fresh_scale]), dict(optimizer.state[scale]))


@pytest.mark.parametrize(("options", "device"), [({}, "cpu"), ({"capturable": True}, "meta")])
def test_the_step_counter_goes_where_the_optimizer_keeps_it(options: dict[str, Any], device: str) -> None:
    """The meta device stands for an accelerator; the saved options decide, whatever this run was configured with."""
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    optimizer = AdamW([parameter])
    entries = {"step": torch.tensor(3.0), "exp_avg": torch.empty(2, device="meta")}
    saved = {"params": ["p"], "capturable": False, "fused": None, **options}
    apply_optimizers([optimizer], {id(parameter): "p"}, {"0": {"state": {"p": entries}, "param_groups": (saved,)}})
    assert optimizer.state[parameter]["step"].device.type == device


def test_numpy_numbers_among_the_options_are_saved_as_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    model, fresh = Net(), Net(seed=1)
    optimizer, fresh_optimizer = adamw(model), adamw(fresh)
    optimizer.param_groups[0]["lr"] = numpy.float64(0.375)
    read(write(tmp_path, model, [optimizer]), fresh, [fresh_optimizer])
    assert same_bits(fresh_optimizer.param_groups[0]["lr"], 0.375)


def leaf(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1)


def test_optimizers_are_found_behind_lists_chains_and_wrappers() -> None:
    model = Net()
    a, b, c = leaf([model.first]), leaf([model.second]), leaf([model.bias])
    duck = SimpleNamespace(state={}, param_groups=[])
    assert flatten_optimizers(None) == []
    assert flatten_optimizers(a) == [a]
    assert flatten_optimizers([a, (b, None), ChainedOptimizer([c])]) == [a, b, c]
    assert flatten_optimizers(SimpleNamespace(optimizer=a)) == [a]
    assert flatten_optimizers(SimpleNamespace(optimizer=[a, b])) == [a, b]
    assert flatten_optimizers(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=a), b])) == [a, b]
    assert flatten_optimizers(duck) == [duck]


def test_an_unknown_wrapper_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"unknown optimizer wrapper .*SimpleNamespace") as caught:
        flatten_optimizers([SimpleNamespace(step=lambda: None)])
    assert "chained_optimizers" in str(caught.value)


def _state_that_does_not_follow_a_sharded_parameter() -> list[str]:
    model = nn.Linear(6, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    names = parameter_names(model)
    weight = model.weight
    assert isinstance(weight, DTensor)
    entries: dict[str, Any] = {
        "plain": torch.zeros(6),
        "of another shape": dtensor_zeros(4, device_mesh=weight.device_mesh),
        "container": [weight.detach().clone()],
    }
    messages = []
    for key, value in entries.items():
        optimizer = AdamW(model.parameters())
        optimizer.state[weight] = {"step": torch.tensor(1.0), key: value}
        try:
            collect_optimizers([optimizer], names)
        except UnsupportedError as error:
            messages.append(str(error))
    optimizer = AdamW(model.parameters())
    optimizer.state[weight] = {"step": torch.tensor(1.0), "count": 3, "exp_avg": weight.detach().clone()}
    collect_optimizers([optimizer], names)
    return messages


def test_state_that_does_not_follow_a_sharded_parameter_is_refused_before_a_save() -> None:
    for messages in run_ranks(_state_that_does_not_follow_a_sharded_parameter, 2):
        assert ["optimizer state plain of weight" in messages[0], len(messages)] == [True, 3]
        assert "optimizer state of another shape of weight" in messages[1]
        assert "optimizer state container of weight" in messages[2]


def test_a_template_for_a_checkpoint_without_optimizer_is_empty(tmp_path: Path) -> None:
    model = Net()
    path = write(tmp_path, model, [])
    entries = DistributedCheckpointer().describe(path)
    assert optimizer_template([adamw(model)], parameter_names(model), entries) == {}
