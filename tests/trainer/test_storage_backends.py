"""A storage backend that only saves and loads resumes a training bit for bit, chosen by ``checkpoint.manager`` alone."""

from __future__ import annotations

import copy
import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from hyper_resume.checkpoint import CHECKPOINTER_REGISTRY, CheckpointerBase
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError, ConfigError
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.ranks import run_ranks
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
from tests.trainer.tiny_training import (
    Record,
    StoppedOnPurpose,
    assert_everything_varies,
    make_trainer,
    records_of,
    run_config,
    seed_streams,
    stop_after,
)

pytestmark = pytest.mark.xdist_group("duck")


TRAINING = {"num_train_epochs": 2, "max_steps": 11}


class ReturnsThePayload(CheckpointerBase):
    """Keeps what it is given, and returns it."""

    saved: ClassVar[dict[str, Any]] = {}

    def save(self, path: str, state: Any, *, global_step: int, save_async: bool = False) -> None:
        self.saved[path] = copy.deepcopy(state)

    def load(self, path: str, state: Any, *, strict_model: bool = True, extra_state_skeleton: Any = None) -> Any:
        return self.saved[path]


class FillsInPlace(ReturnsThePayload):
    """Fills the tensors that it is given, and returns the training state."""

    def load(self, path: str, state: Any, *, strict_model: bool = True, extra_state_skeleton: Any = None) -> Any:
        found = self.saved[path]
        for bucket in state:
            _fill(state[bucket], found[bucket])
        return {} if extra_state_skeleton is None else found["extra_state"]


class ReadsNothing(ReturnsThePayload):
    """Returns the training state, and forgets the tensors."""

    def load(self, path: str, state: Any, *, strict_model: bool = True, extra_state_skeleton: Any = None) -> Any:
        return self.saved[path]["extra_state"]


class OneFilePerRank(CheckpointerBase):
    """Writes a pickle for each rank."""

    def __init__(self, async_mode: str = "thread") -> None:
        self.async_mode = async_mode

    def save(self, path: str, state: Any, *, global_step: int, save_async: bool = False) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(state, self._file(path))

    def load(self, path: str, state: Any, *, strict_model: bool = True, extra_state_skeleton: Any = None) -> Any:
        return torch.load(self._file(path), weights_only=False)

    def _file(self, path: str) -> Path:
        return Path(path, f"rank_{dist.get_rank() if dist.is_initialized() else 0}.pt")


def _fill(own: dict[str, Any], found: dict[str, Any]) -> None:
    for key, value in found.items():
        if isinstance(value, torch.Tensor):
            own[key].copy_(value)
        elif isinstance(value, dict):
            _fill(own.setdefault(key, {}), value)
        else:
            own[key] = value


BACKENDS = {"returns": ReturnsThePayload, "fills": FillsInPlace, "nothing": ReadsNothing, "files": OneFilePerRank}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(CHECKPOINTER_REGISTRY, "_classes", {**CHECKPOINTER_REGISTRY._classes, **BACKENDS})
    yield
    ReturnsThePayload.saved.clear()


def _bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _certificate(caplog: pytest.LogCaptureFixture) -> str:
    (text,) = [line for line in caplog.messages if line.startswith("Restore certificate")]
    return text


# ---- a real training


@pytest.mark.parametrize("manager", ["returns", "fills", "files"])
@pytest.mark.parametrize("restore_from", ["LATEST", "global_step_4"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_training_continues_bit_for_bit(
    tmp_path: Path, manager: str, restore_from: str, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    straight = make_trainer(run_config(tmp_path / "none", training=TRAINING, save_ckpt=False))
    straight.train()
    expected: list[Record] = records_of(straight)
    assert_everything_varies(expected, at_least=10)

    saves: dict[str, Any] = {"manager": manager, "save_steps": 4, "save_epochs": 0, "is_async": is_async}
    config = run_config(tmp_path / "cut", training=TRAINING, **saves)
    with pytest.raises(StoppedOnPurpose):
        make_trainer(config, callbacks=[stop_after(10)]).train()

    source = restore_from if restore_from == "LATEST" else str(tmp_path / "cut" / restore_from)
    config = run_config(tmp_path / "cut", training=TRAINING, restore_from=source, on_mismatch="error", **saves)
    resumed = make_trainer(config)
    seed_streams(99)
    resumed.train()
    # A save in the background counts once the next one has waited for it.
    first = 4 if restore_from != "LATEST" or is_async else 8
    assert [record.global_step for record in records_of(resumed)] == list(range(first + 1, 12))
    assert records_of(resumed) == expected[first:]
    assert "exact (saved = loaded = live)" in _certificate(caplog)
    assert "degraded" not in _certificate(caplog)


def test_the_pointer_and_the_last_save_are_kept_for_it(tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path, manager="returns", save_steps=2, save_epochs=0)
    callback = CheckpointerCallback(trainer)
    callback.on_train_begin()
    trainer.state.global_step = 2
    callback.on_step_end()
    assert (tmp_path / "latest_checkpoint_iteration.txt").read_text() == "2\n"
    assert callback.last_saved == str(tmp_path / "global_step_2")
    assert isinstance(callback.checkpointer, ReturnsThePayload)


def test_latest_without_any_save_starts_from_scratch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_custom_trainer(tmp_path, manager="returns", restore_from="LATEST")
    CheckpointerCallback(trainer).on_train_begin()
    assert trainer.state.global_step == 0
    assert f"no checkpoint found under {tmp_path}: training starts from scratch" in caplog.messages


def test_what_is_kept_is_not_changed_by_the_training_that_resumes(tmp_path: Path) -> None:
    train_custom_trainer(make_custom_trainer(tmp_path, manager="returns", save_epochs=0), until_step=3)
    path = str(tmp_path / "global_step_3")
    before = _bytes(ReturnsThePayload.saved[path])
    train_custom_trainer(make_custom_trainer(tmp_path, manager="returns", save_ckpt=False, restore_from=path), 6)
    assert _bytes(ReturnsThePayload.saved[path]) == before


# ---- what it reads wrongly is noticed


def test_a_backend_that_reads_no_tensors_is_never_certified_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    train_custom_trainer(make_custom_trainer(tmp_path, manager="nothing", save_epochs=0), until_step=3)
    settings: dict[str, Any] = {"manager": "nothing", "save_ckpt": False, "restore_from": "LATEST"}
    CheckpointerCallback(make_custom_trainer(tmp_path, **settings)).on_train_begin()
    assert "model            degraded (what was read differs from what was saved)" in _certificate(caplog)
    assert "optimizer        degraded (what was read differs from what was saved)" in _certificate(caplog)
    refusing = make_custom_trainer(tmp_path, on_mismatch="error", **settings)
    with pytest.raises(CheckpointMismatchError, match="model: what was read differs"):
        CheckpointerCallback(refusing).on_train_begin()


def test_a_missing_model_key_is_refused_in_the_specified_words(tmp_path: Path) -> None:
    train_custom_trainer(make_custom_trainer(tmp_path, manager="returns", save_epochs=0), until_step=3)
    path = str(tmp_path / "global_step_3")
    del ReturnsThePayload.saved[path]["model"]["hidden.bias"]
    trainer = make_custom_trainer(tmp_path, manager="returns", save_ckpt=False, restore_from=path)
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(RuntimeError, match=r"missing model key: model\.hidden\.bias"):
        CheckpointerCallback(trainer).on_train_begin()
    torch.testing.assert_close(trainer.model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("manager", ["returns", "nothing"])
def test_missing_training_state_is_refused_in_the_specified_words(tmp_path: Path, manager: str) -> None:
    train_custom_trainer(make_custom_trainer(tmp_path, manager=manager, save_epochs=0), until_step=3)
    path = str(tmp_path / "global_step_3")
    ReturnsThePayload.saved[path]["extra_state"] = {}
    trainer = make_custom_trainer(tmp_path, manager=manager, save_ckpt=False, restore_from=path)
    with pytest.raises(CheckpointNotFoundError, match=r"no training state.*extra_state"):
        CheckpointerCallback(trainer).on_train_begin()
    assert (trainer.state.global_step, trainer.train_dataloader.batches_consumed) == (0, 0)


def test_a_missing_part_of_the_training_state_is_named(tmp_path: Path) -> None:
    train_custom_trainer(make_custom_trainer(tmp_path, manager="returns", save_epochs=0), until_step=3)
    path = str(tmp_path / "global_step_3")
    del ReturnsThePayload.saved[path]["extra_state"]["rng_state"]
    trainer = make_custom_trainer(tmp_path, manager="returns", save_ckpt=False, restore_from=path)
    with pytest.raises(CheckpointNotFoundError, match="extra_state lacks rng_state"):
        CheckpointerCallback(trainer).on_train_begin()


def test_weights_alone_can_be_taken_over(tmp_path: Path) -> None:
    saved = make_custom_trainer(tmp_path, manager="returns", save_epochs=0, save_train_state=False)
    train_custom_trainer(saved, until_step=3)
    fresh = make_custom_trainer(
        tmp_path, manager="returns", save_ckpt=False, restore_from="LATEST", restore_train_state=False
    )
    CheckpointerCallback(fresh).on_train_begin()
    torch.testing.assert_close(fresh.model.state_dict(), saved.model.state_dict(), rtol=0, atol=0)
    assert fresh.state.global_step == 0


# ---- how it is chosen


def test_an_unknown_name_is_refused_at_the_start_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.manager=dpc.*one of dcp, files, fills, nothing, returns"):
        CheckpointerCallback(make_custom_trainer(tmp_path, manager="dpc"))


def test_options_that_it_does_not_take_are_named_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_custom_trainer(tmp_path, manager="files", keep_last=3, verify="size", async_mode="process")
    callback = CheckpointerCallback(trainer)
    assert caplog.messages == ["the storage backend 'files' has no checkpoint.verify, checkpoint.keep_last"]
    assert callback.checkpointer.async_mode == "process"  # type: ignore[attr-defined]


_PACKAGE = """
import copy
from hyper_resume.checkpoint import CheckpointerBase

class Kept(CheckpointerBase):
    saved = {}
    def save(self, path, state, *, global_step, save_async=False):
        self.saved[path] = copy.deepcopy(state)
    def load(self, path, state, *, strict_model=True, extra_state_skeleton=None):
        return self.saved[path]
"""
_TRAINING = """
import sys
from pathlib import Path
from hyper_resume.checkpoint import CHECKPOINTER_REGISTRY
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
assert "kept_elsewhere" not in sys.modules
folder = Path(sys.argv[1])
straight = train_custom_trainer(make_custom_trainer(folder / "none", save_ckpt=False), until_step=8)
train_custom_trainer(make_custom_trainer(folder, manager="elsewhere", save_steps=5, save_epochs=0), until_step=5)
resumed = train_custom_trainer(
    make_custom_trainer(folder, manager="elsewhere", restore_from="LATEST", on_mismatch="error"), until_step=8
)
print(resumed == straight[5:], len(resumed), CHECKPOINTER_REGISTRY.names())
"""


def _installed(folder: Path, target: str) -> dict[str, str]:
    """Install a package of one module and one entry point below ``folder``; returns the environment that sees it."""
    information = folder / "kept_elsewhere-1.0.dist-info"
    information.mkdir(parents=True)
    (folder / "kept_elsewhere.py").write_text(_PACKAGE)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kept-elsewhere\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[hyper_resume.checkpointers]\nelsewhere = {target}\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])])}


def test_a_backend_of_another_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    environment = _installed(tmp_path / "site", "kept_elsewhere:Kept")
    command = [sys.executable, "-c", _TRAINING, str(tmp_path / "saves")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "True 3 ['dcp', 'elsewhere']\n", done.stderr


def test_a_package_that_cant_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(tmp_path / "site", "kept_elsewhere.nowhere:Kept")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ConfigError, match=r"can't be imported.*checkpoint\.manager=elsewhere.*ModuleNotFoundError"):
        CheckpointerCallback(make_custom_trainer(tmp_path, manager="elsewhere"))


def test_a_class_that_is_no_backend_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECKPOINTER_REGISTRY._classes, "other", dict)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no storage backend.*dict.*does not derive from CheckpointerBase"):
        CheckpointerCallback(make_custom_trainer(tmp_path, manager="other"))


# ---- several ranks


def _resume_on_a_rank(folder: str) -> tuple[int, float]:
    CHECKPOINTER_REGISTRY.register("files")(OneFilePerRank)
    saving = make_custom_trainer(Path(folder), save_epochs=0, manager="files")
    callback = CheckpointerCallback(saving)
    callback.on_train_begin()
    next(iter(saving.train_dataloader))
    saving.state.global_step = 1
    seed_streams(50 + dist.get_rank())
    callback.on_train_end()
    resumed = make_custom_trainer(Path(folder), restore_from="LATEST", on_mismatch="error", manager="files")
    seed_streams(99)
    CheckpointerCallback(resumed).on_train_begin()
    return resumed.state.global_step, float(torch.rand(()))


def test_every_rank_gets_its_own_training_state_back(tmp_path: Path) -> None:
    expected = []
    for rank in range(2):
        seed_streams(50 + rank)
        expected.append((1, float(torch.rand(()))))
    assert run_ranks(_resume_on_a_rank, 2, str(tmp_path)) == expected
    assert len(set(expected)) == 2
    assert (tmp_path / "latest_checkpoint_iteration.txt").read_text() == "1\n"


def _save_fails_on_rank_1(folder: str) -> str:
    class Fails(OneFilePerRank):
        def save(self, path: str, state: Any, *, global_step: int, save_async: bool = False) -> None:
            super().save(path, state, global_step=global_step)
            if dist.get_rank() == 1:
                raise OSError("no room on rank 1")

    CHECKPOINTER_REGISTRY.register("fails")(Fails)
    trainer = make_custom_trainer(Path(folder), manager="fails")
    callback = CheckpointerCallback(trainer)
    callback.on_train_begin()
    trainer.state.global_step = 1
    with pytest.raises(OSError, match="no room on rank 1") as caught:
        callback.on_train_end()
    return str(caught.value)


def test_a_save_that_fails_on_one_rank_fails_on_all_and_moves_no_pointer(tmp_path: Path) -> None:
    assert run_ranks(_save_fails_on_rank_1, 2, str(tmp_path)) == ["no room on rank 1 [rank 1]"] * 2
    assert not (tmp_path / "latest_checkpoint_iteration.txt").exists()
