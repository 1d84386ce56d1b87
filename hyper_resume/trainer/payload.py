"""The state of a trainer that a checkpoint holds, and the destination that a load fills.

Works on any object with ``model``, ``optimizer``, ``lr_scheduler``, ``train_dataloader`` and ``state`` (specification 5.2);
``optimizer`` and ``lr_scheduler`` may be one object or a list. ``data_iterator``, ``callbacks`` and ``device`` are used where
they exist.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from hyper_resume.checkpoint.format.extra_state import SHARDED
from hyper_resume.config.schema import CheckpointingConfig
from hyper_resume.errors import CheckpointMismatchError, UnsupportedError, describe
from hyper_resume.optim.initial_state import initialize_optimizer_state, sample_initial_state
from hyper_resume.state.dataloader import collect_dataloader
from hyper_resume.state.held_optimizers import is_per_rank
from hyper_resume.state.model import collect_model, fit_extra_states
from hyper_resume.state.names import outside_names, parameter_names
from hyper_resume.state.optimizer import (
    check_optimizer_count,
    collect_optimizers,
    flatten_optimizers,
    optimizer_template,
)
from hyper_resume.state.own_state import own_states
from hyper_resume.state.rng import collect_rng, streams_kept
from hyper_resume.state.scheduler import collect_schedulers
from hyper_resume.state.stateful import find_stateful, live_states, local_states, sharded_parts
from hyper_resume.trainer.requirements import as_config
from hyper_resume.trainer.resume_point import knows_position
from hyper_resume.trainer.saved_names import SavedNames

logger = logging.getLogger(__name__)

# Begins the name of what an optimizer keeps for itself, among the stateful objects.
_OF_OPTIMIZER = "optimizer."
# The entries of the training state that a restore requires, whatever this run itself saves.
EXTRA_STATE_SKELETON: Mapping[str, None] = dict.fromkeys(
    ("global_step", "epoch", "lr_scheduler", "train_dataloader", "stateful", "rng_state")
)


def collect_payload(trainer: Any, config: CheckpointingConfig) -> dict[str, Any]:
    """Return the model and optimizer buckets: live tensors by name, read without side effects."""
    payload: dict[str, Any] = {"model": collect_model(trainer.model, trainable_only=config.is_peft)}
    if config.save_optimizer:
        optimizers = flatten_optimizers(trainer.optimizer)
        payload["optimizer"] = collect_optimizers(optimizers, names_in(trainer))
    return payload


def names_in(trainer: Any) -> dict[int, str]:
    """Return id(parameter) -> name: in the model, or the path below the trainer or one of its callbacks."""
    names = parameter_names(trainer.model)
    owners = {
        **vars(trainer),
        "callback": {type(one).__name__: getattr(one, "__dict__", {}) for one in getattr(trainer, "callbacks", ())},
    }
    return {**names, **outside_names(owners, names)}


def collect_extra_state(trainer: Any, state: Any = None) -> dict[str, Any]:
    """Return this rank's training state: progress, schedulers, data position, other stateful objects, random streams.

    ``state`` holds the counters; None means ``trainer.state``.
    """
    return _extra_state(
        trainer,
        state,
        lambda: collect_dataloader(getattr(trainer, "data_iterator", None), trainer.train_dataloader),
        copied=True,
    )


def _extra_state(trainer: Any, state: Any, position: Callable[[], Any], *, copied: bool) -> dict[str, Any]:
    # First, because the state_dict of another object may draw; the caller puts the streams back behind it.
    streams = collect_rng(device_type(trainer))
    found = stateful_of(trainer)
    states = live_states(found)
    sharded = sharded_parts(states)
    return {
        **collect_progress(trainer, state),
        **({SHARDED: sharded} if sharded else {}),
        "lr_scheduler": collect_schedulers(as_list(trainer.lr_scheduler), names_in(trainer)),
        "train_dataloader": position(),
        "stateful": local_states(states, copied=copied),
        "rng_state": streams,
    }


def first_optimizer_states(trainer: Any, config: CheckpointingConfig) -> list[Any]:
    """Return, for each optimizer, an object with what its first step would make its state, for a few small parameters.

    Every rank calls it: the step of an optimizer with sharded parameters may be a collective.
    """
    if not config.save_optimizer:
        return []
    with streams_kept(device_type(trainer)):
        return [
            SimpleNamespace(state=sample_initial_state(optimizer), param_groups=optimizer.param_groups)
            for optimizer in flatten_optimizers(trainer.optimizer)
        ]


def collect_for_trial(
    trainer: Any, config: CheckpointingConfig, state: Any, first_states: Sequence[Any]
) -> dict[str, Any]:
    """Return what a save would collect, without a copy of any tensor and with the random streams where they were.

    ``first_states``, the result of :func:`first_optimizer_states`, stands for optimizer state that is not there yet. A foreign
    loader is left out: its ``state_dict`` may start workers, or change what it reads next.
    """
    with streams_kept(device_type(trainer)):
        payload = collect_payload(trainer, config)
        for one, first in zip(payload.get("optimizer", {}).values(), first_states, strict=False):
            (sampled,) = collect_optimizers([first], names_in(trainer)).values()
            one["state"].update(sampled["state"])
        if config.save_train_state:
            loader = trainer.train_dataloader
            payload["extra_state"] = _extra_state(
                trainer, state, lambda: loader.state_dict() if knows_position(loader) else None, copied=False
            )
        return payload


def collect_progress(trainer: Any, state: Any = None) -> dict[str, Any]:
    """Return the counters of ``state``; None means ``trainer.state``."""
    counters = trainer.state if state is None else state
    return {
        "global_step": counters.global_step,
        "epoch": counters.epoch,
        "epoch_ended": bool(getattr(counters, "epoch_ended", True)),
    }


def make_destination(trainer: Any, config: CheckpointingConfig, saved: SavedNames, path: str) -> dict[str, Any]:
    """Return the payload that a load fills: the live model, and optimizer state as the checkpoint holds it.

    Args:
        trainer: provides the model and the optimizers.
        config: which buckets to restore.
        saved: the names and entries of the checkpoint.
        path: the checkpoint, for messages.

    Raises:
        CheckpointMismatchError: a trainable parameter is missing from an adapter checkpoint, or the optimizer state belongs
            to none of the parameters.
    """
    model = collect_model(trainer.model, trainable_only=config.is_peft)
    if saved.entries is not None:
        now = saved.entries_now()
        model = fit_extra_states(model, now)
        if config.is_peft:
            _require_adapters(model, now, path)
    destination: dict[str, Any] = {"model": model}
    if config.restore_optimizer:
        destination["optimizer"] = _optimizer_destination(trainer, saved, path)
    return destination


def _optimizer_destination(trainer: Any, saved: SavedNames, path: str) -> dict[str, Any]:
    optimizers, entries = flatten_optimizers(trainer.optimizer), saved.entries
    if entries is None:
        # A backend that does not list its entries fills only existing tensors, so the state is created first.
        for optimizer in optimizers:
            initialize_optimizer_state(optimizer)
        primed: dict[str, Any] = _cloned(collect_optimizers(optimizers, saved.names))
        return primed
    for reason in check_optimizer_count(optimizers, entries, path):
        logger.warning("%s", reason)
    return optimizer_template(optimizers, saved.parameters, entries)


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    return type(value)(_cloned(item) for item in value) if type(value) in (list, tuple) else value


def stateful_of(trainer: Any, saved: Iterable[str] = ()) -> dict[str, Any]:
    """Return name -> every other stateful object of the trainer, and what its optimizers keep for themselves.

    ``saved``: the names of which the checkpoint that is restored has state.
    """
    known = [
        trainer.model,
        trainer.train_dataloader,
        getattr(trainer, "data_iterator", None),
        *as_list(trainer.optimizer),
        *reachable_optimizers(trainer.optimizer),
        *as_list(trainer.lr_scheduler),
    ]
    found = find_stateful(trainer, getattr(trainer, "callbacks", ()), known)
    config = as_config(trainer.config.checkpoint)
    if config.save_optimizer or config.restore_optimizer:
        known_own = [name.removeprefix(_OF_OPTIMIZER) for name in saved]
        own = own_states(flatten_optimizers(trainer.optimizer), names_in(trainer), known_own)
        found.update({f"{_OF_OPTIMIZER}{name}": state for name, state in own.items()})
    return found


def stateful_to_restore(trainer: Any, extra_state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the stateful objects and the saved states, without those of optimizers that are not to be restored."""
    saved = dict(extra_state.get("stateful") or {})
    found = stateful_of(trainer, saved)
    if as_config(trainer.config.checkpoint).restore_optimizer:
        return found, saved
    for states in (found, saved):
        for name in [name for name in states if name.startswith(_OF_OPTIMIZER)]:
            del states[name]
    return found, saved


def reachable_optimizers(optimizer: Any) -> list[Any]:
    """The plain optimizers behind ``optimizer``; none for an unknown wrapper, which is allowed where it isn't saved."""
    try:
        return flatten_optimizers(optimizer)
    except UnsupportedError:
        return []


def device_type(trainer: Any) -> str:
    """Return the trainer's device type: cpu, cuda or npu."""
    device = getattr(trainer, "device", None)
    if device is None:
        device = next((parameter.device for parameter in trainer.model.parameters()), "cpu")
    return torch.device(device).type


def as_list(value: Any) -> list[Any]:
    """Return ``value`` as a list: empty for None."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def tensors_in(payload: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the payload's tensors by flattened name."""
    found: dict[str, torch.Tensor] = {}
    for key, value in payload.items():
        if is_per_rank(key):
            continue  # no other rank has a copy
        if isinstance(value, torch.Tensor):
            found[prefix + key] = value
        elif isinstance(value, Mapping):
            found.update(tensors_in(value, f"{prefix}{key}."))
    return found


def _require_adapters(wanted: Mapping[str, Any], entries: Mapping[str, Any], path: str) -> None:
    """Refuse an adapter checkpoint that lacks a trainable parameter; base weights it may lack."""
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
