"""A tiny training job in which every bucket matters, and a record of everything that a resume must bring back.

The net drops activations (torch stream), the loss draws from Python and NumPy, the order of the data is shuffled. Records
are made from the live objects with hashlib, not with the library's own digests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hyper_resume.config import (
    CheckpointingConfig,
    DataConfig,
    LRSchedulerConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
)
from hyper_resume.data import DataLoader
from hyper_resume.optim import build_lr_schedulers, build_optimizer
from hyper_resume.trainer.base import BaseTrainer, planned_steps
from hyper_resume.trainer.callbacks import Callback
from hyper_resume.trainer.state import TrainerState

VOCABULARY = 64


class Net(nn.Module):
    """Matrices, vectors and dropout; the names let Muon find its hidden matrices."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.25)
        self.lm_head = nn.Linear(width, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.tanh(self.hidden(self.embed_tokens(ids))))
        output: torch.Tensor = self.lm_head(self.norm(hidden))
        return output.squeeze(-1)


class Ids:
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index


class NoisyIds(Ids):
    """Sample i is i and one draw from each global stream, made at the moment of reading."""

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(())) + random.random() + float(np.random.rand())


def noisy_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Mean squared error of i / 64, scaled by draws from Python and NumPy (and by the samples' own noise)."""
    ids, noise = batch if isinstance(batch, (list, tuple)) else (batch, torch.zeros(len(batch)))
    scale = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand()) + 0.1 * noise
    loss: torch.Tensor = (scale * (model(ids) - ids / VOCABULARY) ** 2).mean()
    return loss


def seed_streams(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@dataclass(frozen=True, kw_only=True)
class LiveState:
    """Digests of parameters, of every optimizer's state and options, and of the three streams of a CPU process."""

    model: str
    moments: str
    torch_stream: str
    python_stream: str
    numpy_stream: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """One finished step: what the loop saw, and the live state right after it."""

    global_step: int
    epoch: int
    loss: float
    lrs: tuple[float, ...]
    sample_ids: tuple[int, ...]
    live: LiveState
    grad_norm: float = float("inf")
    batch_index: int = -1


def live_state(model: nn.Module, optimizers: Iterable[Any] = ()) -> LiveState:
    moments = [
        ([optimizer.state.get(p) for p in group["params"]], {k: v for k, v in group.items() if k != "params"})
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    numpy_state: Any = np.random.get_state()
    return LiveState(
        model=_digest(model.state_dict()),
        moments=_digest(moments),
        torch_stream=_digest(torch.get_rng_state()),
        python_stream=_digest(random.getstate()),
        numpy_stream=_digest([numpy_state[1].tolist(), *numpy_state[2:]]),
    )


def assert_everything_varies(records: Sequence[Record], at_least: int) -> None:
    """A column that is the same in all steps would make any comparison of it pass."""
    rows = [dataclasses.asdict(record) for record in records]
    for column in ("loss", "lrs", "sample_ids"):
        assert len({row[column] for row in rows}) >= at_least, f"{column} hardly varies"
    for name in rows[0]["live"]:
        assert len({row["live"][name] for row in rows}) == len(rows), f"{name} stands still"


def _digest(value: Any) -> str:
    hasher = hashlib.sha256()
    _feed(hasher, value)
    return hasher.hexdigest()[:16]


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        hasher.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            hasher.update(str(key).encode())
            _feed(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        hasher.update(b"(")
        for item in value:
            _feed(hasher, item)
    else:
        hasher.update(repr(value).encode())


# ---- BaseTrainer on the tiny job


class Recorder(Callback):
    """Keeps a :class:`Record` of each step in ``records``."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.records: list[Record] = []

    def on_step_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        current: TrainerState = self.trainer.state
        optimizer = self.trainer.optimizer
        self.records.append(
            Record(
                global_step=current.global_step,
                epoch=current.epoch,
                loss=current.loss,
                lrs=tuple(current.lrs),
                sample_ids=tuple(current.sample_ids),
                grad_norm=current.grad_norm,
                batch_index=current.batch_index,
                live=live_state(self.trainer.model, getattr(optimizer, "chained_optimizers", [optimizer])),
            )
        )


MakeCallback = Callable[[BaseTrainer], Callback]


def run_config(
    checkpoint_dir: Path,
    *,
    training: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    lr_scheduler: dict[str, Any] | None = None,
    **checkpoint: Any,
) -> RunConfig:
    """A configuration of the tiny job: batches of 3, no bar; keyword arguments are checkpoint fields."""
    return RunConfig(
        training=TrainingConfig(**{"progress_bar": False, **(training or {})}),
        data=DataConfig(**{"batch_size": 3, **(data or {})}),
        optimizer=OptimizerConfig(**{"lr": 0.01, **(optimizer or {})}),
        lr_scheduler=LRSchedulerConfig(**{"warmup_steps": 2, **(lr_scheduler or {})}),
        checkpoint=CheckpointingConfig(checkpoint_dir=str(checkpoint_dir), **checkpoint),
    )


def make_trainer(
    config: RunConfig,
    *,
    dataset: Any = None,
    loader: Any = None,
    callbacks: Sequence[MakeCallback] = (),
    loss_function: Any = noisy_loss,
    width: int = 8,
) -> BaseTrainer:
    """Build everything anew, as a fresh process would: same seeds, then the parts, then the trainer."""
    seed_streams(config.training.seed)
    model = Net(width)
    if loader is None:
        loader = DataLoader(
            dataset or Ids(20),
            batch_size=config.data.batch_size,
            shuffle=config.data.shuffle,
            seed=config.training.seed,
            drop_last=config.data.drop_last,
            num_workers=config.data.num_workers,
        )
    optimizer = build_optimizer(model, config.optimizer)
    schedulers = build_lr_schedulers(optimizer, config.lr_scheduler, planned_steps(config, loader))
    seed_streams(config.training.seed + 1)
    return BaseTrainer(
        config,
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedulers,
        train_dataloader=loader,
        loss_function=loss_function,
        callbacks=[Recorder, *callbacks],
    )


def records_of(trainer: BaseTrainer) -> list[Record]:
    return next(callback for callback in trainer.callbacks if isinstance(callback, Recorder)).records


def train(config: RunConfig, **parts: Any) -> list[Record]:
    """Train a fresh trainer to its end and return its records."""
    trainer = make_trainer(config, **parts)
    trainer.train()
    return records_of(trainer)


class StoppedOnPurpose(Exception):
    """What a callback raises to break training off."""


def at_step(step: int, action: Callable[[Any], None]) -> MakeCallback:
    """A callback that calls ``action(trainer)`` after ``step``, before that step is saved."""

    class AtStep(Callback):
        def on_step_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
            if self.trainer.state.global_step == step:
                action(self.trainer)

    return AtStep


def stop_after(step: int) -> MakeCallback:
    """A callback that breaks training off after ``step``, before that step is saved."""

    def stop(trainer: Any) -> None:
        raise StoppedOnPurpose

    return at_step(step, stop)


# ---- what is on disk


def saved_steps(checkpoint_dir: Path) -> list[int]:
    """Steps of the real step directories, ascending."""
    return sorted(int(path.name.removeprefix("global_step_")) for path in checkpoint_dir.glob("global_step_*"))


def disk_listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below ``folder`` with its size and the time of its last change, in nanoseconds."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size if path.is_file() else 0, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }
