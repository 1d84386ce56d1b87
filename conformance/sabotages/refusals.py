"""Defects in the pointer, completeness and refusals: which checkpoint is chosen, and what is accepted as one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from conformance.sabotages.saboteur import Saboteur, sabotage

_CALLBACK = "hyper_resume.trainer.callbacks.checkpointer:CheckpointerCallback"
_RESTORE = "hyper_resume.trainer.restore"
_LAYOUT = "hyper_resume.checkpoint.format.layout"
_LINEAGE = "hyper_resume.checkpoint.history.lineage"
_DCP = "hyper_resume.checkpoint.dcp"
_STORAGE = f"{_DCP}:DistributedCheckpointer"
_EXTRA = "hyper_resume.checkpoint.format.extra_state"
_PAYLOAD = "hyper_resume.trainer.payload"


# ---- missing refusals -----------------------------------------------------------------------------------------------


@sabotage("missing-path-means-scratch")
def _missing_path_means_scratch(put: Saboteur) -> None:
    def look(original: Any, callback: Any, *path: str) -> Any:
        try:
            return original(callback, *path)
        except FileNotFoundError:
            put.fired()

    put.replace(f"{_CALLBACK}._resolve_restore_path", look, fires=False)
    put.replace(f"{_CALLBACK}._load_checkpoint", look, fires=False)


@sabotage("foreign-format-not-named")
def _foreign_format_not_named(put: Saboteur) -> None:
    put.replace("hyper_resume.trainer.restore_source:recognise", lambda original, path: None)


@sabotage("scheme-taken-for-a-folder")
def _scheme_taken_for_a_folder(put: Saboteur) -> None:
    put.replace("hyper_resume.config.checks:scheme_of", lambda original, path: "")
    put.replace("hyper_resume.local_path:scheme_of", lambda original, path: "")


@sabotage("latest-of-nothing-refused")
def _latest_of_nothing_refused(put: Saboteur) -> None:
    def find_latest(original: Any, storage: Any, checkpoint_dir: str) -> Any:
        found = original(storage, checkpoint_dir)
        if found is None:
            put.fired()
            raise FileNotFoundError(checkpoint_dir)
        return found

    put.replace(f"{_STORAGE}.find_latest_checkpoint", find_latest, fires=False)


@sabotage("no-training-state-tolerated")
def _no_training_state_tolerated(put: Saboteur) -> None:
    def load_checkpoint(original: Any, callback: Any, path: str) -> Any:
        try:
            return original(callback, path)
        except FileNotFoundError:
            put.fired()
            callback.config = dataclasses.replace(callback.config, restore_train_state=False)
            return original(callback, path)

    put.replace(f"{_CALLBACK}._load_checkpoint", load_checkpoint, fires=False)


@sabotage("sentinel-ignored")
def _sentinel_ignored(put: Saboteur) -> None:
    def unwrap(original: Any, loaded: Any, rank: int, where: str) -> Any:
        if "global_step" not in loaded:
            put.fired()
            loaded = {**loaded, "global_step": (0,)}
        return original(loaded, rank, where)

    put.replace(f"{_EXTRA}:unwrap_embedded", unwrap, fires=False)


@sabotage("half-a-training-state-accepted")
def _half_a_training_state_accepted(put: Saboteur) -> None:
    put.replace(f"{_EXTRA}:refuse_missing_parts", lambda original, *args: None)
    # What any backend returns is checked once more.
    put.replace("hyper_resume.trainer.returned_payload:refuse_missing_parts", lambda original, *args: None)


@sabotage("peft-base-required")
def _peft_base_required(put: Saboteur) -> None:
    def apply_model(original: Any, model: Any, loaded: Any, *, strict: bool) -> None:
        original(model, loaded, strict=True)

    put.replace(f"{_RESTORE}:apply_model", apply_model)


@sabotage("missing-adapter-tolerated")
def _missing_adapter_tolerated(put: Saboteur) -> None:
    put.replace(f"{_PAYLOAD}:_require_adapters", lambda original, *args: None)


@sabotage("absent-optimizer-state-refused")
def _absent_optimizer_state_refused(put: Saboteur) -> None:
    def apply_optimizers(original: Any, optimizers: Any, names: Any, loaded: Any, **how: Any) -> None:
        original(optimizers, names, loaded, **how)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter not in optimizer.state:
                        raise RuntimeError("a parameter has no optimizer state")

    put.replace(f"{_RESTORE}:apply_optimizers", apply_optimizers)


@sabotage("another-count-refused")
def _another_count_refused(put: Saboteur) -> None:
    def make_destination(original: Any, trainer: Any, config: Any, saved: Any, path: str) -> Any:
        from hyper_resume.state.optimizer import flatten_optimizers, saved_optimizer_count

        if saved_optimizer_count(saved.entries) != len(flatten_optimizers(trainer.optimizer)):
            put.fired()
            raise RuntimeError("another number of optimizers")
        return original(trainer, config, saved, path)

    put.replace(f"{_RESTORE}:make_destination", make_destination, fires=False)


@sabotage("topology-change-not-noticed")
def _topology_change_not_noticed(put: Saboteur) -> None:
    put.replace("hyper_resume.data.sampler:EpochOrder.changes_since", lambda original, order, state: [])


# ---- which directory is chosen --------------------------------------------------------------------------------------


@sabotage("completeness-not-checked")
def _completeness_not_checked(put: Saboteur) -> None:
    put.replace(f"{_LAYOUT}:why_incomplete", lambda original, directory: "" if directory.is_dir() else "is not there")
    _nothing_asked_without_manifest(put, lambda original, directory, manifest: "")


@sabotage("empty-metadata-accepted")
def _empty_metadata_accepted(put: Saboteur) -> None:
    put.replace(
        f"{_LAYOUT}:why_incomplete",
        lambda original, directory: "" if (directory / ".metadata").is_file() else original(directory),
    )

    def why_incomplete_by_manifest(original: Any, directory: Path, manifest: Any) -> Any:
        return "" if (directory / ".metadata").is_file() else original(directory, manifest)

    _nothing_asked_without_manifest(put, why_incomplete_by_manifest)


def _nothing_asked_without_manifest(put: Saboteur, why_incomplete_by_manifest: Any) -> None:
    """Skip both inspections of a directory: the search's and the load's."""
    put.replace(f"{_LAYOUT}:why_incomplete_by_manifest", why_incomplete_by_manifest)

    def check_metadata(original: Any, directory: Path, manifest: Any) -> Any:
        from torch.distributed.checkpoint.metadata import Metadata

        from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError

        try:
            return original(directory, manifest)
        except (CheckpointMismatchError, CheckpointNotFoundError):
            if manifest is not None:
                raise
            put.fired()
            return Metadata(state_dict_metadata={}, storage_data={})

    put.replace("hyper_resume.checkpoint.loading.file_verification:check_metadata", check_metadata, fires=False)


@sabotage("no-scan-behind-the-pointer")
def _no_scan_behind_the_pointer(put: Saboteur) -> None:
    def in_order(original: Any, checkpoint_dir: Path) -> Any:
        from hyper_resume.checkpoint.format import layout

        order, (pointed, _) = original(checkpoint_dir), layout.read_pointer(checkpoint_dir)
        named = tuple(path for path in order.directories if path.name == f"global_step_{pointed}")
        return dataclasses.replace(order, directories=named)

    put.replace(f"{_LINEAGE}:resume_order", in_order)


@sabotage("lost-checkpoint-means-scratch")
def _lost_checkpoint_means_scratch(put: Saboteur) -> None:
    put.replace(f"{_LINEAGE}:refuse_if_published", lambda original, *args: None)


@sabotage("look-alike-accepted")
def _look_alike_accepted(put: Saboteur) -> None:
    def parse_step(original: Any, name: str) -> int | None:
        match = re.search(r"global_step_([0-9]+)", name)
        return int(match.group(1)) if match else None

    put.replace(f"{_LAYOUT}:parse_step", parse_step)


def _newest_by(put: Saboteur, key: Any) -> None:
    def in_order(original: Any, checkpoint_dir: Path) -> Any:
        order = original(checkpoint_dir)
        return dataclasses.replace(order, directories=tuple(sorted(order.directories, key=key, reverse=True)))

    put.replace(f"{_LINEAGE}:resume_order", in_order)


@sabotage("steps-compared-as-text")
def _steps_compared_as_text(put: Saboteur) -> None:
    _newest_by(put, lambda path: path.name)


@sabotage("newest-by-file-time")
def _newest_by_file_time(put: Saboteur) -> None:
    _newest_by(put, lambda path: path.stat().st_mtime)


@sabotage("recorded-place-trusted")
def _recorded_place_trusted(put: Saboteur) -> None:
    def find_latest(original: Any, storage: Any, checkpoint_dir: str) -> Any:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        found = original(storage, checkpoint_dir)
        if found is None:
            return None
        staged = Path(str(FileSystemReader(found).read_metadata().storage_meta.checkpoint_id))  # type: ignore[union-attr]
        return str(staged.parent.parent / Path(found).name)

    put.replace(f"{_STORAGE}.find_latest_checkpoint", find_latest)


@sabotage("links-passed-over")
def _links_passed_over(put: Saboteur) -> None:
    def verify(original: Any, directory: Path, *args: Any, **how: Any) -> Any:
        if directory.is_symlink() or directory.parent.is_symlink():
            put.fired()
            raise FileNotFoundError(directory)
        return original(directory, *args, **how)

    put.replace("hyper_resume.checkpoint.loading.file_verification:verify", verify, fires=False)


# ---- the pointer ----------------------------------------------------------------------------------------------------


@sabotage("pointer-to-an-older-step")
def _pointer_to_an_older_step(put: Saboteur) -> None:
    first: list[int] = []

    def write_pointer(original: Any, checkpoint_dir: Path, global_step: int) -> None:
        first.append(global_step)
        if len(first) > 1:
            put.fired()
        original(checkpoint_dir, first[0])

    put.replace(f"{_LAYOUT}:write_pointer", write_pointer, fires=False)


@sabotage("pointer-moved-before-the-commit")
def _pointer_moved_before_the_commit(put: Saboteur) -> None:
    def publish(original: Any, attempt: Any, *args: Any) -> Any:
        from hyper_resume import collective
        from hyper_resume.checkpoint.format import layout

        if collective.rank() == 0:
            layout.write_pointer(attempt.target.parent, attempt.global_step)
        return original(attempt, *args)

    put.replace("hyper_resume.checkpoint.saving.publication:publish", publish)


@sabotage("step-found-anywhere-in-the-path")
def _step_found_anywhere_in_the_path(put: Saboteur) -> None:
    def write_pointer(original: Any, checkpoint_dir: Path, global_step: int) -> None:
        match = re.search(r"global_step_([0-9]+)", str(checkpoint_dir / f"global_step_{global_step}"))
        assert match is not None
        original(checkpoint_dir, int(match.group(1)))

    put.replace(f"{_LAYOUT}:write_pointer", write_pointer)


# ---- parts of different saves ---------------------------------------------------------------------------------------
# The manifest's digests detect every such part; they are accepted unverified, so that the check after them is reached.


def _believe_the_files(put: Saboteur) -> None:
    put.replace(
        "hyper_resume.checkpoint.loading.file_verification:_verify_one", lambda original, *args, **how: "", fires=False
    )
    put.replace(
        "hyper_resume.checkpoint.format.bucket_digests:compare_digests", lambda original, *args: None, fires=False
    )


@sabotage("rank-file-of-another-save-accepted")
def _rank_file_of_another_save_accepted(put: Saboteur) -> None:
    _believe_the_files(put)
    put.replace(f"{_DCP}:check_same_save", lambda original, *args: None)


@sabotage("rank-file-of-another-step-accepted")
def _rank_file_of_another_step_accepted(put: Saboteur) -> None:
    _believe_the_files(put)

    def read_file(original: Any, step_directory: Path, rank: int) -> Any:
        state, first = original(step_directory, rank), original(step_directory, 0)
        return {**state, "global_step": first["global_step"], "save_id": first["save_id"]}

    put.replace(f"{_EXTRA}:read_file", read_file)


@sabotage("shards-of-another-save-accepted")
def _shards_of_another_save_accepted(put: Saboteur) -> None:
    _believe_the_files(put)
    put.replace(f"{_DCP}:read_save_id", lambda original, *args: None)


@sabotage("another-ranks-file-accepted")
def _another_ranks_file_accepted(put: Saboteur) -> None:
    _believe_the_files(put)

    def checked(original: Any, state: Any, where: str, rank: int) -> Any:
        return original({**state, "rank": rank}, where, rank)

    put.replace(f"{_EXTRA}:check_format", checked)


@sabotage("no-pointer-before-the-scan")
def _no_pointer_before_the_scan(put: Saboteur) -> None:
    put.replace(f"{_LAYOUT}:read_pointer", lambda original, checkpoint_dir: (None, ""))


@sabotage("missing-key-tolerated")
def _missing_key_tolerated(put: Saboteur) -> None:
    def check(original: Any, wanted: Any, metadata: Any, *, strict: bool, where: str) -> None:
        original(wanted, metadata, strict=False, where=where)

    put.replace("hyper_resume.checkpoint.loading.buffers:check_model_entries", check)
