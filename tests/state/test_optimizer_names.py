"""Names under which optimizer state is filed: one for a tied parameter, and the same whatever wraps the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import AdamW

from hyper_resume.state.model import collect_model
from tests.state.disk import everything, moments_by_name, read, same_bits, steps, write


class Tied(nn.Module):
    """An embedding and a head that are one parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.mix(values @ self.embed.weight[:4]))
        return result


def test_tied_weights_have_one_name_and_stay_tied(tmp_path: Path) -> None:
    model, fresh = Tied(0), Tied(1)
    optimizer, fresh_optimizer = AdamW(model.parameters(), lr=0.01), AdamW(fresh.parameters(), lr=0.01)
    steps(model, [optimizer], range(3))
    path = write(tmp_path, model, [optimizer])
    read(path, fresh, [fresh_optimizer])
    assert fresh.head.weight is fresh.embed.weight
    assert set(moments_by_name(fresh, fresh_optimizer)) == {"embed.weight", "mix.weight", "mix.bias"}
    assert steps(fresh, [fresh_optimizer], range(3, 6)) == steps(model, [optimizer], range(3, 6))
    assert same_bits(everything(fresh, [fresh_optimizer]), everything(model, [optimizer]))


class Blocks(nn.Module):
    """Two layers to wrap one by one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers[1](torch.tanh(self.layers[0](values)))
        return result


def plain(model: Blocks) -> nn.Module:
    return model


def compile_(model: nn.Module) -> nn.Module:
    made = torch.compile(model, backend="eager")
    assert isinstance(made, nn.Module)
    return made


def compiled(model: Blocks) -> nn.Module:
    return compile_(model)


def compiled_layers(model: Blocks) -> nn.Module:
    model.layers[1] = compile_(model.layers[1])
    return model


def recomputed(model: Blocks) -> nn.Module:
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    return model


def compiled_inside_recomputed(model: Blocks) -> nn.Module:
    model.layers[0] = checkpoint_wrapper(compile_(model.layers[0]))
    return compile_(model)


def recomputed_inside_compiled(model: Blocks) -> nn.Module:
    model.layers[0] = compile_(checkpoint_wrapper(model.layers[0]))
    return model


WRAPPINGS = [plain, compiled, compiled_layers, recomputed, compiled_inside_recomputed, recomputed_inside_compiled]


def test_wrappers_of_any_nesting_leave_names_and_checkpoints_alike(tmp_path: Path) -> None:
    expected: dict[str, Any] | None = None
    for number, wrap in enumerate(WRAPPINGS):
        model = wrap(Blocks(0))
        optimizer = AdamW(model.parameters(), lr=0.01)
        # No forward: nothing is compiled, only the names matter here.
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        path = write(tmp_path / str(number), model, [optimizer])
        for other in WRAPPINGS:
            fresh = other(Blocks(1))
            fresh_optimizer = AdamW(fresh.parameters(), lr=0.01)
            read(path, fresh, [fresh_optimizer])
            found = {**collect_model(fresh), **moments_by_name(fresh, fresh_optimizer)}
            expected = expected or {**collect_model(model), **moments_by_name(model, optimizer)}
            assert same_bits(found, expected), (wrap.__name__, other.__name__)
