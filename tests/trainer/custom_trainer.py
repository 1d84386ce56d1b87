"""A trainer that is nothing but a namespace, and its hand-written loop (specification 5.2)."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.optim.lr_scheduler import LambdaLR

from hyper_resume.config import CheckpointingConfig
from hyper_resume.data import DataLoader
from hyper_resume.trainer.callbacks import CheckpointerCallback, TrainerState
from tests.trainer.tiny_training import VOCABULARY, Ids, Net, Record, live_state, seed_streams


def make_custom_trainer(checkpoint_dir: Path, *, optimizers: int = 1, as_lists: bool = False, **checkpoint: Any) -> Any:
    """A fresh namespace: 14 samples in batches of 3 make 5 steps an epoch.

    Args:
        checkpoint_dir: where it saves.
        optimizers: 1, or 2 that share the parameters out between them; each has a scheduler.
        as_lists: ``optimizer`` and ``lr_scheduler`` are lists.
        checkpoint: further checkpoint fields.
    """
    seed_streams(7)
    model = Net()
    parameters = list(model.parameters())
    shares = [parameters] if optimizers == 1 else [parameters[:2], parameters[2:]]
    made = [torch.optim.AdamW(share, lr=0.01 * (i + 1), weight_decay=0.1) for i, share in enumerate(shares)]
    schedulers = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in made]
    seed_streams(8)
    return SimpleNamespace(
        config=SimpleNamespace(checkpoint=CheckpointingConfig(checkpoint_dir=str(checkpoint_dir), **checkpoint)),
        model=model,
        optimizer=made if as_lists or optimizers > 1 else made[0],
        lr_scheduler=schedulers if as_lists or optimizers > 1 else schedulers[0],
        train_dataloader=DataLoader(Ids(14), batch_size=3, seed=3),
        state=TrainerState(),
        train_steps=100,
        start_epoch=0,
        start_step=0,
    )


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def plain_optimizers(trainer: Any) -> list[torch.optim.Optimizer]:
    return [leaf for item in as_list(trainer.optimizer) for leaf in getattr(item, "chained_optimizers", [item])]


def train_custom_trainer(trainer: Any, until_step: int) -> list[Record]:
    """Restore if asked to, train to ``until_step`` through all four hooks; one record a step."""
    callback = CheckpointerCallback(trainer)
    callback.on_train_begin(trainer.state)
    records: list[Record] = []
    epoch = trainer.start_epoch
    while trainer.state.global_step < until_step:
        trainer.state.epoch = epoch
        trainer.train_dataloader.set_epoch(epoch)
        trainer.data_iterator = iter(trainer.train_dataloader)
        for ids in trainer.data_iterator:
            records.append(_step(trainer, ids))
            callback.on_step_end(trainer.state)
            if trainer.state.global_step == until_step:
                break
        if trainer.train_dataloader.batches_consumed == len(trainer.train_dataloader):
            callback.on_epoch_end(trainer.state)
        epoch += 1
    callback.on_train_end(trainer.state)
    return records


def saved_entries(step_directory: Path) -> set[str]:
    """Flattened names of everything in the DCP payload but the mark of the save itself."""
    names = FileSystemReader(step_directory).read_metadata().state_dict_metadata
    return {name for name in names if not name.startswith("save_id.")}


def saved_extra_state(step_directory: Path) -> dict[str, Any]:
    """Rank 0's training state, from its own file."""
    state: dict[str, Any] = torch.load(step_directory / "extra_state" / "extra_state_rank_0.pt", weights_only=True)
    return state


def _step(trainer: Any, ids: torch.Tensor) -> Record:
    scale = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())
    loss = scale * ((trainer.model(ids) - ids / VOCABULARY) ** 2).mean()
    loss.backward()
    lrs = tuple(group["lr"] for optimizer in plain_optimizers(trainer) for group in optimizer.param_groups)
    for part in [*as_list(trainer.optimizer), *as_list(trainer.lr_scheduler)]:
        part.step()
    for optimizer in as_list(trainer.optimizer):
        optimizer.zero_grad()
    trainer.state.global_step += 1
    return Record(
        global_step=trainer.state.global_step,
        epoch=trainer.state.epoch,
        loss=float(loss.detach()),
        lrs=lrs,
        sample_ids=tuple(ids.tolist()),
        live=live_state(trainer.model, plain_optimizers(trainer)),
    )
