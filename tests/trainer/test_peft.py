"""LoRA adapters of the real peft library: only they are written and required."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hyper_resume.config import (
    CheckpointingConfig,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
)
from hyper_resume.errors import CheckpointMismatchError
from hyper_resume.trainer.text_trainer import TextTrainer
from tests.trainer.tiny_training import Record, Recorder, disk_listing, live_state, saved_steps

pytestmark = pytest.mark.xdist_group("peft")


@dataclass(frozen=True, kw_only=True)
class AdapterRun:
    """An uninterrupted run of 5 steps that saved steps 2, 4 and 5."""

    config: RunConfig
    folder: Path
    records: list[Record]
    base_at_start: dict[str, torch.Tensor]
    base_at_end: dict[str, torch.Tensor]


def _config(folder: Path, *, targets: tuple[str, ...] = ("q_proj", "v_proj"), **checkpoint: Any) -> RunConfig:
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of a short text\n" for i in range(20)))
    return RunConfig(
        model=ModelConfig(preset="tiny-llama", lora=LoraConfig(rank=4, dropout=0.1, target_modules=targets)),
        data=DataConfig(paths=(str(text),), seq_length=16),
        optimizer=OptimizerConfig(lr=0.01),
        training=TrainingConfig(max_steps=5, progress_bar=False),
        checkpoint=CheckpointingConfig(
            **{"checkpoint_dir": str(folder / "checkpoints"), "is_peft": True, "save_steps": 2, **checkpoint}
        ),
    )


def _with(config: RunConfig, **checkpoint: Any) -> RunConfig:
    return replace(config, checkpoint=replace(config.checkpoint, **checkpoint))


def _base(trainer: TextTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.base.model.named_parameters() if not p.requires_grad}


def _run(config: RunConfig) -> tuple[TextTrainer, list[Record]]:
    trainer = TextTrainer(config)
    recorder = Recorder(trainer.base)
    trainer.base.callbacks.insert(0, recorder)
    trainer.train()
    return trainer, recorder.records


def _equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _model_entries(step_directory: Path) -> dict[str, tuple[int, ...]]:
    metadata = FileSystemReader(step_directory).read_metadata().state_dict_metadata
    return {
        name: tuple(entry.size)
        for name, entry in metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> AdapterRun:
    config = _config(tmp_path_factory.mktemp("adapters"))
    before = _base(TextTrainer(config))
    trainer, records = _run(config)
    folder = Path(config.checkpoint.checkpoint_dir)
    assert saved_steps(folder) == [2, 4, 5]
    return AdapterRun(config=config, folder=folder, records=records, base_at_start=before, base_at_end=_base(trainer))


def test_only_adapter_parameters_are_written(straight: AdapterRun) -> None:
    entries = _model_entries(straight.folder / "global_step_2")
    # 2 layers x (q_proj, v_proj) x (A, B); hidden 64, 4 heads and 2 key-value heads of 16.
    assert sorted(entries.values()) == sorted([(4, 64)] * 4 + [(64, 4)] * 2 + [(32, 4)] * 2)
    assert all(".lora_A." in name or ".lora_B." in name for name in entries)


def test_base_weights_keep_their_initial_load_and_adapters_continue_exactly(straight: AdapterRun) -> None:
    assert _equal(straight.base_at_start, straight.base_at_end)
    trainer, records = _run(
        _with(straight.config, save_ckpt=False, restore_from=str(straight.folder / "global_step_2"))
    )
    assert records == straight.records[2:]
    assert len({record.live.model for record in straight.records}) == 5
    assert _equal(_base(trainer), straight.base_at_start)


def test_other_base_weights_stay_what_they_are_when_adapters_are_restored(straight: AdapterRun) -> None:
    config = _with(straight.config, save_ckpt=False, restore_from=str(straight.folder / "global_step_5"))
    trainer = TextTrainer(config)
    with torch.no_grad():
        for name, parameter in trainer.base.model.named_parameters():
            if not parameter.requires_grad:
                parameter.fill_(0.125)
            elif ".lora_" in name:
                parameter.fill_(7)
    trainer.train()
    assert all(bool((value == 0.125).all()) for value in _base(trainer).values())
    adapters = [p for p in trainer.base.model.parameters() if p.requires_grad]
    assert all(not bool((p == 7).any()) for p in adapters)


def test_more_adapters_than_were_saved_are_an_error_that_names_the_missing_key(
    tmp_path: Path, straight: AdapterRun
) -> None:
    config = _config(
        tmp_path, targets=("q_proj", "v_proj", "o_proj"), restore_from=str(straight.folder / "global_step_2")
    )
    trainer = TextTrainer(config)
    before = live_state(trainer.base.model)
    listing = disk_listing(straight.folder)
    with pytest.raises(CheckpointMismatchError, match=r"missing model key: model\.\S*o_proj\.lora_A\S* \(trainable\)"):
        trainer.train()
    assert live_state(trainer.base.model) == before
    assert disk_listing(straight.folder) == listing
    assert not (tmp_path / "checkpoints").exists()


def test_a_full_checkpoint_restores_the_adapters_of_a_run_with_is_peft(tmp_path: Path) -> None:
    # Written without is_peft: base weights are there too, and are neither required nor read.
    config = _config(tmp_path, is_peft=False)
    _, records = _run(config)
    resumed = _with(config, is_peft=True, save_ckpt=False, restore_from=str(tmp_path / "checkpoints" / "global_step_2"))
    _, tail = _run(resumed)
    assert tail == records[2:]


def test_an_adapter_checkpoint_without_is_peft_is_an_error(straight: AdapterRun) -> None:
    config = _with(straight.config, is_peft=False, save_ckpt=False, restore_from=str(straight.folder / "global_step_2"))
    with pytest.raises(CheckpointMismatchError, match=r"missing model key: model\.\S*embed_tokens.*is_peft"):
        TextTrainer(config).train()


def test_resuming_adapters_twice_stays_exact(tmp_path: Path, straight: AdapterRun) -> None:
    shutil.copytree(straight.folder / "global_step_2", tmp_path / "global_step_2")
    config = _with(straight.config, checkpoint_dir=str(tmp_path), restore_from="LATEST", save_steps=1)
    short = replace(
        config,
        training=replace(config.training, max_steps=3),
        lr_scheduler=replace(config.lr_scheduler, decay_steps=5),
    )
    _, first = _run(short)
    _, second = _run(config)
    assert first + second == straight.records[2:]
