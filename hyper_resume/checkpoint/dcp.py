"""The storage backend ``dcp``: the order of the steps of a save and of a load."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hyper_resume import collective
from hyper_resume.checkpoint.base import CHECKPOINTER_REGISTRY, CheckpointerBase, LoadReport
from hyper_resume.checkpoint.disk import observing
from hyper_resume.checkpoint.format import bucket_digests
from hyper_resume.checkpoint.format import extra_state as extra
from hyper_resume.checkpoint.format.manifest import Manifest
from hyper_resume.checkpoint.format.mesh import mesh_of_tensors
from hyper_resume.checkpoint.format.segments import VerifiedFile
from hyper_resume.checkpoint.history.retention import Retention
from hyper_resume.checkpoint.loading import buffers
from hyper_resume.checkpoint.loading.entry_reader import ReadResult
from hyper_resume.checkpoint.loading.last_verified import LastVerified
from hyper_resume.checkpoint.loading.latest import find_latest
from hyper_resume.checkpoint.loading.reading import describe_entries, load_entries, load_training_state, read_save_id
from hyper_resume.checkpoint.loading.same_save import check_same_save
from hyper_resume.checkpoint.saving import publication, rank_contribution, trial
from hyper_resume.checkpoint.saving.plan_cache import CachingPlanner, PlanCache
from hyper_resume.checkpoint.saving.publication import SaveInProgress, draft_manifest
from hyper_resume.checkpoint.saving.rank_contribution import SaveMode
from hyper_resume.checkpoint.saving.root import WritableRoot
from hyper_resume.checkpoint.saving.shard_writer import ShardWriter
from hyper_resume.checkpoint.saving.staging import Stager
from hyper_resume.checkpoint.tensors.copying import gc_paused
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError, CheckpointSaveError
from hyper_resume.local_path import local_path

logger = logging.getLogger(__name__)
T = TypeVar("T")


@CHECKPOINTER_REGISTRY.register("dcp")
class DistributedCheckpointer(CheckpointerBase):
    """Writes step directories that stock ``torch.distributed.checkpoint.load`` can read, and reads those that it writes.

    A save is written below ``.staging`` and committed by one rename; then the pointer moves. All collectives run on a separate
    gloo group, so that a background save never mixes with the collectives of the training loop.
    """

    accepts_metrics = True
    verifies_digests = True
    reshards_training_state = True

    def __init__(
        self,
        *,
        extra_state_per_rank: bool = True,
        verify: Literal["digest", "size"] = "digest",
        async_mode: Literal["thread", "process"] = "thread",
        retention: Retention | None = None,
    ) -> None:
        """Set the options of all saves and loads.

        Args:
            extra_state_per_rank: the layout in which saves write the training state; a load detects the layout itself.
            verify: how a load checks every file before it changes anything: by digest, or by size only.
            async_mode: whether an asynchronous save is written in a thread or in a separate process.
            retention: which step directories are kept; None keeps all.
        """
        self._extra_state_per_rank = extra_state_per_rank
        self._verify = verify
        self._async_mode = async_mode
        self._own_group: dist.ProcessGroup | None = None
        self._in_flight: Future[None] | None = None
        self._plans = PlanCache()
        self._stager = Stager()
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hyper_resume-save")
        self._root = WritableRoot(retention or Retention())
        self._verified = LastVerified(verify)
        self._latest_found: str | None = None

    # ---- save -------------------------------------------------------------------------------------------------------

    def try_save(self, checkpoint_dir: str, state: dict[str, Any]) -> None:
        """Check that ``state`` can be saved; create and lock the root, and write to it. See :mod:`~.saving.trial`."""
        root = local_path(checkpoint_dir).absolute()
        trial.try_state(state, self._group())
        trial.try_root(root, self._group())

    def check_names(self, checkpoint_dir: str, is_planned: Callable[[int], bool]) -> None:
        """Refuse a root in which something that this library did not write has the name of a planned save."""
        root = local_path(checkpoint_dir).absolute()
        collective.on_rank_zero(lambda: trial.check_names(root, is_planned), self._group())

    def begin_run(self, checkpoint_dir: str, *, restored_from: str | None) -> None:
        """Make and lock the root, delete the leftovers of interrupted saves, and let LATEST mean the save that is continued.

        If the run continues another save than :meth:`find_latest_checkpoint` has returned, it goes back: the saves that
        continue that one are left behind, and a mark in the root says so.

        Raises:
            CheckpointLockedError: another run saves there; raised on every rank.
            CheckpointSaveError: the root can't be made or written; raised on every rank.
        """
        root = local_path(checkpoint_dir).absolute()
        source = None if restored_from is None else local_path(restored_from).absolute()
        is_latest = restored_from is not None and restored_from == self._latest_found
        collective.on_rank_zero(lambda: self._root.begin(root, source, is_latest=is_latest), self._group())

    @gc_paused()
    def save(
        self,
        path: str,
        state: dict[str, Any],
        *,
        global_step: int,
        save_async: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Write ``state`` to the step directory ``path``; every rank calls it.

        1. all ranks: wait for the running background save; 2. rank 0: creates the staging directory; 3. each rank: writes its
        training state and, through DCP, its shard; 4. rank 0: writes ``.metadata`` and the manifest; 5. barrier; 6. rank 0:
        commits by one rename and moves the pointer; 7. barrier. With ``save_async`` the shards of 3, and 4 to 7, run in the
        background on a copy of the state. The pointer can name ``global_step_N`` directories only: a ``path`` with another
        name is committed, and the pointer does not move. ``metrics`` go into the manifest, for retention. A relative ``path``
        is resolved at the call.

        Raises:
            CheckpointSaveError: on every rank. Unless the message says that the checkpoint is committed, nothing was published
                and earlier checkpoints are unchanged. An error of the previous background save is raised before this save
                begins.
            StateNotPlainError: the state holds an object that can't be read back safely; nothing was written.
            ConfigError: ``path`` is an address with a scheme.
            KeyboardInterrupt: Ctrl-C; what the save had staged is deleted, unless it was committed already.
        """
        started = time.perf_counter()
        self.maybe_wait_for_async_save()
        target, global_step = local_path(path).absolute(), int(operator.index(global_step))
        group = self._group()
        self._verified.forget()
        payload = collective.on_all_ranks(
            lambda: extra.to_plain_state(publication.add_save_identity(state, global_step)), group
        )
        training_state = payload.pop(extra.PAYLOAD_KEY, None)
        save: SaveInProgress | None = None
        try:
            save = self._begin_save(target, global_step, started)
            how: SaveMode = "sync" if not save_async else "process" if self._in_process() else "thread"
            if how == "process":
                publication.replace_dead_save_process(group)
            payload, writer, planner = self._prepare_writer(save, payload, training_state, metrics or {}, how)
            if save_async:
                self._start_background(payload, writer, planner, save, how)
            else:
                save.report("staged")
                self._write(payload, writer, planner, target)
                self._publish(save)
        except BaseException as error:  # noqa: BLE001  raised again by _fail
            self._fail(error, save, target)

    def _begin_save(self, target: Path, global_step: int, started: float) -> SaveInProgress:
        save = collective.on_rank_zero(lambda: self._root.new_save(target, global_step), self._group())
        return replace(save, listeners=self.listeners, started=started)

    def _prepare_writer(
        self,
        save: SaveInProgress,
        payload: dict[str, Any],
        training_state: dict[str, Any] | None,
        metrics: Mapping[str, float],
        how: SaveMode,
    ) -> tuple[dict[str, Any], ShardWriter, CachingPlanner]:
        """Prepare each rank's contribution, and gather what the manifest records of it.

        Returns:
            the payload to write, the writer, and the planner.
        """
        group, per_rank = self._group(), self._extra_state_per_rank
        mesh = extra.take_mesh(training_state) or mesh_of_tensors(payload)
        prepare = partial(
            rank_contribution.prepare, save, payload, training_state, how, self._stager, per_rank=per_rank
        )
        contribution = collective.on_all_ranks(prepare, group)
        summary = (
            contribution.files,
            contribution.buckets,
            contribution.names,
            contribution.uncovered,
            self._plans.has_layout(contribution.layout),
        )
        all_ranks = collective.all_gather(summary, group)
        self.last_bucket_digests = contribution.buckets
        draft = draft_manifest(
            save,
            world_size=collective.world_size(),
            mesh=mesh,
            files={name: entry for found, *_ in all_ranks for name, entry in found.items()},
            buckets={str(index): found for index, (_, found, *_) in enumerate(all_ranks)},
            names={str(index): found for index, (_, _, found, *_) in enumerate(all_ranks)},
            uncovered={str(index): found for index, (_, _, _, found, _) in enumerate(all_ranks) if found},
            # Only rank 0 writes the manifest, so its own is enough.
            run=contribution.run,
            metrics=metrics,
        )
        planner = CachingPlanner(self._plans, contribution.layout, reuse=all(known for *_, known in all_ranks))
        writer = ShardWriter(save.staging, draft, self._plans, contribution.digest_written if how == "sync" else None)
        return contribution.written, writer, planner

    def _in_process(self) -> bool:
        if self._async_mode == "process" and not collective.is_distributed():
            logger.warning("async_mode process needs a process group (torchrun makes one): saving in a thread instead")
        return self._async_mode == "process" and collective.is_distributed()

    def _write(self, payload: dict[str, Any], writer: ShardWriter, planner: CachingPlanner, target: Path) -> None:
        options = self._dcp_options()
        self._run_dcp(lambda: dcp_save(payload, storage_writer=writer, planner=planner, **options), target)

    def _start_background(
        self, payload: dict[str, Any], writer: ShardWriter, planner: CachingPlanner, save: SaveInProgress, how: SaveMode
    ) -> None:
        group, target = self._group(), save.target
        upload = self._start_process(payload, writer, target) if how == "process" else None
        save.report("staged")

        def finish() -> None:
            try:
                if upload is None:
                    self._write(payload, writer, planner, target)
                else:
                    # If the save process of one rank dies, those of the other ranks may still succeed. All must fail then.
                    collective.on_all_ranks(lambda: self._run_dcp(upload.result, target), group)
                self._publish(save)
            except BaseException as error:  # noqa: BLE001  raised again, at the next save or wait
                if upload is not None:
                    publication.end_save_process()
                self._fail(error, save, target)

        self._in_flight = self._background.submit(finish)

    def _start_process(self, payload: dict[str, Any], writer: ShardWriter, target: Path) -> Future[Any]:
        kind = AsyncCheckpointerType.PROCESS
        # The plan cache can't be pickled; it stays in this process.
        bare = writer.without_cache()
        response = self._run_dcp(
            lambda: dcp_async_save(payload, storage_writer=bare, async_checkpointer_type=kind, **self._dcp_options()),
            target,
        )
        return response.upload_completion if isinstance(response, AsyncSaveResponse) else response

    def _publish(self, save: SaveInProgress) -> None:
        group, root = self._group(), self._root
        replaced = publication.publish(save, root.note_committed, group)
        publication.delete_outdated(save, replaced, root.retention, root.protected, group)
        root.note_ended()

    def _fail(self, error: BaseException, save: SaveInProgress | None, target: Path) -> NoReturn:
        """Conclude the save and raise ``error`` as a CheckpointSaveError; an interrupt as it is."""
        self._root.note_ended()
        self._plans.forget()
        ending = "not committed" if save is None else publication.conclude(save, self._root.note_committed, error)
        if isinstance(error, CheckpointSaveError) or not isinstance(error, Exception):
            raise error
        raise publication.save_error(str(target), error, ending) from error

    def maybe_wait_for_async_save(self) -> None:
        """Wait for the background save and raise its error, on every rank.

        Raises:
            CheckpointSaveError: the background save failed; its step directory does not exist.
        """
        future = self._in_flight
        if future is None:
            return
        # No collective here: all ranks already share the result of the background save, and this is also called while an
        # error ends training on one rank only.
        failure = future.exception()
        # Only now: after an interrupt of the wait, the save is still running.
        self._in_flight = None
        if failure is not None:
            raise failure

    # ---- load -------------------------------------------------------------------------------------------------------

    @gc_paused()
    def load(
        self,
        path: str,
        state: dict[str, Any],
        *,
        strict_model: bool = True,
        extra_state_skeleton: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Fill ``state`` in place from ``path``; every rank calls it.

        1. all ranks: compare the files with the manifest, and the entries with the requested ones; 2. each rank: reads its
        training state and its part of the tensors; 3. all ranks: compare the digests of the values that were read with those
        of the save, and call ``check_loaded``; 4. each rank: writes to ``state``, which is unchanged until then.

        Returns:
            this rank's training state, or {} when ``extra_state_skeleton`` is None. If the world size or the mesh has changed,
            it is that of the lowest saved rank (see its ``rank``, ``world_size`` and ``mesh`` entries).

        Raises:
            CheckpointNotFoundError: no such checkpoint, or it lacks the training state or a requested part of it, or it was
                deleted while it was read.
            CheckpointMismatchError: damaged; missing model key; another shape or dtype; parts of different steps or saves.
            CheckpointUnreadableError: it can't be read now, although it was tried again.
        """
        self.maybe_wait_for_async_save()
        directory, group = local_path(path), self._group()
        skeleton = extra_state_skeleton
        manifest, metadata, verified_files = self._verified.verify(
            directory, group, training_state=skeleton is not None
        )
        self._verified.forget()
        try:
            return self._load_verified(directory, state, manifest, metadata, verified_files, skeleton, strict_model)
        except (CheckpointMismatchError, CheckpointNotFoundError) as error:
            if collective.on_rank_zero(directory.is_dir, group):
                raise
            raise observing.vanished_error(directory) from error

    def _load_verified(
        self,
        directory: Path,
        state: dict[str, Any],
        manifest: Manifest | None,
        metadata: Metadata,
        verified_files: Mapping[str, VerifiedFile],
        skeleton: Mapping[str, Any] | None,
        strict_model: bool,
    ) -> dict[str, Any]:
        path, group = str(directory), self._group()
        save_id = collective.on_rank_zero(lambda: read_save_id(directory, metadata, manifest), group)
        load_buffers = collective.on_all_ranks(
            lambda: buffers.prepare_buffers(state, metadata, path, strict_model=strict_model), group
        )
        training_state: dict[str, Any] = {}
        if skeleton is not None:
            training_state = self._read_extra_state(directory, metadata, manifest, skeleton)
            collective.on_all_ranks(lambda: check_same_save(training_state, save_id, directory), group)
            lacking = sorted(set(skeleton) - set(training_state))
            collective.on_all_ranks(lambda: extra.refuse_missing_parts(path, lacking), group)
        if manifest is not None and load_buffers.needs_file_digests(manifest, self._verify, group):
            _, _, verified_files = LastVerified("digest").verify(directory, group, training_state=False)
        self._accept(
            path,
            load_buffers,
            lambda: load_entries(load_buffers.wanted, directory, metadata, verified_files),
            training_state,
            manifest,
        )
        collective.on_all_ranks(load_buffers.write_to_live_state, group)
        return training_state

    def _accept(
        self,
        path: str,
        load_buffers: buffers.LoadBuffers,
        read: Callable[[], ReadResult],
        training_state: dict[str, Any],
        manifest: Manifest | None,
    ) -> None:
        """Read the entries, and raise on every rank if they differ from what was saved, or if ``check_loaded`` refuses them."""
        group = self._group()
        of_training_state = extra.saved_digests(manifest, training_state)
        saved = {**of_training_state, **load_buffers.saved_digests(manifest)}

        def check() -> dict[str, str]:
            load_buffers.store(read())
            found = {**load_buffers.digests(saved), **extra.bucket_digests(training_state)}
            bucket_digests.compare_digests(saved, found, path)
            if self.check_loaded is not None:
                self.check_loaded(load_buffers.nested_state(), training_state)
            return found

        loaded = collective.on_all_ranks(check, group)
        self.last_load = LoadReport(
            path=path,
            step=None if manifest is None else manifest.step,
            verified="no manifest" if manifest is None else self._verify,
            saved={**load_buffers.reported_digests(manifest), **of_training_state},
            loaded=loaded,
            unread=buffers.unread_on_all_ranks(collective.all_gather(load_buffers.unread, group)),
        )

    def _read_extra_state(
        self, directory: Path, metadata: Metadata, manifest: Manifest | None, skeleton: Mapping[str, Any]
    ) -> dict[str, Any]:
        return load_training_state(directory, metadata, manifest, self._group(), skeleton)

    def has_checkpoint(self, path: str) -> bool:
        """Return whether ``path`` is a directory."""
        return local_path(path).is_dir()

    def find_latest_checkpoint(self, checkpoint_dir: str) -> str | None:
        """Return the newest step directory of this root's lineage that verifies; rank 0 decides for all ranks.

        A warning names each newer directory that is skipped, and the reason. Only what is proved to be damaged is skipped.

        Returns:
            None if nothing was ever published: no pointer and no complete step directory.

        Raises:
            CheckpointNotFoundError: something was published, but no step directory verifies; or ``checkpoint_dir`` is a file.
            CheckpointUnreadableError: the newest one that is not known to be damaged can't be read now.
            CheckpointSaveError: the background save, for which this waits, failed.
        """
        self.maybe_wait_for_async_save()
        self._latest_found = None
        self._latest_found = find_latest(local_path(checkpoint_dir), self._verified, self._group())
        return self._latest_found

    def describe(self, path: str) -> dict[str, torch.Tensor | None]:
        """Return each entry's shape and dtype as a meta tensor (None for an entry that is not a tensor).

        Raises:
            CheckpointNotFoundError: there is no complete checkpoint at ``path``.
            CheckpointMismatchError: its metadata can't be decoded.
            CheckpointSaveError: the background save, for which this waits, failed.
        """
        self.maybe_wait_for_async_save()
        directory = local_path(path)
        # Verified first, as in a load: damage must be reported as damage, not as a different set of entries.
        _, metadata, _ = self._verified.verify(directory, self._group(), training_state=False)
        return describe_entries(metadata)

    def describe_run(self, path: str) -> Mapping[str, Any] | None:
        """Return what the run that saved ``path`` is made of, as rank 0 described it in the manifest."""
        manifest, _, _ = self._verified.verify(local_path(path), self._group(), training_state=False)
        return None if manifest is None else manifest.run

    # ---- both -------------------------------------------------------------------------------------------------------

    def _group(self) -> dist.ProcessGroup | None:
        if self._own_group is None:
            self._own_group = collective.new_cpu_group()
        return self._own_group

    def _dcp_options(self) -> dict[str, Any]:
        return {"process_group": self._group(), "no_dist": not collective.is_distributed()}

    def _run_dcp(self, action: Callable[[], T], target: Path) -> T:
        """Run a save of DCP and convert its exception, which derives from BaseException, to this library's error.

        Raises:
            CheckpointSaveError: the save failed on some rank.
            KeyboardInterrupt: DCP has caught an interrupt of this rank.
        """
        try:
            return action()
        except CheckpointException as error:
            interrupt = publication.own_interrupt(error)
            if interrupt is not None:
                raise interrupt from None
            raise publication.save_error(str(target), error) from error
