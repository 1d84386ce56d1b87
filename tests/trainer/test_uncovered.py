"""State that moves and is not saved is named at the save, in the manifest and in the certificate, and refused if asked to."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hyper_resume.checkpoint.commands.inspect import inspect_step_directory
from hyper_resume.checkpoint.format.manifest import read_manifest
from hyper_resume.errors import CheckpointMismatchError
from hyper_resume.state.certificate import Certificate, read_certificate
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.ranks import run_ranks
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer

PATH = "trainer.averages.decay.0"


def keep_average(trainer: Any) -> None:
    """Each forward pass moves a tensor that no save knows."""
    average = torch.zeros(2)
    trainer.averages = {"decay": [average]}
    trainer.model.register_forward_pre_hook(lambda *_: (average.add_(1), None)[1])


def trained(root: Path, until_step: int, **checkpoint: Any) -> Any:
    trainer = make_custom_trainer(root, save_steps=2, save_epochs=0, **checkpoint)
    keep_average(trainer)
    train_custom_trainer(trainer, until_step)
    return trainer


def certificate_of(root: Path) -> Certificate:
    (file,) = (root / "certificates").iterdir()
    return read_certificate(file)


def test_it_is_named_once_in_the_log_and_at_each_save_in_manifest_and_inspection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trained(tmp_path, 6)
    assert len([record for record in caplog.records if PATH in record.getMessage()]) == 1
    for step in (2, 4, 6):
        manifest = read_manifest(tmp_path / f"global_step_{step}")
        assert manifest is not None
        assert manifest.uncovered == {"0": (PATH,)}
        (rank,) = inspect_step_directory(tmp_path / f"global_step_{step}").ranks
        assert rank.uncovered == (PATH,)


def test_a_restore_of_it_is_degraded_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, 4)
    with caplog.at_level(logging.WARNING):
        trained(tmp_path, 6, restore_from="LATEST")
    parts = {part.bucket: part for part in certificate_of(tmp_path).parts}
    assert parts["stateful"].verdict == "degraded"
    assert f"moves and is not saved: {PATH}" in parts["stateful"].reason
    assert parts["model"].verdict == parts["optimizer"].verdict == parts["rng_state"].verdict == "exact"


def test_it_is_refused_before_anything_is_changed_where_differences_are_errors(tmp_path: Path) -> None:
    trained(tmp_path, 4)
    trainer = make_custom_trainer(tmp_path, restore_from="LATEST", on_mismatch="error")
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=f"stateful: moves and is not saved: {PATH}"):
        CheckpointerCallback(trainer).on_train_begin(trainer.state)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    "checkpoint", [{"check_coverage": False}, {"not_saved": ("trainer.averages.*",)}], ids=["off", "declared"]
)
def test_what_is_declared_or_not_searched_for_is_not_named(tmp_path: Path, checkpoint: dict[str, Any]) -> None:
    trained(tmp_path, 4, **checkpoint)
    trained(tmp_path, 6, restore_from="LATEST", on_mismatch="error", **checkpoint)
    assert all(part.verdict != "degraded" for part in certificate_of(tmp_path).parts)


def test_a_buffer_that_is_not_persistent_makes_the_model_incomplete(tmp_path: Path) -> None:
    def trained_with_buffer(**checkpoint: Any) -> None:
        trainer = make_custom_trainer(tmp_path, save_steps=2, save_epochs=0, **checkpoint)
        trainer.model.register_buffer("seen", torch.zeros(1), persistent=False)
        trainer.model.register_forward_pre_hook(lambda module, _: (module.seen.add_(1), None)[1])
        train_custom_trainer(trainer, 4 if not checkpoint else 6)

    trained_with_buffer()
    trained_with_buffer(restore_from="LATEST")
    parts = {part.bucket: part for part in certificate_of(tmp_path).parts}
    assert parts["model"].reason == "moves and is not saved: trainer.model.seen"


def test_running_statistics_that_a_save_of_adapters_leaves_out_make_the_model_incomplete(tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path, save_steps=2, save_epochs=0, is_peft=True)
    trainer.model.register_buffer("mean", torch.zeros(1))
    trainer.model.register_forward_pre_hook(lambda module, _: (module.mean.add_(1), None)[1])
    train_custom_trainer(trainer, 2)
    manifest = read_manifest(tmp_path / "global_step_2")
    assert manifest is not None
    assert manifest.uncovered == {"0": ("trainer.model.mean",)}


def test_a_trainer_that_holds_only_what_is_saved_has_nothing_uncovered(tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path, save_steps=2, save_epochs=0)
    trainer.state.note = SimpleNamespace(text="no state")
    train_custom_trainer(trainer, 4)
    manifest = read_manifest(tmp_path / "global_step_4")
    assert manifest is not None
    assert manifest.uncovered == {}


def _named_by_each_rank(folder: str) -> None:
    import torch.distributed as dist

    trainer = make_custom_trainer(Path(folder), save_steps=2, save_epochs=0)
    if dist.get_rank() == 1:
        keep_average(trainer)
    train_custom_trainer(trainer, 2)


def test_each_rank_names_what_moves_there(tmp_path: Path) -> None:
    run_ranks(_named_by_each_rank, 2, str(tmp_path))
    manifest = read_manifest(tmp_path / "global_step_2")
    assert manifest is not None
    assert manifest.uncovered == {"1": (PATH,)}
