"""One save in progress: its state, its draft manifest, the commit, the pointer, and the deletion of outdated saves."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException

from hyper_resume import collective
from hyper_resume.checkpoint.base import SaveEvent, SaveListener
from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.format import extra_state as extra
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.format.manifest import FileEntry, Manifest
from hyper_resume.checkpoint.format.manifest import can_hold as manifest_can_hold
from hyper_resume.checkpoint.format.mesh import Mesh
from hyper_resume.checkpoint.history import retention
from hyper_resume.checkpoint.history.lineage import Ancestors
from hyper_resume.checkpoint.history.retention import Retention
from hyper_resume.errors import CheckpointSaveError, HyperResumeError, StateNotPlainError, describe, remedy

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SaveInProgress:
    """One save in progress.

    Attributes:
        staging: the staging directory; its name is the save id.
        target: the step directory that the commit creates.
        global_step: finished optimizer steps.
        ordinal: number of the save within its root.
        ancestors: the saves that this one continues.
        listeners: called with every event.
        started: ``time.perf_counter()`` at the call of ``save``.
        reported: the states that were reported on this rank.
    """

    staging: Path
    target: Path
    global_step: int
    ordinal: int
    ancestors: Ancestors
    listeners: tuple[SaveListener, ...] = ()
    started: float = field(default_factory=time.perf_counter)
    reported: list[str] = field(default_factory=list)

    @property
    def save_id(self) -> str:
        """An id that no other save has, and that contains the step."""
        return self.staging.name

    def report(self, state: Literal["staged", "written", "durable", "failed"]) -> None:
        """Call the listeners and log the state on rank 0. An error of a listener is logged and does not stop the save."""
        self.reported.append(state)
        seconds = time.perf_counter() - self.started
        event = SaveEvent(
            state=state,
            global_step=self.global_step,
            path=str(self.target),
            seconds=seconds,
            at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener failed on the event %s of global_step %s", state, self.global_step)
        # Last, so that whoever reads the line finds everything as the listeners left it, also after a Ctrl-C.
        if collective.rank() == 0:
            level = logging.ERROR if state == "failed" else logging.INFO
            logger.log(level, "Checkpoint %s: global_step=%s, seconds=%.3f", state, self.global_step, seconds)


def draft_manifest(
    save: SaveInProgress,
    *,
    world_size: int,
    mesh: Mesh | None,
    files: Mapping[str, FileEntry],
    buckets: Mapping[str, Mapping[str, str]],
    names: Mapping[str, Mapping[str, str]],
    uncovered: Mapping[str, tuple[str, ...]],
    run: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> Manifest:
    """Return the manifest without the shard files, which are not written yet."""
    return Manifest(
        step=save.global_step,
        attempt=save.save_id,
        ordinal=save.ordinal,
        ancestors=save.ancestors,
        world_size=world_size,
        mesh=mesh,
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        versions={"hyper_resume": _own_version(), "torch": torch.__version__},
        # A NaN can't be ranked, and JSON can't hold it.
        metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)},
        files=dict(files),
        buckets=buckets,
        names=names,
        uncovered=uncovered,
        run=_held(run, save),
    )


def _held(run: Mapping[str, Any], save: SaveInProgress) -> Mapping[str, Any]:
    """Leave out a description of the run that no manifest could hold. A restore reads it in the training state."""
    if manifest_can_hold(run):
        return run
    logger.warning(
        "the manifest of %s has no description of the run: it is too large for it, or not plain", save.target
    )
    return {}


def _own_version() -> str:
    try:
        return version("hyper_resume")
    except PackageNotFoundError:
        return "not installed"


def end_save_process() -> None:
    """Kill DCP's save process, if there is one; the next save starts a new one.

    After a failure on any rank, the process group of the save processes is broken. DCP would use it for every later save.
    """
    found, _async_process_executor._CHECKPOINT_PROCESS = _async_process_executor._CHECKPOINT_PROCESS, None
    if found is not None:
        found._save_process.kill()
        found._save_process.join()


def replace_dead_save_process(group: Any) -> None:
    """Let every rank start a new save process if one of them has died since the last save; every rank calls it.

    All of them, because their process group is broken. It is done once for a save: if a new one dies too, the save fails.
    """
    process = _async_process_executor._CHECKPOINT_PROCESS
    is_dead = process is not None and not process._save_process.is_alive()
    dead = [rank for rank, found in enumerate(collective.all_gather(is_dead, group)) if found]
    if dead:
        logger.warning("the process that saves in the background has died on rank %s: starting new ones", dead)
        end_save_process()


def publish(save: SaveInProgress, note_committed: Callable[[SaveInProgress], None], group: Any) -> Path | None:
    """Commit a written save, and let LATEST mean it.

    1. all ranks: barrier, because some rank may still be writing; 2. rank 0: commits, and moves the pointer, with no word of
    another rank in between; 3. all ranks: report the save as durable. The pointer comes before that, because after a crash
    LATEST must mean a save that was reported as durable.

    Returns:
        the earlier copy of the step, which :func:`delete_outdated` deletes, or None; the same on all ranks.

    Raises:
        OSError: the save could not be committed; on every rank.
        CheckpointSaveError: the same; or it is committed, and the message says so; on every rank.
    """
    collective.barrier(group)
    save.report("written")

    def on_rank_zero() -> Path | None:
        replaced = layout.commit(save.staging, save.target)
        note_committed(save)
        _move_pointer(save.target, save.global_step)
        return replaced

    replaced = collective.on_rank_zero(on_rank_zero, group)
    save.report("durable")
    return replaced


Ending = Literal["not committed", "unknown", "committed", "durable"]


def conclude(save: SaveInProgress, note_committed: Callable[[SaveInProgress], None], error: BaseException) -> Ending:
    """Find out how a save has ended that ``error`` broke off, and report it. Without collectives: a rank may be lost.

    What is on disk decides. If rank 0 has committed the save, and an interrupt or a lost rank kept it from moving the pointer,
    it moves it here. It deletes what a save has staged that was not committed.

    Returns:
        "unknown" where the disk can't be read, or on another rank that lost contact with rank 0 at the commit.
    """
    is_first = collective.rank() == 0
    found, is_readable = None, True
    try:
        found = layout.manifest_or_none(save.target)
    except OSError:
        is_readable = False
    # Rank 0 has said on all ranks what failed at the commit or after it.
    is_told = isinstance(error, (OSError, CheckpointSaveError))
    ending: Ending = "not committed"
    if "durable" in save.reported:
        ending = "durable"
    elif found is not None and found.attempt == save.save_id:
        is_durable = not is_told and (_finish_publication(save, note_committed) if is_first else _is_pointed_to(save))
        ending = "durable" if is_durable else "committed"
    elif "written" in save.reported and not (is_readable and (is_told or is_first)):
        ending = "unknown"
    if ending != "durable":
        save.report("failed")
    elif "durable" not in save.reported:
        save.report("durable")
    if ending == "not committed" and is_first:
        layout.discard_staging(save.staging)
    return ending


def _finish_publication(save: SaveInProgress, note_committed: Callable[[SaveInProgress], None]) -> bool:
    """Do what is left after the renames of a commit; return whether the save is durable and LATEST means it."""
    note_committed(save)
    try:
        operations.current().sync_directory(save.target.parent)
        _move_pointer(save.target, save.global_step)
    except (OSError, CheckpointSaveError):
        return False
    return True


def _is_pointed_to(save: SaveInProgress) -> bool:
    try:
        pointed, _ = layout.read_pointer(save.target.parent)
    except OSError:
        return False
    return pointed == save.global_step or layout.parse_step(save.target.name) is None


def delete_outdated(
    save: SaveInProgress, replaced: Path | None, keep: Retention, protected: tuple[Path, ...], group: Any
) -> None:
    """After the save is durable, rank 0 deletes the replaced copy and the outdated saves; all ranks wait for it."""

    def on_rank_zero() -> None:
        if replaced is not None:
            layout.remove(replaced)
        _clear_outdated(keep, save, (save.target, *protected))

    collective.on_rank_zero(on_rank_zero, group)


def _move_pointer(target: Path, global_step: int) -> None:
    if target.name != layout.step_directory_name(global_step):
        logger.warning("%s is not named %s: LATEST will not find it", target, layout.step_directory_name(global_step))
        return
    try:
        layout.write_pointer(target.parent, global_step)
    except OSError as error:
        raise CheckpointSaveError(
            describe(
                "the checkpoint is committed, but the pointer could not be moved to it",
                where=str(target.parent / layout.POINTER_NAME),
                found=f"{type(error).__name__}: {error}",
                do=f"fix the cause; until then checkpoint.restore_from={target} resumes from it",
            )
        ) from error


def _clear_outdated(keep: Retention, save: SaveInProgress, protected: tuple[Path, ...]) -> None:
    """Delete outdated saves of this run and of what it continues, never those of other runs in the same root.

    An error costs disk space only: it is logged, and the next save tries again.
    """
    checkpoint_dir = save.target.parent
    of_run = (*save.ancestors, (save.global_step, save.save_id))
    try:
        outdated = retention.find_outdated(keep, checkpoint_dir, protected, of_run=of_run)
        for gone in retention.prune(checkpoint_dir, outdated):
            logger.info("Deleted outdated checkpoint: %s", gone)
    except OSError as error:
        logger.warning("outdated checkpoints under %s could not be deleted: %s", checkpoint_dir, error)


def add_save_identity(state: dict[str, Any], global_step: int) -> dict[str, Any]:
    """Return ``state`` with format version, rank, world size and step added to its training state, if it has one.

    Raises:
        StateNotPlainError: the training state does not have the form that a load demands.
    """
    if extra.PAYLOAD_KEY not in state:
        return state
    mark = {
        "format_version": extra.FORMAT_VERSION,
        "rank": collective.rank(),
        "world_size": collective.world_size(),
        "global_step": global_step,
    }
    complaint = extra.form_complaint(state[extra.PAYLOAD_KEY])
    if complaint:
        raise StateNotPlainError(
            describe(
                "the training state can't be saved: no load would take it",
                where=extra.PAYLOAD_KEY,
                expected="a dict of named parts; rng_state and stateful are dicts, lr_scheduler is a list",
                found=complaint,
                do="put the value into a part of another name, or into a dict",
            )
        )
    return {**state, extra.PAYLOAD_KEY: {**mark, **state[extra.PAYLOAD_KEY]}}


_WHAT: Mapping[Ending, tuple[str, str]] = {
    # torch's zip writer reports a full disk as "unexpected pos".
    "not committed": (
        "the checkpoint was not saved",
        "fix the cause (if a write failed: disk space, permissions); earlier checkpoints are unchanged",
    ),
    "unknown": (
        "the checkpoint may or may not be committed: this rank lost contact with rank 0, or can't read the directory",
        "see what rank 0 says; LATEST means this checkpoint if it was committed, and the one before it if not",
    ),
    "committed": (
        "the checkpoint is committed, but LATEST may mean an earlier one",
        "fix the cause; checkpoint.restore_from=<this directory> resumes from it",
    ),
    "durable": (
        "the checkpoint is committed and durable, but what follows a commit failed",
        "fix the cause, and resume from LATEST, which means this checkpoint",
    ),
}


def save_error(path: str, error: BaseException, ending: Ending = "not committed") -> CheckpointSaveError:
    """Return ``error`` as a CheckpointSaveError; of DCP's error, which holds those of all ranks, the lowest rank's."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    reason = failures[min(failures)][0] if failures else error
    where = f"{path}, rank {min(failures)}" if failures else path
    what, do = _WHAT[ending]
    return CheckpointSaveError(describe(what, where=where, found=f"{type(reason).__name__}: {reason}", do=do))


def own_interrupt(error: CheckpointException) -> BaseException | None:
    """Return the interrupt (Ctrl-C, an exit) of this rank that DCP has put into its error; None if there is none.

    An interrupt reaches the main thread only. What a save in the background reports is another process's.
    """
    found = error.failures.get(collective.rank(), (None,))[0]
    is_here = threading.current_thread() is threading.main_thread()
    return found if is_here and isinstance(found, BaseException) and not isinstance(found, Exception) else None


def explained_for_root(root: Path, action: Callable[[], T]) -> T:
    """Return ``action()``, which makes or writes the root of a run; errors of this library pass unchanged.

    Raises:
        CheckpointSaveError: an error of the system, on the rank where it happened.
    """
    try:
        return action()
    except HyperResumeError:
        raise
    except OSError as error:
        raise _unwritable_root_error(root, error) from error


def _unwritable_root_error(root: Path, error: OSError) -> CheckpointSaveError:
    """Return the error of a run whose root can't be made or written; on the rank where it happened."""
    return CheckpointSaveError(
        describe(
            "this run could not save: checkpoint_dir can't be written",
            where=f"{root}, rank {collective.rank()}",
            expected="a directory, on storage that all ranks share, where each rank can create files",
            found=f"{type(error).__name__}: {error}",
            do=f"{remedy(error, 'fix the cause (disk space, permissions, a mount)')}; or set another "
            "checkpoint.checkpoint_dir, or checkpoint.save_ckpt=false",
        )
    )
