"""Storage on ``torch.distributed.checkpoint``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hyper_resume import collective
from hyper_resume.checkpoint import extra_state as extra
from hyper_resume.checkpoint import layout
from hyper_resume.checkpoint.attempt import SAVE_ID, check_training_state, mark_shards, read_save_id, save_id_of
from hyper_resume.checkpoint.base import CHECKPOINTER_REGISTRY, CheckpointerBase
from hyper_resume.checkpoint.planner import MODEL_BUCKET, check_model_entries
from hyper_resume.checkpoint.reading import check_shards, load_entries, read_metadata
from hyper_resume.errors import CheckpointMismatchError, CheckpointSaveError, describe

logger = logging.getLogger(__name__)
T = TypeVar("T")


@CHECKPOINTER_REGISTRY.register("dcp")
class DistributedCheckpointer(CheckpointerBase):
    """Writes step directories that stock ``torch.distributed.checkpoint.load`` can read, and reads stock ones.

    A save is staged under ``.staging`` and committed by one rename, after which the pointer moves. All collectives run on
    a gloo group of its own, so that a save in the background never meets a collective of the training loop.
    """

    def __init__(self, *, extra_state_per_rank: bool = True) -> None:
        """Choose the layout of the training state for saves; loads find out by looking."""
        self._extra_state_per_rank = extra_state_per_rank
        self._own_group: dist.ProcessGroup | None = None
        self._in_flight: Future[None] | None = None
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hyper_resume-save")
        self._swept: set[Path] = set()

    # ---- save -------------------------------------------------------------------------------------------------------

    def save(self, path: str, state: dict[str, Any], *, global_step: int, save_async: bool = False) -> None:
        """Write ``state`` as the step directory ``path``; every rank calls it.

        1. all ranks: wait for the save in flight; 2. rank 0: makes the staging directory; 3. each rank: writes its own
        training state and, through DCP, its shards; 4. barrier; 5. rank 0: renames staging to ``path`` and moves the
        pointer; 6. barrier. With ``save_async`` 3 (shards) to 6 run in a thread, on a copy of the state. The pointer names
        ``global_step_N`` directories only, so a ``path`` of another name is committed and the pointer stays.

        Raises:
            CheckpointSaveError: on every rank; nothing was published and earlier checkpoints are untouched. A failure of the
                save in flight is raised before this one begins.
            StateNotPlainError: the state holds something that can't be read back safely; nothing was written.
        """
        self.maybe_wait_for_async_save()
        target = Path(path)
        group = self._group()
        payload = collective.agree(lambda: extra.plain_state(_mark_training_state(state, global_step)), group)
        training_state = payload.pop(extra.PAYLOAD_KEY, None)
        staging: Path | None = None
        try:
            staging = collective.on_rank_zero(lambda: self._prepare(target), group)
            self._stage_training_state(training_state, staging, payload)
            if save_async:
                self._start_background(payload, staging, target, global_step)
            else:
                self._dcp(lambda: dcp_save(payload, checkpoint_id=staging, **self._distribution()), target)
                self._finalize_checkpoint(staging, target, global_step)
        except Exception as error:  # noqa: BLE001  raised again by _fail
            self._fail(error, staging, target)

    def _stage_training_state(
        self, training_state: dict[str, Any] | None, staging: Path, payload: dict[str, Any]
    ) -> None:
        """Write this rank's file, or add the training state to what DCP will write."""
        rank, save_id = collective.rank(), save_id_of(staging)
        mark_shards(payload, save_id, rank)
        if training_state is not None:
            training_state[SAVE_ID] = save_id

        def write() -> None:
            self._check_shared(staging)
            if training_state is not None and self._extra_state_per_rank:
                extra.write_file(staging, rank, extra.encode(training_state))

        collective.agree(write, self._group())
        if training_state is not None and not self._extra_state_per_rank:
            payload[extra.PAYLOAD_KEY] = extra.embed(training_state, rank)

    def _prepare(self, target: Path) -> Path:
        if target.parent not in self._swept:
            layout.sweep_staging(target.parent)
            self._swept.add(target.parent)
        return layout.new_staging_directory(target)

    def _check_shared(self, staging: Path) -> None:
        if not staging.is_dir():
            raise CheckpointSaveError(
                describe(
                    "this rank does not see the directory that rank 0 just made",
                    where=f"{staging}, rank {collective.rank()}",
                    expected="checkpoint_dir on storage shared by all ranks",
                    found="no such directory here",
                    do="set checkpoint.checkpoint_dir to a shared file system",
                )
            )

    def _start_background(self, payload: dict[str, Any], staging: Path, target: Path, global_step: int) -> None:
        def start() -> Any:
            return dcp_async_save(payload, checkpoint_id=staging, process_group=self._group())

        response = self._dcp(start, target)
        upload: Future[Any] = response.upload_completion if isinstance(response, AsyncSaveResponse) else response

        def finish() -> None:
            try:
                self._dcp(upload.result, target)
                self._finalize_checkpoint(staging, target, global_step)
            except Exception as error:  # noqa: BLE001  raised again, at the next save or wait
                self._fail(error, staging, target)

        self._in_flight = self._background.submit(finish)

    def _finalize_checkpoint(self, staging: Path, target: Path, global_step: int) -> None:
        """Publish in three steps: barrier, rank 0 commits and moves the pointer, barrier.

        The first barrier keeps the pointer off a checkpoint that some rank still writes; the second (inside
        ``on_rank_zero``) keeps every rank from reading before the publication is done.
        """
        group = self._group()
        collective.barrier(group)

        def publish() -> None:
            layout.commit(staging, target)
            _move_pointer(target, global_step)

        collective.on_rank_zero(publish, group)

    def _fail(self, error: Exception, staging: Path | None, target: Path) -> NoReturn:
        """Clear away what was staged and raise ``error`` as a CheckpointSaveError."""
        if staging is not None and collective.rank() == 0:
            layout.discard(staging)
        if isinstance(error, CheckpointSaveError):
            raise error
        raise _save_error(str(target), error) from error

    def maybe_wait_for_async_save(self) -> None:
        """Wait for the save in flight and raise its failure, on every rank.

        Raises:
            CheckpointSaveError: the background save failed; what it should have written does not exist.
        """
        future, self._in_flight = self._in_flight, None
        if future is None:
            return
        # No collective here: the background save has told every rank of a failure already, and this is also called while
        # an error breaks training off on one rank only.
        failure = future.exception()
        if failure is not None:
            raise failure

    # ---- load -------------------------------------------------------------------------------------------------------

    def load(
        self,
        path: str,
        state: dict[str, Any],
        *,
        strict_model: bool = True,
        extra_state_skeleton: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Fill ``state`` in place from ``path``; every rank calls it.

        Everything that can be checked without reading tensors is checked first, the training state is read next, and only
        then are the live tensors written.

        Returns:
            this rank's training state, or {} when ``extra_state_skeleton`` is None. After a change of the world size it
            is the lowest saved rank's (its ``rank`` and ``world_size`` entries say so).

        Raises:
            CheckpointNotFoundError: no such checkpoint, or no training state in it, or only a part of what is asked for.
            CheckpointMismatchError: missing model key, another shape or type, parts of different steps or saves.
        """
        self.maybe_wait_for_async_save()
        directory, group = Path(path), self._group()
        metadata = collective.agree(lambda: read_metadata(directory), group)
        collective.on_rank_zero(lambda: check_shards(directory, metadata), group)
        save_id = collective.on_rank_zero(lambda: read_save_id(directory, metadata), group)
        model, _ = flatten_state_dict({MODEL_BUCKET: state.get(MODEL_BUCKET, {})})
        collective.agree(lambda: check_model_entries(model, metadata, strict=strict_model, where=path), group)
        training_state: dict[str, Any] = {}
        if extra_state_skeleton is not None:
            training_state = self._read_extra_state(directory, metadata)
            collective.agree(lambda: check_training_state(training_state, save_id, directory), group)
            lacking = sorted(set(extra_state_skeleton) - set(training_state))
            collective.agree(lambda: extra.refuse_part(path, lacking), group)
        self._dcp_load(state, directory, strict_model=strict_model)
        return training_state

    def _read_extra_state(self, directory: Path, metadata: Metadata) -> dict[str, Any]:
        group, rank, world_size = self._group(), collective.rank(), collective.world_size()
        found = collective.on_rank_zero(lambda: extra.detect(directory, metadata), group)
        probe = self._read_one(directory, metadata, found, found.ranks[0])
        if probe["world_size"] == world_size:
            state = self._read_one(directory, metadata, found, rank)
        else:
            logger.warning(
                "the checkpoint was saved by %s ranks and is resumed by %s: progress, scheduler and data position come "
                "from rank %s",
                probe["world_size"],
                world_size,
                found.ranks[0],
            )
            state = probe
        saves = collective.gather((state["global_step"], state["world_size"]), group)
        if len(set(saves)) > 1:
            raise CheckpointMismatchError(
                describe(
                    "the ranks' extra_state are of different steps",
                    where=str(directory),
                    expected="one global_step and world size on all ranks",
                    found=", ".join(f"rank {i}: step {step} of {size} ranks" for i, (step, size) in enumerate(saves)),
                    do="restore the files that belong together, or resume from another checkpoint",
                )
            )
        if found.kind == "embedded":
            logger.info("Read extra_state embedded in the DCP state dict")
        else:
            logger.info("Read extra_state from %s", extra.file_path(directory, state["rank"]))
        return state

    def _read_one(
        self, directory: Path, metadata: Metadata, found: extra.ExtraStateLayout, rank: int
    ) -> dict[str, Any]:
        """Read the training state that ``rank`` saved. Collective: all ranks call it, each with the rank it wants."""
        group = self._group()
        if found.kind == "per_rank":
            return collective.agree(lambda: extra.read_file(directory, rank), group)
        skeleton = {extra.PAYLOAD_KEY: extra.embedded_skeleton(metadata, rank)}
        self._dcp_load(skeleton, directory, strict_model=True)
        loaded = skeleton[extra.PAYLOAD_KEY]
        return collective.agree(lambda: extra.unwrap_embedded(loaded, rank, str(directory)), group)

    def _dcp_load(self, state: dict[str, Any], directory: Path, *, strict_model: bool) -> None:
        load_entries(state, directory, strict_model=strict_model, **self._distribution())

    def find_latest_checkpoint(self, checkpoint_dir: str) -> str | None:
        """Return the newest complete step directory, as rank 0 sees it, on every rank (None: there is none).

        Raises:
            CheckpointNotFoundError: a pointer is there, yet no complete step directory is.
            CheckpointSaveError: the save in flight, which is waited for, failed.
        """
        self.maybe_wait_for_async_save()
        found = collective.on_rank_zero(lambda: layout.find_latest(Path(checkpoint_dir)), self._group())
        return None if found is None else str(found)

    def describe(self, path: str) -> dict[str, torch.Tensor | None]:
        """Return each entry's shape and type as a meta tensor (None for an entry that is no tensor).

        Raises:
            CheckpointNotFoundError: no complete checkpoint there.
            CheckpointMismatchError: its metadata can't be decoded.
            CheckpointSaveError: the save in flight, which is waited for, failed.
        """
        self.maybe_wait_for_async_save()
        metadata = collective.agree(lambda: read_metadata(Path(path)), self._group())
        return {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            if isinstance(entry, TensorStorageMetadata)
            else None
            for name, entry in metadata.state_dict_metadata.items()
        }

    # ---- both -------------------------------------------------------------------------------------------------------

    def _group(self) -> dist.ProcessGroup | None:
        if self._own_group is None:
            self._own_group = collective.new_cpu_group()
        return self._own_group

    def _distribution(self) -> dict[str, Any]:
        return {"process_group": self._group(), "no_dist": not collective.is_distributed()}

    def _dcp(self, action: Callable[[], T], target: Path) -> T:
        """Run a save of DCP's, turning its BaseException into this library's error."""
        try:
            return action()
        except CheckpointException as error:
            raise _save_error(str(target), error) from error


def _mark_training_state(state: dict[str, Any], global_step: int) -> dict[str, Any]:
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


def _move_pointer(target: Path, global_step: int) -> None:
    """Make the pointer name ``target``, which is committed already.

    Raises:
        CheckpointSaveError: the pointer can't be replaced; says that the checkpoint itself is there.
    """
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


def _save_error(path: str, error: BaseException) -> CheckpointSaveError:
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
