"""The training loop and its hook dispatch, for any model, data and loss."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_resume import collective
from hyper_resume.config.schema import RunConfig
from hyper_resume.data.loader import DataLoader
from hyper_resume.data.prefetch import HyperIter
from hyper_resume.data.resumable import ResumableLoader
from hyper_resume.errors import ConfigError, TrainingIncompleteError, describe
from hyper_resume.parallel import clip_grad_norm, mean_over_group
from hyper_resume.trainer.callbacks import (
    Callback,
    CheckpointerCallback,
    PreemptionCallback,
    ProgressCallback,
    TrajectoryCallback,
)
from hyper_resume.trainer.direct_iterator import DirectIter
from hyper_resume.trainer.resume_point import steps_per_epoch
from hyper_resume.trainer.state import TrainerState

logger = logging.getLogger(__name__)

LossFunction = Callable[[nn.Module, Any], torch.Tensor]


class BaseTrainer:
    """Runs epochs of optimizer steps and calls its callbacks.

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
        """Take the built components.

        Args:
            config: ``training``, ``data``, ``checkpoint`` and ``trajectory`` are read here.
            model: on its device, already sharded.
            optimizer: an optimizer, or an object that steps like one.
            lr_scheduler: a scheduler, a list of them, each stepped once an optimizer step, or None.
            train_dataloader: this package's ``DataLoader``, a torch ``DataLoader``, a loader with ``state_dict`` and
                ``load_state_dict``, or a ``ResumableLoader`` around any loader: each resumes exactly. Of any other iterable
                an epoch that is resumed is read again from its start, with a warning. Where the training saves or restores,
                the attribute ``train_dataloader`` is a ``ResumableLoader`` for every loader but this package's own.
            loss_function: (model, batch) -> the batch's mean loss, a scalar tensor.
            device: where batches are moved; default the CPU.
            dp_group: ranks over which the loss is averaged; None for a single rank.
            callbacks: functions that make further callbacks; these run before the checkpointer in every hook.

        Raises:
            UnsupportedError: the training saves or restores, and this loader can't be resumed.
        """
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader = _positioned(train_dataloader, config, device)
        self.data_iterator: HyperIter | DirectIter | None = None
        self.loss_function = loss_function
        self.device = device or torch.device("cpu")
        self.dp_group = dp_group
        self.state = TrainerState()
        self.num_train_epochs = config.training.num_train_epochs
        self.train_steps = planned_steps(config, train_dataloader)
        self.start_epoch = 0
        self.start_step = 0
        # Set once training was preempted, before anything is closed.
        self.is_leaving = False
        self._exhausted = False
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
            # After these, so that no other callback draws random numbers in its hook after the random streams are restored.
            checkpointer = CheckpointerCallback(self)
            self.callbacks.append(checkpointer)
            if config.checkpoint.save_ckpt and config.checkpoint.preemption_signals:
                # Last, so that every other callback has processed the step. It draws no random numbers.
                self.callbacks.append(PreemptionCallback(self, checkpointer))

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train from the start, or from the restored checkpoint, to the planned step.

        Raises:
            TrainingIncompleteError: the data ended before the planned step.
            PreemptedError: a signal asked to stop; the last step is saved.
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
            self._warn_of_other_epoch_length()
            if self._epoch_end_is_missing():
                self._end_epoch()
            for epoch in range(self.start_epoch, self.num_train_epochs):
                if self.state.global_step >= self.train_steps:
                    break
                self._train_epoch(epoch)
            self._dispatch("on_train_end")
        except BaseException:
            self._dispatch_exception()
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

    def _warn_of_other_epoch_length(self) -> None:
        """Warn when the remaining epochs do not end at the planned step, because an epoch has another length now."""
        if self.config.training.max_steps is not None or self.start_epoch >= self.num_train_epochs:
            return
        left = (self.num_train_epochs - self.start_epoch) * steps_per_epoch(self) - self.start_step
        end = self.state.global_step + left
        if end != self.train_steps:
            logger.warning(
                "an epoch has another length than in the run that was saved: %s epochs would end at step %s, but this run "
                "and its lr schedule are planned for %s steps; set training.max_steps and lr_scheduler.decay_steps",
                self.num_train_epochs,
                end,
                self.train_steps,
            )

    def _epoch_end_is_missing(self) -> bool:
        """True after a restore of a save that was made between an epoch's last step and its ``on_epoch_end``."""
        state = self.state
        at_boundary = self.start_step == 0 and self.start_epoch == state.epoch + 1
        return state.global_step > 0 and at_boundary and not state.epoch_ended

    def _train_epoch(self, epoch: int) -> None:
        self.state.epoch = epoch
        self.state.epoch_ended = False
        set_epoch = getattr(self.train_dataloader, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        # Read before the iterator is made, because a prefetching one advances the loader at once.
        self.state.batch_index = self._batches_consumed(epoch) - 1
        self.data_iterator = self._open_iterator(epoch)
        self.model.train()
        try:
            self._train_windows()
            if self._epoch_is_over():
                self._end_epoch()
        finally:
            self.data_iterator.close()
            self.data_iterator = None

    def _batches_consumed(self, epoch: int) -> int:
        """How many micro-batches of ``epoch`` the loader has delivered; 0 for a loader without a position."""
        loader = self.train_dataloader
        if isinstance(loader, ResumableLoader) and epoch != loader.epoch:
            return 0
        return int(getattr(loader, "batches_consumed", 0))

    def _open_iterator(self, epoch: int) -> HyperIter | DirectIter:
        data, loader = self.config.data, self.train_dataloader
        resumable = isinstance(loader, ResumableLoader)
        if not data.use_background_prefetcher and (resumable or not self.config.checkpoint.save_ckpt):
            # Only a save needs the position of every batch, and a ResumableLoader knows it.
            return DirectIter(loader, epoch)
        return HyperIter(
            DirectIter(loader, epoch) if resumable else loader,
            use_background_prefetcher=data.use_background_prefetcher,
            prefetch_batches=data.prefetch_batches,
        )

    def _train_windows(self) -> int:
        """Train until the epoch's data or the planned steps end; returns the number of steps."""
        before = self.state.global_step
        self._exhausted = False
        while self.state.global_step < self.train_steps:
            batches = self._next_window()
            if not batches:
                break
            self._step(batches)
            self._dispatch("on_step_end")
        return self.state.global_step - before

    def _end_epoch(self) -> None:
        # Before the hooks: a save in them is a save after the epoch's end.
        self.state.epoch_ended = True
        self._dispatch("on_epoch_end")

    def _next_window(self) -> list[Any]:
        """Take the micro-batches of one optimizer step; fewer at an epoch's end, none after it."""
        assert self.data_iterator is not None  # made by _train_epoch
        batches: list[Any] = []
        self.state.sample_ids = []
        while len(batches) < self.config.training.gradient_accumulation_steps:
            try:
                batch = next(self.data_iterator)
            except StopIteration:
                self._exhausted = True
                break
            batches.append(batch)
            self.state.batch_index += 1
            self.state.sample_ids.extend(self.data_iterator.sample_ids)
        return batches

    def _epoch_is_over(self) -> bool:
        """Whether the data ended, or, when ``max_steps`` came first, all batches were counted."""
        if self._exhausted:
            return True
        try:
            return self.state.batch_index + 1 >= len(self.train_dataloader)
        except TypeError:
            return False

    def _step(self, batches: list[Any]) -> None:
        started = time.perf_counter()
        total = self._backward(batches)
        grad_norm = self._clip()
        self.state.lrs = self._learning_rates()
        self.optimizer.step()
        for scheduler in self._schedulers():
            scheduler.step()
        self.optimizer.zero_grad()
        self.state.global_step += 1
        self.state.next_lrs = self._learning_rates()
        self.state.loss = float(total if self.dp_group is None else mean_over_group(total, self.dp_group))
        self.state.grad_norm = float(grad_norm)
        self.state.seconds = time.perf_counter() - started

    def _backward(self, batches: list[Any]) -> torch.Tensor:
        """Accumulate the gradients of the micro-batches; returns their mean loss in float32, detached."""
        if self.config.training.gradient_accumulation_steps == 1:
            (batch,) = batches
            loss = self._loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach().float()
        total = torch.zeros((), device=self.device)
        for index, batch in enumerate(batches):
            self._sync_gradients(index == len(batches) - 1)
            loss = self._loss(batch) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _loss(self, batch: Any) -> torch.Tensor:
        moved = _to_device(batch, self.device)
        bf16, device = self.config.training.bf16, self.device.type
        if not bf16 and not torch.is_autocast_enabled(device):
            # No autocast to enable, and none around the training to disable.
            return self.loss_function(self.model, moved)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
            return self.loss_function(self.model, moved)

    def _clip(self) -> torch.Tensor | float:
        """Clip the gradients and return their norm before clipping; NaN where nothing clips and no callback reads it."""
        max_norm = self.config.training.max_grad_norm
        if max_norm is None and all(isinstance(callback, ProgressCallback) for callback in self.callbacks):
            return math.nan
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if max_norm is None or any(isinstance(parameter, DTensor) for parameter in parameters):
            return clip_grad_norm(parameters, max_norm)
        # The same result bit for bit, with one multiplication for all gradients instead of one for each.
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def _sync_gradients(self, last: bool) -> None:
        """Let FSDP2 reduce gradients once per step, not once per micro-batch."""
        toggle = getattr(self.model, "set_requires_gradient_sync", None)
        if toggle is not None:
            toggle(last)

    def _learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _schedulers(self) -> list[Any]:
        if self.lr_scheduler is None:
            return []
        return list(self.lr_scheduler) if isinstance(self.lr_scheduler, (list, tuple)) else [self.lr_scheduler]

    def _dispatch(self, hook: str) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self.state)

    def _dispatch_exception(self) -> None:
        """Call every callback, also after one has failed: the checkpointer waits for the save in flight here."""
        for callback in self.callbacks:
            try:
                callback.on_exception(self.state)
            except Exception:
                logger.exception("%s failed while training was stopping", type(callback).__name__)


def _positioned(loader: Any, config: RunConfig, device: torch.device | None) -> Any:
    """Return the loader with an exact position, where it has none of its own and a checkpoint may need it."""
    checkpoint = config.checkpoint
    has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    foreign = not isinstance(loader, (DataLoader, ResumableLoader)) and (
        has_state or isinstance(loader, torch.utils.data.DataLoader)
    )
    if not foreign or not (checkpoint.save_ckpt or checkpoint.restore_from is not None):
        return loader
    ignored = checkpoint.preemption_signals if checkpoint.save_ckpt else ()
    return ResumableLoader(loader, device_type="cpu" if device is None else device.type, ignored_signals=ignored)


def planned_steps(config: RunConfig, train_dataloader: Any) -> int:
    """Return the optimizer steps of the whole run: all epochs, or ``max_steps`` where that is set.

    Raises:
        ConfigError: ``max_steps`` is not set and the loader has no length.
    """
    training = config.training
    if training.max_steps is not None:
        return training.max_steps
    try:
        batches = len(train_dataloader)
    except TypeError:
        raise ConfigError(
            describe(
                "the number of steps is unknown",
                where="training.max_steps",
                expected="a number, because the dataloader has no length",
                found="null",
                do="set training.max_steps",
            )
        ) from None
    return training.num_train_epochs * -(-batches // training.gradient_accumulation_steps)


def _to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_to_device(value, device) for value in batch)
    return batch
