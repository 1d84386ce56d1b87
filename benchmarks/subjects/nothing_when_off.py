"""A trainer that neither saves nor restores, against the loop that its user would write by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.protocol import Benchmark, BenchmarkError, Contender, Context, Figure, Options, Point, Scenario
from hyper_resume.config import CheckpointingConfig, DataConfig, RunConfig, TrainingConfig
from hyper_resume.data import DataLoader
from hyper_resume.trainer.base import BaseTrainer

BARE = "bare loop"
OFF = "trainer, saving and restoring off"
_WIDTH, _BATCH, _LAYERS = 512, 32, 4
_STEPS, _SMOKE_STEPS = 100, 20
# A goal of 2% needs more rounds than one of a factor.
_FEWEST_ROUNDS = 15
# Meant is 1. This is what the harness allows for noise.
_TOLERATED = 1.02


class _Numbers:
    """Sample i is the row i of a fixed matrix, and its own sum."""

    def __init__(self, count: int) -> None:
        self._rows = torch.rand((count, _WIDTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


def points(options: Options) -> Sequence[Point]:
    """One number of steps."""
    steps = _SMOKE_STEPS if options.smoke else _STEPS
    rounds = None if options.smoke else max(options.repeat, _FEWEST_ROUNDS)
    return [Point(label=f"{steps} steps", axis="steps", value=steps, rounds=rounds)]


def build(point: Point, context: Context) -> Scenario:
    """Model, optimizer and loader are made anew before each call; the same steps are then timed, and end in the same bits."""
    steps = int(point.value)
    ends: dict[str, torch.Tensor] = {}
    made: dict[str, Any] = {}

    def make(name: str, maker: Callable[[int], Any]) -> Callable[[], None]:
        def before() -> None:
            made[name] = maker(steps)

        return before

    def check(name: str, model: nn.Module) -> None:
        ends[name] = nn.utils.parameters_to_vector(model.parameters()).detach()
        if len(ends) == 2 and not torch.equal(ends[BARE], ends[OFF]):
            raise BenchmarkError("the two loops did not train alike, so their times can't be compared")

    return Scenario(
        payload_bytes=0,
        contenders=[
            Contender(
                name=BARE,
                role="limit",
                before=make(BARE, _parts),
                call=lambda: _bare_loop(*made[BARE]),
                check=lambda model: check(BARE, model),
                note=f"{_LAYERS} layers of width {_WIDTH}, batches of {_BATCH}; clips gradients and reads loss and norm",
            ),
            Contender(
                name=OFF,
                role="ours",
                before=make(OFF, _trainer),
                call=lambda: _train(made[OFF]),
                check=lambda model: check(OFF, model),
            ),
        ],
        figures=[
            Figure(
                text="a step with saving and restoring off, of the bare loop's (2% for noise)",
                above=(OFF,),
                below=BARE,
                relation="at most",
                bound=_TOLERATED,
            )
        ],
    )


def _parts(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    torch.manual_seed(1)
    layers = [layer for _ in range(_LAYERS) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(_WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, DataLoader(_Numbers(steps * _BATCH), batch_size=_BATCH, seed=1)


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch).squeeze(-1) - batch.sum(dim=-1)).square().mean()
    return loss


def _bare_loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> nn.Module:
    model.train()
    for batch in loader:
        loss = _loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())
        float(norm)
    return model


def _trainer(steps: int) -> BaseTrainer:
    model, optimizer, loader = _parts(steps)
    config = RunConfig(
        training=TrainingConfig(progress_bar=False, max_grad_norm=1.0),
        data=DataConfig(batch_size=_BATCH),
        checkpoint=CheckpointingConfig(save_ckpt=False, restore_from=None),
    )
    return BaseTrainer(
        config, model=model, optimizer=optimizer, lr_scheduler=None, train_dataloader=loader, loss_function=_loss
    )


def _train(trainer: BaseTrainer) -> nn.Module:
    trainer.train()
    return trainer.model


BENCHMARK = Benchmark(name="nothing-when-off", title="Nothing when off", points=points, build=build)
