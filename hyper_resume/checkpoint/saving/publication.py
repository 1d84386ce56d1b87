"""One save in progress: its state, its draft manifest, the commit, the pointer, and the deletion of outdated saves."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException

from hyper_resume import collective
from hyper_resume.checkpoint.base import SaveEvent, SaveListener
from hyper_resume.checkpoint.format import extra_state as extra
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.format.manifest import FileEntry, Manifest
from hyper_resume.checkpoint.format.mesh import Mesh
from hyper_resume.checkpoint.history import retention
from hyper_resume.checkpoint.history.lineage import Ancestors
from hyper_resume.checkpoint.history.retention import Retention
from hyper_resume.errors import CheckpointSaveError, describe

logger = logging.getLogger(__name__)


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
    """

    staging: Path
    target: Path
    global_step: int
    ordinal: int
    ancestors: Ancestors
    listeners: tuple[SaveListener, ...] = ()
    started: float = field(default_factory=time.perf_counter)

    @property
    def save_id(self) -> str:
        """An id that no other save has, and that contains the step."""
        return self.staging.name

    def report(self, state: Literal["staged", "written", "durable", "failed"]) -> None:
        """Call the listeners and log the state on rank 0. An error of a listener is logged and does not stop the save."""
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
        run=run,
    )


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


def commit(save: SaveInProgress, group: Any) -> Path | None:
    """Commit a written save: 1. all ranks: barrier, because some rank may still be writing; 2. rank 0: commits.

    Returns:
        the earlier copy of the step, which :func:`delete_outdated` deletes, or None; the same on all ranks.

    Raises:
        OSError: the save could not be committed; on every rank.
    """
    collective.barrier(group)
    save.report("written")
    return collective.on_rank_zero(lambda: layout.commit(save.staging, save.target), group)


def move_pointer_and_report(save: SaveInProgress, group: Any) -> None:
    """After the commit: 1. rank 0: moves the pointer; 2. all ranks: report the save as durable.

    In this order, because after a crash LATEST must mean a save that was reported as durable.

    Raises:
        CheckpointSaveError: the checkpoint is complete, but the pointer could not be moved.
    """
    collective.on_rank_zero(lambda: _move_pointer(save.target, save.global_step), group)
    save.report("durable")


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
                "the checkpoint is complete, but the pointer could not be moved to it",
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
    """Return ``state`` with format version, rank, world size and step added to its training state, if it has one."""
    if extra.PAYLOAD_KEY not in state:
        return state
    mark = {
        "format_version": extra.FORMAT_VERSION,
        "rank": collective.rank(),
        "world_size": collective.world_size(),
        "global_step": global_step,
    }
    return {**state, extra.PAYLOAD_KEY: {**mark, **state[extra.PAYLOAD_KEY]}}


def save_error(path: str, error: BaseException) -> CheckpointSaveError:
    """Return ``error`` as a CheckpointSaveError; of DCP's error, which holds those of all ranks, the lowest rank's."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    reason = failures[min(failures)][0] if failures else error
    where = f"{path}, rank {min(failures)}" if failures else path
    return CheckpointSaveError(
        describe(
            "the checkpoint was not saved",
            where=where,
            found=f"{type(reason).__name__}: {reason}",
            # torch's zip writer reports a full disk as "unexpected pos".
            do="fix the cause (if a write failed: disk space, permissions); earlier checkpoints are unchanged",
        )
    )
