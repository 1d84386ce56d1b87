"""Defects of preemption: whether a signal is handled, what is saved, and how the process exits."""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.sabotages.data_position import training_forgets
from conformance.sabotages.saboteur import Saboteur, sabotage

_PREEMPTION = "hyper_resume.trainer.callbacks.preemption:PreemptionCallback"
_CALLBACK = "hyper_resume.trainer.callbacks.checkpointer:CheckpointerCallback"
_TRAINER = "hyper_resume.trainer.base:BaseTrainer"


@sabotage("signal-not-heard")
def _signal_not_heard(put: Saboteur) -> None:
    put.replace(f"{_PREEMPTION}._set_flag", lambda original, *args: None)


@sabotage("preemption-saves-nothing")
def _preemption_saves_nothing(put: Saboteur) -> None:
    put.replace(f"{_CALLBACK}.save_before_leaving", lambda original, callback, *args: str(callback._directory()))


@sabotage("preemption-saves-in-the-background")
def _preemption_saves_in_the_background(put: Saboteur) -> None:
    def save(original: Any, callback: Any, *args: Any) -> str:
        callback._save_once(callback._state.global_step)
        return str(callback._directory())

    put.replace(f"{_CALLBACK}.save_before_leaving", save)


@sabotage("preempted-run-exits-clean")
def _preempted_run_exits_clean(put: Saboteur) -> None:
    training_forgets(put, "PreemptedError")


@sabotage("last-step-preempted")
def _last_step_preempted(put: Saboteur) -> None:
    def on_step_end(original: Any, callback: Any, *args: Any) -> None:
        from hyper_resume.errors import PreemptedError

        original(callback, *args)
        if callback._received is not None:
            put.fired()
            raise PreemptedError("preempted")

    put.replace(f"{_PREEMPTION}.on_step_end", on_step_end, fires=False)


@sabotage("only-the-asked-rank-leaves")
def _only_the_asked_rank_leaves(put: Saboteur) -> None:
    def asked(original: Any, callback: Any) -> Any:
        return {} if callback._received is None else {0: callback._received.name}

    put.replace(f"{_PREEMPTION}._received_by_rank", asked)


@sabotage("preemption-always-on")
def _preemption_always_on(put: Saboteur) -> None:
    _always(put, lambda checkpoint: not checkpoint.preemption_signals)


@sabotage("preemption-without-saving")
def _preemption_without_saving(put: Saboteur) -> None:
    _always(put, lambda checkpoint: not checkpoint.save_ckpt)


def _always(put: Saboteur, where: Any) -> None:
    """Add the callback, with a checkpointer of its own, to a trainer that must not have it."""

    def init_callbacks(original: Any, trainer: Any, makers: Any) -> None:
        original(trainer, makers)
        checkpoint = trainer.config.checkpoint
        if not where(checkpoint):
            return
        from hyper_resume.trainer.callbacks import CheckpointerCallback, PreemptionCallback

        trainer.config = dataclasses.replace(
            trainer.config, checkpoint=dataclasses.replace(checkpoint, preemption_signals=("SIGTERM",), save_ckpt=True)
        )
        put.fired()
        trainer.callbacks.append(PreemptionCallback(trainer, CheckpointerCallback(trainer)))

    put.replace(f"{_TRAINER}._init_callbacks", init_callbacks, fires=False)
