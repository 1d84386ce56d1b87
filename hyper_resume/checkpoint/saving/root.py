"""The root that a run saves into, as its rank 0 keeps it: whose it is, what was saved there, what must stay."""

from __future__ import annotations

import os
from pathlib import Path

from hyper_resume import collective
from hyper_resume.checkpoint.disk import lock, operations
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.history import lineage
from hyper_resume.checkpoint.history.lineage import Ancestors
from hyper_resume.checkpoint.history.retention import Retention
from hyper_resume.checkpoint.saving.publication import SaveInProgress
from hyper_resume.errors import CheckpointSaveError, describe

# Roots into which a save of this process is on its way. The kernel's lock keeps other processes out; this, a second saver here.
_saving: set[Path] = set()
# A forked child has none of its parent's threads, so none of these saves is its own.
os.register_at_fork(after_in_child=_saving.clear)


class WritableRoot:
    """Taken at the first save, or at the beginning of a run where it exists already. One at a time; another replaces it."""

    def __init__(self, retention: Retention) -> None:
        """Touch nothing yet."""
        self.retention = retention
        self._root: Path | None = None
        self._ordinal = 0
        self._ancestors: Ancestors = ()
        self._source: Path | None = None
        # What a run said of where it begins; until then a save goes on from wherever the pointer is.
        self._begun: tuple[Path, Path | None] | None = None

    @property
    def protected(self) -> tuple[Path, ...]:
        """What retention must not delete: where the run was restored from."""
        return () if self._source is None else (self._source,)

    def begin(self, root: Path, source: Path | None) -> None:
        """Say where a run begins: from ``source``, or from scratch. Takes the root if it exists.

        Raises:
            CheckpointLockedError: another process saves there.
        """
        # A copy that had stepped aside is put back by the sweep.
        self._begun = (root.absolute(), None if source is None else layout.final_path_of(source))
        self._root = None
        if root.is_dir():
            self._take(root)

    def _take(self, root: Path) -> None:
        lock.acquire(root)
        layout.clear_leftovers(root)
        self._root = root.absolute()
        self._ordinal = lineage.next_ordinal(root)
        self._ancestors = self._where_it_begins(root)

    def _where_it_begins(self, root: Path) -> Ancestors:
        if self._begun is None or self._begun[0] != root.absolute():
            return lineage.current_lineage(root)
        source = self._source = self._begun[1]
        if source is None:
            return ()
        step = layout.parse_step(source.name)
        if step is not None and source.resolve().parent == root.resolve():
            # Going back: until the first save of this run, LATEST must not mean the future that it left behind.
            if layout.read_pointer(root)[0] != step:
                layout.write_pointer(root, step)
            manifest = layout.manifest_or_none(source)
            return () if manifest is None else lineage.ancestors_of_next_save(manifest)
        return ()

    def new_save(self, target: Path, global_step: int) -> SaveInProgress:
        """Make a staging directory for a save as ``target``, and say what it descends from.

        Raises:
            CheckpointLockedError: another process saves there.
            CheckpointSaveError: another save of this process is on its way there.
        """
        root = target.parent
        if root.absolute() in _saving:
            raise CheckpointSaveError(
                describe(
                    "two saves into one checkpoint_dir at a time",
                    where=str(target),
                    expected="the save before to be waited for",
                    found="it is still on its way",
                    do="wait for it (maybe_wait_for_async_save of the checkpointer that started it)",
                )
            )
        operations.make_directories(root)
        # Asked for each save: a fork does not inherit the lock, and the root may have been made anew.
        lock.acquire(root)
        if self._root != root.absolute():
            self._take(root)
        save = SaveInProgress(
            staging=layout.new_staging_directory(target),
            target=target,
            global_step=global_step,
            ordinal=self._ordinal,
            ancestors=self._ancestors,
        )
        _saving.add(root.absolute())
        return save

    def note_durable(self, save: SaveInProgress) -> None:
        """The next save descends from this one. Only rank 0 keeps count."""
        if collective.rank() == 0:
            self._ordinal += 1
            self._ancestors = lineage.extend_ancestors(self._ancestors, save.global_step, save.save_id)

    def note_ended(self, save: SaveInProgress) -> None:
        """Another save may begin."""
        if collective.rank() == 0:
            _saving.discard(save.target.parent.absolute())
