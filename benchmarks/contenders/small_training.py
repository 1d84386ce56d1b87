"""A training small enough to measure single steps: linear layers, rows of numbers, AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.contenders.sliced import Collate
from hyper_resume.config import CheckpointingConfig, DataConfig, RunConfig, TrainingConfig, TrajectoryConfig
from hyper_resume.data import DataLoader
from hyper_resume.trainer.base import BaseTrainer

LAYERS, SEED, MOST_NORM = 4, 1, 1.0
_LOOSE = TrajectoryConfig()


class Numbers:
    """A dataset whose samples are the rows of a fixed matrix."""

    def __init__(self, count: int, width: int) -> None:
        """Make ``count`` samples of ``width`` numbers."""
        self._count = count
        self._rows = torch.rand((1024, width), generator=torch.Generator().manual_seed(SEED))

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one sample, of shape ``(width,)``."""
        return self._rows[index % len(self._rows)]


def make_model(width: int) -> nn.Module:
    """Return linear layers of ``width``, with a single output."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean squared distance between the output and the sum of the inputs."""
    loss: torch.Tensor = (model(batch).squeeze(-1) - batch.sum(dim=-1)).square().mean()
    return loss


def train(
    model: nn.Module, dataset: Any, batch_size: int, collate: Collate, trajectory: TrajectoryConfig = _LOOSE
) -> None:
    """Train with this library's trainer, saving and restoring off."""
    config = RunConfig(
        training=TrainingConfig(progress_bar=False, max_grad_norm=MOST_NORM),
        data=DataConfig(batch_size=batch_size),
        checkpoint=CheckpointingConfig(save_ckpt=False, restore_from=None),
        trajectory=trajectory,
    )
    BaseTrainer(
        config,
        model=model,
        optimizer=make_optimizer(model),
        lr_scheduler=None,
        train_dataloader=DataLoader(dataset, batch_size=batch_size, seed=SEED, collate_fn=collate),
        loss_function=loss_of,
    ).train()
