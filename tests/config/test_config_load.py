"""From a file to a checked configuration, and every mistake in one error."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyper_resume.config import (
    AcceleratorConfig,
    CheckpointingConfig,
    DataConfig,
    LoraConfig,
    LRSchedulerConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
    TrajectoryConfig,
    load_config,
)
from hyper_resume.config.load import as_plain, resolve_config
from hyper_resume.errors import ConfigError, HyperResumeError

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the text to one file and return its path."""

    def write_text(text: str) -> Path:
        path = tmp_path / "train.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


def errors_of(path: Path, *overrides: str) -> list[str]:
    """Lines of the error, the file written as FILE."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    head, *lines = str(caught.value).split("\n")
    assert head.endswith(f"{len(lines)} error{'' if len(lines) == 1 else 's'}:")
    return [line.strip().replace(str(path), "FILE") for line in lines]


def test_an_empty_file_gives_the_defaults(write: Write) -> None:
    assert load_config(write("")) == RunConfig()
    assert load_config(str(write("# nothing\n"))) == RunConfig()


def test_a_block_whose_lines_are_all_comments_gives_its_defaults(write: Write) -> None:
    config = load_config(write("checkpoint:\n  # save_steps: 10\nmodel:\n  overrides:\n  lora:\ndata: {}\n"))
    assert config == RunConfig()


def test_values_reach_their_fields_with_the_annotated_types(write: Write) -> None:
    text = """
model: {preset: qwen3_moe, overrides: {attention_dropout: 0.1, layer_types: [a, b], rope: {factor: 2}}}
data: {paths: [a.txt, b.txt], max_samples: 8}
optimizer: {lr: 3e-4, weight_decay: 0, betas: [0, 0.5]}
training: {max_steps: 25, max_grad_norm: null}
accelerator: {timeout_seconds: 60}
"""
    config = load_config(write(text))
    assert config.model.overrides == {"attention_dropout": 0.1, "layer_types": ["a", "b"], "rope": {"factor": 2}}
    assert config.data.paths == ("a.txt", "b.txt")
    assert config.optimizer.lr == 0.0003
    assert config.optimizer.betas == (0.0, 0.5)
    assert config.training.max_grad_norm is None
    for number in (config.optimizer.weight_decay, config.optimizer.betas[0], config.accelerator.timeout_seconds):
        assert type(number) is float
    assert type(config.training.max_steps) is int


def test_numbers_in_text_fields_are_the_text_as_written(write: Write) -> None:
    config = load_config(write("checkpoint: {checkpoint_dir: 10, restore_from: 1e5}\ndata: {paths: [007, 1.50]}\n"))
    assert config.checkpoint.checkpoint_dir == "10"
    assert config.checkpoint.restore_from == "1e5"
    assert config.data.paths == ("007", "1.50")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "training: {seed: '10'}",
            'FILE:1: training.seed: wrong type; expected: a whole number; found: "10" (text)',
        ),
        (
            "training:\n  seed: true",
            "FILE:2: training.seed: wrong type; expected: a whole number; found: true",
        ),
        (
            "training:\n  max_steps: 1e3",
            "FILE:2: training.max_steps: wrong type; expected: a whole number or null; found: 1e3 (a number)",
        ),
        (
            "training:\n  bf16: 1",
            "FILE:2: training.bf16: wrong type; expected: true or false; found: 1 (a number)",
        ),
        (
            "optimizer:\n  lr: fast",
            'FILE:2: optimizer.lr: wrong type; expected: a number; found: "fast" (text)',
        ),
        (
            "optimizer:\n  lr: null",
            "FILE:2: optimizer.lr: wrong type; expected: a number; found: null",
        ),
        (
            "optimizer:\n  betas: [0.9]",
            "FILE:2: optimizer.betas: wrong type; expected: a list of 2: a number, a number, "
            "for example [0.9, 0.95]; found: [0.9] (a list)",
        ),
        (
            "optimizer:\n  betas: [0.9, 0.9, 0.9]",
            "FILE:2: optimizer.betas: wrong type; expected: a list of 2: a number, a number, "
            "for example [0.9, 0.95]; found: [0.9, 0.9, 0.9] (a list)",
        ),
        (
            "data:\n  paths:\n    - a\n    - {b: 1}",
            'FILE:4: data.paths.1: wrong type; expected: text; found: {"b": 1} (a mapping)',
        ),
        (
            "data:\n  paths: a.txt",
            "FILE:2: data.paths: wrong type; expected: a list, each item text, for example [first, second]; "
            'found: "a.txt" (text)',
        ),
        (
            "checkpoint:\n  restore_from: on",
            "FILE:2: checkpoint.restore_from: wrong type; expected: text or null; found: on (YAML for true)",
        ),
        (
            "checkpoint:\n  checkpoint_dir:",
            "FILE:2: checkpoint.checkpoint_dir: wrong type; expected: text; found: null",
        ),
        (
            "\ncheckpoint: 5",
            "FILE:2: checkpoint: wrong type; expected: a block of fields; found: 5 (a number)",
        ),
        (
            "model:\n  overrides: [a]",
            'FILE:2: model.overrides: wrong type; expected: a mapping, {key: value}; found: ["a"] (a list)',
        ),
        (
            "accelerator:\n  device: tpu",
            'FILE:2: accelerator.device: wrong value; expected: one of auto, cpu, cuda, npu; found: "tpu" (text)',
        ),
    ],
)
def test_a_wrong_type_says_where_what_was_expected_and_what_was_found(write: Write, text: str, message: str) -> None:
    assert errors_of(write(text)) == [message]


@pytest.mark.parametrize(
    ("text", "field", "advice"),
    [
        ("checkpoint: {save_step: 1}", "checkpoint.save_step", "write checkpoint.save_steps"),
        ("checkpoint: {save-steps: 1}", "checkpoint.save-steps", "write checkpoint.save_steps"),
        ("save_steps: 1", "save_steps", "write checkpoint.save_steps"),
        ("checkpoint: {max_steps: 1}", "checkpoint.max_steps", "write training.max_steps"),
        ("lora: {rank: 8}", "lora", "write model.lora"),
        ("model: {lora: {rnak: 8}}", "model.lora.rnak", "write model.lora.rank"),
        ("name: adamw", "name", "write optimizer.name or lr_scheduler.name"),
        ("optimizer: {nmae: adamw}", "optimizer.nmae", "write optimizer.name"),
        ("model_name_or_path: x", "model_name_or_path", "write model.pretrained_model_name_or_path"),
        ("chekpoint: {save_steps: 1}", "chekpoint", "write checkpoint"),
        # The place of the field at once, not of a block that has none of that name.
        ("training: {lr: 1.0}", "training.lr", "write optimizer.lr"),
        ("trainer: {save_steps: 1, lr: 1.0}", "trainer", "write checkpoint.save_steps, optimizer.lr"),
        ("checkpoint: {training: {max_steps: 1}}", "checkpoint.training", "write training"),
        ("checkpoint: {max_step: 1}", "checkpoint.max_step", "write training.max_steps"),
        ("model: {lora_rank: 1}", "model.lora_rank", "write model.lora.rank"),
        (
            "trajectory: {zzz: 1}",
            "trajectory.zzz",
            "the fields of trajectory are dir, digests",
        ),
    ],
)
def test_an_unknown_field_names_the_nearest_right_one(write: Write, text: str, field: str, advice: str) -> None:
    assert errors_of(write(text)) == [f"FILE:1: {field}: unknown field; what to do: {advice}"]


def test_every_mistake_is_in_one_error(write: Write) -> None:
    text = """
checkpoint:
  save_step: 10
  save_epochs: -1
  save_epochs: -2
training:
  seed: ten
  num_train_epochs: 0
data: !secret x
"""
    lines = errors_of(write(text), "--accelerator.pp_size=2", "--optimizer.name=sgd", "oops")
    starts = [
        "FILE:5: duplicate key 'save_epochs'",
        "FILE:9: tag !secret",
        "override oops: not an override",
        "FILE:3: checkpoint.save_step: unknown field",
        "FILE:5: checkpoint.save_epochs: wrong value",
        "FILE:7: training.seed: wrong type",
        "FILE:8: training.num_train_epochs: wrong value",
        "override --accelerator.pp_size=2: accelerator.pp_size: wrong value",
        "override --optimizer.name=sgd: optimizer.name: wrong value",
    ]
    assert len(lines) == len(starts)
    for start in starts:
        assert [line for line in lines if line.startswith(start)], start


def test_a_file_that_cannot_be_read_and_a_wrong_override_are_both_reported(tmp_path: Path) -> None:
    lines = errors_of(tmp_path / "missing.yaml", "--training.seed=x")
    assert len(lines) == 2
    assert lines[0].startswith("FILE: the file does not exist")
    assert lines[1].startswith("override --training.seed=x: training.seed: wrong type")


def test_the_error_is_a_value_error_of_this_library(write: Write) -> None:
    with pytest.raises(ValueError, match="unknown field") as caught:
        load_config(write("x: 1"))
    assert isinstance(caught.value, HyperResumeError)


def test_sources_say_where_each_value_came_from(write: Write) -> None:
    path = write("checkpoint:\n  save_steps: 5\n  save_epochs: 2\nmodel:\n  overrides:\n    a: 1\n    b: {c: 2}\n")
    override = ["--checkpoint.save_steps=7", "--model.overrides.b.d=3", "--trajectory={digests: true}"]
    resolved = resolve_config(path, override)
    sources = resolved.sources
    assert resolved.config == load_config(path, override)
    assert sources["checkpoint.save_steps"] == "override --checkpoint.save_steps=7"
    assert sources["checkpoint.save_epochs"] == f"{path}:3"
    assert sources["checkpoint.restore_from"] == "default"
    assert sources["model.overrides.a"] == f"{path}:6"
    assert sources["model.overrides.b.c"] == f"{path}:7"
    assert sources["model.overrides.b.d"] == "override --model.overrides.b.d=3"
    assert "model.overrides" not in sources
    assert sources["trajectory.digests"] == "override --trajectory={digests: true}"
    assert sources["trajectory.dir"] == "default"


def test_sources_of_the_defaults_name_every_leaf_once(write: Write) -> None:
    sources = resolve_config(write("")).sources
    assert set(sources.values()) == {"default"}
    leaves = set()
    for block, fields in as_plain(RunConfig()).items():
        leaves |= {f"{block}.{name}" for name in fields if name != "lora"}
    leaves |= {f"model.lora.{field.name}" for field in dataclasses.fields(LoraConfig)}
    assert set(sources) == leaves


# A number that only YAML 1.2 knows ("1e5", "-.0") is written bare by PyYAML's dumper. In a text field the schema brings it
# back; in a free mapping nothing can. This is the float of YAML 1.2's core schema (10.3.2), word for word.
LOST_IN_FREE_MAPPINGS = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.from_regex(
    r"\A[-+0-9.eE_:x]{1,6}\Z"  # what looks like numbers, dates and base 60
)
free_texts = texts.filter(lambda text: not LOST_IN_FREE_MAPPINGS.fullmatch(text))
at_least_0 = st.floats(0, 1e300)
above_0 = st.floats(0, 1e300, exclude_min=True)
counts = st.integers(1, 10**12)
naturals = st.integers(0, 10**12)
free_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | free_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def checkpoints() -> st.SearchStrategy[CheckpointingConfig]:
    flags = {
        field.name: st.booleans()
        for field in dataclasses.fields(CheckpointingConfig)
        if isinstance(field.default, bool)
    }
    return st.builds(
        CheckpointingConfig,
        checkpoint_dir=texts,
        save_steps=naturals,
        save_epochs=naturals,
        restore_from=st.none() | texts,
        model_save_format=texts,
        save_consolidated=st.sampled_from(["none", "final", "every"]),
        staging_dir=st.none() | texts,
        best_metric_key=texts,
        **flags,
    )


def models() -> st.SearchStrategy[ModelConfig]:
    lora = st.builds(
        LoraConfig,
        rank=naturals,
        alpha=st.integers(),
        dropout=st.floats(0, 1, exclude_max=True),
        target_modules=st.lists(texts, max_size=3).map(tuple),
    )
    common: dict[str, st.SearchStrategy[Any]] = {
        "load_weights": st.booleans(),
        "overrides": st.dictionaries(texts, free_values, max_size=3),
        "lora": lora,
    }
    return st.builds(ModelConfig, preset=st.none() | texts, **common) | st.builds(
        ModelConfig, pretrained_model_name_or_path=texts, **common
    )


def optimizers() -> st.SearchStrategy[OptimizerConfig]:
    beta = st.floats(0, 1, exclude_max=True)
    return st.builds(
        OptimizerConfig,
        name=st.sampled_from(["adamw", "muon"]),
        lr=at_least_0,
        betas=st.tuples(beta, beta),
        eps=above_0,
        weight_decay=at_least_0,
        muon_lr=at_least_0,
        muon_momentum=beta,
    )


def datas() -> st.SearchStrategy[DataConfig]:
    return st.builds(
        DataConfig,
        paths=st.lists(texts, max_size=3).map(tuple),
        tokenizer=texts,
        seq_length=counts,
        max_samples=st.none() | counts,
        batch_size=counts,
        shuffle=st.booleans(),
        drop_last=st.booleans(),
        num_workers=naturals,
        use_background_prefetcher=st.booleans(),
        prefetch_batches=counts,
    )


configs = st.builds(
    RunConfig,
    model=models(),
    data=datas(),
    optimizer=optimizers(),
    lr_scheduler=st.builds(
        LRSchedulerConfig,
        name=st.sampled_from(["constant", "linear", "cosine", "onecycle"]),
        warmup_steps=naturals,
        decay_steps=st.none() | counts,
    ),
    accelerator=st.builds(
        AcceleratorConfig,
        device=st.sampled_from(["auto", "cpu", "cuda", "npu"]),
        tp_size=counts,
        dp_shard_size=st.just(-1) | counts,
        pp_size=st.just(1),
        timeout_seconds=above_0,
    ),
    training=st.builds(
        TrainingConfig,
        num_train_epochs=counts,
        max_steps=st.none() | counts,
        seed=naturals,
        gradient_accumulation_steps=counts,
        max_grad_norm=st.none() | above_0,
        bf16=st.booleans(),
        deterministic=st.booleans(),
        progress_bar=st.booleans(),
    ),
    checkpoint=checkpoints(),
    trajectory=st.builds(TrajectoryConfig, dir=st.none() | texts, digests=st.booleans()),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=configs)
def test_any_configuration_written_as_yaml_reads_back_equal(tmp_path: Path, config: RunConfig) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(as_plain(config)), encoding="utf-8")
    assert load_config(path) == config
