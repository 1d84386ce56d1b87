"""The policy, driven by a plain namespace: six buckets out and in again, exactly."""

from __future__ import annotations

import dataclasses
import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hyper_resume.config import CheckpointingConfig
from hyper_resume.errors import ConfigError, UnsupportedError
from hyper_resume.optim import ChainedOptimizer
from hyper_resume.trainer.callbacks import CheckpointerCallback, TrainerState
from tests.trainer.custom_trainer import (
    make_custom_trainer,
    plain_optimizers,
    saved_entries,
    saved_extra_state,
    train_custom_trainer,
)
from tests.trainer.tiny_training import assert_everything_varies, live_state, saved_steps, seed_streams

pytestmark = pytest.mark.xdist_group("duck")


# ---- exact continuation


@pytest.mark.parametrize("per_rank", [True, False], ids=["per-rank-files", "embedded"])
@pytest.mark.parametrize(("optimizers", "as_lists"), [(1, False), (1, True), (2, True)])
def test_a_namespace_trainer_continues_bit_for_bit(
    tmp_path: Path, per_rank: bool, optimizers: int, as_lists: bool
) -> None:
    options: dict[str, Any] = {"optimizers": optimizers, "as_lists": as_lists, "save_extra_state_per_rank": per_rank}
    straight = train_custom_trainer(make_custom_trainer(tmp_path / "never", save_ckpt=False, **options), until_step=12)
    train_custom_trainer(make_custom_trainer(tmp_path / "cut", save_steps=5, save_epochs=0, **options), until_step=6)
    assert saved_steps(tmp_path / "cut") == [5, 6]

    resumed = make_custom_trainer(tmp_path / "cut", restore_from=str(tmp_path / "cut" / "global_step_5"), **options)
    seed_streams(99)
    records = train_custom_trainer(resumed, until_step=12)

    assert records == straight[5:]
    assert [record.global_step for record in records] == list(range(6, 13))
    assert_everything_varies(straight, at_least=12)


def test_saving_changes_nothing_in_the_run_that_saves(tmp_path: Path) -> None:
    without = train_custom_trainer(make_custom_trainer(tmp_path / "none", save_ckpt=False), until_step=7)
    assert train_custom_trainer(make_custom_trainer(tmp_path / "saves", save_steps=1), until_step=7) == without


def test_one_optimizer_may_come_back_as_a_list_of_one(tmp_path: Path, five_steps: Path) -> None:
    straight = train_custom_trainer(make_custom_trainer(tmp_path, save_ckpt=False), until_step=8)
    resumed = make_custom_trainer(five_steps, as_lists=True, restore_from="LATEST", save_ckpt=False)
    assert train_custom_trainer(resumed, until_step=8) == straight[5:]


def test_a_chained_optimizer_continues_bit_for_bit(tmp_path: Path) -> None:
    def make(**checkpoint: Any) -> Any:
        trainer = make_custom_trainer(tmp_path / "cut", optimizers=2, **checkpoint)
        trainer.optimizer = ChainedOptimizer(trainer.optimizer)
        return trainer

    straight = train_custom_trainer(make(save_ckpt=False), until_step=9)
    train_custom_trainer(make(), until_step=4)
    assert train_custom_trainer(make(restore_from="LATEST", save_ckpt=False), until_step=9) == straight[4:]


def test_any_object_with_chained_optimizers_continues_bit_for_bit(tmp_path: Path) -> None:
    class Foreign:
        """Has neither state nor param_groups nor a state_dict of its own."""

        def __init__(self, members: list[torch.optim.Optimizer]) -> None:
            self.chained_optimizers = members

        def step(self) -> None:
            for member in self.chained_optimizers:
                member.step()

        def zero_grad(self) -> None:
            for member in self.chained_optimizers:
                member.zero_grad()

    def make(**checkpoint: Any) -> Any:
        trainer = make_custom_trainer(tmp_path / "cut", optimizers=2, **checkpoint)
        trainer.optimizer = Foreign(trainer.optimizer)
        return trainer

    straight = train_custom_trainer(make(save_ckpt=False), until_step=7)
    train_custom_trainer(make(), until_step=4)
    assert train_custom_trainer(make(restore_from="LATEST", save_ckpt=False), until_step=7) == straight[4:]


def test_an_unknown_optimizer_wrapper_is_refused_when_the_callback_is_made(tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path)
    trainer.optimizer = SimpleNamespace(step=lambda: None)
    with pytest.raises(UnsupportedError, match=r"unknown optimizer wrapper .*SimpleNamespace.*chained_optimizers"):
        CheckpointerCallback(trainer)


def test_an_unknown_optimizer_wrapper_is_welcome_where_its_state_is_neither_saved_nor_restored(tmp_path: Path) -> None:
    def make(**checkpoint: Any) -> Any:
        trainer = make_custom_trainer(tmp_path, save_optimizer=False, restore_optimizer=False, **checkpoint)
        trainer.optimizer = SimpleNamespace(step=trainer.optimizer.step, zero_grad=trainer.optimizer.zero_grad)
        return trainer

    saving = make()
    callback = CheckpointerCallback(saving)
    callback.on_train_begin()
    saving.state.global_step = 3
    callback.on_train_end()
    assert {name.split(".")[0] for name in saved_entries(tmp_path / "global_step_3")} == {"model"}
    resumed = make(restore_from="LATEST")
    CheckpointerCallback(resumed).on_train_begin()
    assert resumed.state.global_step == 3


# ---- the six buckets, one by one


def test_all_six_buckets_come_back_into_fresh_objects(tmp_path: Path) -> None:
    saved = make_custom_trainer(tmp_path, save_epochs=0)
    train_custom_trainer(saved, until_step=8)
    before = live_state(saved.model, plain_optimizers(saved))
    moments = [dict(state) for state in saved.optimizer.state.values()]
    assert all(bool(state["exp_avg"].any()) for state in moments)

    fresh = make_custom_trainer(tmp_path, restore_from="LATEST")
    seed_streams(99)
    CheckpointerCallback(fresh).on_train_begin()

    assert live_state(fresh.model, plain_optimizers(fresh)) == before
    assert (fresh.state.global_step, fresh.state.epoch) == (8, 1)
    assert (fresh.start_epoch, fresh.start_step) == (1, 3)
    assert fresh.lr_scheduler.state_dict() == saved.lr_scheduler.state_dict()
    assert fresh.lr_scheduler.last_epoch == 8
    assert fresh.optimizer.param_groups[0]["lr"] == 0.01 / 9
    assert (fresh.train_dataloader.epoch, fresh.train_dataloader.batches_consumed) == (1, 3)


def _draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_the_next_draw_of_every_stream_is_the_one_that_would_have_come(tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path)
    train_custom_trainer(trainer, until_step=2)
    expected = _draw()
    seed_streams(99)
    assert _draw() != expected
    CheckpointerCallback(make_custom_trainer(tmp_path, restore_from="LATEST")).on_train_begin()
    assert _draw() == expected


FLAGS = [
    ({}, True, True),
    ({"save_optimizer": False}, False, True),
    ({"save_train_state": False}, True, False),
    ({"save_optimizer": False, "save_train_state": False}, False, False),
]


@pytest.mark.parametrize("per_rank", [True, False], ids=["per-rank-files", "embedded"])
@pytest.mark.parametrize(("flags", "optimizer", "train_state"), FLAGS)
def test_the_save_flags_decide_exactly_which_buckets_are_on_disk(
    tmp_path: Path, flags: dict[str, bool], optimizer: bool, train_state: bool, per_rank: bool
) -> None:
    train_custom_trainer(make_custom_trainer(tmp_path, save_extra_state_per_rank=per_rank, **flags), until_step=1)

    step = tmp_path / "global_step_1"
    buckets = {name.split(".")[0] for name in saved_entries(step)}
    embedded = train_state and not per_rank
    assert buckets == {"model"} | ({"optimizer"} if optimizer else set()) | ({"extra_state"} if embedded else set())
    files = sorted(str(path.relative_to(step)) for path in step.rglob("*") if path.is_file() and path.suffix == ".pt")
    assert files == (["extra_state/extra_state_rank_0.pt"] if train_state and per_rank else [])
    if files:
        state = saved_extra_state(step)
        assert set(state) >= {"global_step", "epoch", "lr_scheduler", "train_dataloader", "rng_state"}
        assert set(state["rng_state"]) == {"torch_cpu", "torch_device", "python", "numpy"}
        assert state["rng_state"]["torch_device"] is None


def test_restore_optimizer_false_leaves_the_optimizer_fresh(five_steps: Path) -> None:
    trainer = make_custom_trainer(five_steps, restore_from="LATEST", restore_optimizer=False)
    CheckpointerCallback(trainer).on_train_begin()
    assert len(trainer.optimizer.state) == 0
    assert trainer.state.global_step == 5
    assert trainer.lr_scheduler.last_epoch == 5


def test_restore_train_state_false_reads_weights_and_moments_only(five_steps: Path, tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path, restore_from=str(five_steps / "global_step_5"), restore_train_state=False)
    seed_streams(99)
    before = live_state(trainer.model)
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    callback = CheckpointerCallback(trainer)
    callback.on_train_begin()

    assert any(not torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    assert len(trainer.optimizer.state) == len(list(trainer.model.parameters()))
    assert (trainer.state.global_step, trainer.start_epoch, trainer.start_step) == (0, 0, 0)
    assert trainer.lr_scheduler.last_epoch == 0
    assert (trainer.train_dataloader.epoch, trainer.train_dataloader.batches_consumed) == (0, 0)
    assert dataclasses.replace(live_state(trainer.model), model="") == dataclasses.replace(before, model="")
    # A new count of steps: its step 5 is another one than the step 5 that was read.
    trainer.state.global_step = 5
    callback.on_train_end()
    assert saved_steps(tmp_path) == [5]


def test_a_run_that_saves_no_training_state_can_still_restore_one(five_steps: Path, tmp_path: Path) -> None:
    straight = train_custom_trainer(make_custom_trainer(tmp_path, save_ckpt=False), until_step=7)
    resumed = make_custom_trainer(
        tmp_path,
        restore_from=str(five_steps / "global_step_5"),
        save_train_state=False,
        save_optimizer=False,
        save_extra_state_per_rank=False,
    )
    assert train_custom_trainer(resumed, until_step=7) == straight[5:]
    assert {name.split(".")[0] for name in saved_entries(tmp_path / "global_step_7")} == {"model"}


# ---- counts that do not match


def test_a_checkpoint_of_two_optimizers_gives_the_first_ones_moments_to_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two = make_custom_trainer(tmp_path, optimizers=2)
    train_custom_trainer(two, until_step=3)
    one = make_custom_trainer(tmp_path, restore_from="LATEST")
    with caplog.at_level(logging.WARNING):
        CheckpointerCallback(one).on_train_begin()

    names = {id(p): name for name, p in one.model.named_parameters()}
    restored = {names[id(p)]: state for p, state in one.optimizer.state.items()}
    live = dict(two.model.named_parameters())
    firsts = [name for name, p in live.items() if any(p is q for q in two.optimizer[0].param_groups[0]["params"])]
    assert sorted(restored) == sorted(firsts) == ["embed_tokens.weight", "hidden.weight"]
    for name, state in restored.items():
        expected = two.optimizer[0].state[live[name]]
        assert torch.equal(state["exp_avg"], expected["exp_avg"])
        assert torch.equal(state["exp_avg_sq"], expected["exp_avg_sq"])
        assert float(state["step"]) == 3
    assert one.lr_scheduler.last_epoch == 3
    assert "the checkpoint holds 2 optimizers and this run has 1" in caplog.text
    assert "the checkpoint holds 2 lr schedulers and this run has 1" in caplog.text


def test_a_checkpoint_of_one_optimizer_gives_its_moments_to_the_first_of_two(
    five_steps: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two = make_custom_trainer(five_steps, optimizers=2, restore_from="LATEST")
    with caplog.at_level(logging.WARNING):
        CheckpointerCallback(two).on_train_begin()

    reference = make_custom_trainer(five_steps, restore_from="LATEST")
    CheckpointerCallback(reference).on_train_begin()
    expected = list(reference.optimizer.state.values())[:2]
    first, second = two.optimizer
    assert [float(state["step"]) for state in first.state.values()] == [5, 5]
    for state, wanted in zip(first.state.values(), expected, strict=True):
        assert torch.equal(state["exp_avg"], wanted["exp_avg"])
    assert len(second.state) == 0
    assert [scheduler.last_epoch for scheduler in two.lr_scheduler] == [5, 0]
    assert "the checkpoint holds 1 optimizers and this run has 2" in caplog.text
    assert (
        "optimizer state of parameters that this optimizer does not have is not restored: hidden.bias, " in caplog.text
    )


# ---- defaults, reserved fields


def test_a_reserved_field_that_is_set_warns_by_name_and_the_others_do_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        CheckpointerCallback(
            make_custom_trainer(tmp_path, staging_dir="/elsewhere", save_consolidated="every")
        ).on_train_begin()
    warned = [message for message in caplog.messages if "no effect yet" in message]
    assert len(warned) == 2
    assert {message.split()[0] for message in warned} == {"checkpoint.staging_dir", "checkpoint.save_consolidated"}

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        CheckpointerCallback(make_custom_trainer(tmp_path)).on_train_begin()
    assert caplog.messages == []


def test_without_a_checkpoint_block_every_epoch_is_saved_and_nothing_restored() -> None:
    defaults = CheckpointingConfig()
    assert (defaults.save_ckpt, defaults.save_steps, defaults.save_epochs, defaults.restore_from) == (True, 0, 1, None)
    assert (defaults.checkpoint_dir, defaults.is_async, defaults.is_peft) == ("./checkpoints", False, False)
    assert (defaults.save_optimizer, defaults.save_train_state, defaults.save_extra_state_per_rank) == (
        True,
        True,
        True,
    )
    assert (defaults.restore_optimizer, defaults.restore_train_state) == (True, True)


def test_the_hooks_work_without_the_state_argument(tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path, save_steps=2)
    callback = CheckpointerCallback(trainer)
    callback.on_train_begin()
    trainer.state = TrainerState(global_step=2)
    callback.on_step_end()
    callback.on_epoch_end()
    callback.on_train_end()
    assert saved_steps(tmp_path) == [2]


def test_a_trainer_that_lacks_attributes_is_refused_at_construction_with_all_of_them(tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path)
    del trainer.state, trainer.lr_scheduler, trainer.start_step
    with pytest.raises(ConfigError, match=r"found: no lr_scheduler, state\.global_step, state\.epoch, start_step;"):
        CheckpointerCallback(trainer)
    with pytest.raises(ConfigError, match=r"found: no config\.checkpoint, model, optimizer, .*start_step;"):
        CheckpointerCallback(object())


def test_a_trainer_whose_lr_scheduler_is_none_lacks_nothing(tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path)
    trainer.lr_scheduler = None
    assert CheckpointerCallback(trainer).last_saved is None


def test_the_configuration_line_is_short_and_shows_what_is_not_the_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        CheckpointerCallback(
            make_custom_trainer(Path("runs"), save_steps=7, is_async=True, save_ckpt=False)
        ).on_train_begin()
    (line,) = [message for message in caplog.messages if message.startswith("Checkpoint config: ")]
    assert line == (
        "Checkpoint config: save_ckpt=False, checkpoint_dir='runs', save_steps=7, save_epochs=1, is_async=True, "
        "restore_from=None"
    )


@pytest.mark.parametrize("is_async", [False, True])
def test_the_last_saved_directory_is_that_of_the_last_durable_save_or_of_the_restore(
    tmp_path: Path, is_async: bool
) -> None:
    trainer = make_custom_trainer(tmp_path, save_epochs=0, is_async=is_async)
    callback = CheckpointerCallback(trainer)
    callback.on_train_begin()
    assert callback.last_saved is None
    trainer.state.global_step = 3
    callback.on_train_end()
    assert callback.last_saved == str(tmp_path / "global_step_3")
    again = CheckpointerCallback(make_custom_trainer(tmp_path, restore_from="LATEST"))
    again.on_train_begin()
    assert again.last_saved == str(tmp_path / "global_step_3")
