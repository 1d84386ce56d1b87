"""POLICY: when to save, what to save, and what to restore from. Knows no storage format.

The callback drives any object with ``config.checkpoint``, ``model``, ``optimizer``, ``lr_scheduler``, ``train_dataloader``,
``state``, ``train_steps``, ``start_epoch`` and ``start_step`` (specification 5.2); ``optimizer`` and ``lr_scheduler`` may be
one object or a list. Attributes that it uses where they exist: ``data_iterator``, ``callbacks``, ``device``,
``config.training.gradient_accumulation_steps`` (``start_step`` counts optimizer steps).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyper_resume import collective
from hyper_resume.checkpoint.base import CheckpointerBase, SaveEvent, build_checkpointer
from hyper_resume.checkpoint.format.extra_state import MESH, PAYLOAD_KEY, RUN, UNCOVERED
from hyper_resume.checkpoint.pointed import with_pointer
from hyper_resume.config import CheckpointingConfig, reserved_fields_set
from hyper_resume.errors import CheckpointNotFoundError, CheckpointSaveError
from hyper_resume.local_path import working_directory
from hyper_resume.parallel.replicas import check_replicas
from hyper_resume.state.certificate import Certificate
from hyper_resume.state.optimizer import flatten_optimizers
from hyper_resume.state.own_state import own_states
from hyper_resume.state.rng import streams_kept
from hyper_resume.trainer.backend import build_backend
from hyper_resume.trainer.bucket_digests import DIGESTS, read_digests
from hyper_resume.trainer.callbacks.base import Callback
from hyper_resume.trainer.draws_after_saves import DrawsAfterSaves
from hyper_resume.trainer.payload import (
    collect_extra_state,
    collect_for_trial,
    collect_payload,
    device_type,
    first_optimizer_states,
    names_in,
    tensors_in,
)
from hyper_resume.trainer.planned_saves import planned_saves
from hyper_resume.trainer.records import SaveRecords, store_certificate
from hyper_resume.trainer.requirements import as_config, copy_counters, metrics_of, require_attributes, require_counters
from hyper_resume.trainer.restore import refusal, restore
from hyper_resume.trainer.restore_source import LATEST, find_restore_path, notice_other_runs
from hyper_resume.trainer.restored_streams import OpenCertificate
from hyper_resume.trainer.run.fingerprint import RunFingerprint
from hyper_resume.trainer.run.mesh import find_run_mesh
from hyper_resume.trainer.run.schedule_order import ScheduleOrder
from hyper_resume.trainer.state import TrainerState
from hyper_resume.trainer.unchanged_buckets import UnchangedBuckets
from hyper_resume.trainer.uncovered import UncoveredState

logger = logging.getLogger(__name__)

_NEVER_SAVED = -1
_MAX_LOOKS = 20
_ALWAYS_LOGGED = ("checkpoint_dir", "save_steps", "save_epochs", "restore_from")


class CheckpointerCallback(Callback):
    """Saves at ``save_steps``, ``save_epochs`` and the end of training; restores once before training.

    No step is saved twice: ``_last_saved_step`` remembers the last one saved or restored.

    Attributes:
        last_saved: the last step directory that this run has saved durably or was restored from; None before the first.
    """

    def __init__(self, trainer: Any) -> None:
        """Build the storage backend from ``trainer.config.checkpoint``.

        Raises:
            ConfigError: the trainer lacks attributes that saving or restoring uses (all of them at once), or
                ``checkpoint.manager`` names no storage backend.
            UnsupportedError: an optimizer or a wrapper whose state can't be reached, saved or restored, now rather than at the
                first save.
        """
        super().__init__(trainer)
        require_attributes(trainer)
        self.config: CheckpointingConfig = as_config(trainer.config.checkpoint)
        # A relative checkpoint_dir is below it, wherever the training changes to.
        self._working_directory = working_directory()
        self.checkpointer = build_backend(self.config, build_checkpointer)
        self._storage.add_listener(self._note_durable)
        self.last_saved: str | None = None
        self._handed: TrainerState | None = None
        self._warned_of_other_state = False
        self._last_saved_step = _NEVER_SAVED
        self._unchanged_buckets = UnchangedBuckets()
        self._uncovered = UncoveredState(trainer, self.config)
        self._schedule_order = ScheduleOrder(trainer)
        self._draws_after_saves = DrawsAfterSaves(trainer)
        self._fingerprint: RunFingerprint | None = None
        # From a restore to the end of the first step after it.
        self._certificate: OpenCertificate | None = None
        self._records: Path | None = _trajectory_directory(trainer)
        if self.config.save_optimizer or self.config.restore_optimizer:
            own_states(flatten_optimizers(trainer.optimizer), names_in(trainer))

    @property
    def checkpointer(self) -> CheckpointerBase:
        """The storage backend."""
        return self._backend

    @checkpointer.setter
    def checkpointer(self, backend: CheckpointerBase) -> None:
        self._backend = backend
        # The backend itself, or with a pointer for one that only saves and loads.
        self._storage = with_pointer(backend)

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def on_train_begin(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Log the configuration, restore, if asked to, and try what a save needs. Runs after every other callback's hook.

        What is restored is written to ``trainer.state``, and to ``state`` where that is another object.
        """
        self._use_state(state)
        logger.info("Checkpoint config: %s", _in_short(self.config))
        for name in reserved_fields_set(self.config):
            logger.warning("checkpoint.%s is reserved for the Hugging Face export and has no effect yet", name)
        if self._records is not None and self.config.save_ckpt:
            self._storage.add_listener(SaveRecords(self._records))
        # Before the restore: what a new run is made of is compared with what was saved.
        self._fingerprint = collective.on_all_ranks(lambda: RunFingerprint(self.trainer, self.config))
        path, certificate = self._restore()
        if self.config.save_ckpt:
            self._try_save()
            self._storage.begin_run(str(self._root), restored_from=self._continued(path))
            collective.on_all_ranks(self._uncovered.begin)
            self._schedule_order.begin()
        if certificate is not None:
            self._publish(certificate)

    def on_step_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Save when ``save_steps`` divides the step. The first step after a restore makes its certificate final.

        Raises:
            CheckpointMismatchError: ``on_mismatch`` is ``error``, and the streams that were restored had moved before the first
                batch; raised on every rank.
        """
        if self._certificate is not None:
            self._finish_certificate(self._certificate)
        if not self.config.save_ckpt:
            return
        self._use_state(state)
        step = self._state.global_step
        self._unchanged_buckets.note_step(getattr(self._state, "lrs", ()))
        self._uncovered.after_step()
        is_due = self.config.save_steps > 0 and step % self.config.save_steps == 0
        if is_due and self._save_once(step):
            self._draws_after_saves.after_save(step)
        self._schedule_order.after_step(step, is_saved=step == self._last_saved_step)

    def on_epoch_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Save when ``save_epochs`` divides the number of finished epochs."""
        self._use_state(state)
        if self._certificate is not None:
            self._certificate.note_epoch_end()
        self._draws_after_saves.note_epoch_end()
        config = self.config
        if not (config.save_ckpt and config.save_epochs > 0 and (self._state.epoch + 1) % config.save_epochs == 0):
            return
        if self._save_once(self._state.global_step):
            self._draws_after_saves.after_save(self._state.global_step)
        else:
            logger.info(
                "Skip saving at the end of epoch %s: global_step=%s is already saved",
                self._state.epoch,
                self._last_saved_step,
            )

    def on_train_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Save the last step, synchronously, unless it is saved; then wait for a save in flight."""
        self._use_state(state)
        if self.config.save_ckpt and self._state.global_step > 0:
            self._save_once(self._state.global_step, force_sync=True)
        self._close_certificate()
        self.wait_for_pending_save()

    def on_exception(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Let a save in flight finish; its failure is logged only, because the first error is the one that is raised."""
        self._close_certificate()
        try:
            # The backend alone: on this rank only, perhaps, so nothing that all ranks take part in.
            self.checkpointer.maybe_wait_for_async_save()
        except Exception:
            logger.exception("the save in flight failed while training was stopping")

    def wait_for_pending_save(self) -> None:
        """Wait for an asynchronous save in flight and raise its failure on every rank."""
        self._storage.maybe_wait_for_async_save()

    def save_before_leaving(self, state: TrainerState | None = None) -> str:
        """Save this step synchronously unless it is saved, and return its directory. For a job that must stop now.

        A failure of the save in flight is logged, not raised: the state that matters is the one that is saved now.

        Raises:
            CheckpointSaveError: the step could not be saved; raised on every rank.
        """
        self._use_state(state)
        try:
            self.wait_for_pending_save()
        except CheckpointSaveError:
            logger.exception("the save in flight failed; saving again")
            self._last_saved_step = _NEVER_SAVED
        self._save_once(self._state.global_step, force_sync=True)
        return str(self._directory())

    def _use_state(self, state: TrainerState | None) -> None:
        """Work with ``state`` until the next hook: it decides what is due, and its counters are the ones that are saved.

        Raises:
            ConfigError: it has no counters.
        """
        if state is not None and state is not self.trainer.state:
            require_counters(state)
            self._warn_of_other_state(state)
        self._handed = state

    def _warn_of_other_state(self, state: TrainerState) -> None:
        handed, own = (f"global_step {one.global_step}, epoch {one.epoch}" for one in (state, self.trainer.state))
        if handed != own and not self._warned_of_other_state:
            self._warned_of_other_state = True
            logger.warning(
                "a hook was handed a state with %s while trainer.state has %s: the one that is handed in is saved",
                handed,
                own,
            )

    @property
    def _state(self) -> TrainerState:
        return self.current_state(self._handed)

    # ---- save -------------------------------------------------------------------------------------------------------

    def _save_once(self, step: int, *, force_sync: bool = False) -> bool:
        """Save unless this step is saved already; returns whether it saved."""
        if step == self._last_saved_step:
            return False
        self._save_checkpoint(force_sync=force_sync)
        self._last_saved_step = step
        return True

    def _try_save(self) -> None:
        """Collect the state once and check it, and write to the root: what would fail at the first save fails now.

        Raises:
            CheckpointSaveError, StateNotPlainError, ReplicaMismatchError, UnsupportedError: as a save; on every rank. A name
                that a later save needs is taken by what no save wrote.
        """
        self._storage.check_names(str(self._root), planned_saves(self.trainer, self.config, self._state))
        first = first_optimizer_states(self.trainer, self.config)
        payload = collective.on_all_ranks(lambda: collect_for_trial(self.trainer, self.config, self._state, first))
        check_replicas(tensors_in({name: part for name, part in payload.items() if name != PAYLOAD_KEY}))
        self._storage.try_save(str(self._root), payload)

    def _save_checkpoint(self, *, force_sync: bool = False) -> None:
        state, config, directory = self._state, self.config, self._directory()
        save_async = config.is_async and not force_sync
        logger.info(
            "Saving checkpoint: global_step=%s, epoch=%s, dir=%s, save_async=%s",
            state.global_step,
            state.epoch,
            directory,
            save_async,
        )
        options: dict[str, Any] = {}
        if config.keep_best > 0 and self._storage.accepts_metrics:
            options["metrics"] = collective.on_all_ranks(lambda: metrics_of(state, config.keep_best_metric))
        with streams_kept(device_type(self.trainer)):
            payload = collective.on_all_ranks(lambda: collect_payload(self.trainer, config))
            check_replicas(tensors_in(payload))
            if config.save_train_state:
                payload["extra_state"] = collective.on_all_ranks(lambda: self._training_state(payload))
        changeable = self._unchanged_buckets.changeable(self.trainer, payload, state.global_step)
        self._storage.save(str(directory), payload, global_step=state.global_step, save_async=save_async, **options)
        for warning in self._unchanged_buckets.check(state.global_step, self._storage.last_bucket_digests, changeable):
            logger.warning("%s", warning)

    def _training_state(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        mesh = find_run_mesh(self.trainer)
        run = {} if self._fingerprint is None else {RUN: self._fingerprint.description}
        moved = [*self._schedule_order.uncovered(), *self._draws_after_saves.uncovered()]
        uncovered = [*moved, *self._uncovered.at_save(payload)]
        found = {
            **collect_extra_state(self.trainer, self._state),
            "rank": collective.rank(),
            "world_size": collective.world_size(),
            UNCOVERED: uncovered,
            MESH: None if mesh is None else mesh.to_plain(),
            **run,
        }
        if not self.checkpointer.verifies_digests:
            found[DIGESTS] = read_digests(self.trainer, payload, found)
        return found

    def _directory(self) -> Path:
        return self._root / f"global_step_{self._state.global_step}"

    @property
    def _root(self) -> Path:
        # In messages as it was written, while that leads there.
        written = Path(self.config.checkpoint_dir)
        return written if working_directory() == self._working_directory else self._working_directory / written

    def _note_durable(self, event: SaveEvent) -> None:
        if event.state == "durable":
            self.last_saved = event.path

    # ---- restore ----------------------------------------------------------------------------------------------------

    def _restore(self) -> tuple[str | None, Certificate | None]:
        """Restore, if asked to; return from where, and what it did.

        If another run deletes the step directory that LATEST means while it is read, LATEST is looked for again: until the
        load has succeeded, nothing is changed.
        """
        for left in reversed(range(_MAX_LOOKS)):
            path = self._resolve_restore_path()
            notice_other_runs(self.config, self._root, self._continued(path))
            try:
                return path, None if path is None else self._load_checkpoint(path)
            except CheckpointNotFoundError:
                if not left or not self._was_deleted(path):
                    raise
                logger.warning("%s was deleted while it was read; LATEST is looked for again", path)
        raise AssertionError  # the last look returns or raises

    def _continued(self, path: str | None) -> str | None:
        """Return ``path``, or None if only weights are restored: that starts a run from scratch, from those weights."""
        return path if self.config.restore_train_state else None

    def _was_deleted(self, path: str | None) -> bool:
        wanted = self.config.restore_from
        is_latest = path is not None and wanted is not None and wanted.lower() == LATEST
        return is_latest and not collective.on_rank_zero(lambda: self.checkpointer.has_checkpoint(str(path)))

    def _load_checkpoint(self, path: str) -> Certificate:
        trainer, config = self.trainer, self.config
        assert self._fingerprint is not None  # set by on_train_begin
        certificate = restore(trainer, config, self._storage, path, self._fingerprint)
        if config.restore_train_state:
            self._last_saved_step = trainer.state.global_step
            self.last_saved = path
            copy_counters(trainer.state, self._state)
            self._certificate = OpenCertificate(trainer, certificate)
        logger.info(
            "Checkpoint loaded successfully: path=%s, global_step=%s, start_epoch=%s, start_step=%s",
            path,
            trainer.state.global_step,
            trainer.start_epoch,
            trainer.start_step,
        )
        return certificate

    def _close_certificate(self) -> None:
        """Observe the restore no longer, where no step has made its certificate final."""
        found, self._certificate = self._certificate, None
        if found is not None:
            found.close()

    def _finish_certificate(self, found: OpenCertificate) -> None:
        """Publish the certificate again, and refuse it, where the first step shows that the restore was not exact."""
        self._certificate = None
        certificate = found.finish()
        if certificate is None:
            return
        self._publish(certificate)
        if self.config.on_mismatch == "error":
            raise refusal(certificate)

    def _publish(self, certificate: Certificate) -> None:
        """Log and store the certificate of the restore."""
        if collective.rank() != 0:
            return
        logger.info("Restore certificate of %s:\n  %s", certificate.path, "\n  ".join(certificate.lines()))
        directories = [self._root] if self.config.save_ckpt else []
        store_certificate(certificate, [*directories, *([self._records] if self._records else [])])

    def _resolve_restore_path(self) -> str | None:
        return find_restore_path(self.config, self._root, self._storage)


def _in_short(config: CheckpointingConfig) -> str:
    """Return the fields that are asked for most, and what else differs from its default."""
    default = CheckpointingConfig()
    shown = {
        field.name: value
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != getattr(default, field.name) or field.name in _ALWAYS_LOGGED
    }
    return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def _trajectory_directory(trainer: Any) -> Path | None:
    directory = getattr(getattr(trainer.config, "trajectory", None), "dir", None)
    return None if directory is None else working_directory() / directory
