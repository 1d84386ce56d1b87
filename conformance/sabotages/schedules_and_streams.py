"""Defects in lr schedules, random streams, layouts of training state, and other stateful objects."""

from __future__ import annotations

from typing import Any

from conformance.sabotages.saboteur import Saboteur, sabotage

_PAYLOAD = "hyper_resume.trainer.payload"
_RESTORE = "hyper_resume.trainer.restore"
_MESH = "hyper_resume.trainer.run.mesh"
_CALLBACK = "hyper_resume.trainer.callbacks.checkpointer"
_SCHEDULER = "hyper_resume.state.scheduler"
_EXTRA_STATE = "hyper_resume.checkpoint.format.extra_state"


# ---- schedules ------------------------------------------------------------------------------------------------------


def _built_lrs(schedulers: Any) -> list[tuple[dict[str, Any], float]]:
    """Each group with the lr that the schedules' construction gave it."""
    return [(group, group["initial_lr"]) for scheduler in schedulers for group in scheduler.optimizer.param_groups]


@sabotage("lr-restarted")
def _lr_restarted(put: Saboteur) -> None:
    def apply(original: Any, schedulers: Any, saved: Any, names: Any, **how: Any) -> None:
        for scheduler in schedulers:
            for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = lr

    put.replace(f"{_RESTORE}:apply_schedulers", apply)


@sabotage("scheduler-one-step-off")
def _scheduler_one_step_off(put: Saboteur) -> None:
    def apply(original: Any, schedulers: Any, saved: Any, names: Any, **how: Any) -> None:
        original(schedulers, saved, names, **how)
        for scheduler in schedulers:
            scheduler.step()

    put.replace(f"{_RESTORE}:apply_schedulers", apply)


@sabotage("scheduler-restored-before-optimizer")
def _scheduler_restored_before_optimizer(put: Saboteur) -> None:
    # The optimizer is then built anew with its configured lr; a schedule writes its lr at its next step only.
    def apply(original: Any, schedulers: Any, saved: Any, names: Any, **how: Any) -> None:
        lrs = _built_lrs(schedulers)
        original(schedulers, saved, names, **how)
        for group, lr in lrs:
            group["lr"] = lr

    put.replace(f"{_RESTORE}:apply_schedulers", apply)


@sabotage("lr-not-written-back")
def _lr_not_written_back(put: Saboteur) -> None:
    put.replace(f"{_SCHEDULER}:_apply_options", lambda original, *args: None)


@sabotage("schedules-by-place")
def _schedules_by_place(put: Saboteur) -> None:
    put.replace(f"{_SCHEDULER}:_reorder_groups", lambda original, state, places: dict(state))


@sabotage("cycled-betas-forgotten")
def _cycled_betas_forgotten(put: Saboteur) -> None:
    put.set(f"{_SCHEDULER}:_SET_WHEN_CYCLING", ("lr",))


@sabotage("second-scheduler-skipped")
def _second_scheduler_skipped(put: Saboteur) -> None:
    def apply(original: Any, schedulers: Any, saved: Any, names: Any, **how: Any) -> None:
        original(schedulers[:1], saved[:1], names, **how)

    put.replace(f"{_RESTORE}:apply_schedulers", apply)


# ---- random streams -------------------------------------------------------------------------------------------------


def _keep(put: Saboteur, *streams: str) -> None:
    """Do not restore these streams."""
    from hyper_resume.state.rng import collect_rng

    def apply(original: Any, saved: Any, device_type: str) -> None:
        own = collect_rng(device_type)
        original({**saved, **{name: own[name] for name in streams}}, device_type)

    put.replace(f"{_MESH}:apply_rng", apply)


@sabotage("torch-stream-forgotten")
def _torch_stream_forgotten(put: Saboteur) -> None:
    _keep(put, "torch_cpu")


@sabotage("python-stream-forgotten")
def _python_stream_forgotten(put: Saboteur) -> None:
    _keep(put, "python")


@sabotage("numpy-stream-forgotten")
def _numpy_stream_forgotten(put: Saboteur) -> None:
    _keep(put, "numpy")


def _draw() -> None:
    import random

    import numpy as np
    import torch

    random.random()
    np.random.rand()
    torch.rand(())


@sabotage("save-draws-from-a-stream")
def _save_draws_from_a_stream(put: Saboteur) -> None:
    def save(original: Any, *args: Any, **how: Any) -> None:
        original(*args, **how)
        _draw()

    put.replace(f"{_CALLBACK}:CheckpointerCallback._save_checkpoint", save)


@sabotage("no-device-stream-refused")
def _no_device_stream_refused(put: Saboteur) -> None:
    def apply(original: Any, saved: Any, device_type: str) -> None:
        if saved["torch_device"] is None:
            put.fired()
            raise RuntimeError("no stream of the device")
        original(saved, device_type)

    put.replace(f"{_MESH}:apply_rng", apply, fires=False)


@sabotage("rng-before-iterator")
def _rng_before_iterator(put: Saboteur) -> None:
    put.replace("hyper_resume.data.stateful_loaders:put_streams", lambda original, *args: None)


@sabotage("rng-restored-too-early")
def _rng_restored_too_early(put: Saboteur) -> None:
    def restore(original: Any, *args: Any) -> Any:
        certificate = original(*args)
        _draw()
        return certificate

    put.replace(f"{_CALLBACK}:restore", restore)


@sabotage("rng-of-the-seed")
def _rng_of_the_seed(put: Saboteur) -> None:
    def apply(original: Any, saved: Any, device_type: str) -> None:
        import random

        import numpy as np
        import torch

        random.seed(1234)
        np.random.seed(1234)
        torch.manual_seed(1234)

    put.replace(f"{_MESH}:apply_rng", apply)


@sabotage("read-by-write-flags")
def _read_by_write_flags(put: Saboteur) -> None:
    def load(original: Any, callback: Any, path: str) -> Any:
        import dataclasses

        config = callback.config
        callback.config = dataclasses.replace(
            config,
            restore_optimizer=config.restore_optimizer and config.save_optimizer,
            restore_train_state=config.restore_train_state and config.save_train_state,
        )
        return original(callback, path)

    put.replace(f"{_CALLBACK}:CheckpointerCallback._load_checkpoint", load)


# ---- layouts --------------------------------------------------------------------------------------------------------


@sabotage("layout-by-setting")
def _layout_by_setting(put: Saboteur) -> None:
    def read(original: Any, storage: Any, directory: Any, metadata: Any, manifest: Any, *rest: Any) -> Any:
        from hyper_resume.checkpoint.format import extra_state

        found = extra_state.detect_layout(directory, metadata, manifest)
        if (found.kind == "per_rank") is not storage._extra_state_per_rank:
            raise extra_state.no_training_state_error(str(directory), "another layout than is configured")
        return original(storage, directory, metadata, manifest, *rest)

    put.replace("hyper_resume.checkpoint.dcp:DistributedCheckpointer._read_extra_state", read)


@sabotage("embedded-entry-of-another-rank")
def _embedded_entry_of_another_rank(put: Saboteur) -> None:
    put.replace(f"{_EXTRA_STATE}:embed", lambda original, state, rank: original(state, rank + 1))


# ---- other stateful objects -----------------------------------------------------------------------------------------


def _without(put: Saboteur, is_forgotten: Any) -> None:
    """Leave out the objects for which ``is_forgotten(name, object)`` is true."""

    def find(original: Any, *args: Any) -> dict[str, Any]:
        found: dict[str, Any] = original(*args)
        return {name: value for name, value in found.items() if not is_forgotten(name, value)}

    put.replace(f"{_PAYLOAD}:find_stateful", find)


@sabotage("callback-state-forgotten")
def _callback_state_forgotten(put: Saboteur) -> None:
    _without(put, lambda name, value: name.startswith("callback."))


@sabotage("generator-forgotten")
def _generator_forgotten(put: Saboteur) -> None:
    _without(put, lambda name, value: type(value).__name__ == "Generator")


@sabotage("scaler-made-after-load")
def _scaler_made_after_load(put: Saboteur) -> None:
    def apply(original: Any, found: Any, saved: Any, **how: Any) -> None:
        original(found, saved, **how)
        found["scaler"].__init__()

    put.replace(f"{_RESTORE}:apply_stateful", apply)


@sabotage("average-count-forgotten")
def _average_count_forgotten(put: Saboteur) -> None:
    def apply(original: Any, found: Any, saved: Any, **how: Any) -> None:
        original(found, saved, **how)
        found["ema"].updates = 0

    put.replace(f"{_RESTORE}:apply_stateful", apply)
