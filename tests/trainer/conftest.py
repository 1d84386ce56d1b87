"""Checkpoints that several tests read and none changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
from tests.trainer.tiny_training import saved_steps


@pytest.fixture(scope="session")
def five_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory with step 5 of one optimizer and one scheduler, saved at the end of a training."""
    folder = tmp_path_factory.mktemp("five")
    train_custom_trainer(make_custom_trainer(folder, save_epochs=0), until_step=5)
    assert saved_steps(folder) == [5]
    return folder
