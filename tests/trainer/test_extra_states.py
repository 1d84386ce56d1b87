"""A module's extra state comes back whatever it is: a tensor that grows, bytes, or another type than that of a new module."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hyper_resume.errors import CheckpointMismatchError
from hyper_resume.state.certificate import Certificate, read_certificate
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer

SAVED, STEPS = 4, 8


class History(nn.Module):
    """Keeps the mean of each forward pass; the output depends on all of them."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner = inner
        self.kind = kind
        self.means: list[float] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(ids)
        self.means.append(float(output.detach().mean()))
        return output * (1 + sum(self.means) / (1 + len(self.means)))

    def get_extra_state(self) -> Any:
        means = torch.tensor(self.means, dtype=torch.float64)
        if self.kind == "bytes":
            return io.BytesIO(means.numpy().tobytes())
        if self.kind == "tensor, none at first":
            return means if self.means else None
        return means if self.kind == "tensor" else {"means": means, "length": len(self.means)}

    def set_extra_state(self, state: Any) -> None:
        if self.kind == "bytes":
            content = bytearray(state.read())
            means = torch.frombuffer(content, dtype=torch.float64) if content else torch.empty(0)
        else:
            means = state["means"] if isinstance(state, dict) else torch.empty(0) if state is None else state
        self.means = means.tolist()


def made(root: Path, kind: str, **checkpoint: Any) -> Any:
    trainer = make_custom_trainer(root, save_epochs=0, **{"on_mismatch": "error", **checkpoint})
    trainer.model = History(trainer.model, kind)
    return trainer


def certificate_of(root: Path) -> Certificate:
    (file,) = (root / "certificates").iterdir()
    return read_certificate(file)


KINDS = ["tensor", "tensor, none at first", "bytes", "dictionary"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_a_growing_extra_state_resumes_exactly(tmp_path: Path, kind: str) -> None:
    reference = [record.loss for record in train_custom_trainer(made(tmp_path / "whole", kind), STEPS)]
    train_custom_trainer(made(tmp_path / "saved", kind), SAVED)
    resumed = train_custom_trainer(made(tmp_path / "saved", kind, restore_from="LATEST"), STEPS)
    assert [record.loss for record in resumed] == reference[SAVED:]
    assert certificate_of(tmp_path / "saved").is_exact


@pytest.mark.parametrize("kind", KINDS)
def test_an_extra_state_that_is_not_set_is_refused(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train_custom_trainer(made(tmp_path, kind), SAVED)
    monkeypatch.setattr(History, "set_extra_state", lambda self, state: None)
    with pytest.raises(CheckpointMismatchError, match="model: "):
        CheckpointerCallback(made(tmp_path, kind, restore_from="LATEST")).on_train_begin()


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_failed_restore_the_extra_state_is_what_it_was(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_custom_trainer(made(tmp_path, kind), SAVED)
    trainer = made(tmp_path, kind, restore_from="LATEST")
    trainer.model.means = [0.5, 0.25]

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr("hyper_resume.trainer.restore.apply_schedulers", fail)
    with pytest.raises(ValueError, match="on purpose"):
        CheckpointerCallback(trainer).on_train_begin()
    assert trainer.model.means == [0.5, 0.25]
