"""Why a restore would not be exact, bucket by bucket, before anything is changed.

Each of these differences is a deliberate leniency (specification 9.3): a warning by default, where the bucket's own ``apply``
gives it, and a refusal with ``checkpoint.on_mismatch: error``. ``LATEST`` with nothing there is none of them: the same command
has to start a job and to go on with it, so it starts from scratch either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hyper_resume import collective
from hyper_resume.config.schema import CheckpointingConfig
from hyper_resume.state.dataloader import check_dataloader
from hyper_resume.state.model import check_model
from hyper_resume.state.names import first_names, parameter_names
from hyper_resume.state.optimizer import (
    check_optimizer_count,
    check_optimizer_entries,
    check_optimizers,
    flatten_optimizers,
    saved_optimizer_count,
)
from hyper_resume.state.rng import check_rng
from hyper_resume.state.scheduler import check_scheduler_fields, check_schedulers
from hyper_resume.state.stateful import check_stateful
from hyper_resume.trainer.payload import as_list, device_type, stateful_of
from hyper_resume.trainer.progress import check_position, knows_position

NOT_ASKED_FOR = "not asked for"
_NOTHING = "neither the checkpoint nor this trainer has any"
_OTHER_RANKS = "the number of ranks changed: random streams start from the seed instead of where they were"
# What a checkpoint of this library holds at its top; anything else is not restored by anyone.
_KNOWN_PARTS = frozenset({"model", "optimizer", "extra_state", "save_id"})


@dataclass(kw_only=True)
class Findings:
    """What this rank found.

    ``reasons``: bucket -> why it would not be exact. ``absent``: bucket -> why there is nothing to restore. ``to_warn``: those
    reasons that nobody else logs.
    """

    reasons: dict[str, list[str]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    to_warn: list[str] = field(default_factory=list)

    def add(self, bucket: str, reasons: list[str], *, warn: bool = False) -> None:
        """File ``reasons`` under ``bucket``."""
        self.reasons.setdefault(bucket, []).extend(reasons)
        if warn:
            self.to_warn.extend(reasons)

    def all_reasons(self) -> list[str]:
        """Every reason, with its bucket."""
        return [f"{bucket}: {reason}" for bucket, reasons in self.reasons.items() for reason in reasons]


def check_all(
    trainer: Any,
    config: CheckpointingConfig,
    entries: Mapping[str, Any] | None,
    payload: Mapping[str, Any],
    extra_state: Mapping[str, Any],
    path: str,
) -> Findings:
    """Look at every bucket; nothing is changed and no other rank is asked.

    Args:
        trainer: the live one.
        config: which buckets are restored.
        entries: the checkpoint's flattened entry names; None where the backend can't say.
        payload: model and optimizer as they were read.
        extra_state: this rank's training state as it was read.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointMismatchError: a part can't be applied at all.
    """
    findings = Findings()
    if entries is not None:
        findings.add("model", check_model(trainer.model, entries), warn=True)
    _check_optimizer(findings, trainer, config, entries, payload, path)
    if config.restore_train_state:
        _check_training_state(findings, trainer, extra_state)
        unknown = sorted(name for name in entries or () if name.split(".", 1)[0] not in _KNOWN_PARTS)
        if unknown:
            text = f"the checkpoint holds entries of no known bucket; not restored: {first_names(unknown)}"
            findings.add("stateful", [text], warn=True)
    else:
        for bucket in ("progress", "lr_scheduler", "train_dataloader", "rng_state", "stateful"):
            findings.absent[bucket] = NOT_ASKED_FOR
    return findings


def _check_optimizer(
    findings: Findings,
    trainer: Any,
    config: CheckpointingConfig,
    entries: Mapping[str, Any] | None,
    payload: Mapping[str, Any],
    path: str,
) -> None:
    if not config.restore_optimizer:
        findings.absent["optimizer"] = NOT_ASKED_FOR
        return
    optimizers, names = flatten_optimizers(trainer.optimizer), parameter_names(trainer.model)
    if entries is not None:
        findings.add("optimizer", check_optimizer_count(optimizers, entries, path))
        findings.add("optimizer", check_optimizer_entries(optimizers, names, entries))
        if saved_optimizer_count(entries) == 0:
            findings.absent["optimizer"] = "the checkpoint holds none"
    findings.add("optimizer", check_optimizers(optimizers, names, payload["optimizer"]))


def _check_training_state(findings: Findings, trainer: Any, extra_state: Mapping[str, Any]) -> None:
    schedulers, saved = as_list(trainer.lr_scheduler), extra_state.get("lr_scheduler") or []
    findings.add("lr_scheduler", check_schedulers(schedulers, saved))
    findings.add("lr_scheduler", check_scheduler_fields(schedulers, saved), warn=True)
    if not schedulers and not saved:
        findings.absent["lr_scheduler"] = _NOTHING
    position = extra_state.get("train_dataloader")
    changes = check_dataloader(trainer.train_dataloader, position)
    findings.add("train_dataloader", changes)
    if position is None:
        findings.absent["train_dataloader"] = "the checkpoint holds none"
    elif not changes and knows_position(trainer.train_dataloader):
        place = [position.get(key) for key in ("epoch", "batches_consumed")]
        if all(type(number) is int for number in place):
            moved = check_position(trainer, extra_state["global_step"], *place)
            findings.add("progress", [] if moved is None else [moved])
    found, states = stateful_of(trainer), extra_state.get("stateful") or {}
    findings.add("stateful", check_stateful(found, states))
    if not found and not states:
        findings.absent["stateful"] = _NOTHING
    if is_own_rank(extra_state):
        findings.add("rng_state", check_rng(extra_state["rng_state"], device_type(trainer)), warn=True)
        return
    findings.add("rng_state", [_OTHER_RANKS], warn=True)
    if set(found) & set(states):
        findings.add("stateful", [f"the number of ranks changed: this is the state of rank {extra_state['rank']}"])


def is_own_rank(extra_state: Mapping[str, Any]) -> bool:
    """True when this very rank, of as many, saved the training state."""
    return (extra_state["rank"], extra_state["world_size"]) == (collective.rank(), collective.world_size())
