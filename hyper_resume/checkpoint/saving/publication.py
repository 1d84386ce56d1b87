"""One save on its way: what the manifest will say of it, how far it has come, and its publication."""

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
from torch.distributed.tensor import DTensor

from hyper_resume import collective
from hyper_resume.checkpoint.base import SaveEvent, SaveListener
from hyper_resume.checkpoint.format import extra_state as extra
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.format.manifest import FileEntry, Manifest, Mesh
from hyper_resume.checkpoint.history import retention
from hyper_resume.checkpoint.history.lineage import Ancestors
from hyper_resume.checkpoint.history.retention import Retention
from hyper_resume.errors import CheckpointSaveError, describe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SaveInProgress:
    """One save: where it is staged, where it will stand, and what rank 0 knows of the root."""

    staging: Path
    target: Path
    global_step: int
    ordinal: int
    ancestors: Ancestors
    listeners: tuple[SaveListener, ...] = ()
    started: float = field(default_factory=time.perf_counter)

    @property
    def save_id(self) -> str:
        """Unique to the save, and telling the step."""
        return self.staging.name

    def report(self, state: Literal["staged", "written", "durable", "failed"]) -> None:
        """Log it on rank 0, and tell the listeners; one that fails is logged, because the save goes on."""
        seconds = time.perf_counter() - self.started
        if collective.rank() == 0:
            level = logging.ERROR if state == "failed" else logging.INFO
            logger.log(level, "Checkpoint %s: global_step=%s, seconds=%.3f", state, self.global_step, seconds)
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


def draft_manifest(
    save: SaveInProgress,
    *,
    world_size: int,
    mesh: Mesh | None,
    files: Mapping[str, FileEntry],
    buckets: Mapping[str, Mapping[str, str]],
    names: Mapping[str, Mapping[str, str]],
    metrics: Mapping[str, float],
) -> Manifest:
    """Return the manifest as far as it is known before the shards are written."""
    return Manifest(
        step=save.global_step,
        attempt=save.save_id,
        ordinal=save.ordinal,
        ancestors=save.ancestors,
        world_size=world_size,
        mesh=mesh,
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        versions={"hyper_resume": _own_version(), "torch": torch.__version__},
        # A loss of NaN ranks nowhere, and JSON has no word for it.
        metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)},
        files=dict(files),
        buckets=buckets,
        names=names,
    )


def _own_version() -> str:
    try:
        return version("hyper_resume")
    except PackageNotFoundError:
        return "not installed"


def find_mesh(state: Any) -> Mesh | None:
    """Return the mesh with the most dimensions among the sharded tensors of a nested state."""
    found: Mesh | None = None
    for tensor in _sharded(state):
        mesh = tensor.device_mesh
        if found is None or mesh.ndim > len(found.shape):
            names = mesh.mesh_dim_names or tuple(f"dim_{index}" for index in range(mesh.ndim))
            found = Mesh(names=tuple(names), shape=tuple(int(size) for size in mesh.shape))
    return found


def _sharded(state: Any) -> list[DTensor]:
    if isinstance(state, DTensor):
        return [state]
    if isinstance(state, Mapping):
        return [tensor for value in state.values() for tensor in _sharded(value)]
    if isinstance(state, (list, tuple)):
        return [tensor for value in state for tensor in _sharded(value)]
    return []


def end_save_process() -> None:
    """End the process that saves in the background, if there is one; the next save starts another.

    After a failure on any rank its process group is of no use: one that died is missing in it, and the others' collectives
    have broken off. DCP itself would hand it every later save.
    """
    found, _async_process_executor._CHECKPOINT_PROCESS = _async_process_executor._CHECKPOINT_PROCESS, None
    if found is not None:
        found._save_process.kill()
        found._save_process.join()


def commit(save: SaveInProgress, group: Any) -> Path | None:
    """Make a written save count: barrier, then rank 0 commits.

    The barrier keeps the commit off a checkpoint that some rank still writes.

    Returns:
        on rank 0's word, an earlier copy of the step that :func:`delete_outdated` deletes.

    Raises:
        OSError: it could not be committed.
    """
    collective.barrier(group)
    save.report("written")
    return collective.on_rank_zero(lambda: layout.commit(save.staging, save.target), group)


def move_pointer_and_report(save: SaveInProgress, group: Any) -> None:
    """After the commit, rank 0 moves the pointer, and all ranks tell of a durable save.

    Not before: whoever is told that a save is durable may count on LATEST meaning it after a crash.

    Raises:
        CheckpointSaveError: the checkpoint is complete, but the pointer could not be moved.
    """
    collective.on_rank_zero(lambda: _move_pointer(save.target, save.global_step), group)
    save.report("durable")


def delete_outdated(
    save: SaveInProgress, aside: Path | None, keep: Retention, protected: tuple[Path, ...], group: Any
) -> None:
    """After all that, rank 0 deletes what is outdated; no rank goes on before that is done."""

    def on_rank_zero() -> None:
        if aside is not None:
            layout.remove(aside)
        _clear_outdated(keep, save.target.parent, (save.target, *protected))

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
                do=f"mend the cause; checkpoint.restore_from={target} resumes from it meanwhile",
            )
        ) from error


def _clear_outdated(keep: Retention, checkpoint_dir: Path, protected: tuple[Path, ...]) -> None:
    """What can't be deleted costs space, not the save: it is told of, and tried again after the next one."""
    try:
        for gone in retention.prune(checkpoint_dir, retention.find_outdated(keep, checkpoint_dir, protected)):
            logger.info("Deleted outdated checkpoint: %s", gone)
    except OSError as error:
        logger.warning("outdated checkpoints under %s could not be deleted: %s", checkpoint_dir, error)


def add_save_identity(state: dict[str, Any], global_step: int) -> dict[str, Any]:
    """Return ``state`` with rank, world size, step and format version in its training state, if it has one."""
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
    """Return a failed save as this library's error; of DCP's, which gathers the ranks', the lowest rank's."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    reason = failures[min(failures)][0] if failures else error
    where = f"{path}, rank {min(failures)}" if failures else path
    return CheckpointSaveError(
        describe(
            "the checkpoint was not saved",
            where=where,
            found=f"{type(reason).__name__}: {reason}",
            # A full disk reaches us as "unexpected pos" of torch's zip writer.
            do="mend the cause (when writing failed: space, permissions); earlier checkpoints are untouched",
        )
    )
