"""What a restore puts back is still there at the first batch, or the certificate says that it is not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torchdata.nodes
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hyper_resume.data import ResumableLoader
from hyper_resume.errors import CheckpointMismatchError
from hyper_resume.state.certificate import BucketCertificate, read_certificate
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
from tests.trainer.tiny_training import make_trainer, records_of, run_config, train

SAMPLES, BATCH_SIZE, EPOCHS = 11, 3, 2


class Rows(Dataset[torch.Tensor]):
    """Token ids; each is drawn in part from the stream of whoever reads it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor((index + int(torch.randint(3, ()))) % SAMPLES)


class Drawing:
    """An object whose ``state_dict`` draws."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        return {"drawn": float(torch.rand(()))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None


# ---- the trainer, with loaders that are not this package's


def _torch(**options: Any) -> Any:
    return DataLoader(Rows(), batch_size=BATCH_SIZE, shuffle=True, **options)


def _stateful(**options: Any) -> Any:
    return StatefulDataLoader(Rows(), batch_size=BATCH_SIZE, shuffle=True, **options)


@pytest.mark.parametrize("make", [_torch, _stateful], ids=["torch", "StatefulDataLoader"])
@pytest.mark.parametrize(("workers", "prefetch"), [(0, False), (2, False), (2, True)])
def test_the_trainer_resumes_torchs_loaders_bit_for_bit_at_every_step(
    tmp_path: Path, make: Any, workers: int, prefetch: bool
) -> None:
    options: dict[str, Any] = {
        "training": {"num_train_epochs": EPOCHS},
        "data": {"use_background_prefetcher": prefetch},
    }
    straight = train(run_config(tmp_path, save_steps=1, **options), loader=make(num_workers=workers))
    assert len(straight) == 8
    for step in range(1, 8):
        config = run_config(
            tmp_path,
            save_ckpt=False,
            restore_from=str(tmp_path / f"global_step_{step}"),
            on_mismatch="error",
            **options,
        )
        trainer = make_trainer(config, loader=make(num_workers=workers))
        torch.manual_seed(99)
        trainer.train()
        assert records_of(trainer) == straight[step:], f"resumed from step {step}"


def test_the_trainer_leaves_a_loader_alone_where_nothing_is_saved_or_restored(tmp_path: Path) -> None:
    loader = _torch()
    assert make_trainer(run_config(tmp_path, save_ckpt=False), loader=loader).train_dataloader is loader
    assert isinstance(make_trainer(run_config(tmp_path), loader=loader).train_dataloader, ResumableLoader)


# ---- a loop of one's own


def _with_loader(folder: Path, loader: Any, **checkpoint: Any) -> Any:
    trainer = make_custom_trainer(folder, save_steps=2, save_epochs=0, **checkpoint)
    trainer.train_dataloader = loader
    return trainer


def _rng_part(folder: Path) -> BucketCertificate:
    (path,) = (folder / "certificates").iterdir()
    (part,) = [part for part in read_certificate(path).parts if part.bucket == "rng_state"]
    return part


def _save_two_steps(folder: Path, loader: Any) -> None:
    trainer = _with_loader(folder, loader)
    checkpointer = CheckpointerCallback(trainer)
    checkpointer.on_train_begin()
    for batch in loader:
        trainer.model(batch).sum().backward()
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        trainer.state.global_step += 1
        checkpointer.on_step_end()
        if trainer.state.global_step == 2:
            break
    checkpointer.on_train_end()


@pytest.mark.parametrize("make", [_torch, _stateful], ids=["torch", "StatefulDataLoader"])
def test_a_loader_whose_iterator_moves_the_restored_stream_is_named_and_refused(tmp_path: Path, make: Any) -> None:
    _save_two_steps(tmp_path, make())
    CheckpointerCallback(_with_loader(tmp_path, make(), restore_from="LATEST")).on_train_begin()
    part = _rng_part(tmp_path)
    assert part.verdict == "degraded"
    assert "draws from the torch_cpu stream" in part.reason
    # The claim is true: the loop finds another stream than the one that was restored.
    restored = torch.get_rng_state()
    next(iter(make()))
    assert not torch.equal(restored, torch.get_rng_state())

    refused = _with_loader(tmp_path, make(), restore_from="LATEST", on_mismatch="error")
    with pytest.raises(CheckpointMismatchError, match="ResumableLoader"):
        CheckpointerCallback(refused).on_train_begin()
    assert refused.state.global_step == 0


def test_a_loader_with_a_generator_of_its_own_moves_no_global_stream(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(list(range(SAMPLES)), batch_size=BATCH_SIZE, shuffle=True, generator=torch.Generator())

    _save_two_steps(tmp_path, make())
    CheckpointerCallback(_with_loader(tmp_path, make(), restore_from="LATEST")).on_train_begin()
    part = _rng_part(tmp_path)
    assert part.verdict == "exact"
    restored = torch.get_rng_state()
    next(iter(make()))
    assert torch.equal(restored, torch.get_rng_state())


def test_a_restore_does_not_ask_a_foreign_loader_for_its_state(tmp_path: Path) -> None:
    def make() -> Any:
        node = torchdata.nodes.Batcher(torchdata.nodes.IterableWrapper(range(SAMPLES)), batch_size=BATCH_SIZE)
        return torchdata.nodes.Loader(torchdata.nodes.Mapper(node, torch.tensor))

    _save_two_steps(tmp_path, make())
    loader = make()
    CheckpointerCallback(_with_loader(tmp_path, loader, restore_from="LATEST")).on_train_begin()
    # Asked before it is loaded, this loader begins again with sample 0.
    assert next(iter(loader)).tolist() == [6, 7, 8]


# ---- saves move no stream


@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
def test_a_state_dict_that_draws_moves_no_stream_of_the_training(tmp_path: Path, save_async: bool) -> None:
    def run(folder: Path, **checkpoint: Any) -> tuple[Any, list[Any]]:
        trainer = make_custom_trainer(folder, save_epochs=0, **checkpoint)
        trainer.drawing = Drawing()
        return trainer, train_custom_trainer(trainer, until_step=7)

    _, plain = run(tmp_path / "plain", save_ckpt=False)
    saving, records = run(tmp_path / "saving", save_steps=2, is_async=save_async)
    assert saving.drawing.calls >= 4
    assert records == plain
    _, resumed = run(tmp_path / "saving", save_ckpt=False, restore_from=str(tmp_path / "saving" / "global_step_4"))
    assert resumed == plain[4:]


def test_a_state_dict_that_draws_does_not_make_the_restored_streams_inexact(tmp_path: Path) -> None:
    class DrawsAndKeepsNothing(Drawing):
        def state_dict(self) -> dict[str, Any]:
            return {"kept": 0 * float(torch.rand(()))}

    for until_step, more in ((4, {}), (6, {"restore_from": "LATEST", "on_mismatch": "error"})):
        trainer = make_custom_trainer(tmp_path, **{"save_steps": 2, "save_epochs": 0, **more})
        trainer.drawing = DrawsAndKeepsNothing()
        train_custom_trainer(trainer, until_step)
    assert _rng_part(tmp_path).verdict == "exact"


# ---- the order of the user's calls


def _loop(trainer: Any, steps: int, *, schedule_first: bool, per_epoch: bool = False) -> None:
    checkpointer = CheckpointerCallback(trainer)
    checkpointer.on_train_begin()
    for step in range(1, steps + 1):
        trainer.model(torch.tensor([step])).sum().backward()
        trainer.optimizer.step()
        if schedule_first and not per_epoch:
            trainer.lr_scheduler.step()
        trainer.state.global_step += 1
        checkpointer.on_step_end()
        if not schedule_first or (per_epoch and step % 3 == 0):
            trainer.lr_scheduler.step()


def test_a_schedule_that_is_stepped_behind_the_save_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _loop(make_custom_trainer(tmp_path, save_steps=2, save_epochs=0), 4, schedule_first=False)
    assert caplog.text.count("stepped after on_step_end, which had saved global_step 2:") == 1
    resumed = make_custom_trainer(tmp_path, restore_from="LATEST", on_mismatch="error")
    with pytest.raises(CheckpointMismatchError, match=r"lr_scheduler: .*stepped after on_step_end"):
        CheckpointerCallback(resumed).on_train_begin()


@pytest.mark.parametrize("per_epoch", [False, True])
def test_a_schedule_in_order_or_of_another_rhythm_is_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, per_epoch: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        _loop(make_custom_trainer(tmp_path, save_steps=2, save_epochs=0), 6, schedule_first=True, per_epoch=per_epoch)
    assert "stepped after on_step_end" not in caplog.text
