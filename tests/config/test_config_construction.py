"""Blocks that a program builds in Python are checked like those of a file."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

from hyper_resume.config import CheckpointingConfig, RunConfig, TrainingConfig, TrajectoryConfig, load_config
from hyper_resume.errors import ConfigError


def _refused(block: Any, **fields: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        block(**fields)
    head, *lines = str(caught.value).split("\n")
    assert head == f"{block.__name__} is wrong, {len(lines)} error{'' if len(lines) == 1 else 's'}:"
    return [line.strip() for line in lines]


def test_every_mistake_is_named_at_once() -> None:
    assert _refused(
        CheckpointingConfig,
        save_steps="ten",
        checkpoint_dir=Path("somewhere"),
        verify="none",
        keep_last=0,
        preemption_signals="SIGTERM",
    ) == [
        "checkpoint.checkpoint_dir: wrong type; expected: text; found: PosixPath('somewhere') (PosixPath)",
        'checkpoint.save_steps: wrong type; expected: a whole number; found: "ten" (text)',
        'checkpoint.verify: wrong value; expected: one of digest, size; found: "none" (text)',
        "checkpoint.preemption_signals: wrong type; expected: a list, each item text, for example [SIGTERM]; "
        'found: "SIGTERM" (text)',
        "checkpoint.keep_last: wrong value; expected: at least 1 or null; found: 0 (a number)",
    ]


@pytest.mark.parametrize(
    ("block", "fields", "start"),
    [
        (CheckpointingConfig, {"save_epochs": -1}, "checkpoint.save_epochs: wrong value; expected: at least 0"),
        (CheckpointingConfig, {"is_async": 1}, "checkpoint.is_async: wrong type; expected: true or false"),
        (CheckpointingConfig, {"save_steps": 1.5}, "checkpoint.save_steps: wrong type; expected: a whole number"),
        (CheckpointingConfig, {"restore_from": object}, "checkpoint.restore_from: wrong type; expected: text or null"),
        (CheckpointingConfig, {"preemption_signals": ["SIGKILL"]}, "checkpoint.preemption_signals: wrong value"),
        (TrainingConfig, {"max_steps": "5"}, "training.max_steps: wrong type"),
        (TrainingConfig, {"gradient_accumulation_steps": 0}, "training.gradient_accumulation_steps: wrong value"),
        (TrajectoryConfig, {"dir": Path("records")}, "trajectory.dir: wrong type; expected: text or null"),
    ],
)
def test_one_wrong_field_is_refused(block: Any, fields: dict[str, Any], start: str) -> None:
    (line,) = _refused(block, **fields)
    assert line.startswith(start)


def test_the_file_with_the_same_values_is_refused_in_the_same_words(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("checkpoint: {save_steps: ten, keep_last: 0, on_mismatch: ignore}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = [line.strip().removeprefix(f"{path}:1: ") for line in str(caught.value).split("\n")[1:]]
    assert lines == _refused(CheckpointingConfig, save_steps="ten", keep_last=0, on_mismatch="ignore")


def test_right_values_are_taken_as_they_are() -> None:
    config = CheckpointingConfig(save_steps=5, keep_last=None, preemption_signals=("SIGUSR1",), restore_from="LATEST")
    assert (config.save_steps, config.keep_last, config.preemption_signals) == (5, None, ("SIGUSR1",))
    assert TrainingConfig(max_grad_norm=1).max_grad_norm == 1


def test_a_changed_copy_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.save_steps: wrong type"):
        dataclasses.replace(CheckpointingConfig(), save_steps=None)  # type: ignore[arg-type]


def test_fields_may_be_given_by_position_in_the_order_of_the_specification() -> None:
    config = CheckpointingConfig(True, "./elsewhere", 10, 2, True, False, False)
    assert (config.checkpoint_dir, config.save_steps, config.save_epochs, config.is_async) == (
        "./elsewhere",
        10,
        2,
        True,
    )
    assert (config.is_peft, config.save_optimizer, config.save_train_state) == (False, False, True)
    with pytest.raises(ConfigError, match=r"checkpoint\.save_steps: wrong type"):
        CheckpointingConfig(True, "./elsewhere", "10")  # type: ignore[arg-type]


def test_a_field_may_be_changed_to_a_right_value() -> None:
    config = CheckpointingConfig(save_steps=5)
    other = CheckpointingConfig(save_steps=5)
    config.restore_from = "LATEST"
    config.save_steps = 7
    assert dataclasses.asdict(config) == {**dataclasses.asdict(other), "restore_from": "LATEST", "save_steps": 7}
    assert config != other


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("save_steps", "ten", 'checkpoint.save_steps: wrong type; expected: a whole number; found: "ten"'),
        ("keep_last", 0, "checkpoint.keep_last: wrong value; expected: at least 1 or null; found: 0"),
        ("verify", "none", "checkpoint.verify: wrong value; expected: one of digest, size"),
    ],
)
def test_a_change_to_a_wrong_value_is_refused_and_the_old_one_stays(name: str, value: Any, words: str) -> None:
    config = CheckpointingConfig(save_steps=5)
    with pytest.raises(ConfigError) as caught:
        setattr(config, name, value)
    assert words in str(caught.value)
    assert config == CheckpointingConfig(save_steps=5)


def test_a_field_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"checkpoint\.save_step: unknown field; the fields are save_ckpt, check"):
        CheckpointingConfig().save_step = 5  # type: ignore[attr-defined]


def test_a_block_of_a_file_may_be_changed_too(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("checkpoint: {save_steps: 3}\n", encoding="utf-8")
    config = load_config(path).checkpoint
    config.save_steps = 4
    with pytest.raises(ConfigError):
        config.save_steps = -1
    assert config == CheckpointingConfig(save_steps=4)
    assert load_config(path).checkpoint == CheckpointingConfig(save_steps=3)


def test_a_copy_can_be_pickled_and_copied() -> None:
    config = CheckpointingConfig(save_steps=5)
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)


def test_a_file_is_still_checked_as_a_whole_and_a_block_after_it_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("checkpoint: {save_steps: -1}\ntraining: {max_steps: 0}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="the configuration is wrong, 2 errors"):
        load_config(path)
    assert RunConfig().checkpoint == CheckpointingConfig()
    assert _refused(CheckpointingConfig, save_steps=-1)
