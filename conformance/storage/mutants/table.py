"""The mutants of T7: each change removes one protection, or reverses the order of two operations.

``probes`` are those most likely to detect it, the likeliest first. An ``explanation`` says why a mutant that survives is no
loss; if it is detected all the same, it counts as detected.
"""

from __future__ import annotations

from dataclasses import dataclass

from conformance.storage.mutants.mutating import Change


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One mutant."""

    id: str
    title: str
    change: Change
    probes: tuple[str, ...]
    explanation: str = ""


def _entry(
    name: str, title: str, where: str, fragment: str, replacement: str, *probes: str, explanation: str = ""
) -> Entry:
    module, _, function = where.partition(":")
    change = Change(module=module, function=function, fragment=fragment, replacement=replacement)
    return Entry(id=name, title=title, change=change, probes=probes, explanation=explanation)


# fmt: off
_SYNCS = (
    _entry(
        "file-sync-dropped", "no file is ever synced", "disk.operations:OutputFile.sync", "os.fsync(self._descriptor)",
        "pass", "crash/first_save",
    ),
    _entry(
        "directory-sync-dropped", "no directory is ever synced", "disk.operations:FileOperations.sync_directory",
        "os.fsync(descriptor)", "pass", "crash/first_save",
    ),
    _entry(
        "shard-sync-dropped", "a shard is not synced", "saving.shard_writer:ShardWriter._write_shard",
        "            file.sync()\n", "", "crash/first_save",
    ),
    _entry(
        "small-file-sync-dropped", "metadata, manifest, training state and pointer are not synced",
        "disk.operations:write_file", "        file.sync()\n", "", "crash/first_save",
    ),
    _entry(
        "metadata-sync-dropped", ".metadata and the index are written without a sync", "saving.shard_writer:_write_pieces",
        "        file.sync()\n", "",
        "crash/first_save",
    ),
    _entry(
        "manifest-sync-dropped", "the manifest is written without a sync", "saving.shard_writer:ShardWriter.finish",
        "operations.write_file(self._path / manifest.MANIFEST_NAME, manifest.encode(whole))",
        "_f = operations.current().create(self._path / manifest.MANIFEST_NAME); _f.write(manifest.encode(whole)); _f.close()",
        "crash/first_save",
    ),
    _entry(
        "training-state-sync-dropped", "a rank's training state is written without a sync", "format.extra_state:write_file",
        "operations.write_file(path, content)",
        "_f = operations.current().create(path); _f.write(content); _f.close()", "crash/first_save",
    ),
    _entry(
        "pointer-sync-dropped", "the pointer's temporary is renamed without a sync", "format.layout:replace_file",
        "operations.write_file(temporary, content)",
        "_f = operations.current().create(temporary); _f.write(content); _f.close()",
        "crash/next_save", "crash/lineage",
    ),
    _entry(
        "staging-sync-dropped", "the staged directories are renamed without a sync", "format.layout:commit",
        "        disk.sync_directory(directory)", "        pass", "crash/first_save",
    ),
    _entry(
        "root-sync-dropped", "durable is said before the root has the new name", "format.layout:commit",
        "disk.sync_directory(target.parent)", "pass", "errors/save under another name",
    ),
    _entry(
        "pointer-name-sync-dropped", "the root is not synced after the pointer's rename", "format.layout:replace_file",
        "    operations.current().sync_directory(checkpoint_dir)\n", "", "crash/lineage", "errors/next save",
    ),
    _entry(
        "made-directory-sync-dropped", "a directory is made, and its parent not synced",
        "disk.operations:make_directories", "        current().sync_directory(directory.parent)", "        pass",
        "errors/first save",
    ),
    _entry(
        "trash-sync-dropped", "files are deleted before the rename to trash is durable", "history.retention:prune",
        "    operations.current().sync_directory(checkpoint_dir)\n", "", "errors/next save",
    ),
    _entry(
        "sync-tried-again", "a failed sync of a shard is tried again", "saving.shard_writer:ShardWriter._write_shard",
        "            file.sync()\n",
        "            try:\n                file.sync()\n            except OSError:\n                file.sync()\n",
        "errors/next save/sync",
    ),
    _entry(
        "sync-error-ignored", "a failed sync of a shard is passed over", "saving.shard_writer:ShardWriter._write_shard",
        "            file.sync()\n",
        "            try:\n                file.sync()\n            except OSError:\n                pass\n",
        "errors/next save/sync",
    ),
)

_ORDER = (
    _entry(
        "pointer-before-commit", "the pointer moves before the commit", "saving.publication:publish",
        "        replaced = layout.commit(save.staging, save.target)\n",
        "        _move_pointer(save.target, save.global_step)\n        replaced = layout.commit(save.staging, save.target)\n",
        "errors/next save/rename",
    ),
    _entry(
        "durable-before-commit", "durable is said before the commit", "saving.publication:publish",
        '    save.report("written")\n', '    save.report("durable")\n', "crash/next_save",
    ),
    _entry(
        "pointer-in-place", "the pointer is written over instead of replaced", "format.layout:replace_file",
        "operations.current().rename(temporary, checkpoint_dir / name)",
        "(checkpoint_dir / name).write_bytes(content); operations.current().remove(temporary)",
        "crash/next_save",
    ),
    _entry(
        "staging-in-place", "a save is written under its final name", "format.layout:new_staging_directory",
        'staging = target.parent / STAGING_NAME / f"{_quote(target.name)}.{uuid.uuid4().hex[:12]}"', "staging = target",
        "crash/first_save",
    ),
    _entry(
        "old-copy-removed-first", "the earlier copy of a step is deleted before the new one takes its name",
        "format.layout:commit", "elif disk.exchange(staging, target):",
        "elif operations.remove_tree(target) or disk.rename(staging, target) or True:", "crash/resave",
    ),
    _entry(
        "old-copy-removed-unsynced", "the earlier copy is deleted before the exchange is durable", "format.layout:commit",
        "    try:\n        disk.sync_directory(target.parent)\n",
        "    if replaced is not None:\n        remove(replaced)\n    try:\n        disk.sync_directory(target.parent)\n",
        "crash/resave",
    ),
    _entry(
        "not-taken-back", "a commit whose last sync fails stays published", "format.layout:commit",
        "        _undo_commit(staging, target, replaced)\n", "        pass\n", "errors/next save/sync_directory",
    ),
    _entry(
        "deleted-in-place", "retention deletes under the final name", "history.retention:prune",
        "operations.current().rename(candidate.path, trashed)", "operations.remove_tree(candidate.path)",
        "errors/next save/remove",
    ),
    _entry(
        "retention-takes-all", "retention keeps nothing but the new save", "history.retention:find_outdated",
        "kept |= {candidate.path.absolute() for candidate in complete[-max(1, retention.keep_last or 0) :]}", "pass",
        "errors/next save",
    ),
    _entry(
        "commit-barrier-dropped", "rank 0 commits without waiting for the others", "saving.publication:publish",
        "    collective.barrier(group)\n", "", "crash/next_save",
        explanation="DCP gathers every rank's write results before rank 0 writes .metadata, so all have written by then",
    ),
)

_CHECKS = (
    _entry(
        "size-unchecked", "a file of another size passes", "format.manifest:_compare",
        "if status.st_size != entry.size_bytes:", "if False:", "corruption/per_rank",
    ),
    _entry(
        "digest-unchecked", "a file with another digest passes", "format.manifest:_compare",
        'return "" if found == entry.digest else', 'return "" if True else', "corruption/per_rank",
    ),
    _entry(
        "missing-file-passes", "a file that is not there passes", "format.manifest:_verify_one", "        return MISSING\n",
        '        return ""\n', "corruption/per_rank",
    ),
    _entry(
        "manifest-digest-unchecked", "a manifest that is not as it was written passes", "format.manifest:_decode",
        "if own != _own_digest(content):", "if False:", "corruption/per_rank",
    ),
    _entry(
        "only-own-rank-verified", "files of ranks that do not exist any more are not verified",
        "loading.file_verification:verify",
        "entry.rank % world_size == rank", "entry.rank == rank", "corruption/per_rank",
    ),
    _entry(
        "training-state-unverified", "the files of the training state are not verified", "loading.file_verification:verify",
        "and _part_of(name) in parts", 'and _part_of(name) == "weights"', "corruption/per_rank",
    ),
    _entry(
        "first-complaint-lost", "a single complaint of a rank is passed over", "loading.file_verification:verify",
        "    if complaints:\n", "    if len(complaints) > 1:\n", "corruption/per_rank",
    ),
    _entry(
        "latest-by-existence", "LATEST takes what is there, not what is verified",
        "loading.latest:_first_that_verifies",
        "verified.verify(directory, group, training_state=True)", "pass", "corruption/per_rank",
    ),
    _entry(
        "load-unverified", "nothing is verified", "loading.last_verified:LastVerified.verify",
        "known.manifest = file_verification.verify(",
        "known.manifest = (lambda directory, *_, **__: file_verification.read_manifest(directory))(", "corruption/per_rank",
    ),
    _entry(
        "other-step-passes", "a manifest of another step passes in LATEST and load",
        "loading.file_verification:step_name_mismatch",
        "    if step in (None, manifest.step):\n", "    if True:\n", "corruption/per_rank",
    ),
    _entry(
        "digest-of-what-was-meant", "the digest of a piece leaves out its last byte", "saving.stream:HashingStream._hash",
        "digest.data_digest(content)", "digest.data_digest(memoryview(content)[:-1])",
        "corruption/per_rank",
    ),
    _entry(
        "damaged-segment-passes", "one damaged segment of a shard is passed over", "format.segments:verify",
        "    if damaged:\n", "    if len(damaged) > 1:\n", "corruption/per_rank",
    ),
    _entry(
        "read-into-live", "a load reads straight into the live tensors", "loading.reading:_read_entries",
        "entries.tensor(name, live if isinstance(live, torch.Tensor) else None)",
        "(live.detach().copy_ if isinstance(live, torch.Tensor) else (lambda found: found))(entries.tensor(name, live))",
        "errors/load",
    ),
)

_ERRORS = (
    _entry(
        "short-write-believed", "a short write is taken for a whole one", "disk.operations:OutputFile.write",
        "        while rest:\n", "        if rest:\n", "errors/next save",
    ),
    _entry(
        "short-read-believed", "a short read of a shard is taken for its end", "disk.operations:InputFile.view",
        "        while done < len(content) and", "        if done < len(content) and", "errors/load",
    ),
    _entry(
        "failure-kept-alone", "a rank that can't write its training state does not tell the others",
        "dcp:DistributedCheckpointer._prepare_writer", "collective.on_all_ranks(prepare, group)", "prepare()",
        "errors/next save/write",
    ),
    _entry(
        "commit-failure-kept-alone", "a commit that fails on rank 0 is not reported to the others",
        "saving.publication:publish",
        "collective.on_rank_zero(on_rank_zero, group)", "on_rank_zero() if collective.rank() == 0 else None",
        "errors/next save/rename",
    ),
    _entry(
        "pointer-failure-swallowed", "a pointer that can't be moved is no failure", "saving.publication:_move_pointer",
        "    except OSError as error:\n", "    except OSError as error:\n        return\n", "errors/next save/rename",
    ),
    _entry(
        "background-failure-swallowed", "a save in the background that fails says nothing",
        "dcp:DistributedCheckpointer._start_background", "                self._fail(error, save, target)\n",
        "                pass\n", "errors/background save",
    ),
    _entry(
        "staging-left", "what a failed save staged stays", "saving.publication:conclude",
        "        layout.discard_staging(save.staging)\n", "        pass\n", "errors/next save/write",
    ),
    _entry(
        "sweep-dropped", "leftovers are never cleared", "format.layout:clear_leftovers", "            remove(leftover)\n",
        "            pass\n", "errors/same step again", "errors/next save",
    ),
    _entry(
        "root-stays-taken", "after a failed save the root counts as being saved to", "saving.root:WritableRoot.note_ended",
        "            del _saving[root]", "            pass", "errors/next save",
    ),
    _entry(
        "lineage-ignored", "LATEST goes to the highest ordinal, abandoned or not", "history.lineage:_why_not_in_lineage",
        "    if candidate.manifest is None or candidate is start.first:\n", "    if True:\n", "lineage/going back",
    ),
    _entry(
        "layout-not-compared", "a plan is used again whatever is saved", "saving.plan_cache:PlanCache.has_layout",
        "self.plan is not None and self._layout == layout", "self.plan is not None", "plans/other layout",
    ),
    _entry(
        "plan-kept-after-a-failure", "what a failed save has planned and written is taken as known",
        "dcp:DistributedCheckpointer._fail", "        self._plans.forget()\n", "        pass\n", "errors/first save",
        "errors/next save",
    ),
    _entry(
        "going-back-untold", "a run that goes back leaves the pointer at the future that it left",
        "saving.root:WritableRoot._where_it_begins", "            layout.write_pointer(root, step)\n",
        "            pass\n", "crash/lineage",
    ),
    _entry(
        "going-back-unmarked", "a run that goes back moves the pointer and leaves no mark",
        "saving.root:WritableRoot._where_it_begins", "            lineage.go_back(root, manifest, self._ordinal - 1)\n",
        "            pass\n", "crash/lineage",
    ),
    _entry(
        "pointer-decides-alone", "a save that was committed before a kill is passed over, because the pointer is older",
        "history.lineage:_Start.first", "return max(self.newer, key=lambda one: one.order, default=self.head)",
        "return self.head", "crash/next_save",
    ),
    _entry(
        "unreadable-passed-over", "LATEST steps back from what it could not read",
        "loading.latest:_first_that_verifies",
        "            raise CheckpointUnreadableError(order.unreadable[directory])\n", "            continue\n",
        "errors/load/open_read",
    ),
    _entry(
        "unreadable-is-damaged", "a file that can't be read for once counts as damaged", "disk.reading:again",
        "        except OSError as error:\n            if not may_pass(error):\n",
        "        except OSError as error:\n            if True:\n", "errors/load/open_read", "errors/load",
    ),
    _entry(
        "retention-of-all-runs", "retention counts and deletes the saves of all runs", "saving.publication:_clear_outdated",
        "of_run=of_run", "of_run=None", "lineage/other runs",
    ),
)

_FORMS = (
    _entry(
        "table-of-a-part-passes", "a table passes that does not cover the bytes before it exactly", "format.segments:decode",
        "return found if begin + len(table) == file_bytes else None", "return found", "hostile/shard",
    ),
    _entry(
        "shared-bytes-pass", "an index passes in which two entries share bytes", "format.index:_decode",
        "    reader.refuse_shared_bytes()\n", "", "hostile/index",
    ),
    _entry(
        "changed-since-passes", "a file that was changed after it was verified is taken for verified",
        "format.segments:VerifiedFile.is_unchanged",
        "return file_identity(path.lstat()) == self.identity", "return True", "verified/changed since",
    ),
)

# fmt: on
MUTANTS: tuple[Entry, ...] = (*_SYNCS, *_ORDER, *_CHECKS, *_ERRORS, *_FORMS)
