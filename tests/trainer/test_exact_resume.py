"""Cut at every step, resumed by fresh objects: the rest of the run equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer.tiny_training import (
    Ids,
    NoisyIds,
    Record,
    StoppedOnPurpose,
    assert_everything_varies,
    make_trainer,
    records_of,
    run_config,
    saved_steps,
    stop_after,
    train,
)

EPOCHS = 3
SAMPLES = 8  # 3 batches an epoch: of 3, 3 and 2


def assert_every_step_resumes_exactly(folder: Path, steps: range | None = None, **options: Any) -> list[Record]:
    """Save after every step of one run, resume from each of them, and hold each tail against a run that saved nothing.

    Args:
        folder: for the checkpoints.
        steps: which checkpoints to resume from; default all.
        options: ``dataset`` and blocks of the configuration.
    """
    dataset = options.pop("dataset", Ids(SAMPLES))
    training = {"num_train_epochs": EPOCHS, **options.pop("training", {})}
    straight = train(run_config(folder, training=training, **{**options, "save_ckpt": False}), dataset=dataset)
    saving = run_config(folder, training=training, save_steps=1, **options)
    assert train(saving, dataset=dataset) == straight
    assert saved_steps(folder) == list(range(1, len(straight) + 1))
    for step in steps or range(1, len(straight) + 1):
        config = run_config(
            folder,
            training=training,
            **{**options, "save_ckpt": False, "restore_from": str(folder / f"global_step_{step}")},
        )
        assert train(config, dataset=dataset) == straight[step:], f"resumed from step {step}"
    return straight


@pytest.mark.parametrize(
    ("accumulation", "per_epoch", "batches_of_steps"),
    [(1, 3, [0, 1, 2]), (2, 2, [1, 2])],
    ids=["single", "accumulation-2"],
)
def test_with_adamw_and_cosine(tmp_path: Path, accumulation: int, per_epoch: int, batches_of_steps: list[int]) -> None:
    straight = assert_every_step_resumes_exactly(
        tmp_path, training={"gradient_accumulation_steps": accumulation}, lr_scheduler={"name": "cosine"}
    )
    assert [record.batch_index for record in straight] == batches_of_steps * EPOCHS
    assert [record.epoch for record in straight] == [epoch for epoch in range(EPOCHS) for _ in range(per_epoch)]
    for epoch in range(EPOCHS):
        read = [i for record in straight[epoch * per_epoch : (epoch + 1) * per_epoch] for i in record.sample_ids]
        assert sorted(read) == list(range(SAMPLES)), "every sample once an epoch"
    assert_everything_varies(straight, at_least=len(straight) - 1)


def test_with_a_muon_chain_linear_decay_and_embedded_training_state(tmp_path: Path) -> None:
    straight = assert_every_step_resumes_exactly(
        tmp_path, optimizer={"name": "muon"}, lr_scheduler={"name": "linear"}, save_extra_state_per_rank=False
    )
    assert len(straight[0].lrs) == 3  # Muon's group; AdamW's with and without decay


def test_with_onecycle_and_accumulation_of_4(tmp_path: Path) -> None:
    straight = assert_every_step_resumes_exactly(
        tmp_path, dataset=Ids(14), lr_scheduler={"name": "onecycle"}, training={"gradient_accumulation_steps": 4}
    )
    assert [len(record.sample_ids) for record in straight] == [12, 2] * EPOCHS


def test_with_the_background_prefetcher_and_async_saves(tmp_path: Path) -> None:
    assert_every_step_resumes_exactly(
        tmp_path,
        data={"use_background_prefetcher": True, "prefetch_batches": 3},
        is_async=True,
        training={"gradient_accumulation_steps": 2},
    )


def test_with_worker_processes_and_noise_drawn_in_them(tmp_path: Path) -> None:
    assert_every_step_resumes_exactly(
        tmp_path, range(2, 5), data={"num_workers": 2}, dataset=NoisyIds(SAMPLES), training={"num_train_epochs": 2}
    )


def test_with_a_dataset_that_draws_noise_from_the_trainings_own_streams(tmp_path: Path) -> None:
    assert_every_step_resumes_exactly(tmp_path, dataset=NoisyIds(SAMPLES))


def test_with_bf16_autocast_and_no_clipping(tmp_path: Path) -> None:
    assert_every_step_resumes_exactly(
        tmp_path,
        training={"bf16": True, "max_grad_norm": None, "num_train_epochs": 2},
        lr_scheduler={"name": "constant"},
    )


def test_a_checkpoint_at_an_epochs_end_with_accumulation_that_does_not_divide_it(tmp_path: Path) -> None:
    # No window of micro-batches may cross an epoch's end: its gradients would be lost with the checkpoint.
    training = {"num_train_epochs": EPOCHS, "gradient_accumulation_steps": 4}
    straight = train(run_config(tmp_path, training=training, save_ckpt=False), dataset=Ids(30))
    assert [len(record.sample_ids) for record in straight] == [12, 12, 6] * EPOCHS
    config = run_config(tmp_path, training=training, save_epochs=1, restore_from="LATEST")
    _stopped(config, stop_after(4), dataset=Ids(30))
    assert saved_steps(tmp_path) == [3]
    assert train(config, dataset=Ids(30)) == straight[3:]
    assert saved_steps(tmp_path) == [3, 6, 9]


def test_a_short_last_window_of_an_epoch_is_a_mean_like_any_other(tmp_path: Path) -> None:
    def loss_of_one(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = 1 + 0 * model(ids).sum()
        return loss

    config = run_config(tmp_path, training={"gradient_accumulation_steps": 2}, save_ckpt=False)
    records = train(config, dataset=Ids(SAMPLES), loss_function=loss_of_one)
    assert [(len(record.sample_ids), record.loss) for record in records] == [(6, 1.0), (2, 1.0)]


# ---- real interruptions


def _stopped(config: Any, *callbacks: Any, **parts: Any) -> list[Record]:
    trainer = make_trainer(config, callbacks=callbacks, **parts)
    with pytest.raises(StoppedOnPurpose):
        trainer.train()
    return records_of(trainer)


@pytest.mark.parametrize(
    ("stops", "save_steps", "prefetch"),
    [
        ([6, 7, 8, 9], 1, False),  # around the end of the first epoch of 7
        ([9, 10, 11, 12], 1, True),  # four times within one epoch
        ([8, 9], 7, True),  # twice from an epoch's last step
        ([2, 3, 6, 9, 11], 2, False),
    ],
    ids=["across", "within", "epoch-end", "every-other"],
)
def test_a_run_stopped_again_and_again_equals_the_uninterrupted_one(
    tmp_path: Path, stops: list[int], save_steps: int, prefetch: bool
) -> None:
    options: dict[str, Any] = {
        "training": {"num_train_epochs": 2},
        "data": {"use_background_prefetcher": prefetch},
    }
    straight = train(run_config(tmp_path / "none", save_ckpt=False, **options))
    config = run_config(tmp_path, save_steps=save_steps, save_epochs=0, restore_from="LATEST", **options)
    # The stop comes before the step's save, so that each leg redoes what came after the last multiple.
    for stop in stops:
        leg = _stopped(config, stop_after(stop))
        first = leg[0].global_step
        assert (first - 1) % save_steps == 0
        assert leg == straight[first - 1 : stop]
    tail = train(config)
    assert len(tail) == len(straight) - (stops[-1] - 1) // save_steps * save_steps
    assert tail == straight[-len(tail) :]


@pytest.mark.parametrize("max_steps", [2, 3, 4])
def test_a_run_ended_by_max_steps_goes_on_exactly_under_the_same_schedule(tmp_path: Path, max_steps: int) -> None:
    options: dict[str, Any] = {"lr_scheduler": {"decay_steps": 9, "warmup_steps": 3}}
    training = {"num_train_epochs": EPOCHS}
    straight = train(run_config(tmp_path, training=training, save_ckpt=False, **options), dataset=Ids(SAMPLES))
    first = train(run_config(tmp_path, training={**training, "max_steps": max_steps}, **options), dataset=Ids(SAMPLES))
    assert first == straight[:max_steps]
    second = train(run_config(tmp_path, training=training, restore_from="LATEST", **options), dataset=Ids(SAMPLES))
    assert second == straight[max_steps:]


def test_a_stopped_training_leaves_the_loader_behind_the_last_trained_batch_and_no_thread(tmp_path: Path) -> None:
    data = {"use_background_prefetcher": True, "prefetch_batches": 3}
    trainer = make_trainer(run_config(tmp_path, data=data, save_ckpt=False), callbacks=[stop_after(3)])
    with pytest.raises(StoppedOnPurpose):
        trainer.train()
    assert trainer.train_dataloader.batches_consumed == 3
    assert [thread.name for thread in threading.enumerate() if "prefetch" in thread.name] == []
