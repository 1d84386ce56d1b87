"""Each leniency of a restore: a warning by default; with ``on_mismatch: error`` a refusal that has touched nothing."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR, StepLR

from hyper_resume.data import DataLoader
from hyper_resume.errors import CheckpointMismatchError
from hyper_resume.state.certificate import read_certificate
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.ranks import run_ranks
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
from tests.trainer.live_snapshot import live_snapshot
from tests.trainer.test_stateful_objects import Scaler
from tests.trainer.tiny_training import Ids, seed_streams

pytestmark = pytest.mark.xdist_group("on-mismatch")

Change = Callable[[Any], None]


def _none(trainer: Any) -> None:
    pass


def _two_optimizers(trainer: Any) -> None:
    """What ``make_custom_trainer(optimizers=2)`` gives, made of one."""
    parameters = list(trainer.model.parameters())
    trainer.optimizer = [torch.optim.AdamW(share, lr=0.01) for share in (parameters[:2], parameters[2:])]
    trainer.lr_scheduler = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in trainer.optimizer]


def _one_more_parameter(trainer: Any) -> None:
    trainer.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    trainer.lr_scheduler = None


def _less_parameters(trainer: Any) -> None:
    trainer.optimizer = torch.optim.AdamW(list(trainer.model.parameters())[:-1], lr=0.01)
    trainer.lr_scheduler = LambdaLR(trainer.optimizer, lambda step: 1 / (1 + step))


def _two_schedulers(trainer: Any) -> None:
    trainer.lr_scheduler = [trainer.lr_scheduler, LambdaLR(trainer.optimizer, lambda step: 1.0)]


def _another_scheduler(trainer: Any) -> None:
    trainer.lr_scheduler = StepLR(trainer.optimizer, step_size=3)


def _another_batch_size(trainer: Any) -> None:
    trainer.train_dataloader = DataLoader(Ids(14), batch_size=2, seed=3)


class _PlainLoader:
    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter(torch.arange(15).view(5, 3))


def _plain_loader(trainer: Any) -> None:
    trainer.train_dataloader = _PlainLoader()


def _scaler(trainer: Any) -> None:
    trainer.scaler = Scaler()


def _extra_model_entry(trainer: Any) -> None:
    trainer.model.register_buffer("old_table", torch.ones(3))


def _unsaved_optimizer(trainer: Any) -> None:
    trainer.config.checkpoint = dataclasses.replace(trainer.config.checkpoint, save_optimizer=False)


# name: (what is changed in the run that saves, in the run that resumes, the bucket, its warning by default)
LENIENCIES: dict[str, tuple[Change, Change, str, str]] = {
    "optimizer-count": (
        _none,
        _two_optimizers,
        "optimizer",
        "the checkpoint holds 1 optimizers and this run has 2: pairing the first 1, the others keep their state",
    ),
    "scheduler-count": (
        _none,
        _two_schedulers,
        "lr_scheduler",
        "the checkpoint holds 1 lr schedulers and this run has 2: pairing the first 1, the others keep their state",
    ),
    "optimizer-parameters": (
        _none,
        _less_parameters,
        "optimizer",
        "optimizer state of parameters that this optimizer does not have is not restored: lm_head.bias",
    ),
    "scheduler-kind": (
        _none,
        _another_scheduler,
        "lr_scheduler",
        "the saved state of lr scheduler 0 lacks gamma, step_size, which StepLR has",
    ),
    "no-optimizer-state": (
        _unsaved_optimizer,
        _none,
        "optimizer",
        "global_step_3 holds no optimizer state: the optimizer starts fresh",
    ),
    "data-topology": (_none, _another_batch_size, "train_dataloader", "batch_size saved 3, current 2"),
    "plain-loader": (
        _none,
        _plain_loader,
        "train_dataloader",
        "the dataloader has no load_state_dict: its saved position",
    ),
    "no-position": (
        _plain_loader,
        _none,
        "train_dataloader",
        "the checkpoint holds no data position: this epoch is replayed from its start",
    ),
    "state-that-is-not-here": (
        _scaler,
        _none,
        "stateful",
        "the checkpoint holds state of scaler, which this trainer does not have; it is not restored",
    ),
    "state-that-was-not-saved": (
        _none,
        _scaler,
        "stateful",
        "the checkpoint holds no state of scaler; it keeps its initial state",
    ),
    "extra-model-key": (
        _extra_model_entry,
        _none,
        "model",
        "the checkpoint holds model entries that this model does not have; not restored: model.old_table",
    ),
}


def _save(folder: Path, change: Change) -> None:
    """A checkpoint of step 3, in which every bucket has something."""
    trainer = make_custom_trainer(folder, save_epochs=0)
    change(trainer)
    callback = CheckpointerCallback(trainer)
    callback.on_train_begin()
    loss = trainer.model(torch.arange(3)).sum()
    loss.backward()
    trainer.optimizer.step()
    trainer.state.global_step = 3
    if hasattr(trainer.train_dataloader, "state_dict"):
        iterator = iter(trainer.train_dataloader)
        for _ in range(3):
            next(iterator)
    callback.on_train_end()


@pytest.fixture(scope="module", params=LENIENCIES)
def leniency(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Change, str, str]:
    before, after, bucket, warning = LENIENCIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    _save(folder, before)
    return folder / "global_step_3", after, bucket, warning


def _resume(step: Path, own: Path, change: Change, **checkpoint: Any) -> tuple[Any, CheckpointerCallback]:
    trainer = make_custom_trainer(own, restore_from=str(step), **checkpoint)
    change(trainer)
    seed_streams(99)
    return trainer, CheckpointerCallback(trainer)


def test_a_leniency_is_a_warning_by_default_and_named_in_the_certificate(
    leniency: tuple[Path, Change, str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step, change, bucket, warning = leniency
    trainer, callback = _resume(step, tmp_path, change)
    with caplog.at_level(logging.WARNING):
        callback.on_train_begin()
    assert warning in caplog.text
    assert trainer.state.global_step == 3
    (file,) = (tmp_path / "certificates").iterdir()
    (part,) = [part for part in read_certificate(file).parts if part.bucket == bucket]
    assert part.verdict in ("degraded", "absent")
    assert warning.split(": ")[0].split(" holds")[-1] in part.reason


def test_with_error_it_is_a_refusal_that_has_touched_nothing(
    leniency: tuple[Path, Change, str, str], tmp_path: Path
) -> None:
    step, change, bucket, warning = leniency
    trainer, callback = _resume(step, tmp_path, change, on_mismatch="error")
    before = live_snapshot(trainer)
    with pytest.raises(CheckpointMismatchError, match="on_mismatch is error") as caught:
        callback.on_train_begin()
    assert live_snapshot(trainer) == before
    assert f"{bucket}: " in str(caught.value)
    assert warning in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_whose_state_the_checkpoint_lacks_is_silent_by_default_and_refused_with_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def saving(trainer: Any) -> None:
        trainer.optimizer = torch.optim.AdamW(list(trainer.model.parameters())[:-1], lr=0.01, weight_decay=0.1)
        trainer.lr_scheduler = None

    def resuming(trainer: Any) -> None:
        trainer.lr_scheduler = None

    _save(tmp_path / "saved", saving)
    step = tmp_path / "saved" / "global_step_3"
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        _resume(step, tmp_path / "warn", resuming)[1].on_train_begin()
    assert [record for record in caplog.records if record.name.startswith("hyper_resume")] == []
    trainer, callback = _resume(step, tmp_path / "error", resuming, on_mismatch="error")
    before = live_snapshot(trainer)
    with pytest.raises(CheckpointMismatchError, match=r"no optimizer state of lm_head\.bias: it starts fresh"):
        callback.on_train_begin()
    assert live_snapshot(trainer) == before


def test_a_parameter_that_never_had_a_gradient_is_no_mismatch(tmp_path: Path) -> None:
    def freeze(trainer: Any) -> None:
        trainer.model.norm.bias.requires_grad_(False)

    _save(tmp_path / "saved", freeze)
    trainer, callback = _resume(tmp_path / "saved" / "global_step_3", tmp_path / "own", freeze, on_mismatch="error")
    callback.on_train_begin()
    assert trainer.state.global_step == 3
    assert len(trainer.optimizer.state) == len(list(trainer.model.parameters())) - 1


def test_an_exact_restore_is_welcome_with_error(tmp_path: Path) -> None:
    straight = train_custom_trainer(make_custom_trainer(tmp_path, save_steps=2, save_epochs=0), until_step=8)
    for step in (2, 4, 6):
        resumed = make_custom_trainer(
            tmp_path, save_ckpt=False, restore_from=str(tmp_path / f"global_step_{step}"), on_mismatch="error"
        )
        assert train_custom_trainer(resumed, until_step=8) == straight[step:]


def test_latest_in_an_empty_directory_starts_from_scratch_with_error_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_custom_trainer(tmp_path / "empty", restore_from="LATEST", on_mismatch="error")
    with caplog.at_level(logging.WARNING):
        CheckpointerCallback(trainer).on_train_begin()
    assert "training starts from scratch" in caplog.text
    assert trainer.state.global_step == 0


def test_what_is_not_asked_for_is_no_mismatch(tmp_path: Path) -> None:
    _save(tmp_path / "saved", _scaler)
    trainer, callback = _resume(
        tmp_path / "saved" / "global_step_3",
        tmp_path / "own",
        _two_optimizers,
        on_mismatch="error",
        restore_optimizer=False,
        restore_train_state=False,
    )
    callback.on_train_begin()
    assert trainer.state.global_step == 0


# ---- several ranks


def _other_world(folder: Path) -> tuple[str, bool]:
    """Every rank: tries to resume, strictly, what another number of ranks saved."""
    trainer, callback = _resume(folder / "global_step_3", folder / "own", _none, on_mismatch="error")
    before = live_snapshot(trainer)
    with pytest.raises(CheckpointMismatchError) as caught:
        callback.on_train_begin()
    return str(caught.value), live_snapshot(trainer) == before


def test_another_number_of_ranks_is_refused_with_error_on_every_rank(tmp_path: Path) -> None:
    _save(tmp_path, _none)
    results = run_ranks(_other_world, 2, tmp_path)
    assert [unchanged for _, unchanged in results] == [True, True]
    assert len({message for message, _ in results}) == 1
    assert "the number of ranks changed: random streams start from the seed" in results[0][0]


def _one_rank_differs(folder: Path) -> tuple[str, bool]:
    """Every rank: saves together, then only rank 1 has something that the checkpoint does not know."""
    _save(folder, _none)
    change = _scaler if dist.get_rank() == 1 else _none
    trainer, resuming = _resume(folder / "global_step_3", folder / "own", change, on_mismatch="error")
    before = live_snapshot(trainer)
    with pytest.raises(CheckpointMismatchError) as caught:
        resuming.on_train_begin()
    return str(caught.value), live_snapshot(trainer) == before


def test_a_mismatch_on_one_rank_is_refused_by_all_and_leaves_all_as_they_were(tmp_path: Path) -> None:
    results = run_ranks(_one_rank_differs, 2, tmp_path)
    assert [unchanged for _, unchanged in results] == [True, True]
    assert len({message for message, _ in results}) == 1
    assert "no state of scaler" in results[0][0]
    assert "[rank 1]" in results[0][0]
