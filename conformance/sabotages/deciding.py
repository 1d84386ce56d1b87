"""Defects in the decision when to save and when to restore."""

from __future__ import annotations

from typing import Any

from conformance.sabotages.saboteur import Saboteur, sabotage

_CALLBACK = "hyper_resume.trainer.callbacks.checkpointer:CheckpointerCallback"


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
