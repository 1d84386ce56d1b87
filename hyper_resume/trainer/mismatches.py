"""Why a restore would not be exact, bucket by bucket, before anything is changed.

Each of these mismatches is accepted on purpose (specification 9.3): by default it is a warning, which the ``apply`` function of
most buckets logs; with ``checkpoint.on_mismatch: error`` it is a refusal. ``LATEST`` without any checkpoint is no mismatch: one
command must be able both to start a job and to resume it, so training starts from scratch either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hyper_resume.checkpoint.format.extra_state import RESHARDED, SHARDED, UNCOVERED
from hyper_resume.config.schema import CheckpointingConfig
from hyper_resume.state.dataloader import check_dataloader, knows_shares, why_streams_move
from hyper_resume.state.model import check_model
from hyper_resume.state.names import first_names
from hyper_resume.state.optimizer import (
    check_optimizer_count,
    check_optimizer_entries,
    check_optimizers,
    flatten_optimizers,
    saved_optimizer_count,
)
from hyper_resume.state.rng import check_rng
from hyper_resume.state.scheduler import check_scheduler_fields, check_schedulers
from hyper_resume.state.stateful import check_sharding, check_stateful, refuse_sharded_parts
from hyper_resume.trainer.payload import as_list, device_type, stateful_to_restore
from hyper_resume.trainer.resume_point import check_position, knows_position
from hyper_resume.trainer.run.mesh import StreamIdentity
from hyper_resume.trainer.saved_names import SavedNames
from hyper_resume.trainer.uncovered import reasons_of

NOT_ASKED_FOR = "not asked for"
_NOTHING = "neither the checkpoint nor this trainer has any"
_BY_PLACE = "the checkpoint names parameters outside the model by their position, and their state is assigned by it"
# The top-level entries of a checkpoint of this library; nothing restores any other entry.
_KNOWN_ENTRIES = frozenset({"model", "optimizer", "extra_state", "save_id"})


@dataclass(kw_only=True)
class Mismatches:
    """The mismatches of this rank.

    ``reasons``: bucket -> why its restore would not be exact. ``absent``: bucket -> why there is nothing to restore.
    ``unlogged``: those reasons that no other code logs, so the restore logs them. ``overridden``: bucket -> what differs and
    is declared as wanted.
    """

    reasons: dict[str, list[str]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    unlogged: list[str] = field(default_factory=list)
    overridden: Mapping[str, list[str]] = field(default_factory=dict)

    def add(self, bucket: str, reasons: list[str], *, warn: bool = False) -> None:
        """Add ``reasons`` to ``bucket``; with ``warn`` the restore logs them."""
        self.reasons.setdefault(bucket, []).extend(reasons)
        if warn:
            self.unlogged.extend(reasons)

    def all_reasons(self) -> list[str]:
        """Every reason, with its bucket."""
        return [f"{bucket}: {reason}" for bucket, reasons in self.reasons.items() for reason in reasons]


def find_mismatches(
    trainer: Any,
    config: CheckpointingConfig,
    saved: SavedNames,
    payload: Mapping[str, Any],
    extra_state: Mapping[str, Any],
    path: str,
    streams: StreamIdentity,
) -> Mismatches:
    """Compare every bucket with the live trainer; changes nothing and enters no collective.

    Args:
        trainer: the live trainer.
        config: which buckets are restored.
        saved: the names and entries of the checkpoint.
        payload: model and optimizer as they were read.
        extra_state: this rank's training state as it was read.
        path: the checkpoint, for messages.
        streams: whose per-rank state this rank has.

    Raises:
        CheckpointMismatchError: a bucket can't be applied at all.
    """
    mismatches = Mismatches()
    if saved.entries is not None:
        mismatches.add("model", check_model(trainer.model, saved.entries_now()), warn=True)
    _check_optimizer(mismatches, trainer, config, saved, payload, path)
    if config.restore_train_state:
        _check_training_state(mismatches, trainer, extra_state, streams)
        for bucket, reason in reasons_of(extra_state.get(UNCOVERED) or ()).items():
            mismatches.add(bucket, [reason], warn=True)
            if mismatches.absent.get(bucket) == _NOTHING:
                # Neither side saves any, and there is some all the same.
                del mismatches.absent[bucket]
        unknown = sorted(name for name in saved.entries or () if name.split(".", 1)[0] not in _KNOWN_ENTRIES)
        if unknown:
            text = f"the checkpoint holds entries of no known bucket; not restored: {first_names(unknown)}"
            mismatches.add("stateful", [text], warn=True)
    else:
        for bucket in ("progress", "lr_scheduler", "train_dataloader", "rng_state", "stateful"):
            mismatches.absent[bucket] = NOT_ASKED_FOR
    return mismatches


def _check_optimizer(
    mismatches: Mismatches,
    trainer: Any,
    config: CheckpointingConfig,
    saved: SavedNames,
    payload: Mapping[str, Any],
    path: str,
) -> None:
    if not config.restore_optimizer:
        mismatches.absent["optimizer"] = NOT_ASKED_FOR
        return
    optimizers, names, entries = flatten_optimizers(trainer.optimizer), saved.names, saved.entries
    if entries is not None:
        mismatches.add("optimizer", check_optimizer_count(optimizers, entries, path))
        mismatches.add("optimizer", check_optimizer_entries(optimizers, saved.parameters, entries))
        if saved.by_place and set(saved.parameters) < set(names):
            mismatches.add("optimizer", [_BY_PLACE], warn=True)
        if saved_optimizer_count(entries) == 0:
            mismatches.absent["optimizer"] = "the checkpoint holds none"
    mismatches.add("optimizer", check_optimizers(optimizers, names, payload["optimizer"]))


def _check_training_state(
    mismatches: Mismatches, trainer: Any, extra_state: Mapping[str, Any], streams: StreamIdentity
) -> None:
    schedulers, saved = as_list(trainer.lr_scheduler), extra_state.get("lr_scheduler") or []
    mismatches.add("lr_scheduler", check_schedulers(schedulers, saved))
    mismatches.add("lr_scheduler", check_scheduler_fields(schedulers, saved), warn=True)
    if not schedulers and not saved:
        mismatches.absent["lr_scheduler"] = _NOTHING
    position = extra_state.get("train_dataloader")
    changes = check_dataloader(trainer.train_dataloader, position)
    mismatches.add("train_dataloader", changes)
    if position is None:
        mismatches.absent["train_dataloader"] = "the checkpoint holds none"
    elif not changes and knows_position(trainer.train_dataloader):
        place = [position.get(key) for key in ("epoch", "batches_consumed")]
        if all(type(number) is int for number in place):
            moved = check_position(trainer, extra_state["global_step"], *place)
            mismatches.add("progress", [] if moved is None else [moved])
    found, states = stateful_to_restore(trainer, extra_state)
    mismatches.add("stateful", check_stateful(found, states))
    differing, resharded = extra_state.get(RESHARDED) or (None, ())
    mismatches.add("stateful", check_sharding(found, extra_state.get(SHARDED) or (), resharded), warn=True)
    if not found and not states:
        mismatches.absent["stateful"] = _NOTHING
    change = streams.change_since(extra_state)
    if change is None:
        mismatches.add("rng_state", check_rng(extra_state["rng_state"], device_type(trainer)), warn=True)
        mismatches.add("rng_state", why_streams_move(trainer.train_dataloader), warn=True)
        return
    mismatches.add("rng_state", [change], warn=True)
    what = change.partition(":")[0]
    # Where the state of every rank was read, only what is not the same on all of them is that of one rank.
    of_one_rank = sorted((set(found) & set(states)).intersection(states if differing is None else differing))
    refuse_sharded_parts({name: found[name] for name in states if name in found}, what, resharded)
    if of_one_rank:
        names = "" if differing is None else f" ({first_names(of_one_rank)})"
        mismatches.add("stateful", [f"{what}: this is the state of rank {extra_state.get('rank')}{names}"])
    if position is not None and not knows_shares(trainer.train_dataloader):
        mismatches.add(
            "train_dataloader", [f"{what}: this is the position of rank {extra_state.get('rank')}"], warn=True
        )
