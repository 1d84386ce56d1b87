"""A run that saves, and one that resumes with something changed: what a certificate then says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_resume.state.certificate import BucketCertificate, read_certificate
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
from tests.trainer.tiny_training import Record

Change = Callable[[Any], None]


def unchanged(trainer: Any) -> None:
    pass


def trained(root: Path, until_step: int, change: Change = unchanged, **checkpoint: Any) -> list[Record]:
    trainer = make_custom_trainer(root, **{"save_steps": 2, "save_epochs": 0, **checkpoint})
    change(trainer)
    return train_custom_trainer(trainer, until_step)


def certified(root: Path, step: int) -> dict[str, BucketCertificate]:
    """The certificate of the newest restore of that step, by bucket."""
    newest = max((root / "certificates").glob(f"global_step_{step}.*"))
    return {part.bucket: part for part in read_certificate(newest).parts}


def verdicts(root: Path, step: int) -> set[str]:
    return {part.verdict for part in certified(root, step).values()} - {"absent"}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def with_options(**options: Any) -> Change:
    """The optimizer's options as another configuration gives them, with the same schedule."""

    def change(trainer: Any) -> None:
        schedule = trainer.lr_scheduler.lr_lambdas[0]
        trainer.optimizer = torch.optim.AdamW(
            trainer.model.parameters(), **{"lr": 0.01, "weight_decay": 0.1, **options}
        )
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, schedule)

    return change
