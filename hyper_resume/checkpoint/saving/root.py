"""The root that a run saves to, kept by rank 0: its lock, the lineage of the next save, and what retention must keep."""

from __future__ import annotations

import os
from pathlib import Path

from hyper_resume.checkpoint.disk import lock, operations
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.history import lineage
from hyper_resume.checkpoint.history.lineage import Ancestors
from hyper_resume.checkpoint.history.retention import Retention
from hyper_resume.checkpoint.saving.publication import SaveInProgress, explained_for_root
from hyper_resume.errors import CheckpointSaveError, describe

# Root -> who saves there now. The file lock keeps other processes out; this keeps a second save of this process out.
_saving: dict[Path, WritableRoot] = {}
# A forked child has none of its parent's threads, so these saves do not run in it.
os.register_at_fork(after_in_child=_saving.clear)


class WritableRoot:
    """The root of one checkpointer. It is made and locked at the start of a run, or at the first save of one without a start.

    There is one root at a time. A save to another root replaces it.
    """

    def __init__(self, retention: Retention) -> None:
        """Lock nothing yet."""
        self.retention = retention
        self._root: Path | None = None
        self._ordinal = 0
        self._ancestors: Ancestors = ()
        self._source: Path | None = None
        self._is_latest = False
        # (root, restored from), set by begin. Without it, a save continues the save that the pointer names.
        self._begun: tuple[Path, Path | None] | None = None

    @property
    def protected(self) -> tuple[Path, ...]:
        """Step directories that retention must not delete: the one from which the run was restored."""
        return () if self._source is None else (self._source,)

    def begin(self, root: Path, source: Path | None, *, is_latest: bool = False) -> None:
        """Begin a run that continues ``source`` (None: from scratch). Makes the root and locks it.

        Args:
            root: where the run will save.
            source: the step directory that the run was restored from.
            is_latest: LATEST has led there. Otherwise somebody has named it, and saves that continue it are left behind.

        Raises:
            CheckpointLockedError: another process saves there.
            CheckpointSaveError: the root can't be made, read or written, or an ordinal in it is too large for a save after it.
            CheckpointUnreadableError: what decides the order of saves can't be read now.
        """
        self._is_latest = is_latest
        # A source below .staging is moved back to its final path when leftovers are cleared.
        self._begun = (root.absolute(), None if source is None else layout.final_path_of(source.absolute()))
        self._root = None
        explained_for_root(root, lambda: self._take(root))

    def _take(self, root: Path) -> None:
        operations.make_directories(root)
        # For each save: a forked process does not inherit the lock, and the root may have been deleted and created again.
        lock.acquire(root)
        if self._root == root.absolute():
            return
        # Until all of it is known: what can't be read now is asked for again by the next save.
        self._root = None
        layout.clear_leftovers(root)
        self._ordinal = lineage.next_ordinal(root)
        self._ancestors = self._where_it_begins(root)
        self._root = root.absolute()

    def _where_it_begins(self, root: Path) -> Ancestors:
        if self._begun is None or self._begun[0] != root.absolute():
            return lineage.current_lineage(root)
        source = self._source = self._begun[1]
        if source is None or not lineage.is_step_of(source, root):
            self._begun = None
            return ()
        # By the root's own path: retention knows what is protected by it, whatever link has led here.
        source = self._source = root.absolute() / source.name
        manifest = layout.manifest_or_none(source)
        # The run may go back to an earlier step. Until its first save, LATEST must not mean a later save that it abandoned.
        # The mark comes first: with the pointer alone, this looks like a run that was killed before its pointer moved.
        if manifest is not None and not self._is_latest:
            lineage.go_back(root, manifest, self._ordinal - 1)
        step = layout.parse_step(source.name)
        assert step is not None  # is_step_of
        if layout.read_pointer(root)[0] != step:
            layout.write_pointer(root, step)
        # Only once: a run that comes back to this root, after a save to another one, continues its own saves.
        self._begun = None
        return () if manifest is None else lineage.ancestors_of_next_save(manifest)

    def new_save(self, target: Path, global_step: int) -> SaveInProgress:
        """Create a staging directory for a save to ``target``, and return the save with its ancestors.

        The last save of this checkpointer has ended, however it ended: ``save`` waits for it.

        Raises:
            CheckpointLockedError: another process saves there.
            CheckpointSaveError: another save of this process to this root is still running; or ``target`` is no name for a save
                of this step, or is taken by what this library did not write.
        """
        root = target.parent
        _check_target(target, global_step)
        if _saving.get(root.absolute(), self) is not self:
            raise CheckpointSaveError(
                describe(
                    "two saves into one checkpoint_dir at a time",
                    where=str(target),
                    expected="the previous save to have ended",
                    found="it is still running",
                    do="wait for it (maybe_wait_for_async_save of the checkpointer that started it)",
                )
            )
        self._take(root)
        _saving[root.absolute()] = self
        return SaveInProgress(
            staging=layout.new_staging_directory(target),
            target=target,
            global_step=global_step,
            ordinal=self._ordinal,
            ancestors=self._ancestors,
        )

    def note_committed(self, save: SaveInProgress) -> None:
        """Record that the save is committed, so that the next save continues it; once for each save, on rank 0."""
        if self._ordinal == save.ordinal:
            self._ordinal += 1
            self._ancestors = lineage.extend_ancestors(self._ancestors, save.global_step, save.save_id)

    def note_ended(self) -> None:
        """Record that the save of this checkpointer has ended, so that another checkpointer's may begin."""
        for root in [root for root, saving in _saving.items() if saving is self]:
            del _saving[root]


def _check_target(target: Path, global_step: int) -> None:
    """Refuse a name under which a save could not be found or loaded again.

    Raises:
        CheckpointSaveError: says why.
    """
    layout.refuse_taken_name(target)
    complaint = ""
    if not 0 <= global_step <= layout.MAX_STEP:
        complaint = f"global_step {global_step}"
    elif target.name in layout.RESERVED_NAMES:
        complaint = f"the name {target.name!r}, which this library uses for something else"
    elif layout.parse_step(target.name) not in (None, global_step):
        complaint = f"global_step {global_step} under the name of another step"
    if complaint:
        raise CheckpointSaveError(
            describe(
                "a save that could not be loaded again",
                where=str(target),
                expected=f"a step from 0 to {layout.MAX_STEP}, in global_step_N of this step or under a name of your own",
                found=complaint,
                do="save to checkpoint_dir/global_step_N, with global_step N",
            )
        )
