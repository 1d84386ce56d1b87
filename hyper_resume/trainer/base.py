"""The training loop and its hook dispatch, for any model, data and loss."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_resume import collective
from hyper_resume.config.schema import RunConfig
from hyper_resume.data.prefetch import HyperIter
from hyper_resume.errors import TrainingIncompleteError, describe
from hyper_resume.parallel import clip_grad_norm, mean_over
from hyper_resume.trainer.callbacks import (
    Callback,
    CheckpointerCallback,
    ProgressCallback,
    TrajectoryCallback,
)
from hyper_resume.trainer.state import TrainerState

logger = logging.getLogger(__name__)

LossFunction = Callable[[nn.Module, Any], torch.Tensor]


class BaseTrainer:
    """Runs epochs of optimizer steps over what it is given, and tells its callbacks.

    Attributes that callbacks read: ``config``, ``model``, ``optimizer``, ``lr_scheduler``, ``train_dataloader``,
    ``data_iterator`` (None between epochs), ``device``, ``callbacks``, ``state``, ``train_steps`` (planned optimizer steps of
    the whole run), ``num_train_epochs``, ``start_epoch``, ``start_step``. Any other attribute with a ``state_dict`` is saved
    and restored with the training state.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        model: nn.Module,
        optimizer: Any,
        lr_scheduler: Any,
        train_dataloader: Any,
        loss_function: LossFunction,
        device: torch.device | None = None,
        dp_group: dist.ProcessGroup | None = None,
        callbacks: Sequence[Callable[[BaseTrainer], Callback]] = (),
    ) -> None:
        """Take the built parts.

        Args:
            config: ``training``, ``data``, ``checkpoint`` and ``trajectory`` are read here.
            model: on its device, already sharded.
            optimizer: an optimizer, or an object that steps like one.
            lr_scheduler: a scheduler or a list, each stepped once an optimizer step.
            train_dataloader: any sized iterable; a stateful one resumes exactly.
            loss_function: (model, batch) -> the batch's mean loss, a scalar tensor.
            device: where batches are moved; default the CPU.
            dp_group: ranks over which the loss is averaged; None averages over nothing.
            callbacks: makers of further callbacks; they run before the checkpointer in every hook.
        """
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader = train_dataloader
        self.data_iterator: HyperIter | None = None
        self.loss_function = loss_function
        self.device = device or torch.device("cpu")
        self.dp_group = dp_group
        self.state = TrainerState()
        self.num_train_epochs = config.training.num_train_epochs
        self.train_steps = planned_steps(config, train_dataloader)
        self.start_epoch = 0
        self.start_step = 0
        self.callbacks: list[Callback] = []
        self._init_callbacks(callbacks)

    def _init_callbacks(self, makers: Sequence[Callable[[BaseTrainer], Callback]]) -> None:
        """Register the callbacks, once. With saving and restoring both off there is no checkpointer at all."""
        config = self.config
        if config.training.progress_bar:
            self.callbacks.append(ProgressCallback(self))
        if config.trajectory.dir is not None:
            self.callbacks.append(
                TrajectoryCallback(self, directory=config.trajectory.dir, digests=config.trajectory.digests)
            )
        self.callbacks.extend(make(self) for make in makers)
        if config.checkpoint.save_ckpt or config.checkpoint.restore_from is not None:
            # Last, so that nothing that another callback draws in its hook comes after the random streams are restored.
            self.callbacks.append(CheckpointerCallback(self))

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train from the start, or from where the checkpoint left off, to the planned step.

        Raises:
            TrainingIncompleteError: the data ended before the planned step.
        """
        try:
            self._dispatch("on_train_begin")
            logger.info(
                "Rank%s Start training. Start step: %s. Train steps: %s. Start epoch: %s. Train epochs: %s.",
                collective.rank(),
                self.start_step,
                self.train_steps,
                self.start_epoch,
                self.num_train_epochs,
            )
            for epoch in range(self.start_epoch, self.num_train_epochs):
                if self.state.global_step >= self.train_steps:
                    break
                self._train_epoch(epoch)
            self._dispatch("on_train_end")
        except BaseException:
            self._dispatch("on_exception")
            raise
        if self.state.global_step < self.train_steps:
            raise TrainingIncompleteError(
                describe(
                    "the data ended before the planned number of steps",
                    expected=f"{self.train_steps} steps",
                    found=f"{self.state.global_step} steps after {self.num_train_epochs} epochs",
                    do="raise training.num_train_epochs, or lower training.max_steps",
                )
            )

    def _train_epoch(self, epoch: int) -> None:
        self.state.epoch = epoch
        set_epoch = getattr(self.train_dataloader, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        # Where in the epoch the iterator starts, in micro-batches; 0 for a loader that can't tell. Asked before the iterator
        # is made, because a prefetching one moves the loader at once.
        self.state.batch_index = getattr(self.train_dataloader, "batches_consumed", 0) - 1
        data = self.config.data
        self.data_iterator = HyperIter(
            self.train_dataloader,
            use_background_prefetcher=data.use_background_prefetcher,
            prefetch_batches=data.prefetch_batches,
        )
        self.model.train()
        try:
            while self.state.global_step < self.train_steps:
                batches = self._next_window()
                if not batches:
                    break
                self._step(batches)
                self._dispatch("on_step_end")
            if self._epoch_is_over():
                self._dispatch("on_epoch_end")
        finally:
            self.data_iterator.close()
            self.data_iterator = None

    def _next_window(self) -> list[Any]:
        """Take the micro-batches of one optimizer step; fewer at an epoch's end, none after it."""
        assert self.data_iterator is not None  # made by _train_epoch
        batches: list[Any] = []
        self.state.sample_ids = []
        while len(batches) < self.config.training.gradient_accumulation_steps:
            try:
                batch = next(self.data_iterator)
            except StopIteration:
                break
            batches.append(batch)
            self.state.batch_index += 1
            self.state.sample_ids.extend(self.data_iterator.sample_ids)
        return batches

    def _epoch_is_over(self) -> bool:
        try:
            return self.state.batch_index + 1 >= len(self.train_dataloader)
        except TypeError:
            return False

    def _step(self, batches: list[Any]) -> None:
        started = time.perf_counter()
        training = self.config.training
        total = torch.zeros((), device=self.device)
        for index, batch in enumerate(batches):
            self._sync_gradients(index == len(batches) - 1)
            with self._autocast():
                loss = self.loss_function(self.model, _to_device(batch, self.device)) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        grad_norm = clip_grad_norm(parameters, training.max_grad_norm)
        self.state.lrs = self._learning_rates()
        self.optimizer.step()
        for scheduler in self._schedulers():
            scheduler.step()
        self.optimizer.zero_grad()
        self.state.global_step += 1
        self.state.next_lrs = self._learning_rates()
        self.state.loss = float(mean_over(total, self.dp_group))
        self.state.grad_norm = float(grad_norm)
        self.state.seconds = time.perf_counter() - started

    def _sync_gradients(self, last: bool) -> None:
        """FSDP2 reduces gradients once a step, not once a micro-batch."""
        toggle = getattr(self.model, "set_requires_gradient_sync", None)
        if toggle is not None:
            toggle(last)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.training.bf16)

    def _learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _schedulers(self) -> list[Any]:
        return list(self.lr_scheduler) if isinstance(self.lr_scheduler, (list, tuple)) else [self.lr_scheduler]

    def _dispatch(self, hook: str) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self.state)


def planned_steps(config: RunConfig, train_dataloader: Any) -> int:
    """Return the optimizer steps of the whole run: all epochs, or ``max_steps`` where that is set."""
    training = config.training
    if training.max_steps is not None:
        return training.max_steps
    batches = len(train_dataloader)
    return training.num_train_epochs * -(-batches // training.gradient_accumulation_steps)


def _to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_to_device(value, device) for value in batch)
    return batch
