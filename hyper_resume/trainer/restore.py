"""A restore: everything is checked, then applied in the one order that is exact, then verified by digests.

A failure on any rank leaves every live object on every rank as it was.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

from hyper_resume import collective
from hyper_resume.checkpoint.base import CheckpointerBase
from hyper_resume.checkpoint.format.extra_state import MESH, SHARDED
from hyper_resume.config.schema import CheckpointingConfig
from hyper_resume.errors import CheckpointMismatchError, describe
from hyper_resume.state.certificate import BUCKETS, BucketCertificate, Certificate, certify_bucket
from hyper_resume.state.dataloader import apply_dataloader
from hyper_resume.state.model import apply_extra_states, apply_model
from hyper_resume.state.optimizer import apply_optimizers, flatten_optimizers, register_optimizer_undo
from hyper_resume.state.rng import apply_rng, collect_rng, streams_kept
from hyper_resume.state.scheduler import apply_schedulers
from hyper_resume.state.stateful import apply_stateful, live_states, tensor_parts
from hyper_resume.trainer import returned_payload
from hyper_resume.trainer.bucket_digests import DIGESTS, live_digests, read_digests
from hyper_resume.trainer.mismatches import Mismatches, find_mismatches
from hyper_resume.trainer.payload import (
    EXTRA_STATE_SKELETON,
    as_list,
    device_type,
    make_destination,
    names_in,
    reachable_optimizers,
    stateful_of,
    stateful_to_restore,
)
from hyper_resume.trainer.resume_point import resume_point
from hyper_resume.trainer.run.fingerprint import RunFingerprint
from hyper_resume.trainer.run.mesh import StreamIdentity
from hyper_resume.trainer.saved_names import SavedNames

logger = logging.getLogger(__name__)


def restore(
    trainer: Any, config: CheckpointingConfig, checkpointer: CheckpointerBase, path: str, fingerprint: RunFingerprint
) -> Certificate:
    """Restore the trainer from the checkpoint at ``path``; every rank calls it.

    1. all ranks: the backend reads into buffers of its own; 2. each rank: checks every bucket; with ``on_mismatch: error`` a
    mismatch on any rank is an error on all; 3. each rank: applies everything except the model's tensors; 4. all ranks: once
    every rank has succeeded so far, the backend fills the live model; 5. each rank: runs the model's load hooks, then restores
    the random streams once more, LAST; 6. each rank: compares digests of the live state with those of what was read.

    Raises:
        CheckpointMismatchError: the checkpoint does not fit, or ``on_mismatch: error`` and the restore would not be, or was
            not, exact.
        CheckpointNotFoundError: a required part of the checkpoint is missing.
    """
    undo = ExitStack()
    _remember_streams(trainer, undo)
    try:
        certificate = _Restore(trainer, config, checkpointer, path, fingerprint, undo).run()
    except BaseException:
        try:
            undo.close()
        except Exception:
            logger.exception(
                "the restore failed, and not everything could be rolled back: this process must not train on"
            )
        raise
    return certificate


def _remember_streams(trainer: Any, undo: ExitStack) -> None:
    streams, kind = collect_rng(device_type(trainer)), device_type(trainer)
    undo.callback(apply_rng, streams, kind)


class _Restore:
    """One restore on this rank."""

    def __init__(
        self,
        trainer: Any,
        config: CheckpointingConfig,
        checkpointer: CheckpointerBase,
        path: str,
        fingerprint: RunFingerprint,
        undo: ExitStack,
    ) -> None:
        self._trainer = trainer
        self._config = config
        self._checkpointer = checkpointer
        self._path = path
        self._fingerprint = fingerprint
        self._undo = undo
        self._destination: dict[str, Any] = {}
        self._findings: Mismatches | None = None
        # What was read, with the values that this run overrides.
        self._applied: Mapping[str, Any] = {}
        self._digests: Mapping[str, str] = {}
        self._saved: SavedNames | None = None
        # What the run that saved is made of, where no training state is read that says so.
        self._described: Mapping[str, Any] | None = None
        self._streams = StreamIdentity(trainer)

    def run(self) -> Certificate:
        trainer, config, checkpointer = self._trainer, self._config, self._checkpointer
        self._saved = saved = SavedNames(trainer.model, names_in(trainer), checkpointer.describe(self._path))
        if not config.restore_train_state:
            self._described = checkpointer.describe_run(self._path)
        for optimizer in reachable_optimizers(trainer.optimizer):
            register_optimizer_undo(optimizer, self._undo)
        self._destination = collective.on_all_ranks(lambda: make_destination(trainer, config, saved, self._path))
        destination = saved.as_saved(self._destination)
        skeleton = collective.on_all_ranks(self._skeleton) if config.restore_train_state else None
        checkpointer.check_loaded = lambda read, extra_state: self._check_and_apply(saved, read, extra_state)
        try:
            returned = checkpointer.load(
                self._path,
                destination,
                strict_model=not config.is_peft,
                extra_state_skeleton=skeleton,
            )
        finally:
            checkpointer.check_loaded = None
        payload, extra_state = collective.on_all_ranks(lambda: returned_payload.split(returned, config, self._path))
        if self._findings is None:
            # A backend without buffers has written to the live model by now, or to nothing; everything else is unchanged.
            filled = collective.on_all_ranks(lambda: self._filled(destination, payload))
            collective.on_all_ranks(lambda: self._check_and_apply(saved, filled, extra_state))
            destination = filled
        self._destination = saved.as_now(destination)
        collective.on_all_ranks(lambda: self._finish(self._applied))
        parts = collective.on_all_ranks(lambda: self._judge_buckets(self._applied))
        gathered = collective.all_gather(parts)
        certificate = self._certificate(tuple(part for index in range(len(parts)) for part in _column(gathered, index)))
        if config.on_mismatch == "error" and not certificate.is_exact:
            raise refusal(certificate)
        return certificate

    def _skeleton(self) -> dict[str, Any]:
        """Return what the training state must have, with the mesh of this run, which decides whose state each rank gets.

        With it come this rank's parts of the tensors in other stateful objects.
        """
        mesh = self._streams.mesh
        skeleton = {**EXTRA_STATE_SKELETON, MESH: None if mesh is None else mesh.to_plain()}
        if self._checkpointer.reshards_training_state:
            with streams_kept(device_type(self._trainer)):
                skeleton[SHARDED] = tensor_parts(live_states(stateful_of(self._trainer)))
        return skeleton

    # ---- before the live model is written ---------------------------------------------------------------------------

    def _filled(self, destination: dict[str, Any], payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return the destination with the values of a payload that the backend has returned instead of filling it."""
        if "model" not in payload or payload["model"] is destination["model"]:
            return destination
        self._saved = SavedNames(self._trainer.model, names_in(self._trainer), returned_payload.entries_of(payload))
        made = make_destination(self._trainer, self._config, self._saved, self._path)
        self._destination = returned_payload.values_for(
            made, payload, self._path, strict_model=not self._config.is_peft
        )
        return self._destination

    def _check_and_apply(self, saved: SavedNames, read: Mapping[str, Any], extra_state: Mapping[str, Any]) -> None:
        """Check what was read, then apply all of it except the model's tensors."""
        payload = _overlay(self._destination, saved.as_now(read))
        if "optimizer" in payload:
            optimizers = flatten_optimizers(self._trainer.optimizer)
            payload["optimizer"] = saved.optimizers_now(optimizers, payload["optimizer"])
        saved.rename_schedulers(extra_state.get("lr_scheduler") or [])
        run = self._fingerprint.compare(payload, extra_state, self._described)
        payload, extra_state = dict(run.payload), run.extra_state
        mismatches = find_mismatches(
            self._trainer, self._config, self._saved or saved, payload, extra_state, self._path, self._streams
        )
        mismatches.overridden = run.overridden
        for bucket, reasons in run.reasons.items():
            mismatches.add(bucket, reasons, warn=True)
        if self._config.on_mismatch == "error" and mismatches.all_reasons():
            raise _refusal(self._path, mismatches.all_reasons())
        for reason in mismatches.unlogged:
            logger.warning("%s", reason)
        self._fingerprint.log(run)
        self._digests = read_digests(self._trainer, payload, extra_state)
        self._apply(payload, extra_state)
        self._findings = mismatches
        self._applied = extra_state

    def _apply(self, payload: Mapping[str, Any], extra_state: Mapping[str, Any]) -> None:
        """Apply in this order: optimizer; scheduler (it writes the groups' lr); progress; data position (before the iterator
        exists); other stateful objects; random streams.
        """
        trainer, config, undo = self._trainer, self._config, self._undo
        names = names_in(trainer)
        apply_extra_states(trainer.model, payload["model"], undo)
        if config.restore_optimizer:
            apply_optimizers(flatten_optimizers(trainer.optimizer), names, payload["optimizer"])
        if not config.restore_train_state:
            return
        schedulers = as_list(trainer.lr_scheduler)
        for optimizer in [found for one in schedulers if (found := getattr(one, "optimizer", None)) is not None]:
            register_optimizer_undo(optimizer, undo)
        apply_schedulers(schedulers, extra_state.get("lr_scheduler") or [], names, undo=undo)
        _remember_attributes(trainer.state, ("global_step", "epoch", "epoch_ended"), undo)
        _remember_attributes(trainer, ("start_epoch", "start_step"), undo)
        trainer.state.global_step = extra_state["global_step"]
        trainer.state.epoch = extra_state["epoch"]
        if hasattr(trainer.state, "epoch_ended"):
            trainer.state.epoch_ended = extra_state.get("epoch_ended", True)
        positioned = apply_dataloader(trainer.train_dataloader, extra_state.get("train_dataloader"), undo=undo)
        trainer.start_epoch, trainer.start_step = resume_point(trainer, positioned=positioned)
        apply_stateful(*stateful_to_restore(trainer, extra_state), undo=undo)
        self._streams.apply(extra_state)

    # ---- after it was written ---------------------------------------------------------------------------------------

    def _finish(self, extra_state: Mapping[str, Any]) -> None:
        apply_model(self._trainer.model, self._destination["model"], strict=not self._config.is_peft)
        if self._config.restore_train_state:
            # Once more, and last: a load hook may have drawn random numbers.
            self._streams.apply(extra_state)

    def _judge_buckets(self, extra_state: Mapping[str, Any]) -> list[BucketCertificate]:
        """Judge every bucket of this rank, without moving a random stream, whatever a foreign ``state_dict`` does."""
        mismatches = self._findings
        assert mismatches is not None  # _check_and_apply has run
        with streams_kept(device_type(self._trainer)):
            live = live_digests(self._trainer, self._destination, extra_state, self._digests)
        saved = self._storage_digests(extra_state)
        return [
            certify_bucket(
                bucket=bucket,
                rank=collective.rank(),
                absent=mismatches.absent.get(bucket, ""),
                reasons=mismatches.reasons.get(bucket, ()),
                saved=saved.get(bucket),
                loaded=self._digests.get(bucket),
                live=live.get(bucket),
                overridden=mismatches.overridden.get(bucket, ()),
            )
            for bucket in BUCKETS
        ]

    def _storage_digests(self, extra_state: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Return bucket -> the digests at the save and of what was read, for buckets that were read completely.

        They are the backend's, or those that the training state holds for a backend without digests.
        """
        report = self._checkpointer.last_load
        if report is None:
            saved = extra_state.get(DIGESTS, {}) if self._streams.change_since(extra_state) is None else {}
            return {bucket: (saved[bucket], found) for bucket, found in self._digests.items() if bucket in saved}
        partly = {name.split(".", 1)[0] for name in report.unread}
        return {
            bucket: (report.saved[bucket], report.loaded[bucket])
            for bucket in BUCKETS
            if bucket in report.saved and bucket in report.loaded and bucket not in partly
        }

    def _certificate(self, parts: tuple[BucketCertificate, ...]) -> Certificate:
        trainer, report = self._trainer, self._checkpointer.last_load
        return Certificate(
            path=self._path,
            global_step=trainer.state.global_step,
            start_epoch=trainer.start_epoch,
            start_step=trainer.start_step,
            world_size=collective.world_size(),
            verified="not reported by the backend" if report is None else report.verified,
            created_at=datetime.now(UTC).isoformat(timespec="microseconds"),
            parts=parts,
        )


def _column(rows: list[list[BucketCertificate]], index: int) -> list[BucketCertificate]:
    return [row[index] for row in rows]


def _remember_attributes(owner: Any, names: tuple[str, ...], undo: ExitStack) -> None:
    for name in names:
        if hasattr(owner, name):
            undo.callback(setattr, owner, name, copy.copy(getattr(owner, name)))


def _overlay(structure: Mapping[str, Any], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``structure`` with the leaves that were read; leaves that were not read keep their value."""
    result = dict(structure)
    for key, value in leaves.items():
        own = structure.get(key)
        nested = isinstance(own, Mapping) and isinstance(value, Mapping)
        result[key] = _overlay(own, value) if nested and own is not None else value
    return result


def refusal(certificate: Certificate) -> CheckpointMismatchError:
    """Return the error of a restore that was not exact, under ``on_mismatch: error``."""
    return _refusal(certificate.path, [f"{p.bucket}: {p.reason}" for p in certificate.parts if p.verdict == "degraded"])


def _refusal(path: str, reasons: list[str]) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        describe(
            "the restore would not be exact, and checkpoint.on_mismatch is error",
            where=path,
            expected="every bucket as it was saved",
            found="; ".join(reasons),
            do="resume with the settings of the save, declare wanted changes in checkpoint.override_on_restore, or set "
            "checkpoint.on_mismatch=warn to accept these differences",
        )
    )
