"""The ``checkpoint:`` block is the specification's, to the letter."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_resume.config import CheckpointingConfig, RunConfig, load_config
from hyper_resume.config.load import as_plain, reserved_fields_set
from hyper_resume.errors import ConfigError

# Specification 5.1, in its order.
SPECIFIED = {
    "save_ckpt": True,
    "checkpoint_dir": "./checkpoints",
    "save_steps": 0,
    "save_epochs": 1,
    "is_async": False,
    "is_peft": False,
    "save_optimizer": True,
    "save_train_state": True,
    "save_extra_state_per_rank": True,
    "restore_from": None,
    "restore_optimizer": True,
    "restore_train_state": True,
    "model_save_format": "safetensors",
    "save_consolidated": "final",
    "staging_dir": None,
    "best_metric_key": "default",
}
# Beyond it: each leaves what the specification says as it is, unless it is set.
ADDED = {
    "manager": "dcp",
    "async_mode": "thread",
    "verify": "digest",
    "on_mismatch": "warn",
    "keep_last": None,
    "keep_every": None,
    "keep_best": 0,
    "keep_best_metric": "loss",
    "keep_best_mode": "min",
    "check_coverage": True,
    "not_saved": (),
    "override_on_restore": (),
    "preemption_signals": ("SIGTERM",),
    "on_other_run": "warn",
    "initial_restore_from": None,
}


def test_the_checkpoint_block_has_the_sixteen_specified_fields_and_defaults_first(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.touch()
    read = dataclasses.asdict(load_config(path).checkpoint)
    assert len(SPECIFIED) == 16
    assert list(read) == [*SPECIFIED, *ADDED]
    assert read == SPECIFIED | ADDED
    assert {name: type(value) for name, value in read.items()} == {n: type(v) for n, v in (SPECIFIED | ADDED).items()}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("keep_last: 0", "at least 1"),
        ("keep_every: -5", "at least 1"),
        ("keep_best: -1", "at least 0"),
        ("preemption_signals: [SIGKILL]", "names of signals that a process can catch"),
        ("preemption_signals: [TERM]", "names of signals that a process can catch"),
        ("verify: none", "digest"),
        ("on_mismatch: ignore", "warn"),
    ],
)
def test_a_wrong_value_of_an_added_field_is_named(tmp_path: Path, wrong: str, reason: str) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(f"checkpoint: {{{wrong}}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=reason):
        load_config(path)


def test_preemption_can_be_switched_off_and_set_to_other_signals(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    for text, expected in (("[]", ()), ("[SIGUSR1, SIGTERM]", ("SIGUSR1", "SIGTERM"))):
        path.write_text(f"checkpoint: {{preemption_signals: {text}}}\n", encoding="utf-8")
        assert load_config(path).checkpoint.preemption_signals == expected


def test_every_specified_field_can_be_set_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(
        """
checkpoint:
  save_ckpt: false
  checkpoint_dir: ./elsewhere
  save_steps: 10
  save_epochs: 2
  is_async: true
  is_peft: true
  save_optimizer: false
  save_train_state: false
  save_extra_state_per_rank: false
  restore_from: LATEST
  restore_optimizer: false
  restore_train_state: false
  model_save_format: other
  save_consolidated: every
  staging_dir: /tmp/staging
  best_metric_key: loss
""",
        encoding="utf-8",
    )
    assert dataclasses.asdict(load_config(path).checkpoint) == ADDED | {
        "save_ckpt": False,
        "checkpoint_dir": "./elsewhere",
        "save_steps": 10,
        "save_epochs": 2,
        "is_async": True,
        "is_peft": True,
        "save_optimizer": False,
        "save_train_state": False,
        "save_extra_state_per_rank": False,
        "restore_from": "LATEST",
        "restore_optimizer": False,
        "restore_train_state": False,
        "model_save_format": "other",
        "save_consolidated": "every",
        "staging_dir": "/tmp/staging",
        "best_metric_key": "loss",
    }


@pytest.mark.parametrize("choice", ["none", "final", "every"])
def test_save_consolidated_takes_the_specified_words(tmp_path: Path, choice: str) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(f"checkpoint: {{save_consolidated: {choice}}}\n", encoding="utf-8")
    assert load_config(path).checkpoint.save_consolidated == choice


def test_reserved_fields_that_are_set_are_named_and_are_no_error(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("checkpoint: {staging_dir: /x, save_consolidated: none, save_steps: 3}\n", encoding="utf-8")
    config = load_config(path)
    assert reserved_fields_set(config) == ("save_consolidated", "staging_dir")
    assert reserved_fields_set(config.checkpoint) == ("save_consolidated", "staging_dir")
    assert reserved_fields_set(RunConfig()) == ()


def test_a_plain_configuration_is_nested_dicts_that_are_copies() -> None:
    config = RunConfig()
    plain = as_plain(config)
    assert plain["checkpoint"] == SPECIFIED | ADDED
    plain["model"]["overrides"]["x"] = 1
    assert config.model.overrides == {}


def test_validation_leaves_the_schema_classes_untouched(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.touch()
    load_config(path)
    for block in (RunConfig, CheckpointingConfig):
        assert [name for name in vars(block) if "pydantic" in name] == []


def test_importing_the_configuration_does_not_import_torch() -> None:
    code = "import sys, hyper_resume.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
