"""The rules about values of the right type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hyper_resume.config import load_config
from hyper_resume.config.annotations import hint_at
from hyper_resume.config.checks import CHECKS
from hyper_resume.errors import ConfigError


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    path = tmp_path / "empty.yaml"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("checkpoint.save_steps", "0", "-1"),
        ("checkpoint.save_epochs", "0", "-1"),
        ("data.batch_size", "1", "0"),
        ("data.seq_length", "1", "0"),
        ("data.prefetch_batches", "1", "0"),
        ("data.num_workers", "0", "-1"),
        ("data.max_samples", "1", "0"),
        ("accelerator.tp_size", "1", "0"),
        ("accelerator.dp_shard_size", "-1", "0"),
        ("accelerator.dp_shard_size", "1", "-2"),
        ("accelerator.pp_size", "1", "2"),
        ("accelerator.timeout_seconds", "0.5", "0"),
        ("accelerator.timeout_seconds", "1", ".inf"),
        ("training.gradient_accumulation_steps", "1", "0"),
        ("training.num_train_epochs", "1", "0"),
        ("training.max_steps", "1", "0"),
        ("training.max_steps", "null", "-1"),
        ("training.max_grad_norm", "null", "0"),
        ("optimizer.lr", "0", "-1e-9"),
        ("optimizer.lr", "0.0", ".nan"),
        ("optimizer.lr", "1", ".inf"),
        ("optimizer.muon_lr", "0", "-1"),
        ("optimizer.weight_decay", "0", "-0.1"),
        ("optimizer.eps", "1e-30", "0"),
        ("data.token_noise", "0.5", "1"),
        ("data.token_noise", "0", "-0.1"),
        ("optimizer.betas", "[0, 0.999]", "[0.9, 1.0]"),
        ("optimizer.betas", "[0.0, 0]", "[-0.1, 0.9]"),
        ("lr_scheduler.warmup_steps", "0", "-1"),
        ("lr_scheduler.decay_steps", "null", "0"),
        ("model.lora.rank", "0", "-1"),
    ],
)
def test_the_edge_is_taken_and_the_value_beyond_it_refused(empty: Path, field: str, good: str, bad: str) -> None:
    load_config(empty, [f"--{field}={good}"])
    with pytest.raises(ConfigError) as caught:
        load_config(empty, [f"--{field}={bad}"])
    lines = str(caught.value).split("\n")[1:]
    assert len(lines) == 1
    assert lines[0].strip().startswith(f"override --{field}={bad}: {field}: wrong value; expected: ")
    assert f"found: {bad}" in lines[0]


def test_a_field_that_may_be_null_says_so(empty: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.max_steps: wrong value; expected: at least 1 or null; found: 0"):
        load_config(empty, ["--training.max_steps=0"])


def test_pipeline_parallel_is_said_to_be_not_built(empty: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline parallel is not built"):
        load_config(empty, ["--accelerator.pp_size=2"])


def test_a_preset_and_a_folder_together_are_refused_with_both_places(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("model:\n  preset: llama\n", encoding="utf-8")
    override = "--model.pretrained_model_name_or_path=/models/x"
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert f'model.preset="llama" (text) at {path}:2' in str(caught.value)
    assert f'model.pretrained_model_name_or_path="/models/x" (text) at override {override}' in str(caught.value)
    assert load_config(path, [override, "--model.preset=null"]).model.preset is None
    assert load_config(path).model.preset == "llama"


def test_a_field_of_the_wrong_type_is_not_also_a_wrong_value(empty: Path) -> None:
    with pytest.raises(ConfigError, match="1 error"):
        load_config(empty, ["--checkpoint.save_steps=minus one"])
    with pytest.raises(ConfigError, match="1 error"):
        load_config(empty, ["--optimizer.betas=[a, 2]"])
    with pytest.raises(ConfigError, match="1 error"):
        load_config(empty, ["--checkpoint=5"])


def test_every_rule_is_about_fields_that_exist() -> None:
    assert CHECKS
    unknown = [field for check in CHECKS for field in check.fields if hint_at(field.split(".")) is Any]
    assert unknown == []
