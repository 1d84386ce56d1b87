"""Names that no wrapper changes, and the model bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hyper_resume.errors import CheckpointMismatchError
from hyper_resume.state.model import apply_model, collect_model
from hyper_resume.state.names import canonical_name, parameter_names
from tests.state.disk import same_bits


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("_orig_mod.layers.0.weight", "layers.0.weight"),
        ("layers.0._orig_mod.weight", "layers.0.weight"),
        ("_orig_mod.layers.0._checkpoint_wrapped_module._orig_mod.weight", "layers.0.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("a_checkpoint_wrapped_module.b", "a_checkpoint_wrapped_module.b"),
        ("weight", "weight"),
    ],
)
def test_only_whole_parts_that_wrappers_add_are_taken_out(name: str, expected: str) -> None:
    assert canonical_name(name) == expected


def test_a_tied_parameter_has_the_name_it_is_met_under_first() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    assert parameter_names(model)[id(model["b"].weight)] == "a.weight"


def test_the_collected_tensors_are_the_live_ones() -> None:
    model = nn.Linear(2, 2)
    collected = collect_model(model)
    with torch.no_grad():
        model.weight.fill_(7.0)
    assert same_bits(collected["weight"], torch.full((2, 2), 7.0))


def test_buffers_are_collected_and_those_that_are_not_persistent_are_not() -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert set(collect_model(model)) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def test_trainable_only_leaves_out_frozen_parameters_and_buffers() -> None:
    model = nn.BatchNorm1d(3)
    model.bias.requires_grad_(False)
    assert set(collect_model(model, trainable_only=True)) == {"weight"}


def test_two_entries_with_one_name_are_refused() -> None:
    model = nn.Module()
    model.layer = nn.Linear(2, 2)
    model._orig_mod = nn.Module()
    model._orig_mod.layer = nn.Linear(2, 2)
    with pytest.raises(CheckpointMismatchError, match="4 entries, 2 names"):
        collect_model(model)


class Hooked(nn.Module):
    """Counts what its load hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.loads = 0
        self.register_load_state_dict_post_hook(self._loaded)  # type: ignore[no-untyped-call]

    def _loaded(self, module: nn.Module, keys: Any) -> None:
        self.loads += 1


def test_applying_runs_the_modules_own_load_hooks_and_keeps_its_tensors() -> None:
    model = Hooked()
    weight = model.weight
    state = collect_model(model)
    state["weight"].fill_(3.0)
    apply_model(model, state, strict=True)
    assert model.loads == 1
    assert model.weight is weight
    assert same_bits(model.weight.detach(), torch.full((2,), 3.0))


def test_a_partial_state_is_an_error_only_when_strict() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="bias"):
        apply_model(model, {"weight": torch.ones(2, 2)}, strict=True)
    apply_model(model, {"weight": torch.ones(2, 2)}, strict=False)
    assert same_bits(model.weight.detach(), torch.ones(2, 2))
