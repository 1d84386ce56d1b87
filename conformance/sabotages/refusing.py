"""Defects in pointers, completeness and refusals: which checkpoint is taken, and what is taken for one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from conformance.sabotage import Saboteur, sabotage

_CALLBACK = "hyper_resume.trainer.callbacks.checkpointer:CheckpointerCallback"
_LAYOUT = "hyper_resume.checkpoint.layout"
_DCP = "hyper_resume.checkpoint.dcp"
_EXTRA = "hyper_resume.checkpoint.extra_state"
_PAYLOAD = "hyper_resume.trainer.payload"


# ---- refusals that give way -----------------------------------------------------------------------------------------


@sabotage("missing-path-means-scratch")
def _missing_path_means_scratch(put: Saboteur) -> None:
    def load_checkpoint(original: Any, callback: Any) -> None:
        try:
            original(callback)
        except FileNotFoundError:
            put.fired()

    put.replace(f"{_CALLBACK}._load_checkpoint", load_checkpoint, fires=False)


@sabotage("latest-of-nothing-refused")
def _latest_of_nothing_refused(put: Saboteur) -> None:
    def find_latest(original: Any, checkpoint_dir: Path) -> Any:
        found = original(checkpoint_dir)
        if found is None:
            put.fired()
            raise FileNotFoundError(checkpoint_dir)
        return found

    put.replace(f"{_LAYOUT}:find_latest", find_latest, fires=False)


@sabotage("no-training-state-tolerated")
def _no_training_state_tolerated(put: Saboteur) -> None:
    def load_checkpoint(original: Any, callback: Any) -> None:
        try:
            original(callback)
        except FileNotFoundError:
            put.fired()
            callback.config = dataclasses.replace(callback.config, restore_train_state=False)
            original(callback)

    put.replace(f"{_CALLBACK}._load_checkpoint", load_checkpoint, fires=False)


@sabotage("sentinel-ignored")
def _sentinel_ignored(put: Saboteur) -> None:
    def unwrap(original: Any, loaded: Any, rank: int, where: str) -> Any:
        state = loaded[f"rank_{rank}"]
        if state["global_step"] == (-1,):
            put.fired()
            state["global_step"] = (0,)
        return original(loaded, rank, where)

    put.replace(f"{_EXTRA}:unwrap_embedded", unwrap, fires=False)


@sabotage("half-a-training-state-accepted")
def _half_a_training_state_accepted(put: Saboteur) -> None:
    put.replace(f"{_EXTRA}:refuse_part", lambda original, *args: None)


@sabotage("peft-base-required")
def _peft_base_required(put: Saboteur) -> None:
    def apply_model(original: Any, model: Any, loaded: Any, *, strict: bool) -> None:
        original(model, loaded, strict=True)

    put.replace(f"{_PAYLOAD}:apply_model", apply_model)


@sabotage("missing-adapter-tolerated")
def _missing_adapter_tolerated(put: Saboteur) -> None:
    put.replace(f"{_PAYLOAD}:_require_adapters", lambda original, *args: None)


@sabotage("absent-optimizer-state-refused")
def _absent_optimizer_state_refused(put: Saboteur) -> None:
    def apply_optimizers(original: Any, optimizers: Any, names: Any, loaded: Any) -> None:
        original(optimizers, names, loaded)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter not in optimizer.state:
                        raise RuntimeError("a parameter has no optimizer state")

    put.replace(f"{_PAYLOAD}:apply_optimizers", apply_optimizers)


@sabotage("another-count-refused")
def _another_count_refused(put: Saboteur) -> None:
    def make_destination(original: Any, trainer: Any, config: Any, entries: Any, path: str) -> Any:
        from hyper_resume.state.optimizer import flatten_optimizers, saved_optimizer_count

        if saved_optimizer_count(entries) != len(flatten_optimizers(trainer.optimizer)):
            put.fired()
            raise RuntimeError("another number of optimizers")
        return original(trainer, config, entries, path)

    put.replace("hyper_resume.trainer.callbacks.checkpointer:make_destination", make_destination, fires=False)


@sabotage("topology-change-not-noticed")
def _topology_change_not_noticed(put: Saboteur) -> None:
    put.replace("hyper_resume.data.sampler:EpochOrder.changes_since", lambda original, order, state: [])


# ---- which directory is taken ---------------------------------------------------------------------------------------


@sabotage("completeness-not-checked")
def _completeness_not_checked(put: Saboteur) -> None:
    put.replace(f"{_LAYOUT}:is_complete", lambda original, directory: directory.is_dir())


@sabotage("empty-metadata-accepted")
def _empty_metadata_accepted(put: Saboteur) -> None:
    put.replace(f"{_LAYOUT}:is_complete", lambda original, directory: (directory / ".metadata").is_file())


@sabotage("no-scan-behind-the-pointer")
def _no_scan_behind_the_pointer(put: Saboteur) -> None:
    put.replace(f"{_LAYOUT}:_scan", lambda original, checkpoint_dir: None)


@sabotage("lost-checkpoint-means-scratch")
def _lost_checkpoint_means_scratch(put: Saboteur) -> None:
    def find_latest(original: Any, checkpoint_dir: Path) -> Any:
        try:
            return original(checkpoint_dir)
        except FileNotFoundError:
            put.fired()
            return None

    put.replace(f"{_LAYOUT}:find_latest", find_latest, fires=False)


@sabotage("look-alike-accepted")
def _look_alike_accepted(put: Saboteur) -> None:
    def parse_step(original: Any, name: str) -> int | None:
        match = re.search(r"global_step_([0-9]+)", name)
        return int(match.group(1)) if match else None

    put.replace(f"{_LAYOUT}:parse_step", parse_step)


def _newest_by(put: Saboteur, key: Any) -> None:
    def scan(original: Any, checkpoint_dir: Path) -> Any:
        found = [path for path in checkpoint_dir.glob("global_step_*") if (path / ".metadata").is_file()]
        return max(found, key=key, default=None)

    put.replace(f"{_LAYOUT}:_scan", scan)


@sabotage("steps-compared-as-text")
def _steps_compared_as_text(put: Saboteur) -> None:
    _newest_by(put, lambda path: path.name)


@sabotage("newest-by-file-time")
def _newest_by_file_time(put: Saboteur) -> None:
    _newest_by(put, lambda path: path.stat().st_mtime)


@sabotage("recorded-place-trusted")
def _recorded_place_trusted(put: Saboteur) -> None:
    def find_latest(original: Any, checkpoint_dir: Path) -> Any:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        found = original(checkpoint_dir)
        if found is None:
            return None
        staged = Path(str(FileSystemReader(found).read_metadata().storage_meta.checkpoint_id))  # type: ignore[union-attr]
        return staged.parent.parent / found.name

    put.replace(f"{_LAYOUT}:find_latest", find_latest)


@sabotage("links-passed-over")
def _links_passed_over(put: Saboteur) -> None:
    def is_complete(original: Any, directory: Path) -> bool:
        if directory.is_symlink() or directory.parent.is_symlink():
            put.fired()
            return False
        complete: bool = original(directory)
        return complete

    put.replace(f"{_LAYOUT}:is_complete", is_complete, fires=False)


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
    def finalize(original: Any, checkpointer: Any, staging: Path, target: Path, global_step: int) -> None:
        from hyper_resume.checkpoint import layout

        layout.write_pointer(target.parent, global_step)
        original(checkpointer, staging, target, global_step)

    put.replace(f"{_DCP}:DistributedCheckpointer._finalize_checkpoint", finalize)


@sabotage("step-found-anywhere-in-the-path")
def _step_found_anywhere_in_the_path(put: Saboteur) -> None:
    def write_pointer(original: Any, checkpoint_dir: Path, global_step: int) -> None:
        match = re.search(r"global_step_([0-9]+)", str(checkpoint_dir / f"global_step_{global_step}"))
        assert match is not None
        original(checkpoint_dir, int(match.group(1)))

    put.replace(f"{_LAYOUT}:write_pointer", write_pointer)


# ---- parts of different saves ---------------------------------------------------------------------------------------


@sabotage("rank-file-of-another-save-accepted")
def _rank_file_of_another_save_accepted(put: Saboteur) -> None:
    put.replace(f"{_DCP}:check_training_state", lambda original, *args: None)


@sabotage("rank-file-of-another-step-accepted")
def _rank_file_of_another_step_accepted(put: Saboteur) -> None:
    def read_file(original: Any, step_directory: Path, rank: int) -> Any:
        state, first = original(step_directory, rank), original(step_directory, 0)
        return {**state, "global_step": first["global_step"], "save_id": first["save_id"]}

    put.replace(f"{_EXTRA}:read_file", read_file)


@sabotage("shards-of-another-save-accepted")
def _shards_of_another_save_accepted(put: Saboteur) -> None:
    put.replace(f"{_DCP}:read_save_id", lambda original, *args: None)


@sabotage("another-ranks-file-accepted")
def _another_ranks_file_accepted(put: Saboteur) -> None:
    def checked(original: Any, state: Any, where: str, rank: int) -> Any:
        return original({**state, "rank": rank}, where, rank)

    put.replace(f"{_EXTRA}:checked_format", checked)


@sabotage("no-pointer-before-the-scan")
def _no_pointer_before_the_scan(put: Saboteur) -> None:
    put.replace(f"{_LAYOUT}:_follow_pointer", lambda original, pointer: (None, ""))
