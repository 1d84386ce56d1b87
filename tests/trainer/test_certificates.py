"""Every restore says, bucket by bucket and rank by rank, what it did, and ``exact`` is measured."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_resume.config import RunConfig, TrajectoryConfig
from hyper_resume.errors import CheckpointMismatchError
from hyper_resume.state.certificate import BUCKETS, Certificate, read_certificate
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.checkpoint.directories import forget_manifest
from tests.ranks import run_ranks
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
from tests.trainer.tiny_training import run_config, seed_streams, train

pytestmark = pytest.mark.xdist_group("certificates")


def _stored(folder: Path) -> list[Certificate]:
    return [read_certificate(file) for file in sorted((folder / "certificates").iterdir())]


def _verdicts(certificate: Certificate, rank: int = 0) -> dict[str, str]:
    return {part.bucket: part.verdict for part in certificate.parts if part.rank == rank}


def _with_trajectory(config: RunConfig, directory: Path) -> RunConfig:
    return dataclasses.replace(config, trajectory=TrajectoryConfig(dir=str(directory)))


def test_an_exact_restore_is_certified_by_three_equal_digests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(run_config(tmp_path, save_steps=3))
    with caplog.at_level(logging.INFO):
        train(run_config(tmp_path, restore_from=str(tmp_path / "global_step_3")))
    (certificate,) = _stored(tmp_path)
    assert _verdicts(certificate) == {**dict.fromkeys(BUCKETS, "exact"), "stateful": "absent"}
    manifest = json.loads((tmp_path / "global_step_3" / "manifest.json").read_text())
    for part in certificate.parts:
        if part.verdict == "exact":
            assert part.saved == manifest["buckets"]["0"][part.bucket]
            assert part.loaded == part.live != ""
    assert (certificate.global_step, certificate.start_epoch, certificate.start_step) == (3, 0, 3)
    assert (certificate.world_size, certificate.verified) == (1, "digest")
    (block,) = [message for message in caplog.messages if message.startswith("Restore certificate of ")]
    assert "\n  model            exact (saved = loaded = live)\n" in block
    loaded = next(
        i for i, message in enumerate(caplog.messages) if message.startswith("Checkpoint loaded successfully")
    )
    assert caplog.messages.index(block) > loaded


def test_certificates_are_kept_beside_checkpoints_and_trajectory_one_a_restore(tmp_path: Path) -> None:
    train(run_config(tmp_path / "saves", save_steps=3))
    source = str(tmp_path / "saves" / "global_step_3")
    for _ in range(2):
        train(_with_trajectory(run_config(tmp_path / "new", restore_from=source), tmp_path / "trajectory"))
    train(_with_trajectory(run_config(tmp_path / "not", restore_from=source, save_ckpt=False), tmp_path / "only"))
    assert [one.global_step for one in _stored(tmp_path / "new")] == [3, 3]
    assert _stored(tmp_path / "new") == _stored(tmp_path / "trajectory")
    assert len(_stored(tmp_path / "only")) == 1
    assert not (tmp_path / "not").exists()
    assert all(file.name.startswith("global_step_3.2") for file in (tmp_path / "new" / "certificates").iterdir())


def test_a_start_from_scratch_has_no_certificate(tmp_path: Path) -> None:
    train(run_config(tmp_path, restore_from="LATEST"))
    assert not (tmp_path / "certificates").exists()


def test_what_was_not_asked_for_is_absent(five_steps: Path, tmp_path: Path) -> None:
    trainer = make_custom_trainer(
        tmp_path, restore_from=str(five_steps / "global_step_5"), restore_optimizer=False, restore_train_state=False
    )
    CheckpointerCallback(trainer).on_train_begin()
    (certificate,) = _stored(tmp_path)
    assert _verdicts(certificate) == {**dict.fromkeys(BUCKETS, "absent"), "model": "exact"}
    assert {part.reason for part in certificate.parts if part.verdict == "absent"} == {"not asked for"}


def test_reordered_parameter_groups_come_back_exactly(tmp_path: Path) -> None:
    def make(order: int, **checkpoint: Any) -> Any:
        trainer = make_custom_trainer(tmp_path, **checkpoint)
        parameters = list(trainer.model.parameters())
        groups = [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:], "lr": 0.02}][::order]
        trainer.optimizer = torch.optim.AdamW(groups)
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 1 / (1 + step))
        return trainer

    train_custom_trainer(make(1), until_step=3)
    CheckpointerCallback(make(-1, restore_from="LATEST", on_mismatch="error")).on_train_begin()
    (certificate,) = _stored(tmp_path)
    assert _verdicts(certificate)["optimizer"] == _verdicts(certificate)["lr_scheduler"] == "exact"


class Forgets:
    """Has a state and does not take it back."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _saved_with_a_count(folder: Path) -> None:
    trainer = make_custom_trainer(folder)
    trainer.counter = Forgets()
    trainer.counter.count = 4
    train_custom_trainer(trainer, until_step=2)


def test_an_object_that_does_not_take_its_state_back_is_found_by_measuring(tmp_path: Path) -> None:
    _saved_with_a_count(tmp_path)
    trainer = make_custom_trainer(tmp_path, restore_from="LATEST")
    trainer.counter = Forgets()
    CheckpointerCallback(trainer).on_train_begin()
    (certificate,) = _stored(tmp_path)
    assert _verdicts(certificate) == {**dict.fromkeys(BUCKETS, "exact"), "stateful": "degraded"}
    (part,) = [part for part in certificate.parts if part.bucket == "stateful"]
    assert part.reason == "the live state after the restore differs from what was read"
    assert not certificate.is_exact


def test_with_error_a_restore_that_was_not_exact_is_refused(tmp_path: Path) -> None:
    _saved_with_a_count(tmp_path)
    trainer = make_custom_trainer(tmp_path, restore_from="LATEST", on_mismatch="error")
    trainer.counter = Forgets()
    with pytest.raises(CheckpointMismatchError, match="stateful: the live state after the restore differs"):
        CheckpointerCallback(trainer).on_train_begin()
    assert trainer.state.global_step == 0


def test_a_checkpoint_without_manifest_is_certified_by_what_was_read(tmp_path: Path) -> None:
    train_custom_trainer(make_custom_trainer(tmp_path), until_step=2)
    forget_manifest(tmp_path / "global_step_2")
    trainer = make_custom_trainer(tmp_path / "own", restore_from=str(tmp_path / "global_step_2"))
    CheckpointerCallback(trainer).on_train_begin()
    (certificate,) = _stored(tmp_path / "own")
    assert certificate.verified == "no manifest"
    assert _verdicts(certificate)["model"] == "exact"
    assert all(part.saved is None for part in certificate.parts)


def test_looking_moves_no_stream(tmp_path: Path) -> None:
    class Draws(Forgets):
        """Its state_dict draws a number, as some loaders' do when they make an iterator for it."""

        def state_dict(self) -> dict[str, Any]:
            torch.rand(())
            return {"count": 4}

    def make(**checkpoint: Any) -> Any:
        trainer = make_custom_trainer(tmp_path, **checkpoint)
        trainer.counter = Draws()
        return trainer

    train_custom_trainer(make(save_steps=2, save_epochs=0), until_step=2)
    saved = torch.load(tmp_path / "global_step_2" / "extra_state" / "extra_state_rank_0.pt", weights_only=True)
    seed_streams(99)
    CheckpointerCallback(make(restore_from="LATEST")).on_train_begin()
    assert torch.equal(torch.get_rng_state(), saved["rng_state"]["torch_cpu"])


def test_a_model_whose_load_hook_draws_moves_no_stream(five_steps: Path, tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path, restore_from=str(five_steps / "global_step_5"))
    drawn: list[float] = []
    trainer.model.register_load_state_dict_post_hook(lambda module, keys: drawn.append(float(torch.rand(()))))
    CheckpointerCallback(trainer).on_train_begin()
    saved = torch.load(five_steps / "global_step_5" / "extra_state" / "extra_state_rank_0.pt", weights_only=True)
    assert drawn
    assert torch.equal(torch.get_rng_state(), saved["rng_state"]["torch_cpu"])


# ---- several ranks


def _save_and_resume(folder: Path) -> None:
    train_custom_trainer(make_custom_trainer(folder, save_epochs=0), until_step=3)
    trainer = make_custom_trainer(folder, restore_from="LATEST")
    if dist.get_rank() == 1:
        trainer.counter = Forgets()
    CheckpointerCallback(trainer).on_train_begin()


def test_each_rank_has_its_own_line_where_ranks_differ(tmp_path: Path) -> None:
    run_ranks(_save_and_resume, 2, tmp_path)
    (certificate,) = _stored(tmp_path)
    assert [(part.bucket, part.rank) for part in certificate.parts] == [
        (bucket, rank) for bucket in BUCKETS for rank in range(2)
    ]
    assert _verdicts(certificate, 0) == {**dict.fromkeys(BUCKETS, "exact"), "stateful": "absent"}
    assert _verdicts(certificate, 1) == {**dict.fromkeys(BUCKETS, "exact"), "stateful": "degraded"}
    line = "stateful         degraded (the checkpoint holds no state of counter; it keeps its initial state) on rank 1"
    assert line in certificate.lines()


def _save(folder: Path) -> None:
    train_custom_trainer(make_custom_trainer(folder, save_epochs=0), until_step=3)


def _resume(folder: Path) -> None:
    CheckpointerCallback(make_custom_trainer(folder, restore_from="LATEST")).on_train_begin()


def test_another_number_of_ranks_is_named_in_the_certificate(tmp_path: Path) -> None:
    run_ranks(_save, 1, tmp_path)
    run_ranks(_resume, 2, tmp_path)
    (certificate,) = _stored(tmp_path)
    for rank in range(2):
        assert _verdicts(certificate, rank) == {
            **dict.fromkeys(BUCKETS, "exact"),
            "rng_state": "degraded",
            "stateful": "absent",
        }
    assert (
        "the number of ranks changed" in next(part for part in certificate.parts if part.bucket == "rng_state").reason
    )
