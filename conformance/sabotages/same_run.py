"""Defects in the comparison of the run that resumes with the run that was saved, and in what a run tries at its start."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from conformance.sabotages.saboteur import Saboteur, sabotage

_FINGERPRINT = "hyper_resume.trainer.run.fingerprint"
_DESCRIPTION = "hyper_resume.trainer.run.description"
_STREAMS = "hyper_resume.trainer.restored_streams:RestoredStreams"
_CALLBACK = "hyper_resume.trainer.callbacks.checkpointer"


# ---- what a run is made of ------------------------------------------------------------------------------------------


@sabotage("run-not-compared")
def _run_not_compared(put: Saboteur) -> None:
    put.replace(f"{_FINGERPRINT}:find_differences", lambda original, *args: [])


@sabotage("weights-alone-not-compared")
def _weights_alone_not_compared(put: Saboteur) -> None:
    put.replace("hyper_resume.checkpoint.dcp:DistributedCheckpointer.describe_run", lambda original, *args: None)


@sabotage("options-not-described")
def _options_not_described(put: Saboteur) -> None:
    put.replace(f"{_DESCRIPTION}:_group", lambda original, *args: {})


@sabotage("modules-not-described")
def _modules_not_described(put: Saboteur) -> None:
    put.replace(f"{_DESCRIPTION}:_modules", lambda original, *args: {})


@sabotage("configuration-not-described")
def _configuration_not_described(put: Saboteur) -> None:
    put.replace(f"{_DESCRIPTION}:_configuration", lambda original, *args: {})


@sabotage("schedule-not-described")
def _schedule_not_described(put: Saboteur) -> None:
    put.replace(f"{_DESCRIPTION}:schedule_options", lambda original, *args: {})


@sabotage("frozen-not-digested")
def _frozen_not_digested(put: Saboteur) -> None:
    put.replace(f"{_DESCRIPTION}:_digests", lambda original, *args: {})


@sabotage("changed-loader-believed")
def _changed_loader_believed(put: Saboteur) -> None:
    put.replace("hyper_resume.data.resumable:ResumableLoader.changes_since", lambda original, *args: [])


@sabotage("override-refused")
def _override_refused(put: Saboteur) -> None:
    put.replace(f"{_FINGERPRINT}:RunFingerprint._is_declared", lambda original, *args: False)


@sabotage("override-not-applied")
def _override_not_applied(put: Saboteur) -> None:
    put.replace(f"{_FINGERPRINT}:RunFingerprint._override", lambda original, *args: None)


@sabotage("description-of-the-checkpoint-kept")
def _description_of_the_checkpoint_kept(put: Saboteur) -> None:
    """After a restore, saves describe the run that was restored, whatever this run overrides."""

    def compare(original: Any, fingerprint: Any, payload: Any, extra_state: Any, described: Any) -> Any:
        result = original(fingerprint, payload, extra_state, described)
        fingerprint._holding = extra_state["run"]
        return result

    put.replace(f"{_FINGERPRINT}:RunFingerprint.compare", compare)


@sabotage("held-values-not-described")
def _held_values_not_described(put: Saboteur) -> None:
    put.replace(f"{_FINGERPRINT}:with_values", lambda original, description, held: description)


# ---- a loop of one's own --------------------------------------------------------------------------------------------


@sabotage("schedule-order-not-observed")
def _schedule_order_not_observed(put: Saboteur) -> None:
    put.replace("hyper_resume.trainer.run.schedule_order:ScheduleOrder.begin", lambda original, *args: None)


@sabotage("moving-loader-not-named")
def _moving_loader_not_named(put: Saboteur) -> None:
    put.replace("hyper_resume.trainer.mismatches:why_streams_move", lambda original, *args: [])
    # Otherwise it is found at the first forward pass.
    put.replace(f"{_STREAMS}.reason", lambda original, *args: "", fires=False)


@sabotage("moved-streams-not-told")
def _moved_streams_not_told(put: Saboteur) -> None:
    put.replace(f"{_STREAMS}.reason", lambda original, *args: "")


@sabotage("draws-after-saves-not-observed")
def _draws_after_saves_not_observed(put: Saboteur) -> None:
    put.replace("hyper_resume.trainer.draws_after_saves:moved_since", lambda original, *args: [])


@sabotage("moved-streams-left")
def _moved_streams_left(put: Saboteur) -> None:
    put.replace("hyper_resume.trainer.restored_streams:put_streams", lambda original, *args: None)


@sabotage("handed-state-ignored")
def _handed_state_ignored(put: Saboteur) -> None:
    put.replace(f"{_CALLBACK}:CheckpointerCallback._use_state", lambda original, callback, state: None)


@sabotage("saves-move-the-streams")
def _saves_move_the_streams(put: Saboteur) -> None:
    put.replace(f"{_CALLBACK}:streams_kept", lambda original, *args: contextlib.nullcontext())


# ---- other backends, and the start of a run -------------------------------------------------------------------------


@sabotage("manager-ignored")
def _manager_ignored(put: Saboteur) -> None:
    def build(original: Any, config: Any, *args: Any) -> Any:
        return original(dataclasses.replace(config, manager="dcp"), *args)

    put.replace(f"{_CALLBACK}:build_backend", build)


@sabotage("no-pointer-for-a-plain-backend")
def _no_pointer_for_a_plain_backend(put: Saboteur) -> None:
    put.replace(f"{_CALLBACK}:with_pointer", lambda original, backend: backend)


@sabotage("no-digests-for-a-plain-backend")
def _no_digests_for_a_plain_backend(put: Saboteur) -> None:
    put.replace(f"{_CALLBACK}:read_digests", lambda original, *args: {})


@sabotage("nothing-tried-at-the-start")
def _nothing_tried_at_the_start(put: Saboteur) -> None:
    put.replace(f"{_CALLBACK}:CheckpointerCallback._try_save", lambda original, *args: None)


# ---- names ----------------------------------------------------------------------------------------------------------


@sabotage("outside-parameters-without-names")
def _outside_parameters_without_names(put: Saboteur) -> None:
    put.replace("hyper_resume.trainer.payload:outside_names", lambda original, *args: {})


@sabotage("data-parallel-prefix-kept")
def _data_parallel_prefix_kept(put: Saboteur) -> None:
    put.set("hyper_resume.state.names:_DATA_PARALLEL", ())
