"""A hand-written loop around CheckpointerCallback (specification 5.2): nothing of the library's trainer is used."""

from __future__ import annotations

from typing import Any

import torch

from conformance.adapters.hyper_resume.data_components import draw_from_all_streams
from conformance.adapters.hyper_resume.leg import Leg
from hyper_resume.data import ResumableLoader
from hyper_resume.trainer.callbacks import TrainerState


def drive_custom_loop(leg: Leg) -> None:
    """Restore if the job says so, and train to the planned step (or all epochs), with all four hooks."""
    trainer, callbacks = leg.trainer, leg.trainer.callbacks
    for callback in callbacks:
        callback.on_train_begin(trainer.state)
    leg.report_begin(callbacks[0].checkpointer.loaded_from if callbacks else None)
    if leg.given.draws_at == "begin":
        draw_from_all_streams()
    if leg.given.save_at_step_zero and callbacks and not callbacks[0].checkpointer.loaded_from:
        callbacks[0].on_step_end(trainer.state)
    epoch = trainer.start_epoch
    while not _is_done(leg) and epoch < (leg.given.epochs or epoch + 1):
        _epoch(leg, epoch)
        epoch += 1
    _call(leg, "on_train_end")


def _call(leg: Leg, hook: str) -> None:
    """Call a hook with the loop's state; with ``handed_state`` the trainer's own is another one meanwhile, at step 0."""
    trainer, counted = leg.trainer, leg.trainer.state
    if leg.given.handed_state:
        trainer.state = TrainerState()
    try:
        for callback in trainer.callbacks:
            getattr(callback, hook)(counted)
    finally:
        trainer.state = counted


def _is_done(leg: Leg) -> bool:
    until = leg.job.until_step
    return until is not None and leg.trainer.state.global_step >= until


def _epoch(leg: Leg, epoch: int) -> None:
    trainer, loader = leg.trainer, leg.trainer.train_dataloader
    trainer.state.epoch = epoch
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    trainer.state.batch_index = getattr(loader, "batches_consumed", 0) - 1
    if isinstance(loader, ResumableLoader):
        if loader.start_epoch != loader.epoch or loader.epoch != epoch:
            trainer.state.batch_index = -1  # its position is still that of the epoch before
        trainer.data_iterator = loader.batches(epoch)
    else:
        trainer.data_iterator = iter(loader)
    exhausted = False
    while not exhausted and not _is_done(leg):
        window: list[Any] = []
        for batch in trainer.data_iterator:
            window.append(batch)
            if len(window) == leg.given.accumulation:
                break
        exhausted = len(window) < leg.given.accumulation
        if window:
            _step(leg, window)
            _report_step(leg)
    if exhausted or trainer.state.batch_index + 1 == _batches_per_epoch(loader):
        _call(leg, "on_epoch_end")
        leg.probe.moment("after_epoch", trainer.state.global_step)
    trainer.data_iterator = None


def _batches_per_epoch(loader: Any) -> int | None:
    """None for a loader without a length: the end of its epoch shows when it gives no further batch."""
    try:
        return len(loader)
    except TypeError:
        return None


def _step(leg: Leg, window: list[Any]) -> None:
    state = leg.trainer.state
    total = 0.0
    for batch in window:
        loss = leg.loss_function(leg.model, batch) / len(window)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    trainable = [parameter for parameter in leg.model.parameters() if parameter.requires_grad]
    limit = leg.given.clip if leg.given.clip is not None else float("inf")
    state.grad_norm = float(torch.nn.utils.clip_grad_norm_(trainable, limit))
    state.lrs = [float(group["lr"]) for optimizer in leg.optimizers for group in optimizer.param_groups]
    optimizers = leg.optimizer if isinstance(leg.optimizer, list) else [leg.optimizer]
    is_before = leg.given.schedule_stepped == "before-save"
    for part in [*optimizers, *(leg.schedulers if is_before else ())]:
        part.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    state.global_step += 1
    state.batch_index += len(window)
    state.loss = total


def _report_step(leg: Leg) -> None:
    leg.report_step()
    _call(leg, "on_step_end")
    if leg.given.draws_at == "after-save":
        draw_from_all_streams()
    if leg.given.schedule_stepped == "after-save":
        for scheduler in leg.schedulers:
            scheduler.step()
    leg.probe.moment("after_step", leg.trainer.state.global_step)
