"""A restore that fails, wherever it fails, on whichever rank, leaves every live object as it was."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim.lr_scheduler import LambdaLR

from hyper_resume.checkpoint.format import extra_state as extra
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.checkpoint.directories import forget_manifest
from tests.ranks import run_ranks
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
from tests.trainer.live_snapshot import live_snapshot
from tests.trainer.test_stateful_objects import Scaler
from tests.trainer.tiny_training import Net, seed_streams

pytestmark = pytest.mark.xdist_group("failed-restore")

STEP = 4


class CountingNet(Net):
    """Keeps a plain count beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def _make(folder: Path, **checkpoint: Any) -> Any:
    trainer = make_custom_trainer(folder, **checkpoint)
    seed_streams(7)
    trainer.model = CountingNet()
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.01)
    trainer.lr_scheduler = LambdaLR(trainer.optimizer, lambda step: 1 / (1 + step))
    trainer.scaler = Scaler()
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trainer = _make(folder, save_epochs=0)
    trainer.model.count, trainer.scaler.scale = 5, 8.0
    train_custom_trainer(trainer, until_step=STEP)
    return folder / f"global_step_{STEP}"


# ---- what can go wrong


class Refuses:
    """A loader, scheduler or scaler whose ``load_state_dict`` changes something and then fails."""

    def __init__(self, inner: Any) -> None:
        self.__dict__["inner"] = inner
        self.__dict__["is_refusing"] = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)
        if self.is_refusing:
            self.__dict__["is_refusing"] = False
            torch.rand(3)
            raise ZeroDivisionError("refused")


def _other_shape(trainer: Any) -> None:
    trainer.model.norm.weight = nn.Parameter(torch.ones(3))


def _missing_key(trainer: Any) -> None:
    trainer.model.extra = nn.Linear(2, 2)


def _groups_cut_anew(trainer: Any) -> None:
    parameters = list(trainer.model.parameters())
    trainer.optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.01)
    trainer.lr_scheduler = LambdaLR(trainer.optimizer, lambda step: 1 / (1 + step))


def _foreign_scheduler(trainer: Any) -> None:
    class Foreign:
        """Wants a field that no scheduler of torch has, and notices too late."""

        def __init__(self, optimizer: Any) -> None:
            self.optimizer, self.phase, self.moved = optimizer, "warm", 0

        def step(self) -> None:
            self.moved += 1

        def state_dict(self) -> dict[str, Any]:
            return {"phase": self.phase, "moved": self.moved}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.moved = int(state.get("last_epoch", state.get("moved", 0)))
            self.phase = state["phase"]

    trainer.lr_scheduler = Foreign(trainer.optimizer)


def _refusing(name: str) -> Callable[[Any], None]:
    def put(trainer: Any) -> None:
        setattr(trainer, name, Refuses(getattr(trainer, name)))

    return put


class ChokingNet(CountingNet):
    """Takes the count over and then fails, once."""

    is_refusing = True

    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state(state)
        if self.is_refusing:
            self.is_refusing = False
            raise ZeroDivisionError("refused")


def _choking_model(trainer: Any) -> None:
    trainer.model.__class__ = ChokingNet


FAILURES: dict[str, tuple[Callable[[Any], None], str]] = {
    "another-shape": (_other_shape, r"model\.norm\.weight does not fit"),
    "missing-key": (_missing_key, "missing model key"),
    "groups-cut-anew": (_groups_cut_anew, "does not fit its optimizer"),
    "foreign-scheduler": (_foreign_scheduler, "Foreign refuses the saved state"),
    "scheduler-that-fails": (_refusing("lr_scheduler"), "refused"),
    "loader-that-fails": (_refusing("train_dataloader"), "refused"),
    "stateful-that-fails": (_refusing("scaler"), "refused"),
    "model-that-fails": (_choking_model, "refused"),
}


def _damage_optimizer(step: Path, folder: Path) -> Path:
    """A copy of the checkpoint without ``exp_avg`` of one parameter; stock DCP writes it, so nothing but the state is wrong."""
    metadata = FileSystemReader(step).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.items()
        if not name.startswith("save_id.")
    }
    load(state, checkpoint_id=step)
    del state["optimizer.0.state.hidden.weight.exp_avg"]
    target = folder / step.name
    save(state, checkpoint_id=target)
    shutil.copytree(step / "extra_state", target / "extra_state")
    return target


def _damage_training_state(step: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the checkpoint without a manifest, whose training state was changed."""
    target = folder / step.name
    shutil.copytree(step, target)
    forget_manifest(target)
    path = extra.file_path(target, 0)
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)
    return target


def _fails(trainer: Any, message: str) -> None:
    seed_streams(99)
    callback = CheckpointerCallback(trainer)
    before = live_snapshot(trainer)
    with pytest.raises((RuntimeError, ZeroDivisionError, ValueError, TypeError, KeyError), match=message):
        callback.on_train_begin()
    assert live_snapshot(trainer) == before


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("optimizer", [True, False], ids=["with-optimizer", "without-optimizer"])
def test_what_does_not_fit_leaves_every_live_object_as_it_was(
    saved: Path, tmp_path: Path, failure: str, warm: bool, optimizer: bool
) -> None:
    change, message = FAILURES[failure]
    trainer = _make(tmp_path, restore_from=str(saved), restore_optimizer=optimizer)
    if warm:
        # An optimizer with state of its own, schedules and positions in the middle.
        trainer.model(torch.arange(4)).sum().backward()
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        next(iter(trainer.train_dataloader))
        trainer.state.global_step, trainer.state.epoch, trainer.scaler.scale, trainer.model.count = 1, 2, 2.0, 9
    change(trainer)
    _fails(trainer, message)
    assert not (tmp_path / "certificates").exists()


def test_incomplete_optimizer_state_leaves_every_live_object_as_it_was(saved: Path, tmp_path: Path) -> None:
    step = _damage_optimizer(saved, tmp_path)
    trainer = _make(tmp_path / "own", restore_from=str(step))
    _fails(trainer, r"optimizer state of hidden\.weight is incomplete")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["rng_state"].pop("numpy"), "rng_state lacks numpy"),
        (lambda state: state["rng_state"].update(torch_cpu=torch.zeros(3, dtype=torch.uint8)), "RNG state size"),
        (lambda state: state["rng_state"].update(python=(3, (1, 2), None)), "state vector"),
        (lambda state: state["train_dataloader"].pop("epoch"), "the saved data position can't be read"),
        (lambda state: state["train_dataloader"].update(batches_consumed=99), "past the epoch's end"),
        (lambda state: state["stateful"].update(scaler={}), "scale"),
    ],
    ids=["lost-stream", "short-stream", "wrong-stream", "lost-position", "impossible-position", "empty-scaler"],
)
def test_damaged_training_state_leaves_every_live_object_as_it_was(
    saved: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    step = _damage_training_state(saved, tmp_path, change)
    _fails(_make(tmp_path / "own", restore_from=str(step)), message)


def test_after_a_failed_restore_the_same_objects_train_as_if_nothing_had_been_tried(
    saved: Path, tmp_path: Path
) -> None:
    straight = train_custom_trainer(_make(tmp_path / "a", save_ckpt=False), until_step=4)
    trainer = _make(tmp_path / "b", save_ckpt=False)
    plain = trainer.config.checkpoint
    trainer.config.checkpoint = dataclasses.replace(plain, restore_from=str(saved))
    trainer.scaler = Refuses(trainer.scaler)
    with pytest.raises(ZeroDivisionError):
        CheckpointerCallback(trainer).on_train_begin()
    trainer.config.checkpoint = plain
    assert train_custom_trainer(trainer, until_step=4) == straight


# ---- several ranks


def _fails_on_one_rank(folder: Path, step: str) -> tuple[str, bool]:
    """Every rank: rank 1 can't take the scaler's state; nobody may keep anything."""
    trainer = _make(folder / "own", restore_from=step)
    if dist.get_rank() == 1:
        trainer.scaler = Refuses(trainer.scaler)
    seed_streams(99)
    callback = CheckpointerCallback(trainer)
    before = live_snapshot(trainer)
    with pytest.raises(Exception, match="refused") as caught:
        callback.on_train_begin()
    return str(caught.value), live_snapshot(trainer) == before


def _save_on_two(folder: Path) -> None:
    trainer = _make(folder, save_epochs=0)
    train_custom_trainer(trainer, until_step=2)


def test_a_failure_on_one_rank_leaves_all_ranks_as_they_were(tmp_path: Path) -> None:
    run_ranks(_save_on_two, 2, tmp_path)
    results = run_ranks(_fails_on_one_rank, 2, tmp_path, str(tmp_path / "global_step_2"))
    assert [unchanged for _, unchanged in results] == [True, True]
    assert all("[rank 1]" in message for message, _ in results)
