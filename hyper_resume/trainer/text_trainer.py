"""Causal language models on text: builds all components from the configuration and passes them to BaseTrainer."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from hyper_resume import collective
from hyper_resume.config.schema import RunConfig
from hyper_resume.data.loader import DataLoader
from hyper_resume.data.text import build_text_dataset, collate
from hyper_resume.device import DeviceContext, resolve_device
from hyper_resume.models.build import build_model
from hyper_resume.models.lora import apply_lora
from hyper_resume.optim.build import build_lr_schedulers, build_optimizer
from hyper_resume.parallel import ParallelMesh, build_mesh, parallelize
from hyper_resume.state.rng import seed_streams
from hyper_resume.trainer.base import BaseTrainer, planned_steps

logger = logging.getLogger(__name__)


class TextTrainer:
    """Composes a :class:`BaseTrainer` (``.base``), which owns the loop and the hooks.

    The order of building matters for bitwise equality: one seed for all ranks while the model is made, so that every rank
    shards the same weights; then each rank's own streams for training.
    """

    def __init__(self, config: RunConfig) -> None:
        """Build device, mesh, data, model, optimizer and schedule. The process group must exist when there are ranks."""
        self.config = config
        self.device: DeviceContext = resolve_device(config.accelerator.device)
        self.mesh: ParallelMesh | None = build_mesh(config.accelerator, self.device.type, collective.world_size())
        torch.use_deterministic_algorithms(config.training.deterministic, warn_only=True)
        # An error on one rank (a folder that one node lacks) is raised on all, so that no rank waits for it.
        dataset = collective.on_all_ranks(lambda: build_text_dataset(config.data))
        model = self._build_model(dataset.vocab_size)
        loader = self._build_loader(dataset)
        optimizer = build_optimizer(model, config.optimizer)
        schedulers = build_lr_schedulers(optimizer, config.lr_scheduler, planned_steps(config, loader))
        self._seed_this_rank()
        self.base = BaseTrainer(
            config,
            model=model,
            optimizer=optimizer,
            lr_scheduler=schedulers,
            train_dataloader=loader,
            loss_function=causal_lm_loss,
            device=self.device.device,
            dp_group=None if self.mesh is None else self.mesh.dp_mesh.get_group(),
        )

    def train(self) -> None:
        """Run the training to its planned step."""
        self.base.train()

    def _build_model(self, vocab_size: int) -> nn.Module:
        seed_streams(self.config.training.seed, self.device.type)
        config, device = self.config.model, self.device.device
        model = collective.on_all_ranks(
            lambda: apply_lora(build_model(config, vocab_size=vocab_size), config.lora).to(device)
        )
        return parallelize(model, self.mesh)

    def _build_loader(self, dataset: Any) -> DataLoader:
        data, mesh = self.config.data, self.mesh
        return DataLoader(
            dataset,
            batch_size=data.batch_size,
            shuffle=data.shuffle,
            shuffle_method=data.shuffle_method,
            seed=self.config.training.seed,
            drop_last=data.drop_last,
            dp_rank=0 if mesh is None else mesh.dp_rank,
            dp_world_size=1 if mesh is None else mesh.dp_size,
            num_workers=data.num_workers,
            collate_fn=collate,
            ignored_signals=self.config.checkpoint.preemption_signals if self.config.checkpoint.save_ckpt else (),
        )

    def _seed_this_rank(self) -> None:
        """Give each data-parallel rank its own random streams.

        Ranks that share a sample by tensor parallelism share the seed too: they must drop the same activations, and a
        dataset that draws random numbers must give them the same sample.
        """
        dp_rank = 0 if self.mesh is None else self.mesh.dp_rank
        seed_streams(self.config.training.seed + 1 + dp_rank, self.device.type)


def causal_lm_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean next-token cross-entropy of ``input_ids`` and ``labels``, both (batch, sequence)."""
    loss: torch.Tensor = model(**batch).loss
    return loss
