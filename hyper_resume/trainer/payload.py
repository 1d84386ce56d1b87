"""What of a trainer goes into a checkpoint, and how what was read is put back, in the one order that keeps the bits.

Works on any object with ``model``, ``optimizer``, ``lr_scheduler``, ``train_dataloader`` and ``state`` (specification 5.2);
``optimizer`` and ``lr_scheduler`` may be one object or a list. ``data_iterator``, ``callbacks`` and ``device`` are used where
they exist.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from hyper_resume import collective
from hyper_resume.config.schema import CheckpointingConfig
from hyper_resume.errors import CheckpointMismatchError, UnsupportedError, describe
from hyper_resume.optim.priming import initialize_optimizer_state
from hyper_resume.state.dataloader import apply_dataloader, collect_dataloader
from hyper_resume.state.model import apply_model, collect_model
from hyper_resume.state.names import parameter_names
from hyper_resume.state.optimizer import (
    apply_optimizers,
    collect_optimizers,
    flatten_optimizers,
    optimizer_template,
    saved_optimizer_count,
)
from hyper_resume.state.rng import apply_rng, collect_rng
from hyper_resume.state.scheduler import apply_schedulers, collect_schedulers
from hyper_resume.state.stateful import apply_stateful, collect_stateful, find_stateful
from hyper_resume.trainer.progress import resume_point

logger = logging.getLogger(__name__)

Entries = Mapping[str, torch.Tensor | None]

# The parts of the training state that a restore asks for, whatever this run itself will write.
EXTRA_STATE_SKELETON: Mapping[str, None] = dict.fromkeys(
    ("global_step", "epoch", "lr_scheduler", "train_dataloader", "stateful", "rng_state")
)


def collect_payload(trainer: Any, config: CheckpointingConfig) -> dict[str, Any]:
    """Return the model and optimizer buckets: live tensors by name, read without side effects."""
    payload: dict[str, Any] = {"model": collect_model(trainer.model, trainable_only=config.is_peft)}
    if config.save_optimizer:
        optimizers = flatten_optimizers(trainer.optimizer)
        payload["optimizer"] = collect_optimizers(optimizers, parameter_names(trainer.model))
    return payload


def collect_extra_state(trainer: Any) -> dict[str, Any]:
    """Return this rank's training state: progress, schedulers, data position, other stateful objects, random streams."""
    return {
        "global_step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "epoch_ended": bool(getattr(trainer.state, "epoch_ended", True)),
        "lr_scheduler": collect_schedulers(_as_list(trainer.lr_scheduler), parameter_names(trainer.model)),
        "train_dataloader": collect_dataloader(getattr(trainer, "data_iterator", None), trainer.train_dataloader),
        "stateful": collect_stateful(_find_stateful(trainer)),
        "rng_state": collect_rng(_device_type(trainer)),
    }


def make_destination(trainer: Any, config: CheckpointingConfig, entries: Entries | None, path: str) -> dict[str, Any]:
    """Return the payload that a load fills: the live model, and optimizer state as the checkpoint holds it.

    Args:
        trainer: whose model and optimizers.
        config: which buckets.
        entries: what the checkpoint holds (``CheckpointerBase.describe``); None where the backend can't say.
        path: for messages.

    Raises:
        CheckpointMismatchError: a trainable parameter is missing from an adapter checkpoint, or the optimizer state belongs
            to none of the parameters.
    """
    model = collect_model(trainer.model, trainable_only=config.is_peft)
    if config.is_peft and entries is not None:
        _require_adapters(model, entries, path)
    destination: dict[str, Any] = {"model": model}
    if config.restore_optimizer:
        destination["optimizer"] = _optimizer_destination(trainer, entries, path)
    return destination


def _optimizer_destination(trainer: Any, entries: Entries | None, path: str) -> dict[str, Any]:
    optimizers, names = flatten_optimizers(trainer.optimizer), parameter_names(trainer.model)
    if entries is None:
        # A backend that can't say what it holds fills only what exists, so the state is created first.
        for optimizer in optimizers:
            initialize_optimizer_state(optimizer)
        return collect_optimizers(optimizers, names)
    saved = saved_optimizer_count(entries)
    if saved == 0:
        logger.warning("%s holds no optimizer state: the optimizer starts fresh", path)
    elif saved != len(optimizers):
        logger.warning(
            "the checkpoint holds %s optimizers and this run has %s: pairing the first %s, the others keep their state",
            saved,
            len(optimizers),
            min(saved, len(optimizers)),
        )
    return optimizer_template(optimizers, names, entries)


def apply_loaded(
    trainer: Any, config: CheckpointingConfig, payload: dict[str, Any], extra_state: dict[str, Any]
) -> None:
    """Put what was read into the live objects.

    Model; optimizer; scheduler (it writes the groups' lr); progress; data position (before the iterator exists); anything
    else with a state; random streams LAST, after everything that could draw from them. Sets ``start_epoch`` and
    ``start_step`` of the trainer.
    """
    apply_model(trainer.model, payload["model"], strict=not config.is_peft)
    if config.restore_optimizer:
        apply_optimizers(flatten_optimizers(trainer.optimizer), parameter_names(trainer.model), payload["optimizer"])
    if not config.restore_train_state:
        return
    names = parameter_names(trainer.model)
    apply_schedulers(_as_list(trainer.lr_scheduler), extra_state.get("lr_scheduler") or [], names)
    trainer.state.global_step = extra_state["global_step"]
    trainer.state.epoch = extra_state["epoch"]
    if hasattr(trainer.state, "epoch_ended"):
        trainer.state.epoch_ended = extra_state.get("epoch_ended", True)
    positioned = apply_dataloader(trainer.train_dataloader, extra_state.get("train_dataloader"))
    trainer.start_epoch, trainer.start_step = resume_point(trainer, positioned=positioned)
    apply_stateful(_find_stateful(trainer), extra_state.get("stateful") or {})
    if (extra_state["rank"], extra_state["world_size"]) == (collective.rank(), collective.world_size()):
        apply_rng(extra_state["rng_state"], _device_type(trainer))
    else:
        logger.warning("the number of ranks changed: random streams start from the seed instead of where they were")


def _find_stateful(trainer: Any) -> dict[str, Any]:
    known = [
        trainer.model,
        trainer.train_dataloader,
        getattr(trainer, "data_iterator", None),
        *_as_list(trainer.optimizer),
        *_reachable_optimizers(trainer.optimizer),
        *_as_list(trainer.lr_scheduler),
    ]
    return find_stateful(trainer, getattr(trainer, "callbacks", ()), known)


def _reachable_optimizers(optimizer: Any) -> list[Any]:
    """The plain optimizers behind ``optimizer``; none behind an unknown wrapper, which may be there when it isn't saved."""
    try:
        return flatten_optimizers(optimizer)
    except UnsupportedError:
        return []


def _device_type(trainer: Any) -> str:
    device = getattr(trainer, "device", None)
    if device is None:
        device = next((parameter.device for parameter in trainer.model.parameters()), "cpu")
    return torch.device(device).type


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _require_adapters(wanted: Mapping[str, Any], entries: Mapping[str, Any], path: str) -> None:
    """An adapter checkpoint needs no base weights, but every trainable parameter."""
    missing = sorted(name for name in wanted if f"model.{name}" not in entries)
    if missing:
        raise CheckpointMismatchError(
            describe(
                f"missing model key: model.{missing[0]} (trainable)",
                where=path,
                expected=f"all {len(wanted)} trainable parameters",
                found=f"{len(wanted) - len(missing)} of them",
                do="resume with the adapter configuration that was saved",
            )
        )
