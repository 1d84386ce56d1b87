"""What a load checks before it reads: each rank its own files, one verdict for all."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.disk.operations import FileOperations
from hyper_resume.checkpoint.loading import file_verification
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError, CheckpointUnreadableError
from tests.checkpoint.directories import latest
from tests.checkpoint.payloads import same
from tests.checkpoint.single_value import damage, manifest_content, save, state, value_of
from tests.ranks import run_ranks


class Reads(FileOperations):
    """Notes what is opened for reading; fails for one name."""

    def __init__(self, root: Path, fails: str = "") -> None:
        self.root = root
        self.fails = fails
        self.names: list[str] = []

    def open_read(self, path: Path) -> BinaryIO:
        if self.fails and path.name == self.fails:
            raise OSError(errno.EIO, "Input/output error", str(path))
        self.names.append(path.relative_to(self.root).as_posix())
        return super().open_read(path)

    def pause(self, seconds: float) -> None:
        return


def _own(rank: int) -> dict[str, Any]:
    """A weight of its own on every rank, so that every rank writes a shard."""
    return {"model": {f"w{rank}": torch.full((1000,), float(rank))}, "extra_state": {"value": rank}}


def _save(folder: str) -> None:
    DistributedCheckpointer().save(f"{folder}/global_step_1", _own(dist.get_rank()), global_step=1)


def _reads_of_a_verification(folder: str, how: Literal["digest", "size"]) -> list[str]:
    directory = Path(folder) / "global_step_1"
    with operations.use(Reads(directory)) as reads:
        file_verification.verify(directory, how, None)
    assert isinstance(reads, Reads)
    return sorted(reads.names)


def test_every_rank_reads_the_files_of_its_own_number_and_together_all(tmp_path: Path) -> None:
    run_ranks(_save, 3, str(tmp_path))
    found = run_ranks(_reads_of_a_verification, 3, str(tmp_path), "digest")
    assert found == [
        [".metadata", "__0_0.distcp", "extra_state/extra_state_rank_0.pt", "index.json", "manifest.json"],
        ["__1_0.distcp", "extra_state/extra_state_rank_1.pt"],
        ["__2_0.distcp", "extra_state/extra_state_rank_2.pt"],
    ]
    assert run_ranks(_reads_of_a_verification, 3, str(tmp_path), "size") == [["manifest.json"], [], []]
    # Fewer ranks share the same files among them.
    two = run_ranks(_reads_of_a_verification, 2, str(tmp_path), "digest")
    assert sorted(two[0] + two[1]) == sorted(name for names in found for name in names)
    assert not set(two[0]) & set(two[1])


def _try(folder: str, fails_on: int = -1, fails: str = "") -> BaseException | None:
    directory = Path(folder) / "global_step_1"
    rank = dist.get_rank()
    live = {"model": {f"w{rank}": torch.full((1000,), -1.0)}}
    with operations.use(Reads(directory, fails if rank == fails_on else "")):
        try:
            DistributedCheckpointer().load(str(directory), live, extra_state_skeleton={"value": None})
        except Exception as error:  # noqa: BLE001  the error is what is looked at
            assert same(live["model"][f"w{rank}"], torch.full((1000,), -1.0))
            return error
    return None


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_damage_that_one_rank_sees_is_the_same_verdict_on_all(tmp_path: Path, victim: int) -> None:
    run_ranks(_save, 3, str(tmp_path))
    damage(tmp_path / "global_step_1", f"__{victim}_0.distcp")
    errors = run_ranks(_try, 3, str(tmp_path))
    assert {type(error) for error in errors} == {CheckpointMismatchError}
    assert len({str(error) for error in errors}) == 1
    expected = manifest_content(tmp_path / "global_step_1")["files"][f"__{victim}_0.distcp"]["digest"]
    assert f"__{victim}_0.distcp: expected digest {expected}, found other bytes at " in str(errors[0])


def test_damage_that_several_ranks_see_is_told_together(tmp_path: Path) -> None:
    run_ranks(_save, 3, str(tmp_path))
    for rank in range(3):
        damage(tmp_path / "global_step_1", f"__{rank}_0.distcp")
        (tmp_path / "global_step_1" / f"extra_state/extra_state_rank_{rank}.pt").unlink()
    (error, *others) = run_ranks(_try, 3, str(tmp_path))
    assert {str(other) for other in others} == {str(error)}
    assert "and 3 more" in str(error)
    assert isinstance(error, CheckpointMismatchError)


def test_a_file_that_one_rank_can_not_read_stops_all_by_its_reason(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path))
    errors = run_ranks(_try, 2, str(tmp_path), 1, "__1_0.distcp")
    assert {type(error) for error in errors} == {CheckpointUnreadableError}
    assert "can't be read now; that does not mean that it is damaged" in str(errors[0])
    assert f"{tmp_path}/global_step_1/__1_0.distcp" in str(errors[0])
    assert "Input/output error" in str(errors[0])
    assert str(errors[0]) == str(errors[1])


def test_one_process_checks_the_files_of_all_ranks(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path))
    damage(tmp_path / "global_step_1", "extra_state/extra_state_rank_1.pt")
    with pytest.raises(CheckpointMismatchError, match=r"extra_state_rank_1\.pt: expected digest"):
        DistributedCheckpointer().load(str(tmp_path / "global_step_1"), {}, extra_state_skeleton={"value": None})


@pytest.mark.parametrize("how", ["digest", "size"])
def test_a_size_that_is_wrong_is_seen_by_both_kinds_of_check(tmp_path: Path, how: Literal["digest", "size"]) -> None:
    directory = save(tmp_path, 1, 1.0)
    shard = directory / "__0_0.distcp"
    size = shard.stat().st_size
    for content in (shard.read_bytes() + b"\0", shard.read_bytes()[:-1]):
        shard.write_bytes(content)
        with pytest.raises(CheckpointMismatchError, match=f"__0_0.distcp: expected {size} bytes, found {len(content)}"):
            DistributedCheckpointer(verify=how).load(str(directory), {})


def test_a_changed_bit_that_sizes_do_not_show_is_seen_when_it_is_read(tmp_path: Path) -> None:
    directory = save(tmp_path, 1, 1.0)
    shard = directory / "__0_0.distcp"
    weight = torch.full((8,), 1.0).numpy().tobytes()
    content = shard.read_bytes()
    assert content.count(weight) == 1
    shard.write_bytes(content.replace(weight, bytes([weight[0] ^ 1]) + weight[1:]))
    live = state(0.0)["model"]
    by_size = DistributedCheckpointer(verify="size")
    assert by_size.find_latest_checkpoint(str(tmp_path)) == str(directory)
    with pytest.raises(CheckpointMismatchError, match="the model bucket was read otherwise than it was saved"):
        by_size.load(str(directory), {"model": live})
    assert same(live["w"], torch.zeros(8))
    with pytest.raises(CheckpointMismatchError, match=r"__0_0\.distcp: expected digest"):
        DistributedCheckpointer().load(str(directory), {"model": live})
    with pytest.raises(CheckpointNotFoundError, match="none can be resumed from"):
        DistributedCheckpointer().find_latest_checkpoint(str(tmp_path))


def test_a_load_of_weights_only_needs_no_whole_training_state(tmp_path: Path) -> None:
    directory = save(tmp_path, 1, 1.0)
    damage(directory, "extra_state/extra_state_rank_0.pt")
    live = {"model": {"w": torch.zeros(8)}}
    DistributedCheckpointer().load(str(directory), live)
    assert same(live["model"]["w"], torch.ones(8))
    with pytest.raises(CheckpointMismatchError, match="extra_state_rank_0"):
        DistributedCheckpointer().load(str(directory), live, extra_state_skeleton={"value": None})


def test_a_load_of_what_was_just_found_is_not_checked_again_but_the_next_one_is(tmp_path: Path) -> None:
    directory = save(tmp_path, 1, 1.0)
    checkpointer = DistributedCheckpointer()
    counts = []
    with operations.use(Reads(tmp_path)) as reads:
        assert isinstance(reads, Reads)
        found = checkpointer.find_latest_checkpoint(str(tmp_path))
        for _ in range(2):
            checkpointer.load(str(found), {"model": {"w": torch.zeros(8)}}, extra_state_skeleton={"value": None})
            counts.append(reads.names.count("global_step_1/__0_0.distcp"))
    # Checked, and read where it was checked; the same once more.
    assert counts == [1, 2]
    damage(directory)
    with pytest.raises(CheckpointMismatchError):
        checkpointer.load(str(directory), {})


def _load_beside_others(folder: str) -> list[str]:
    lines = _Lines()
    logging.getLogger("hyper_resume").addHandler(lines)
    assert _try(folder) is None
    return lines.lines


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_files_that_nobody_wrote_are_told_of_once_and_read_by_nobody(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path))
    directory = tmp_path / "global_step_1"
    for number in range(7):
        (directory / f"__9_{number}.distcp").write_text("of a larger world")
    results = run_ranks(_load_beside_others, 2, str(tmp_path))
    names = ", ".join(f"__9_{number}.distcp" for number in range(5))
    expected = f"{directory} holds files that its manifest does not list; they are not read: {names} and 2 more"
    assert results == [[expected], []]


@pytest.mark.parametrize("name", ["my best run", "数据 ünï", "a.b.c"])
def test_a_directory_of_any_name_can_be_saved_and_loaded(tmp_path: Path, name: str) -> None:
    DistributedCheckpointer().save(str(tmp_path / name), state(5.0), global_step=5)
    assert manifest_content(tmp_path / name)["attempt"].startswith(f"{name}.")
    assert value_of(tmp_path / name) == 5.0


def test_a_step_that_has_lost_its_manifest_is_refused_and_latest_falls_back(tmp_path: Path) -> None:
    for step in (1, 2):
        DistributedCheckpointer().save(
            str(tmp_path / f"global_step_{step}"), {"model": {"w": torch.full((3,), float(step))}}, global_step=step
        )
    (tmp_path / "global_step_2" / "manifest.json").unlink()
    live = {"w": torch.zeros(3)}
    with pytest.raises(CheckpointMismatchError, match="has lost its manifest"):
        DistributedCheckpointer().load(str(tmp_path / "global_step_2"), {"model": live})
    assert torch.equal(live["w"], torch.zeros(3))
    assert latest(tmp_path) == tmp_path / "global_step_1"
    # Without the mark it is another tool's, which never had one.
    stock = tmp_path / "stock"
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=stock, no_dist=True)
    DistributedCheckpointer().load(str(stock), {"model": live})
    assert torch.equal(live["w"], torch.ones(3))


def test_a_rank_may_load_more_of_a_bucket_than_it_saved(tmp_path: Path) -> None:
    run_ranks(_save_one_and_load_all, 2, str(tmp_path / "global_step_1"))


def _save_one_and_load_all(path: str) -> None:
    rank = dist.get_rank()
    DistributedCheckpointer().save(path, {"model": {f"w{rank}": torch.full((3,), float(rank))}}, global_step=1)
    live = {f"w{index}": torch.full((3,), 9.0) for index in range(2)}
    DistributedCheckpointer().load(path, {"model": live})
    for index in range(2):
        assert torch.equal(live[f"w{index}"], torch.full((3,), float(index)))


def test_another_steps_manifest_stands_for_nothing_and_latest_goes_on_to_the_next(tmp_path: Path) -> None:
    for step in (4, 8):
        DistributedCheckpointer().save(
            str(tmp_path / f"global_step_{step}"), {"model": {"w": torch.ones(3)}}, global_step=step
        )
    content = (tmp_path / "global_step_4" / "manifest.json").read_bytes()
    (tmp_path / "global_step_8" / "manifest.json").write_bytes(content)
    assert latest(tmp_path) == tmp_path / "global_step_4"
