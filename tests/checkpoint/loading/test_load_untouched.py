"""A load that fails, however late, leaves the running state as it was, bit for bit, on every rank."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pytest
import torch
import torch.distributed as dist

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.disk.operations import FileOperations
from hyper_resume.errors import CheckpointMismatchError, CheckpointUnreadableError
from tests.checkpoint.directories import forget_manifest
from tests.checkpoint.payloads import same
from tests.checkpoint.single_value import damage
from tests.ranks import run_ranks


def full(value: float, **changes: Any) -> dict[str, Any]:
    """A payload with weights and an optimizer, the same on every rank."""
    moments = {"exp_avg": torch.full((4,), value), "step": torch.tensor(value)}
    return {
        "model": {"a": torch.full((4,), value), "b": torch.full((2, 3), value)},
        "optimizer": {"0": {"state": {"a": {**moments, **changes}}, "param_groups": ({"lr": value},)}},
    }


def save(folder: Path | str, state: dict[str, Any]) -> Path:
    directory = Path(folder) / "global_step_1"
    DistributedCheckpointer().save(str(directory), {**state, "extra_state": {"value": 1}}, global_step=1)
    return directory


def refused(
    directory: Path,
    live: dict[str, Any],
    checkpointer: DistributedCheckpointer | None = None,
    verify: Literal["digest", "size"] = "digest",
    error: type[Exception] = CheckpointMismatchError,
) -> Exception:
    """Try to load; the error, once it is known that nothing has changed, not even which objects hold it."""
    before = pickle.loads(pickle.dumps(live))
    tensors = list(_tensors(live))
    checkpointer = checkpointer or DistributedCheckpointer(verify=verify)
    with pytest.raises(error) as caught:
        checkpointer.load(str(directory), live, extra_state_skeleton={"value": None})
    assert same(live, before)
    assert all(one is other for one, other in zip(_tensors(live), tensors, strict=True))
    return caught.value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inside = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, tuple) else []
    return [tensor for item in inside for tensor in _tensors(item)]


def test_a_load_that_succeeds_changes_all_of_it(tmp_path: Path) -> None:
    """The other tests prove something only if there is a change to be seen."""
    live = full(0.0)
    tensors = _tensors(live)
    DistributedCheckpointer().load(str(save(tmp_path, full(1.0))), live, extra_state_skeleton={"value": None})
    assert same(live, full(1.0))
    assert all(one is other for one, other in zip(_tensors(live), tensors, strict=True))


class Later(FileOperations):
    """Does something to a shard after it was verified, when the index is opened for what it says."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.opened = 0
        self.fired = False

    def open_read(self, path: Path) -> BinaryIO:
        if self.what == "unreadable" and path.suffix == ".distcp":
            self.fired = True
            raise PermissionError(13, "Permission denied", str(path))
        if self.what != "unreadable" and path.name == "index.json":
            self.opened += 1
            if self.opened == 2:
                self._ruin(path.parent / "__0_0.distcp")
        return super().open_read(path)

    def pause(self, seconds: float) -> None:
        return

    def _ruin(self, path: Path) -> None:
        self.fired = True
        if self.what == "gone":
            path.unlink()
        elif self.what == "cut":
            path.write_bytes(path.read_bytes()[:3000])
        elif self.what == "one value":
            weights = torch.full((2, 3), 1.0).numpy().tobytes()
            content = path.read_bytes()
            assert weights in content
            path.write_bytes(content.replace(weights, bytes(len(weights))))
        else:
            damage(path.parent, path.name)


LATER = {
    "unreadable": "PermissionError",
    "gone": "__0_0.distcp",
    "cut": "__0_0.distcp",
    "one value": "a file of the checkpoint was changed after it was verified",
}


@pytest.mark.parametrize("what", LATER)
def test_a_shard_that_is_ruined_between_check_and_reading(tmp_path: Path, what: str) -> None:
    directory = save(tmp_path, full(1.0))
    with operations.use(Later(what)) as later:
        # One that is verified by its size alone is first opened when it is read.
        if what == "unreadable":
            error = refused(directory, full(0.0), verify="size", error=CheckpointUnreadableError)
        else:
            error = refused(directory, full(0.0))
    assert isinstance(later, Later)
    assert later.fired
    assert LATER[what] in str(error)


def _save_ranks(folder: str) -> None:
    save(folder, full(1.0) | {"model": {f"w{dist.get_rank()}": torch.ones(5), "all": torch.ones(2)}})


def _ruined_on_one_rank(folder: str) -> str:
    rank = dist.get_rank()
    live = full(0.0) | {"model": {f"w{rank}": torch.zeros(5), "all": torch.zeros(2)}}
    with operations.use(Later("unreadable") if rank == 1 else FileOperations()):
        directory = Path(folder) / "global_step_1"
        return str(refused(directory, live, verify="size", error=CheckpointUnreadableError))


def test_a_shard_that_one_rank_can_not_read_any_more_stops_all_of_them(tmp_path: Path) -> None:
    run_ranks(_save_ranks, 2, str(tmp_path))
    errors = run_ranks(_ruined_on_one_rank, 2, str(tmp_path))
    assert errors[0] == errors[1]
    assert "rank 1" in errors[0]
    assert "PermissionError" in errors[0]


def _refused_by_the_caller(folder: str) -> tuple[str, list[float]]:
    rank = dist.get_rank()
    seen: list[float] = []

    def check(state: Mapping[str, Any], training_state: Mapping[str, Any]) -> None:
        seen.extend([float(state["model"]["all"][0]), float(training_state["value"])])
        if rank == 1:
            raise CheckpointMismatchError("the data set is another one")

    checkpointer = DistributedCheckpointer()
    checkpointer.check_loaded = check
    live = full(0.0) | {"model": {f"w{rank}": torch.zeros(5), "all": torch.zeros(2)}}
    return str(refused(Path(folder) / "global_step_1", live, checkpointer)), seen


def test_what_one_rank_does_not_accept_is_loaded_by_none(tmp_path: Path) -> None:
    run_ranks(_save_ranks, 2, str(tmp_path))
    for error, seen in run_ranks(_refused_by_the_caller, 2, str(tmp_path)):
        assert error.startswith("the data set is another one")
        assert "rank 1" in error
        assert seen == [1.0, 1.0], "it was asked with what was read"


def _drifted(folder: str) -> str:
    """Copies that should be equal differ in one bit; one of them is kept."""
    rank = dist.get_rank()
    state = full(1.0)
    if rank == 1:
        state["model"]["b"][0, 0] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    return str(refused(save(folder, state), full(0.0)))


def test_replicas_that_had_drifted_at_the_save_are_refused_by_the_name_of_the_bucket(tmp_path: Path) -> None:
    errors = run_ranks(_drifted, 2, str(tmp_path))
    assert errors[0] == errors[1]
    assert "the model bucket was read otherwise than it was saved" in errors[0]
    # DCP keeps the copy of either, to spread the work; the other one does not get its own back.
    assert errors[0].endswith(("[rank 0]", "[rank 1]"))


OTHER_KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"exp_avg": torch.zeros(4, dtype=torch.bfloat16)}, "shape (4,), torch.bfloat16 (the running job)"),
    "wider type": ({"exp_avg": torch.zeros(4, dtype=torch.float64)}, "shape (4,), torch.float64 (the running job)"),
    "integers": ({"step": torch.tensor(0)}, "shape (), torch.int64 (the running job)"),
    "longer": ({"exp_avg": torch.zeros(5)}, "shape (5,), torch.float32 (the running job)"),
    "shape": ({"exp_avg": torch.zeros(2, 2)}, "shape (2, 2), torch.float32 (the running job)"),
    "no dimension": ({"exp_avg": torch.tensor(0.0)}, "shape (), torch.float32 (the running job)"),
    "no tensor": ({"step": 0.0}, "no tensor (the running job)"),
}


@pytest.mark.parametrize("case", OTHER_KINDS)
@pytest.mark.parametrize("with_manifest", [True, False], ids=["manifest", "stock"])
def test_an_optimizer_entry_of_another_kind_is_refused_and_never_converted(
    tmp_path: Path, case: str, with_manifest: bool
) -> None:
    changes, found = OTHER_KINDS[case]
    directory = save(tmp_path, full(1.0))
    if not with_manifest:
        forget_manifest(directory)
    (name,) = changes
    error = refused(directory, full(0.0, **changes))
    assert f"entry optimizer.0.state.a.{name} does not fit" in str(error)
    assert f"expected: {found}" in str(error)


def test_a_value_that_was_saved_is_no_tensor_for_a_live_tensor(tmp_path: Path) -> None:
    directory = save(tmp_path, full(1.0, step=1.0))
    assert "found: no tensor (the checkpoint)" in str(refused(directory, full(0.0)))


@pytest.mark.parametrize("part", ["a chunk is missing", "a chunk is moved", "a chunk stands twice"])
def test_a_tensor_that_is_not_covered_exactly_is_refused(tmp_path: Path, part: str) -> None:
    directory = save(tmp_path, full(1.0))
    file = directory / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    entry = metadata.state_dict_metadata["model.b"]
    if part == "a chunk is missing":
        entry.chunks = []
    elif part == "a chunk stands twice":
        entry.chunks = entry.chunks * 2
    else:
        entry.chunks[0].offsets = torch.Size([1, 0])
    file.write_bytes(pickle.dumps(metadata))
    assert ".metadata: expected" in str(refused(directory, full(0.0)))
    error = refused(forget_manifest(directory), full(0.0))
    assert "the checkpoint's metadata can't be read" in str(error)
    assert "model.b" in str(error)


def test_entries_that_nothing_asked_for_are_reported_and_no_error(tmp_path: Path) -> None:
    state = full(1.0)
    state["model"]["dropped"] = torch.ones(9)
    state["optimizer"]["1"] = {"state": {}, "param_groups": ({"lr": 1.0},)}
    directory = save(tmp_path, state)
    checkpointer = DistributedCheckpointer()
    assert checkpointer.last_load is None
    live = full(0.0)
    checkpointer.load(str(directory), live, extra_state_skeleton={"value": None})
    assert same(live, full(1.0))
    report = checkpointer.last_load
    assert report is not None
    assert report.unread == ("model.dropped", "optimizer.1.param_groups")
    assert (report.path, report.step, report.verified) == (str(directory), 1, "digest")
    # A bucket that was not read in full has another digest, and is no error for it.
    assert report.saved.keys() == report.loaded.keys() == {"model", "optimizer", "progress", "value"}
    assert {name for name in report.saved if report.saved[name] == report.loaded[name]} == {"progress", "value"}


def _report(folder: str) -> tuple[tuple[str, ...], bool]:
    checkpointer = DistributedCheckpointer()
    live = full(0.0) | {"model": {f"w{dist.get_rank()}": torch.zeros(5), "all": torch.zeros(2)}}
    checkpointer.load(f"{folder}/global_step_1", live, extra_state_skeleton={"value": None})
    assert checkpointer.last_load is not None
    return checkpointer.last_load.unread, dict(checkpointer.last_load.saved) == dict(checkpointer.last_load.loaded)


def test_an_entry_that_another_rank_reads_is_not_unread(tmp_path: Path) -> None:
    run_ranks(_save_ranks, 2, str(tmp_path))
    assert run_ranks(_report, 2, str(tmp_path)) == [((), True), ((), True)]


def test_a_report_of_a_stock_directory_says_that_nothing_vouches_for_it(tmp_path: Path) -> None:
    directory = forget_manifest(save(tmp_path, full(1.0)))
    checkpointer = DistributedCheckpointer()
    checkpointer.load(str(directory), full(0.0))
    assert checkpointer.last_load is not None
    assert (checkpointer.last_load.verified, checkpointer.last_load.saved) == ("no manifest", {})
