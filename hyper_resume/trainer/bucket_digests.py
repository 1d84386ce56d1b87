"""Digests of each bucket as read from the checkpoint and as restored in the live trainer, in one comparable form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_resume.digest import state_digest_text
from hyper_resume.state.model import collect_model
from hyper_resume.state.optimizer import collect_optimizers, flatten_optimizers
from hyper_resume.state.rng import collect_rng
from hyper_resume.state.scheduler import collect_schedulers, expected_scheduler_states
from hyper_resume.state.stateful import collect_stateful
from hyper_resume.trainer.payload import as_list, collect_progress, device_type, names_in, stateful_to_restore
from hyper_resume.trainer.resume_point import knows_position

DIGESTS = "digests"
"""The key of the training state under which the digests of a save are kept for a backend that keeps none."""
# Derived from the state when it is collected.
_DERIVED = frozenset({"state_keys"})


def read_digests(trainer: Any, payload: Mapping[str, Any], extra_state: Mapping[str, Any]) -> dict[str, str]:
    """Return bucket -> digest of what this rank read, for the buckets whose live state can be collected again."""
    read: dict[str, Any] = {"model": payload["model"]}
    if "optimizer" in payload:
        read["optimizer"] = _plain_optimizers(payload["optimizer"])
    if extra_state:
        progress = collect_progress(trainer)
        schedulers, names = as_list(trainer.lr_scheduler), names_in(trainer)
        read["progress"] = {key: extra_state.get(key, value) for key, value in progress.items()}
        read["lr_scheduler"] = expected_scheduler_states(schedulers, extra_state.get("lr_scheduler") or [], names)
        if knows_position(trainer.train_dataloader):
            read["train_dataloader"] = extra_state.get("train_dataloader")
        found, saved = stateful_to_restore(trainer, extra_state)
        read["stateful"] = {name: saved[name] for name in found if name in saved}
        read["rng_state"] = extra_state["rng_state"]
    return {bucket: state_digest_text(state) for bucket, state in read.items()}


def live_digests(
    trainer: Any, payload: Mapping[str, Any], extra_state: Mapping[str, Any], buckets: Mapping[str, str]
) -> dict[str, str]:
    """Return bucket -> digest of the live state, for the given ``buckets`` and in the form of :func:`read_digests`.

    The data position is collected only from a loader that reports it as plain numbers: a foreign loader's ``state_dict`` may
    start workers.
    """
    names = names_in(trainer)
    # First, because a state_dict that is collected below may draw.
    streams = collect_rng(device_type(trainer))
    live: dict[str, Any] = {}
    model = collect_model(trainer.model)
    live["model"] = {name: model[name] for name in payload["model"]}
    if "optimizer" in buckets:
        optimizers = collect_optimizers(flatten_optimizers(trainer.optimizer), names)
        live["optimizer"] = _plain_optimizers({index: optimizers[index] for index in payload["optimizer"]})
    if "progress" in buckets:
        saved = extra_state.get("lr_scheduler") or []
        live["progress"] = collect_progress(trainer)
        live["lr_scheduler"] = [
            {key: value for key, value in state.items() if key in expected}
            for state, expected in zip(collect_schedulers(as_list(trainer.lr_scheduler), names), saved, strict=False)
        ]
        found, states = stateful_to_restore(trainer, extra_state)
        live["stateful"] = collect_stateful({name: value for name, value in found.items() if name in states})
        live["rng_state"] = streams
    if "train_dataloader" in buckets:
        live["train_dataloader"] = trainer.train_dataloader.state_dict()
    return {bucket: state_digest_text(state) for bucket, state in live.items()}


def _plain_optimizers(optimizers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with groups and names in an order that does not depend on the run."""
    return {
        index: {
            "state": part["state"],
            "groups": sorted(
                (_plain_group(group) for group in part["param_groups"] or ()), key=lambda one: one["params"]
            ),
        }
        for index, part in optimizers.items()
    }


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: sorted(value) if key == "params" else value for key, value in group.items() if key not in _DERIVED}
