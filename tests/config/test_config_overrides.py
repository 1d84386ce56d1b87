"""``--dotted.path=value``: its one form, its types and its order."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_resume.config import CheckpointingConfig, RunConfig, load_config
from hyper_resume.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a few fields set."""
    path = tmp_path / "train.yaml"
    path.write_text(
        "checkpoint:\n  save_steps: 5\n  save_epochs: 2\nmodel:\n  overrides: {a: 1, b: {c: 2}}\n", encoding="utf-8"
    )
    return path


def errors_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [line.strip() for line in str(caught.value).split("\n")[1:]]


def value_of(config: object, dotted: str) -> object:
    for name in dotted.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("--checkpoint.save_steps=7", 7),
        ("--optimizer.lr=3e-4", 0.0003),
        ("--optimizer.lr=1", 1.0),
        ("--training.max_steps=null", None),
        ("--training.max_grad_norm=", None),
        ("--training.bf16=true", True),
        ("--data.paths=[a, 10]", ("a", "10")),
        ("--optimizer.betas=[0.5, 0.6]", (0.5, 0.6)),
        ("--accelerator.device=cpu", "cpu"),
        ("--accelerator.dp_shard_size=-1", -1),
        ("--checkpoint.restore_from=LATEST", "LATEST"),
        ("--checkpoint.restore_from=null", None),
        ("--checkpoint.restore_from=", None),
        ("--checkpoint.checkpoint_dir=/tmp/a b/123", "/tmp/a b/123"),
        ("--checkpoint.checkpoint_dir=10", "10"),
        ("--checkpoint.checkpoint_dir=true", "true"),
        ("--checkpoint.checkpoint_dir=a=b", "a=b"),
        ("--checkpoint.checkpoint_dir=[x]: #1", "[x]: #1"),
        ("--trajectory.dir='quoted'", "'quoted'"),
        ("--model.lora.rank=8", 8),
        ("--model.overrides.attention_dropout=0.2", 0.2),
        ("--model.overrides.b.c=[x, 1]", ["x", 1]),
        ("--model.overrides.new.deep={k: v}", {"k": "v"}),
    ],
)
def test_an_override_is_read_by_the_type_of_its_field(path: Path, override: str, value: object) -> None:
    read = value_of(load_config(path, [override]), override[2:].partition("=")[0])
    assert read == value
    assert type(read) is type(value)


def test_overrides_win_over_the_file_and_leave_the_rest_of_it(path: Path) -> None:
    config = load_config(path, ["--checkpoint.save_steps=7", "--model.overrides.b.d=3"])
    assert config.checkpoint == CheckpointingConfig(save_steps=7, save_epochs=2)
    assert config.model.overrides == {"a": 1, "b": {"c": 2, "d": 3}}


def test_later_overrides_win_over_earlier_ones(path: Path) -> None:
    assert load_config(path, ["--training.seed=1", "--training.seed=2"]).training.seed == 2
    assert load_config(path, ["--training={seed: 1}", "--training.max_steps=9"]).training.seed == 1
    assert load_config(path, ["--training.max_steps=9", "--training={seed: 1}"]).training.max_steps is None


def test_an_override_repairs_a_wrong_value_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("training: {seed: ten}\n", encoding="utf-8")
    assert load_config(path, ["--training.seed=10"]).training.seed == 10


def test_an_override_of_a_whole_block_replaces_it(path: Path) -> None:
    config = load_config(path, ["--checkpoint={restore_from: LATEST, checkpoint_dir: 10}", "--model.overrides={z: 1}"])
    assert config.checkpoint == CheckpointingConfig(restore_from="LATEST", checkpoint_dir="10")
    assert config.model.overrides == {"z": 1}
    assert load_config(path, ["--checkpoint=null", "--model="]) == RunConfig()


@pytest.mark.parametrize(
    ("overrides", "origin", "right"),
    [
        (["--training.seed"], "--training.seed", "--training.seed=VALUE"),
        (["--training.seed", "10"], "--training.seed", "--training.seed=10"),
        (["--training.max_steps", "-1"], "--training.max_steps", "--training.max_steps=-1"),
        (["training.seed=10"], "training.seed=10", "--training.seed=10"),
        (["-training.seed=10"], "-training.seed=10", "--training.seed=10"),
        (["--training.seed =10"], "--training.seed =10", "--training.seed=10"),
        (["--=10"], "--=10", "--dotted.path=10"),
        (["--training..seed=10"], "--training..seed=10", "--training..seed=10"),
        ([""], "", "--dotted.path=VALUE"),
    ],
)
def test_any_other_form_is_refused_and_the_right_one_shown(
    path: Path, overrides: list[str], origin: str, right: str
) -> None:
    assert errors_of(path, *overrides) == [
        f"override {origin}: not an override; expected: --dotted.path=value, in one word; what to do: write {right}"
    ]


def test_two_overrides_without_a_value_are_two_mistakes(path: Path) -> None:
    assert len(errors_of(path, "--training.seed", "--training.bf16")) == 2


def test_an_override_far_deeper_than_any_field_is_refused(path: Path) -> None:
    assert "not an override" in errors_of(path, "--model.overrides" + ".a" * 2000 + "=1")[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--training.seed=x", 'training.seed: wrong type; expected: a whole number; found: "x" (text)'),
        ("--training.seed='10'", 'training.seed: wrong type; expected: a whole number; found: "10" (text)'),
        ("--checkpoint.checkpoint_dir=", "checkpoint.checkpoint_dir: wrong type; expected: text; found: null"),
        ("--training.sede=1", "training.sede: unknown field; what to do: write training.seed"),
        ("--save_steps=1", "save_steps: unknown field; what to do: write checkpoint.save_steps"),
        ("--chekpoint.save_steps=1", "chekpoint: unknown field; what to do: write checkpoint"),
        ("--training.seed.x=1", 'training.seed: wrong type; expected: a whole number; found: {"x": 1} (a mapping)'),
        (
            "--checkpoint={save_step: 1}",
            "checkpoint.save_step: unknown field; what to do: write checkpoint.save_steps",
        ),
    ],
)
def test_a_wrong_override_is_named_whole(path: Path, override: str, message: str) -> None:
    assert errors_of(path, override) == [f"override {override}: {message}"]


@pytest.mark.parametrize("value", ["[a", "{a: 1, a: 2}", "!!python/name:os.system", "*nowhere", "a: b: c"])
def test_a_value_that_is_not_plain_yaml_is_refused(path: Path, value: str) -> None:
    lines = errors_of(path, f"--model.overrides.x={value}")
    assert len(lines) == 1
    assert lines[0].startswith(f"override --model.overrides.x={value}: ")


def test_setting_something_inside_a_single_value_is_refused(path: Path) -> None:
    assert errors_of(path, "--model.overrides.a.x=1") == [
        "override --model.overrides.a.x=1: model.overrides.a is not a block, so nothing in it can be set; "
        f"found: 1 (a number) at {path}:5"
    ]


def test_bytes_of_an_argument_that_are_not_utf8_are_refused(path: Path) -> None:
    for field in ("checkpoint.checkpoint_dir", "model.overrides.x"):
        lines = errors_of(path, f"--{field}=\udcff")  # as Python passes a byte 0xff of the command line
        assert len(lines) == 1
        assert lines[0].isascii() or "\udcff" in lines[0]
