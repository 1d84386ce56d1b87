"""The data, or its division over ranks and batches, is another one after the resume."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hyper_resume.data import DataLoader
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
from tests.trainer.tiny_training import Ids, make_trainer, records_of, run_config, train

HORIZON: dict[str, Any] = {"lr_scheduler": {"decay_steps": 40}}


def _save_at_step_13(folder: Path) -> None:
    """3 epochs of 10 batches of 2: step 13 is 3 batches into epoch 1."""
    train(run_config(folder, training={"num_train_epochs": 3}, data={"batch_size": 2}, save_steps=13, **HORIZON))


def test_another_batch_size_warns_and_replays_the_epoch_from_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _save_at_step_13(tmp_path)
    config = run_config(
        tmp_path,
        training={"num_train_epochs": 3, "max_steps": 23},
        data={"batch_size": 4},
        save_ckpt=False,
        restore_from=str(tmp_path / "global_step_13"),
        **HORIZON,
    )
    trainer = make_trainer(config)
    with caplog.at_level(logging.INFO):
        trainer.train()

    assert (trainer.start_epoch, trainer.start_step) == (1, 0)
    assert "batch_size saved 2, current 4" in caplog.text
    assert "global_step=13, start_epoch=1, start_step=0" in caplog.text
    records = records_of(trainer)
    assert [(record.global_step, record.epoch, record.batch_index) for record in records] == [
        (14 + i, 1 + i // 5, i % 5) for i in range(10)
    ]
    for epoch in (records[:5], records[5:]):
        assert sorted(i for record in epoch for i in record.sample_ids) == list(range(20))
    assert records[0].lrs[0] == pytest.approx(0.01 * _cosine(13), rel=1e-9), "the schedule goes on at step 13"


def _cosine(step: int) -> float:
    import math

    return 0.5 * (1 + math.cos(math.pi * (step - 2) / 38))


@pytest.mark.parametrize(("batch_size", "end"), [(4, 23), (1, 53)])
def test_epochs_of_another_length_warn_when_they_do_not_end_at_the_planned_step(
    tmp_path: Path, batch_size: int, end: int, caplog: pytest.LogCaptureFixture
) -> None:
    _save_at_step_13(tmp_path)
    config = run_config(
        tmp_path,
        training={"num_train_epochs": 3},
        data={"batch_size": batch_size},
        save_ckpt=False,
        restore_from=str(tmp_path / "global_step_13"),
    )
    trainer = make_trainer(config)
    planned = 3 * 20 // batch_size
    with caplog.at_level(logging.WARNING):
        if planned > end:
            with pytest.raises(RuntimeError, match=f"found: {end} steps after 3 epochs"):
                trainer.train()
        else:
            trainer.train()
    assert (
        f"3 epochs would end at step {end}, but this run and its lr schedule are planned for {planned} steps"
        in caplog.text
    )


def test_the_same_data_gives_no_warning_at_any_place_of_the_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(tmp_path, training={"num_train_epochs": 2, "gradient_accumulation_steps": 2}, save_steps=1)
    with caplog.at_level(logging.WARNING):
        train(config)
        for step in range(1, 9):
            train(
                run_config(
                    tmp_path,
                    training={"num_train_epochs": 2, "gradient_accumulation_steps": 2},
                    save_ckpt=False,
                    restore_from=str(tmp_path / f"global_step_{step}"),
                )
            )
    assert caplog.messages == []


def test_another_number_of_data_ranks_warns_and_replays_the_epoch_from_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(world: int, **checkpoint: Any) -> Any:
        trainer = make_custom_trainer(tmp_path, **checkpoint)
        trainer.train_dataloader = DataLoader(Ids(24), batch_size=2, seed=3, dp_rank=0, dp_world_size=world)
        return trainer

    train_custom_trainer(make(2), until_step=8)  # 6 batches an epoch: 2 batches into epoch 1
    resumed = make(4, restore_from="LATEST", save_ckpt=False)
    with caplog.at_level(logging.WARNING):
        records = train_custom_trainer(resumed, until_step=11)
    assert (resumed.start_epoch, resumed.start_step) == (1, 0)
    assert "dp_world_size saved 2, current 4" in caplog.text
    straight = train_custom_trainer(make(4, save_ckpt=False), until_step=6)
    assert [record.sample_ids for record in records] == [record.sample_ids for record in straight if record.epoch == 1]


def test_more_accumulation_after_the_resume_goes_on_with_the_next_unread_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight = train(run_config(tmp_path, save_steps=3, **HORIZON))
    config = run_config(
        tmp_path,
        training={"gradient_accumulation_steps": 2, "max_steps": 5},
        save_ckpt=False,
        restore_from=str(tmp_path / "global_step_3"),
        **HORIZON,
    )
    trainer = make_trainer(config)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    read = [i for record in records_of(trainer) for i in record.sample_ids]
    assert read == [i for record in straight[3:] for i in record.sample_ids]
    assert (trainer.start_epoch, trainer.start_step) == (0, 2)  # of 4 steps, the second half done
    assert "the data position is used" in caplog.text
