"""Defects in verification (manifest, digests), in what a save leaves, in the choice of LATEST, and in the certificate."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch

from conformance.sabotages.saboteur import Saboteur, sabotage

_DCP = "hyper_resume.checkpoint.dcp"
_STORAGE = f"{_DCP}:DistributedCheckpointer"
_VERIFYING = "hyper_resume.checkpoint.loading.file_verification"
_DIGESTS = "hyper_resume.checkpoint.format.bucket_digests"
_MANIFEST = "hyper_resume.checkpoint.format.manifest"
_LINEAGE = "hyper_resume.checkpoint.history.lineage"
_LAYOUT = "hyper_resume.checkpoint.format.layout"
_SAVING = "hyper_resume.checkpoint.saving.publication"
_OPERATIONS = "hyper_resume.checkpoint.disk.operations"
_ROOT = "hyper_resume.checkpoint.saving.root:WritableRoot"
_MISMATCHES = "hyper_resume.trainer.mismatches"
_RESTORE = "hyper_resume.trainer.restore"
_CALLBACK = "hyper_resume.trainer.callbacks.checkpointer"


# ---- verification ---------------------------------------------------------------------------------------------------


@sabotage("digest-not-verified")
def _digest_not_verified(put: Saboteur) -> None:
    """Verify sizes only, whatever is configured."""

    def verify(original: Any, directory: Path, how: str, *args: Any, **options: Any) -> Any:
        return original(directory, "size", *args, **options)

    put.replace(f"{_VERIFYING}:verify", verify)


@sabotage("sizes-not-verified")
def _sizes_not_verified(put: Saboteur) -> None:
    put.replace(f"{_MANIFEST}:_verify_one", lambda original, *args, **options: "")


@sabotage("verdict-ignored")
def _verdict_ignored(put: Saboteur) -> None:
    """Files are verified, and the result is dropped."""

    def verify(original: Any, directory: Path, how: str, *args: Any, **options: Any) -> Any:
        from hyper_resume.checkpoint.format.manifest import read_manifest
        from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError

        try:
            return original(directory, how, *args, **options)
        except (CheckpointMismatchError, CheckpointNotFoundError):
            put.fired()
            return read_manifest(directory)

    put.replace(f"{_VERIFYING}:verify", verify, fires=False)


@sabotage("fallback-without-reason")
def _fallback_without_reason(put: Saboteur) -> None:
    put.replace("hyper_resume.checkpoint.loading.latest:logger.warning", lambda original, *args: None)


@sabotage("manifest-of-any-content")
def _manifest_of_any_content(put: Saboteur) -> None:
    """A manifest that can't be read counts as missing, so the directory counts as another tool's."""

    def read_manifest(original: Any, directory: Path) -> Any:
        from hyper_resume.errors import CheckpointMismatchError

        try:
            return original(directory)
        except CheckpointMismatchError:
            put.fired()
            return None

    for module in (_VERIFYING, _LINEAGE, _LAYOUT):
        put.replace(f"{module}:read_manifest", read_manifest, fires=False)
    put.replace(f"{_LINEAGE}:_without_foreign_manifest", lambda original, one: one, fires=False)
    put.replace(f"{_VERIFYING}:check_metadata", lambda original, directory, manifest: None, fires=False)


@sabotage("step-of-the-manifest-not-compared")
def _step_of_the_manifest_not_compared(put: Saboteur) -> None:
    """A manifest of another step is accepted for the directory, with its files."""

    def read_manifest(original: Any, directory: Path) -> Any:
        from hyper_resume.checkpoint.format.layout import parse_step

        manifest, step = original(directory), parse_step(directory.name)
        if manifest is None or step in (None, manifest.step):
            return manifest
        put.fired()
        return dataclasses.replace(manifest, step=step, files={})

    for module in (_VERIFYING, _LINEAGE, _LAYOUT):
        put.replace(f"{module}:read_manifest", read_manifest, fires=False)


@sabotage("bucket-digests-not-compared")
def _bucket_digests_not_compared(put: Saboteur) -> None:
    put.replace(f"{_DIGESTS}:compare_digests", lambda original, *args: None)


@sabotage("bucket-of-the-wrong-rank")
def _bucket_of_the_wrong_rank(put: Saboteur) -> None:
    """The manifest gives each rank the digests of its neighbour's buckets."""

    def draft(original: Any, attempt: Any, *, buckets: Any, **options: Any) -> Any:
        ranks = sorted(buckets)
        moved = {rank: buckets[ranks[place - 1]] for place, rank in enumerate(ranks)}
        return original(attempt, buckets=moved, **options)

    put.replace(f"{_DCP}:draft_manifest", draft)


@sabotage("load-not-buffered")
def _load_not_buffered(put: Saboteur) -> None:
    """Each entry is read directly into the live tensor."""

    def load(original: Any, wanted: Any, *args: Any) -> Any:
        found = original({}, *args)
        for name, live in wanted.items():
            found.values.update(original({name: live}, *args).values)
            if isinstance(live, torch.Tensor):
                with torch.no_grad():
                    live.detach().copy_(found.values[name])
        return found

    put.replace(f"{_DCP}:load_entries", load)


@sabotage("unknown-files-not-told")
def _unknown_files_not_told(put: Saboteur) -> None:
    put.replace(f"{_VERIFYING}:unlisted_files", lambda original, *args: [])


@sabotage("unknown-entries-not-told")
def _unknown_entries_not_told(put: Saboteur) -> None:
    put.replace(f"{_MISMATCHES}:check_model", lambda original, *args: [])


# ---- what a save leaves ---------------------------------------------------------------------------------------------


@sabotage("file-left-out-of-the-manifest")
def _file_left_out_of_the_manifest(put: Saboteur) -> None:
    def draft(original: Any, attempt: Any, *, files: Any, **options: Any) -> Any:
        return original(attempt, files=dict(sorted(files.items())[:-1]), **options)

    put.replace(f"{_DCP}:draft_manifest", draft)


@sabotage("manifest-not-written-last")
def _manifest_not_written_last(put: Saboteur) -> None:
    held: list[Any] = []

    def write_pieces(original: Any, path: Path, pieces: Any) -> Any:
        from hyper_resume.checkpoint.format.manifest import FileEntry
        from hyper_resume.digest import bytes_digest_text

        if path.name != ".metadata":
            return original(path, pieces)
        held.append(lambda: original(path, pieces))
        return FileEntry(size_bytes=sum(map(len, pieces)), digest=bytes_digest_text(pieces), rank=0)

    def write_file(original: Any, path: Path, content: Any) -> None:
        original(path, content)
        while held and path.name == "manifest.json":
            put.fired()
            held.pop()()

    put.replace("hyper_resume.checkpoint.saving.shard_writer:_write_pieces", write_pieces, fires=False)
    put.replace(f"{_OPERATIONS}:write_file", write_file, fires=False)


@sabotage("files-not-flushed")
def _files_not_flushed(put: Saboteur) -> None:
    put.replace(f"{_OPERATIONS}:OutputFile.sync", lambda original, file: None)


@sabotage("earlier-copy-removed-first")
def _earlier_copy_removed_first(put: Saboteur) -> None:
    def publish(original: Any, attempt: Any, *args: Any) -> Any:
        from hyper_resume import collective

        if collective.rank() == 0 and attempt.target.exists():
            put.fired()
            shutil.rmtree(attempt.target)
        return original(attempt, *args)

    put.replace(f"{_SAVING}:publish", publish, fires=False)


@sabotage("step-saved-again-is-skipped")
def _step_saved_again_is_skipped(put: Saboteur) -> None:
    def save(original: Any, storage: Any, path: str, *args: Any, **options: Any) -> None:
        if Path(path).exists():
            put.fired()
        else:
            original(storage, path, *args, **options)

    put.replace(f"{_STORAGE}.save", save, fires=False)


@sabotage("failed-save-moves-the-pointer")
def _failed_save_moves_the_pointer(put: Saboteur) -> None:
    def fail(original: Any, storage: Any, error: Any, attempt: Any, target: Path) -> None:
        (target.parent / "latest_checkpoint_iteration.txt").write_text(target.name.rpartition("_")[2])
        original(storage, error, attempt, target)

    put.replace(f"{_STORAGE}._fail", fail)


@sabotage("save-failure-swallowed")
def _save_failure_swallowed(put: Saboteur) -> None:
    put.replace(f"{_STORAGE}._fail", lambda original, *args: None)


# ---- which save is LATEST -------------------------------------------------------------------------------------------


@sabotage("highest-step-wins")
def _highest_step_wins(put: Saboteur) -> None:
    """LATEST is the highest complete step; pointer and lineage are ignored."""

    def in_order(original: Any, checkpoint_dir: Path) -> Any:
        from hyper_resume.checkpoint.format import layout

        order = original(checkpoint_dir)
        steps = sorted(layout.step_directories(checkpoint_dir), reverse=True)
        return dataclasses.replace(order, directories=tuple(path for _, path in steps))

    put.replace(f"{_LINEAGE}:resume_order", in_order)


@sabotage("lineage-ignored")
def _lineage_ignored(put: Saboteur) -> None:
    """After the pointer's step comes the highest one, of any branch."""

    def in_order(original: Any, checkpoint_dir: Path) -> Any:
        from hyper_resume.checkpoint.format import layout

        order = original(checkpoint_dir)
        steps = [path for _, path in sorted(layout.step_directories(checkpoint_dir), reverse=True)]
        first = order.directories[:1]
        return dataclasses.replace(order, directories=(*first, *(path for path in steps if path not in first)))

    put.replace(f"{_LINEAGE}:resume_order", in_order)


@sabotage("going-back-not-noted")
def _going_back_not_noted(put: Saboteur) -> None:
    """The pointer stays in the abandoned future until the branch's first save."""
    put.replace(f"{_ROOT}.begin", lambda original, *args: None)


@sabotage("going-back-without-its-mark")
def _going_back_without_its_mark(put: Saboteur) -> None:
    """The pointer moves back, and the newest save that continues what it names is the one that was left behind."""
    put.replace(f"{_LINEAGE}:go_back", lambda original, *args: None)


@sabotage("committed-save-passed-over")
def _committed_save_passed_over(put: Saboteur) -> None:
    """The pointer alone decides, also when a newer save continues the one that it names."""

    def find_start(original: Any, *args: Any, **options: Any) -> Any:
        return dataclasses.replace(original(*args, **options), newer=())

    put.replace(f"{_LINEAGE}:_find_start", find_start)


# ---- the certificate -----------------------------------------------------------------------------------------------


@sabotage("on-mismatch-ignored")
def _on_mismatch_ignored(put: Saboteur) -> None:
    def restore(original: Any, trainer: Any, config: Any, *args: Any) -> Any:
        return original(trainer, dataclasses.replace(config, on_mismatch="warn"), *args)

    put.replace(f"{_CALLBACK}:restore", restore)


@sabotage("another-count-not-found")
def _another_count_not_found(put: Saboteur) -> None:
    """Another number of optimizers is logged as before, but is no finding."""
    put.replace(f"{_MISMATCHES}:check_optimizer_count", lambda original, *args: [])


@sabotage("certificate-claims-exact")
def _certificate_claims_exact(put: Saboteur) -> None:
    def judge(original: Any, **found: Any) -> Any:
        return original(bucket=found["bucket"], rank=found["rank"])

    put.replace(f"{_RESTORE}:certify_bucket", judge)


@sabotage("live-state-not-measured")
def _live_state_not_measured(put: Saboteur) -> None:
    put.replace(f"{_RESTORE}:live_digests", lambda original, trainer, payload, extra_state, digests: dict(digests))


@sabotage("every-restore-is-degraded")
def _every_restore_is_degraded(put: Saboteur) -> None:
    """The digests of live state are computed differently from those of the saved state."""
    put.replace(
        f"{_RESTORE}:live_digests", lambda original, *args: {name: f"{text}0" for name, text in original(*args).items()}
    )


@sabotage("certificate-not-printed")
def _certificate_not_printed(put: Saboteur) -> None:
    put.replace(f"{_CALLBACK}:CheckpointerCallback._publish", lambda original, *args: None)
