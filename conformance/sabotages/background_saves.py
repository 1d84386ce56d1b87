"""Defects of saves in the background: what they write, when they become visible, how their failures are reported."""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.sabotages.saboteur import Saboteur, sabotage

_DCP = "hyper_resume.checkpoint.dcp"
_STAGING = "hyper_resume.checkpoint.saving.staging"
_STORAGE = f"{_DCP}:DistributedCheckpointer"
_CALLBACK = "hyper_resume.trainer.callbacks.checkpointer:CheckpointerCallback"
_WAIT_SECONDS = 3.0


@sabotage("async-save-writes-live-tensors")
def _async_save_writes_live_tensors(put: Saboteur) -> None:
    """No copy is taken: what is written are the tensors as training has moved them since."""

    waiting: list[Any] = []

    def stage(original: Any, stager: Any, flat: Any, places: Any) -> Any:
        from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

        watched = next(value for name, value in flat.items() if name.startswith("model.")).detach()
        # With several ranks, each observes its own shard.
        watched = watched.to_local() if hasattr(watched, "to_local") else watched
        before = watched.clone()
        waiting.append(lambda: not bool((watched == before).all()))
        return dataclasses.replace(original(stager, flat, places), state=unflatten_state_dict(dict(flat), places))

    def save(original: Any, payload: Any, **how: Any) -> Any:
        if waiting:
            _until(waiting.pop())
        return original(payload, **how)

    put.replace(f"{_STAGING}:Stager.stage", stage)
    put.replace(f"{_DCP}:dcp_save", save, fires=False)


@sabotage("async-save-writes-earlier-state")
def _async_save_writes_earlier_state(put: Saboteur) -> None:
    """The tensors of the first save are written again and again."""
    kept: list[Any] = []

    def earlier(payload: Any) -> Any:
        import copy

        if not kept:
            kept.append({bucket: copy.deepcopy(payload[bucket]) for bucket in ("model", "optimizer")})
        else:
            put.fired()
        return {**payload, **kept[0]}

    def stage(original: Any, stager: Any, flat: Any, places: Any) -> Any:
        staged = original(stager, flat, places)
        return dataclasses.replace(staged, state=earlier(staged.state))

    def save_in_process(original: Any, payload: Any, **how: Any) -> Any:
        return original(earlier(payload), **how)

    put.replace(f"{_STAGING}:Stager.stage", stage, fires=False)
    put.replace(f"{_DCP}:dcp_async_save", save_in_process, fires=False)


@sabotage("async-failure-swallowed")
def _async_failure_swallowed(put: Saboteur) -> None:
    def wait(original: Any, storage: Any) -> None:
        try:
            original(storage)
        except Exception:  # noqa: BLE001  this is the defect
            put.fired()

    put.replace(f"{_STORAGE}.maybe_wait_for_async_save", wait, fires=False)


@sabotage("next-save-does-not-wait")
def _next_save_does_not_wait(put: Saboteur) -> None:
    def save(original: Any, storage: Any, *args: Any, **how: Any) -> None:
        if storage._in_flight is not None:
            put.fired()
            storage._in_flight = None
        original(storage, *args, **how)

    put.replace(f"{_STORAGE}.save", save, fires=False)


@sabotage("async-save-holds-up-training")
def _async_save_holds_up_training(put: Saboteur) -> None:
    def save(original: Any, storage: Any, *args: Any, **how: Any) -> None:
        original(storage, *args, **how)
        if storage._in_flight is not None:
            put.fired()
            storage._in_flight.exception()

    put.replace(f"{_STORAGE}.save", save, fires=False)


@sabotage("training-ends-without-its-saves")
def _training_ends_without_its_saves(put: Saboteur) -> None:
    def on_train_end(original: Any, callback: Any, *args: Any) -> None:
        callback.wait_for_pending_save = put.fired
        original(callback, *args)

    put.replace(f"{_CALLBACK}.on_train_end", on_train_end, fires=False)


@sabotage("error-abandons-the-save")
def _error_abandons_the_save(put: Saboteur) -> None:
    """An error ends the process at once, during a save."""

    def on_exception(original: Any, callback: Any, *args: Any) -> None:
        import os

        put.fired()
        if callback.checkpointer._in_flight is not None:
            os._exit(1)

    put.replace(f"{_CALLBACK}.on_exception", on_exception, fires=False)


@sabotage("pointer-moved-before-the-data")
def _pointer_moved_before_the_data(put: Saboteur) -> None:
    def start(original: Any, storage: Any, payload: Any, writer: Any, planner: Any, attempt: Any, how: str) -> None:
        from hyper_resume import collective
        from hyper_resume.checkpoint.format import layout

        if collective.rank() == 0:
            layout.write_pointer(attempt.target.parent, attempt.global_step)
        original(storage, payload, writer, planner, attempt, how)

    put.replace(f"{_STORAGE}._start_background", start)


def _until(is_so: Any) -> None:
    """Wait for it, a few seconds at most."""
    import time

    deadline = time.monotonic() + _WAIT_SECONDS
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.002)
