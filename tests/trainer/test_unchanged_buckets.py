"""A bucket that should have moved between two saves and did not is warned of by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_resume.trainer.callbacks import Callback, CheckpointerCallback
from tests.ranks import run_ranks
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
from tests.trainer.test_stateful_objects import ForeignLoader
from tests.trainer.tiny_training import MakeCallback, make_trainer, run_config, train

pytestmark = pytest.mark.xdist_group("liveness")


def _still(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "nothing in it changed in between" in message]


def _expected(bucket: str, step: int, last: int) -> str:
    return (
        f"the {bucket} bucket of global_step {step} has the same digest as that of global_step {last}: "
        "nothing in it changed in between"
    )


def _every_step(action: Any) -> MakeCallback:
    class EveryStep(Callback):
        def on_step_end(self, state: Any = None, **kwargs: Any) -> None:
            action(self.trainer)

    return EveryStep


def test_a_healthy_training_gives_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(run_config(tmp_path, training={"num_train_epochs": 2}, save_steps=1))
        train(run_config(tmp_path, training={"num_train_epochs": 3}, save_steps=1, restore_from="LATEST"))
    assert _still(caplog) == []


def test_weights_that_stand_still_are_named_with_both_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = run_config(tmp_path, training={"max_steps": 6}, save_steps=2)
    trainer = make_trainer(config)
    kept = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    put_back = _every_step(lambda trainer: trainer.model.load_state_dict(kept))
    trainer.callbacks.insert(0, put_back(trainer))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert _still(caplog) == [_expected("model", 4, 2), _expected("model", 6, 4)]


def test_an_optimizer_that_stands_still_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_custom_trainer(tmp_path, save_steps=2, save_epochs=0)
    trainer.lr_scheduler = None
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01, momentum=0.9)
    callback = CheckpointerCallback(trainer)
    callback.on_train_begin()
    trainer.model(torch.arange(3)).sum().backward()
    trainer.optimizer.step()
    iterator = iter(trainer.train_dataloader)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 5):
            next(iterator)
            with torch.no_grad():
                trainer.model.norm.bias.add_(1.0)
            trainer.state.global_step = step
            callback.on_step_end()
    assert _still(caplog) == [_expected("optimizer", 4, 2)]


def test_a_position_that_stands_still_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(ForeignLoader):
        def state_dict(self) -> dict[str, Any]:
            return {"taken": 1}

    config = run_config(tmp_path, training={"max_steps": 4}, save_steps=2)
    with caplog.at_level(logging.WARNING):
        train(config, loader=Stuck(batches=9))
    expected = "the state of Stuck is the same before and after 2 more batches: a resume would read them twice"
    assert [record.getMessage() for record in caplog.records if "Stuck" in record.getMessage()] == [expected]


def test_a_count_of_steps_that_stands_still_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # The step is saved as it was three steps before, by a wrong trainer of one's own.
    config = run_config(tmp_path, training={"max_steps": 4}, save_steps=2)
    trainer = make_trainer(config)
    callback = next(one for one in trainer.callbacks if isinstance(one, CheckpointerCallback))
    save = callback.checkpointer.save

    def save_with_an_old_count(path: str, state: dict[str, Any], **options: Any) -> None:
        state["extra_state"].update(global_step=1)
        save(path, state, **options)

    callback.checkpointer.save = save_with_an_old_count  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert _still(caplog) == [_expected("progress", 4, 2)]


# ---- what is rightly still


def test_weights_are_not_warned_of_while_every_learning_rate_is_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(tmp_path, training={"max_steps": 4}, save_steps=2, optimizer={"lr": 0.0})
    with caplog.at_level(logging.WARNING):
        train(config)
    assert _still(caplog) == []


def test_an_optimizer_without_state_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_custom_trainer(tmp_path, save_steps=1, save_epochs=0)
    trainer.lr_scheduler = []
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01)
    with caplog.at_level(logging.WARNING):
        train_custom_trainer(trainer, until_step=4)
    assert _still(caplog) == []


def test_a_foreign_position_that_is_the_same_after_every_epoch_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(tmp_path, training={"num_train_epochs": 3})
    with caplog.at_level(logging.WARNING):
        train(config, loader=ForeignLoader())
    assert _still(caplog) == []


def test_a_frozen_model_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_custom_trainer(tmp_path, save_steps=1, save_epochs=0)
    callback = CheckpointerCallback(trainer)
    callback.on_train_begin()
    trainer.model.requires_grad_(False)
    iterator = iter(trainer.train_dataloader)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            next(iterator)
            trainer.state.global_step = step
            callback.on_step_end()
    assert _still(caplog) == []


# ---- several ranks


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def _one_position_stands_still(folder: Path) -> list[str]:
    """Every rank: rank 1's loader reports the same position at every save."""

    class Stuck(ForeignLoader):
        def state_dict(self) -> dict[str, Any]:
            return {"taken": 1} if dist.get_rank() == 1 else super().state_dict()

    messages = _Messages()
    logging.getLogger("hyper_resume").addHandler(messages)
    train(run_config(folder, training={"max_steps": 4}, save_steps=2), loader=Stuck(batches=9))
    return [message for message in messages.found if "Stuck" in message]


def test_the_rank_concerned_warns_and_the_others_do_not(tmp_path: Path) -> None:
    expected = "the state of Stuck is the same before and after 2 more batches: a resume would read them twice"
    assert run_ranks(_one_position_stands_still, 2, tmp_path) == [[], [expected]]
