"""Defects in configuration fields: which are ignored, when saves happen, and which lines and warnings are logged."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from conformance.sabotages.saboteur import Saboteur, sabotage

_CALLBACK_MODULE = "hyper_resume.trainer.callbacks.checkpointer"
_SOURCE_MODULE = "hyper_resume.trainer.restore_source"
_CALLBACK = f"{_CALLBACK_MODULE}:CheckpointerCallback"
_BASE = "hyper_resume.trainer.base:BaseTrainer"


def _with_config(put: Saboteur, **changes: Any) -> None:
    """Give the callback other values of fields; a callable computes the value from the old one."""

    def init(original: Any, callback: Any, trainer: Any) -> None:
        original(callback, trainer)
        values = {name: value(callback.config) if callable(value) else value for name, value in changes.items()}
        callback.config = dataclasses.replace(callback.config, **values)

    put.replace(f"{_CALLBACK}.__init__", init)


@sabotage("callback-always-registered")
def _callback_always_registered(put: Saboteur) -> None:
    def init_callbacks(original: Any, trainer: Any, makers: Any) -> None:
        original(trainer, makers)
        checkpoint = trainer.config.checkpoint
        if not checkpoint.save_ckpt and checkpoint.restore_from is None:
            from hyper_resume.trainer.callbacks import CheckpointerCallback

            trainer.callbacks.append(CheckpointerCallback(trainer))

    put.replace(f"{_BASE}._init_callbacks", init_callbacks)


@sabotage("save-flag-ignored")
def _save_flag_ignored(put: Saboteur) -> None:
    _with_config(put, save_ckpt=True)


@sabotage("restore-from-ignored")
def _restore_from_ignored(put: Saboteur) -> None:
    put.replace(f"{_CALLBACK}._resolve_restore_path", lambda original, callback: None)


@sabotage("initial-restore-ignored")
def _initial_restore_ignored(put: Saboteur) -> None:
    _with_config(put, initial_restore_from=None)


@sabotage("initial-restore-wins")
def _initial_restore_wins(put: Saboteur) -> None:
    """Every start is from the other run's checkpoint, also when this run has its own."""

    def resolve(original: Any, callback: Any) -> Any:
        initial = callback.config.initial_restore_from
        if initial is None:
            return original(callback)
        put.fired()
        return initial

    put.replace(f"{_CALLBACK}._resolve_restore_path", resolve, fires=False)


@sabotage("restore-follows-the-save-flags")
def _restore_follows_the_save_flags(put: Saboteur) -> None:
    _with_config(
        put,
        restore_optimizer=lambda config: config.save_optimizer,
        restore_train_state=lambda config: config.save_train_state,
    )


@sabotage("save-steps-ignored")
def _save_steps_ignored(put: Saboteur) -> None:
    put.replace(f"{_CALLBACK}.on_step_end", lambda original, *args, **kwargs: None)


@sabotage("save-epochs-ignored")
def _save_epochs_ignored(put: Saboteur) -> None:
    put.replace(f"{_CALLBACK}.on_epoch_end", lambda original, *args, **kwargs: None)


@sabotage("default-epochs-are-two")
def _default_epochs_are_two(put: Saboteur) -> None:
    _with_config(put, save_epochs=lambda config: 2 * config.save_epochs)


@sabotage("duplicate-save-not-suppressed")
def _duplicate_save_not_suppressed(put: Saboteur) -> None:
    def save_once(original: Any, callback: Any, step: int, *, force_sync: bool = False) -> bool:
        callback._last_saved_step = -1
        saved: bool = original(callback, step, force_sync=force_sync)
        return saved

    put.replace(f"{_CALLBACK}._save_once", save_once)


@sabotage("restored-step-not-remembered")
def _restored_step_not_remembered(put: Saboteur) -> None:
    def load_checkpoint(original: Any, callback: Any, path: str) -> Any:
        certificate = original(callback, path)
        if callback._last_saved_step != -1:
            put.fired()
        callback._last_saved_step = -1
        return certificate

    put.replace(f"{_CALLBACK}._load_checkpoint", load_checkpoint, fires=False)


@sabotage("last-save-left-out")
def _last_save_left_out(put: Saboteur) -> None:
    put.replace(
        f"{_CALLBACK}.on_train_end", lambda original, callback, *args, **kwargs: callback.wait_for_pending_save()
    )


@sabotage("last-save-in-background")
def _last_save_in_background(put: Saboteur) -> None:
    def save_checkpoint(original: Any, callback: Any, *, force_sync: bool = False) -> None:
        if force_sync:
            put.fired()
        original(callback, force_sync=False)

    put.replace(f"{_CALLBACK}._save_checkpoint", save_checkpoint, fires=False)


@sabotage("async-flag-ignored")
def _async_flag_ignored(put: Saboteur) -> None:
    _with_config(put, is_async=False)


@sabotage("checkpoint-dir-ignored")
def _checkpoint_dir_ignored(put: Saboteur) -> None:
    _with_config(put, checkpoint_dir="./checkpoints")


@sabotage("peft-flag-ignored")
def _peft_flag_ignored(put: Saboteur) -> None:
    _with_config(put, is_peft=False)


@sabotage("optimizer-written-although-off")
def _optimizer_written_although_off(put: Saboteur) -> None:
    _with_config(put, save_optimizer=True)


@sabotage("train-state-written-although-off")
def _train_state_written_although_off(put: Saboteur) -> None:
    _with_config(put, save_train_state=True)


@sabotage("layout-flag-ignored")
def _layout_flag_ignored(put: Saboteur) -> None:
    def build(original: Any, **kwargs: Any) -> Any:
        return original(**{**kwargs, "extra_state_per_rank": True})

    put.replace(f"{_CALLBACK_MODULE}:build_checkpointer", build)


@sabotage("optimizer-restored-although-off")
def _optimizer_restored_although_off(put: Saboteur) -> None:
    _with_config(put, restore_optimizer=True)


@sabotage("train-state-restored-although-off")
def _train_state_restored_although_off(put: Saboteur) -> None:
    _with_config(put, restore_train_state=True)


@sabotage("saving-draws-numbers")
def _saving_draws_numbers(put: Saboteur) -> None:
    def save_checkpoint(original: Any, callback: Any, **kwargs: Any) -> None:
        import torch

        original(callback, **kwargs)
        torch.rand(())

    put.replace(f"{_CALLBACK}._save_checkpoint", save_checkpoint)


@sabotage("latest-in-capitals-only")
def _latest_in_capitals_only(put: Saboteur) -> None:
    def resolve(original: Any, callback: Any) -> Any:
        wanted = callback.config.restore_from
        if wanted is not None and wanted != "LATEST" and wanted.lower() == "latest":
            put.fired()
            raise FileNotFoundError(wanted)
        return original(callback)

    put.replace(f"{_CALLBACK}._resolve_restore_path", resolve, fires=False)


@sabotage("step-cut-from-the-raw-path")
def _step_cut_from_the_raw_path(put: Saboteur) -> None:
    def resolve(original: Any, callback: Any) -> Any:
        wanted = callback.config.restore_from
        if wanted is not None and wanted.lower() != "latest":
            put.fired()
            int(wanted.split("/")[-1].removeprefix("global_step_"))
        return original(callback)

    put.replace(f"{_CALLBACK}._resolve_restore_path", resolve, fires=False)


@sabotage("path-cut-to-plain-letters")
def _path_cut_to_plain_letters(put: Saboteur) -> None:
    _with_config(put, checkpoint_dir=lambda config: re.sub(r"[^A-Za-z0-9_./-]", "", config.checkpoint_dir))


# ---- what is logged --------------------------------------------------------------------------------------------------


@sabotage("policy-tells-nothing")
def _policy_tells_nothing(put: Saboteur) -> None:
    for module in (_CALLBACK_MODULE, _SOURCE_MODULE):
        put.replace(f"{module}:logger.info", lambda original, *args: None)


@sabotage("told-step-is-the-next-one")
def _told_step_is_the_next_one(put: Saboteur) -> None:
    def info(original: Any, message: str, *args: Any) -> None:
        if message.startswith("Saving checkpoint"):
            put.fired()
            args = (args[0] + 1, *args[1:])
        original(message, *args)

    put.replace(f"{_CALLBACK_MODULE}:logger.info", info, fires=False)


@sabotage("start-line-left-out")
def _start_line_left_out(put: Saboteur) -> None:
    put.replace("hyper_resume.trainer.base:logger.info", lambda original, *args: None)


@sabotage("layout-not-told")
def _layout_not_told(put: Saboteur) -> None:
    put.replace("hyper_resume.checkpoint.loading.reading:logger.info", lambda original, *args: None)


@sabotage("policy-warns-of-nothing")
def _policy_warns_of_nothing(put: Saboteur) -> None:
    for module in (_CALLBACK_MODULE, _SOURCE_MODULE):
        put.replace(f"{module}:logger.warning", lambda original, *args: None)


@sabotage("damaged-pointer-not-told")
def _damaged_pointer_not_told(put: Saboteur) -> None:
    put.replace("hyper_resume.checkpoint.history.lineage:logger.log", lambda original, *args: None)


@sabotage("optimizer-count-mismatch-silent")
def _optimizer_count_mismatch_silent(put: Saboteur) -> None:
    put.replace("hyper_resume.trainer.payload:logger.warning", lambda original, *args: None)


@sabotage("scheduler-count-mismatch-silent")
def _scheduler_count_mismatch_silent(put: Saboteur) -> None:
    put.replace("hyper_resume.state.scheduler:logger.warning", lambda original, *args: None)


@sabotage("topology-change-silent")
def _topology_change_silent(put: Saboteur) -> None:
    put.replace("hyper_resume.data.loader:logger.warning", lambda original, *args: None)


@sabotage("stateless-loader-silent")
def _stateless_loader_silent(put: Saboteur) -> None:
    put.replace("hyper_resume.state.dataloader:logger.warning", lambda original, *args: None)


@sabotage("train-state-left-out")
def _train_state_left_out(put: Saboteur) -> None:
    _with_config(put, save_train_state=False)


@sabotage("restore-from-means-latest")
def _restore_from_means_latest(put: Saboteur) -> None:
    _with_config(put, restore_from=lambda config: config.restore_from and "LATEST")


@sabotage("latest-by-default")
def _latest_by_default(put: Saboteur) -> None:
    _with_config(put, restore_from=lambda config: config.restore_from or "LATEST")


@sabotage("reserved-fields-always-warn")
def _reserved_fields_always_warn(put: Saboteur) -> None:
    put.replace(f"{_CALLBACK_MODULE}:reserved_fields_set", lambda original, config: ["staging_dir"])


@sabotage("callback-never-registered")
def _callback_never_registered(put: Saboteur) -> None:
    def init(original: Any, trainer: Any, makers: Any) -> None:
        original(trainer, makers)
        trainer.callbacks = [item for item in trainer.callbacks if type(item).__name__ != "CheckpointerCallback"]

    put.replace("hyper_resume.trainer.base:BaseTrainer._init_callbacks", init)


@sabotage("saved-one-step-late")
def _saved_one_step_late(put: Saboteur) -> None:
    def on_step_end(original: Any, callback: Any, *args: Any) -> None:
        callback._state.global_step -= 1
        try:
            due = callback.config.save_steps and callback._state.global_step % callback.config.save_steps == 0
        finally:
            callback._state.global_step += 1
        if due and callback._state.global_step > 1:
            put.fired()
            callback._save_once(callback._state.global_step)

    put.replace(f"{_CALLBACK}.on_step_end", on_step_end, fires=False)
