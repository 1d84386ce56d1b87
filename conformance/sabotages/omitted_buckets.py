"""Defects by omission: a bucket that is not saved, or not restored."""

from __future__ import annotations

from typing import Any

from conformance.sabotages.saboteur import Saboteur, sabotage

_PAYLOAD = "hyper_resume.trainer.payload"
_RESTORE = "hyper_resume.trainer.restore"
_CALLBACK = "hyper_resume.trainer.callbacks.checkpointer"


def _nothing(original: Any, *args: Any, **kwargs: Any) -> None:
    """Do nothing instead."""


# ---- left out of the save -------------------------------------------------------------------------------------------


@sabotage("model-left-out")
def _model_left_out(put: Saboteur) -> None:
    put.replace(f"{_CALLBACK}:collect_payload", lambda original, *args: {**original(*args), "model": {}})


@sabotage("optimizer-left-out")
def _optimizer_left_out(put: Saboteur) -> None:
    put.replace(f"{_CALLBACK}:collect_payload", lambda original, *args: {"model": original(*args)["model"]})


@sabotage("scheduler-left-out")
def _scheduler_left_out(put: Saboteur) -> None:
    # The lr in the optimizer's groups is left out too, because it would hide the defect for a step.
    put.replace(f"{_PAYLOAD}:collect_schedulers", lambda original, *args: [])
    put.replace(f"{_RESTORE}:apply_optimizers", _apply_with_initial_lr, fires=False)


@sabotage("data-position-left-out")
def _data_position_left_out(put: Saboteur) -> None:
    put.replace(f"{_PAYLOAD}:collect_dataloader", _nothing)


@sabotage("rng-left-out")
def _rng_left_out(put: Saboteur) -> None:
    def collect(original: Any, device_type: str) -> Any:
        import random

        import numpy as np
        import torch

        from hyper_resume.state.rng import apply_rng

        own = original(device_type)
        random.seed(1234)
        np.random.seed(1234)
        torch.manual_seed(1234)
        fresh = original(device_type)
        apply_rng(own, device_type)
        return fresh

    put.replace(f"{_PAYLOAD}:collect_rng", collect)


@sabotage("extras-left-out")
def _extras_left_out(put: Saboteur) -> None:
    put.replace(f"{_PAYLOAD}:local_states", lambda original, states, **options: {})


@sabotage("buffers-left-out")
def _buffers_left_out(put: Saboteur) -> None:
    def collect(original: Any, model: Any, **options: Any) -> dict[str, Any]:
        buffers = {name for name, _ in model.named_buffers()}
        return {name: value for name, value in original(model, **options).items() if name not in buffers}

    put.replace(f"{_PAYLOAD}:collect_model", collect)
    put.replace(f"{_RESTORE}:apply_model", _apply_model_loosely, fires=False)


# ---- left out of the restore ----------------------------------------------------------------------------------------


@sabotage("model-not-put-back")
def _model_not_put_back(put: Saboteur) -> None:
    def make_destination(original: Any, *args: Any) -> dict[str, Any]:
        destination: dict[str, Any] = original(*args)
        copies = {
            name: value if isinstance(value, tuple) else value.detach().clone()
            for name, value in destination["model"].items()
        }
        return {**destination, "model": copies}

    put.replace(f"{_RESTORE}:make_destination", make_destination)
    put.replace(f"{_RESTORE}:apply_model", lambda original, *args, **options: None)


@sabotage("model-hooks-not-run")
def _model_hooks_not_run(put: Saboteur) -> None:
    put.replace(f"{_RESTORE}:apply_extra_states", lambda original, *args: None)
    put.replace(f"{_RESTORE}:apply_model", lambda original, *args, **options: None)


@sabotage("optimizer-not-restored")
def _optimizer_not_restored(put: Saboteur) -> None:
    put.replace(f"{_RESTORE}:apply_optimizers", _nothing)


@sabotage("scheduler-not-restored")
def _scheduler_not_restored(put: Saboteur) -> None:
    put.replace(f"{_RESTORE}:apply_schedulers", _nothing)


@sabotage("progress-not-restored")
def _progress_not_restored(put: Saboteur) -> None:
    def restore(original: Any, trainer: Any, *args: Any) -> Any:
        certificate = original(trainer, *args)
        trainer.state.global_step = trainer.state.epoch = trainer.start_epoch = trainer.start_step = 0
        return certificate

    put.replace(f"{_CALLBACK}:restore", restore)


@sabotage("data-position-not-restored")
def _data_position_not_restored(put: Saboteur) -> None:
    put.replace(f"{_RESTORE}:apply_dataloader", lambda original, *args, **how: False)


@sabotage("extras-not-restored")
def _extras_not_restored(put: Saboteur) -> None:
    put.replace(f"{_RESTORE}:apply_stateful", _nothing)


def _apply_with_initial_lr(original: Any, optimizers: Any, names: Any, loaded: Any, **how: Any) -> None:
    lrs = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    original(optimizers, names, loaded, **how)
    for optimizer, own in zip(optimizers, lrs, strict=True):
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = lr


def _apply_model_loosely(original: Any, model: Any, loaded: Any, *, strict: bool) -> None:
    original(model, loaded, strict=False)
