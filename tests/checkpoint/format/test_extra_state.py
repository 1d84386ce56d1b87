"""What may stand in a training state, and what its files refuse."""

from __future__ import annotations

import io
import os
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.format import extra_state as extra
from hyper_resume.checkpoint.parsing import safe_load
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError, StateNotPlainError
from tests.checkpoint.directories import forget_manifest, listing
from tests.checkpoint.payloads import payload, same, tiny


def read_back(value: Any) -> Any:
    """What weights_only gives for the encoded value."""
    return torch.load(io.BytesIO(extra.encode({"value": extra.to_plain_state(value)})), weights_only=True)["value"]


PLAIN = [
    0,
    True,
    2**2038,
    -(2**2038),
    1.5,
    1 + 2j,
    "text",
    b"bytes",
    None,
    torch.bfloat16,
    torch.device("cpu"),
    torch.Size([2, 3]),
    (),
    [],
    {},
    {1, 2},
    Counter({3: 2}),
    OrderedDict([("b", 1), ("a", 2)]),
    {None: 1, (1, "x"): 2, 2.5: 3},
    {"deep": [({"er": (torch.tensor([1.0]),)},)]},
]


@pytest.mark.parametrize("value", PLAIN, ids=[type(value).__name__ + str(i) for i, value in enumerate(PLAIN)])
def test_a_plain_value_reads_back_with_its_type(value: Any) -> None:
    assert same(read_back(value), value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(np.float64(0.1), 0.1), (np.int64(-3), -3), (np.uint8(7), 7), (np.bool_(True), True), ([np.float64(0.5)], [0.5])],
)
def test_numpy_numbers_that_python_has_too_become_pythons(value: Any, expected: Any) -> None:
    assert same(read_back({"x": value}), {"x": expected})


class Level(IntEnum):
    """An int with a class of its own."""

    HIGH = 3


Point = namedtuple("Point", "x y")


class Custom:
    """Anything."""


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        (Custom(), "Custom"),
        (np.zeros(2), "numpy.ndarray"),
        (np.float32(0.1), "numpy.float32"),
        (np.random.default_rng(0), "Generator"),
        (defaultdict(int), "collections.defaultdict"),
        (frozenset({1}), "frozenset"),
        (Level.HIGH, "Level"),
        (Point(1, 2), "Point"),
        (lambda: 0, "function"),
        (Path(), "PosixPath"),
        (2**2040, "int"),
        (torch.strided, "torch.layout"),
        (torch.Generator(), "Generator"),
    ],
)
def test_anything_else_is_refused_by_path_and_type(value: Any, type_name: str) -> None:
    with pytest.raises(StateNotPlainError, match=r"lr_scheduler\.0\.milestones\[1\]") as caught:
        extra.to_plain_state({"lr_scheduler": {"0": {"milestones": [1, value]}}})
    assert type_name in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_a_key_is_refused_like_a_value() -> None:
    with pytest.raises(StateNotPlainError, match=r"seen\.Level\.HIGH \(as a key\)|seen\.3 \(as a key\)"):
        extra.to_plain_state({"seen": {Level.HIGH: 1}})


@pytest.mark.parametrize(
    ("bucket", "path"),
    [
        ("model", r"model\.w"),
        ("optimizer", r"optimizer\.0\.param_groups\[0\]\.lr"),
        ("extra_state", r"extra_state\.best"),
    ],
)
def test_a_save_of_what_could_not_be_read_back_writes_nothing(tmp_path: Path, bucket: str, path: str) -> None:
    state: dict[str, Any] = {
        "model": {"w": Custom() if bucket == "model" else torch.ones(1)},
        "optimizer": {"0": {"state": {}, "param_groups": ({"lr": Custom() if bucket == "optimizer" else 0.1},)}},
        "extra_state": {"best": Custom() if bucket == "extra_state" else 1},
    }
    with pytest.raises(StateNotPlainError, match=path):
        DistributedCheckpointer().save(str(tmp_path / "global_step_1"), state, global_step=1)
    assert listing(tmp_path) == {}


def test_equal_states_give_equal_bytes() -> None:
    state = {"a": torch.arange(4), "b": [1, {"c": 2.0}]}
    assert extra.encode(state) == extra.encode({"a": torch.arange(4), "b": [1, {"c": 2.0}]})


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def complete_checkpoint(tmp_path: Path, *, per_rank: bool = True) -> Path:
    directory = tmp_path / "global_step_3"
    DistributedCheckpointer(extra_state_per_rank=per_rank).save(str(directory), payload(tiny(1), step=3), global_step=3)
    return directory


def test_an_extra_state_file_runs_no_code(tmp_path: Path) -> None:
    directory = complete_checkpoint(tmp_path)
    torch.save({"format_version": 1, "bomb": Bomb(tmp_path / "exploded")}, extra.file_path(directory, 0))
    with pytest.raises(CheckpointMismatchError, match=r"extra_state_rank_0\.pt: expected \d+ bytes, found \d+"):
        DistributedCheckpointer().load(str(directory), {}, extra_state_skeleton={"global_step": None})
    forget_manifest(directory)
    with pytest.raises(CheckpointMismatchError, match=r"can't be read; where: .*extra_state_rank_0\.pt;") as caught:
        DistributedCheckpointer().load(str(directory), {}, extra_state_skeleton={"global_step": None})
    assert not (tmp_path / "exploded").exists()
    assert "mkdir" in str(caught.value), "the message must say what the file asked for"
    assert "weights_only" not in str(caught.value), "torch's own message advises to run the code"
    torch.load(extra.file_path(directory, 0), weights_only=False)
    assert (tmp_path / "exploded").exists(), "the bomb must work, or the test proves nothing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format that this version does not read"),
        ({"format_version": None}, "format that this version does not read"),
        ({"rank": 1}, "not this rank's"),
        ({"world_size": None}, "has no world_size"),
        ({"global_step": "3"}, "has no global_step"),
    ],
)
def test_a_file_of_another_format_or_rank_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    directory = complete_checkpoint(tmp_path)
    path = extra.file_path(directory, 0)
    torch.save({**torch.load(path, weights_only=True), **change}, path)
    with pytest.raises(CheckpointMismatchError, match=r"extra_state_rank_0\.pt: expected \d+ bytes"):
        DistributedCheckpointer().load(str(directory), {}, extra_state_skeleton={"global_step": None})
    forget_manifest(directory)
    with pytest.raises(CheckpointMismatchError, match=message) as caught:
        DistributedCheckpointer().load(str(directory), {}, extra_state_skeleton={"global_step": None})
    assert str(path) in str(caught.value)


def test_a_file_that_holds_no_dict_is_refused(tmp_path: Path) -> None:
    directory = complete_checkpoint(tmp_path)
    torch.save([1, 2], extra.file_path(directory, 0))
    forget_manifest(directory)
    with pytest.raises(CheckpointMismatchError, match="list with format_version None"):
        DistributedCheckpointer().load(str(directory), {}, extra_state_skeleton={"global_step": None})


@pytest.mark.parametrize("per_rank", [True, False], ids=["per-rank", "embedded"])
def test_a_part_that_is_asked_for_and_missing_is_an_error(tmp_path: Path, per_rank: bool) -> None:
    directory = tmp_path / "global_step_1"
    checkpointer = DistributedCheckpointer(extra_state_per_rank=per_rank)
    checkpointer.save(str(directory), {"model": {}, "extra_state": {"epoch": 1}}, global_step=1)
    skeleton = dict.fromkeys(("global_step", "epoch", "rng_state", "lr_scheduler"))
    with pytest.raises(CheckpointNotFoundError, match="extra_state lacks lr_scheduler, rng_state"):
        checkpointer.load(str(directory), {}, extra_state_skeleton=skeleton)


@pytest.mark.parametrize("per_rank", [True, False], ids=["per-rank", "embedded"])
def test_the_step_of_the_save_is_in_the_state_even_if_the_caller_left_it_out(tmp_path: Path, per_rank: bool) -> None:
    directory = tmp_path / "global_step_8"
    checkpointer = DistributedCheckpointer(extra_state_per_rank=per_rank)
    checkpointer.save(str(directory), {"model": {}, "extra_state": {"epoch": 1}}, global_step=8)
    state = checkpointer.load(str(directory), {}, extra_state_skeleton={"global_step": None})
    assert (state["global_step"], state["epoch"], state["rank"], state["world_size"]) == (8, 1, 0, 1)


def test_files_that_were_put_beside_embedded_entries_are_of_another_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = complete_checkpoint(tmp_path, per_rank=False)
    other = complete_checkpoint(tmp_path / "other")
    path = extra.file_path(other, 0)
    torch.save({**torch.load(path, weights_only=True), "epoch": 99}, path)
    (other / "extra_state").rename(directory / "extra_state")
    state = DistributedCheckpointer().load(str(directory), {}, extra_state_skeleton={"epoch": None})
    assert state["epoch"] == 1, "the entries that the manifest vouches for, not the file"
    assert "its manifest does not list; they are not read: extra_state/extra_state_rank_0.pt" in caplog.text
    forget_manifest(directory)
    with pytest.raises(CheckpointMismatchError, match="parts of different saves"):
        DistributedCheckpointer().load(str(directory), {}, extra_state_skeleton={"global_step": None})


def test_other_files_in_the_extra_state_folder_are_passed_over(tmp_path: Path) -> None:
    directory = complete_checkpoint(tmp_path)
    for name in ("extra_state_rank_1.pt.bak", "extra_state_rank_x.pt", "old_extra_state_rank_1.pt", ".nfs000"):
        (directory / "extra_state" / name).write_bytes(b"")
    state = DistributedCheckpointer().load(str(directory), {}, extra_state_skeleton={"global_step": None})
    assert state["global_step"] == 3


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(b"", id="empty bytes"),
        pytest.param(torch.ones(2, device="meta"), id="meta"),
    ],
)
def test_what_could_be_written_but_not_read_again_is_refused_at_the_save(value: object, request: Any) -> None:
    with pytest.raises(StateNotPlainError, match=rf"where: stateful\.x; .*{request.node.callspec.id}"):
        extra.to_plain_state({"stateful": {"x": value}})
    with pytest.raises(CheckpointMismatchError):
        safe_load.load_plain(extra.encode({"x": value}), "here")
