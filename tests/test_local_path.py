"""An address with a scheme is refused wherever a directory is taken, at once, and leaves nothing on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyper_resume import cli
from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.commands.difference import compare
from hyper_resume.checkpoint.commands.doctor import run_checks
from hyper_resume.checkpoint.commands.inspect import inspect_step_directory
from hyper_resume.checkpoint.commands.verification import verify_path
from hyper_resume.checkpoint.pointed import PointedCheckpointer
from hyper_resume.config import CheckpointingConfig, TrajectoryConfig, load_config
from hyper_resume.errors import ConfigError
from hyper_resume.local_path import local_path, scheme_of
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.trainer.custom_trainer import make_custom_trainer

ADDRESSES = (
    "s3://bucket/run",
    "gs://bucket/run",
    "file:///tmp/run",
    "hf://user/model",
    "S3://bucket",
    "simplecache::s3://bucket/run",
    "dbfs:/mnt/run",
    str(Path("s3://bucket/run")),  # s3:/bucket/run
)
ADDRESS = pytest.mark.parametrize("address", ADDRESSES)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, in which a local folder of such a name would appear."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@ADDRESS
@pytest.mark.parametrize("field", ["checkpoint_dir", "restore_from", "staging_dir"])
def test_the_configuration_refuses_it_by_field(address: str, field: str) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint.{field}: wrong value.*without a scheme") as caught:
        CheckpointingConfig(**{field: address})
    assert address in str(caught.value)
    config = CheckpointingConfig()
    with pytest.raises(ConfigError, match=f"checkpoint.{field}"):
        setattr(config, field, address)


@ADDRESS
@pytest.mark.parametrize(
    "field",
    [
        "checkpoint.checkpoint_dir",
        "checkpoint.restore_from",
        "trajectory.dir",
        "model.pretrained_model_name_or_path",
        "data.tokenizer",
    ],
)
def test_the_command_line_refuses_it_with_exit_code_2(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], address: str, field: str
) -> None:
    (elsewhere / "run.yaml").write_text("")
    assert cli.main(["train", "run.yaml", f"--{field}={address}"]) == cli.EXIT_USAGE
    assert f"{field}: wrong value" in capsys.readouterr().err
    assert [path.name for path in elsewhere.iterdir()] == ["run.yaml"]


def test_a_list_of_paths_and_a_block_of_its_own_are_checked_too(elsewhere: Path) -> None:
    (elsewhere / "run.yaml").write_text("data: {paths: [text, 's3://bucket/text']}")
    with pytest.raises(ConfigError, match=r"data\.paths: wrong value"):
        load_config("run.yaml")
    with pytest.raises(ConfigError, match=r"trajectory\.dir: wrong value"):
        TrajectoryConfig(dir="gs://bucket")


@ADDRESS
@pytest.mark.parametrize("command", ["inspect", "verify", "diff", "prune", "doctor"])
def test_every_command_refuses_it(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], address: str, command: str
) -> None:
    more = {"diff": ["."], "prune": ["--keep-last", "1"]}.get(command, [])
    assert cli.main([command, address, *more]) == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert "no storage backend serves" in error
    assert address in error
    assert list(elsewhere.iterdir()) == []


def _backend_calls(backend: Any) -> dict[str, Callable[[str], Any]]:
    state = {"model": {"w": torch.ones(1)}}
    return {
        "save": lambda path: backend.save(f"{path}/global_step_1", state, global_step=1),
        "load": lambda path: backend.load(f"{path}/global_step_1", state),
        "try_save": lambda path: backend.try_save(path, state),
        "check_names": lambda path: backend.check_names(path, lambda step: True),
        "begin_run": lambda path: backend.begin_run(path, restored_from=None),
        "begin_run from": lambda path: backend.begin_run("root", restored_from=path),
        "find_latest_checkpoint": backend.find_latest_checkpoint,
        "has_checkpoint": backend.has_checkpoint,
        "describe": backend.describe,
    }


@pytest.mark.parametrize("call", list(_backend_calls(DistributedCheckpointer())))
def test_every_call_of_the_backend_refuses_it(elsewhere: Path, call: str) -> None:
    for backend in (DistributedCheckpointer(), PointedCheckpointer(DistributedCheckpointer())):
        for address in ADDRESSES:
            with pytest.raises(ConfigError, match="no storage backend serves"):
                _backend_calls(backend)[call](address)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    "function",
    [verify_path, inspect_step_directory, lambda path: list(compare(path, ".")), lambda path: run_checks(Path(path))],
    ids=["verify", "inspect", "diff", "doctor"],
)
def test_the_functions_behind_the_commands_refuse_it(function: Callable[[str], Any]) -> None:
    for address in ADDRESSES:
        with pytest.raises(ConfigError, match="no storage backend serves"):
            function(address)


def test_a_configuration_of_another_class_is_checked_too(elsewhere: Path) -> None:
    trainer = make_custom_trainer(elsewhere)
    trainer.config = SimpleNamespace(checkpoint=SimpleNamespace(checkpoint_dir="s3://bucket/run"))
    with pytest.raises(ConfigError, match="checkpoint_dir: wrong value"):
        CheckpointerCallback(trainer)


@given(st.text())
def test_a_path_is_taken_as_it_is_or_refused_and_never_changed(text: str) -> None:
    """Written another way than in the library: a scheme ends at the first slash, at a colon, and is no single letter."""
    head, slash, _ = text.partition("/")
    scheme = head.removesuffix(":")
    letters = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+.:-")
    refused = bool(
        slash
        and head.endswith(":")
        and len(scheme) > 1
        and set(scheme) <= letters
        and scheme[0].isascii()
        and scheme[0].isalpha()
    )
    assert bool(scheme_of(text)) == refused
    if not refused:
        assert local_path(text) == Path(text)


@pytest.mark.parametrize(
    "text", ["./s3://bucket", "a b/c", "C:/data", "/s3:/x", "10:30/run", "run:1", "", "~/x", "ü:/x"]
)
def test_what_only_looks_like_one_is_a_path(text: str) -> None:
    assert local_path(text) == Path(text)
