"""What one save leaves for the next saves work, and never puts old data or an old layout into a checkpoint."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.disk.operations import FileOperations, OutputFile
from hyper_resume.checkpoint.saving import planning
from hyper_resume.checkpoint.saving.plan_cache import MetadataTemplate
from hyper_resume.errors import CheckpointSaveError
from tests.checkpoint.payloads import same
from tests.checkpoint.single_value import manifest_content
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each plan that is made; how many entries it has."""
    made: list[int] = []
    original = planning.local_write_items

    def counted(flat: dict[str, Any], **options: Any) -> list[WriteItem]:
        items = original(flat, **options)
        made.append(len(items))
        return items

    monkeypatch.setattr(planning, "local_write_items", counted)
    return made


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_plans(monkeypatch)


def base(value: float) -> dict[str, Any]:
    return {
        "w": torch.full((50, 3), float(value)),
        "b": {"c": torch.full((7,), int(value)), "text": f"value {value}"},
        "number": value,
        "scalar": torch.tensor(float(value)),
        "empty": torch.zeros(0, 3),
    }


def changed(value: float, **parts: Any) -> dict[str, Any]:
    return {**base(value), **parts}


def without(name: str, value: float) -> dict[str, Any]:
    return {key: part for key, part in base(value).items() if key != name}


CHANGES: dict[str, Callable[[float], dict[str, Any]]] = {
    "an entry more": lambda value: changed(value, more=torch.full((3,), value)),
    "a value more": lambda value: changed(value, more=[value]),
    "an entry less": lambda value: without("w", value),
    "a value less": lambda value: without("number", value),
    "another order": lambda value: dict(reversed(base(value).items())),
    "another name": lambda value: {**without("w", value), "v": torch.full((50, 3), value)},
    "another name of equal length in its place": lambda value: {
        {"w": "v"}.get(name, name): part for name, part in base(value).items()
    },
    "two names exchanged": lambda value: {
        {"w": "scalar", "scalar": "w"}.get(name, name): part for name, part in base(value).items()
    },
    "another shape": lambda value: changed(value, w=torch.full((3, 50), value)),
    "another number of dimensions": lambda value: changed(value, w=torch.full((150,), value)),
    "another type": lambda value: changed(value, w=torch.full((50, 3), int(value), dtype=torch.int32)),
    "a type without a template": lambda value: changed(value, scalar=torch.tensor(int(value), dtype=torch.uint16)),
    "a value instead of a tensor": lambda value: changed(value, w=value),
    "a tensor instead of a value": lambda value: changed(value, number=torch.tensor([value])),
    "a longer value": lambda value: changed(value, number=[value] * 1000),
    "a long text": lambda value: changed(value, b={"c": torch.full((7,), int(value)), "text": "x" * 10_000}),
    "a value of another type": lambda value: changed(value, number=f"{value} as a text"),
    "another nesting of the same flat names": lambda value: {
        "w": torch.full((50, 3), float(value)),
        "b.c": torch.full((7,), int(value)),
        "b.text": f"value {value}",
        **{name: base(value)[name] for name in ("number", "scalar", "empty")},
    },
    "not contiguous": lambda value: changed(value, w=torch.full((3, 50), value).T),
    "a parameter": lambda value: changed(value, w=torch.nn.Parameter(torch.full((50, 3), float(value)))),
    "nothing": lambda value: {},
}


def zeros(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: zeros(part) for name, part in state.items()}
    return torch.zeros(state.shape, dtype=state.dtype) if isinstance(state, torch.Tensor) else type(state)()


def plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: plain(part) for name, part in state.items()}
    return state.detach().contiguous() if isinstance(state, torch.Tensor) else state


def check(directory: Path, model: dict[str, Any], extra: Any = None) -> None:
    """By stock loading, stock conversion and this library; and all parts say that they are of this very save."""
    live = zeros(model)
    dcp_load({"model": live}, checkpoint_id=directory, no_dist=True)
    assert same(live, plain(model))
    live = {"model": zeros(model)}
    found = DistributedCheckpointer().load(
        str(directory), live, extra_state_skeleton=None if extra is None else dict.fromkeys(extra)
    )
    assert same(live["model"], plain(model))
    assert extra is None or same({name: found[name] for name in extra}, extra)
    dcp_to_torch_save(directory, directory.parent / "one.pt")
    one = torch.load(directory.parent / "one.pt", weights_only=True)
    assert same(one.get("model", {}), plain(model))
    attempt = manifest_content(directory)["attempt"]
    assert attempt.startswith(f"{directory.name}.")
    assert one["save_id"]["rank_0"] == attempt
    about = pickle.loads((directory / ".metadata").read_bytes()).storage_meta
    assert (about.save_id, Path(str(about.checkpoint_id)).name) == (attempt, attempt)


def save(
    by: DistributedCheckpointer, root: Path, step: int, model: Any, extra: Any = None, *, later: bool = False
) -> Path:
    directory = root / f"global_step_{step}"
    state = {"model": model} if extra is None else {"model": model, "extra_state": extra}
    by.save(str(directory), state, global_step=step, save_async=later)
    by.maybe_wait_for_async_save()
    return directory


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_an_unchanged_layout_is_planned_once_and_each_save_has_its_own_data(
    tmp_path: Path, plans: list[int], later: bool
) -> None:
    checkpointer = DistributedCheckpointer()
    for step in (1, 2, 3):
        save(checkpointer, tmp_path, step, base(step), {"value": step}, later=later)
    assert plans == [7]  # six entries, and what tells of which save they are
    for step in (1, 2, 3):
        check(tmp_path / f"global_step_{step}", base(step), {"value": step})
    assert len({manifest_content(tmp_path / f"global_step_{step}")["attempt"] for step in (1, 2, 3)}) == 3


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_save_after_a_change_is_right_and_so_is_the_one_after_it(tmp_path: Path, change: str, later: bool) -> None:
    checkpointer = DistributedCheckpointer()
    states = [base(1), base(2), CHANGES[change](3), CHANGES[change](4), base(5), base(6)]
    for step, state in enumerate(states, start=1):
        # At once: the next save may write over what this one left.
        check(save(checkpointer, tmp_path, step, state, later=later), state)
    check(tmp_path / "global_step_2", states[1])
    check(tmp_path / "global_step_4", states[3])


@pytest.mark.parametrize("per_rank", [True, False], ids=["files", "embedded"])
def test_a_training_state_that_changes_is_saved_as_it_is(tmp_path: Path, per_rank: bool) -> None:
    checkpointer = DistributedCheckpointer(extra_state_per_rank=per_rank)
    states: list[dict[str, Any]] = [
        {"value": 1, "list": [1.0]},
        {"value": 2, "list": [2.0]},
        {"value": 3, "list": [3.0] * 500},
        {"value": 4, "list": [4.0] * 500, "more": torch.arange(4)},
        {"list": [5.0], "value": 5},
        {"value": torch.arange(6), "list": {}},
        {"value": torch.arange(7), "list": {}},
    ]
    for step, extra in enumerate(states, start=1):
        check(save(checkpointer, tmp_path, step, base(step), extra), base(step), extra)


@pytest.mark.parametrize("per_rank", [True, False], ids=["files", "embedded"])
def test_a_training_state_that_comes_and_goes_is_saved_as_it_is(tmp_path: Path, per_rank: bool) -> None:
    checkpointer = DistributedCheckpointer(extra_state_per_rank=per_rank)
    for step in range(1, 6):
        extra = {"value": step} if step in (2, 3) else None
        check(save(checkpointer, tmp_path, step, base(step), extra), base(step), extra)
        assert (extra is None) != any("extra_state" in name for name in _entries(tmp_path / f"global_step_{step}"))


def _entries(directory: Path) -> list[str]:
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    return [*metadata.state_dict_metadata, *(str(path) for path in directory.rglob("*.pt"))]


def test_two_checkpointers_of_one_process_do_not_get_each_others_plans(tmp_path: Path, plans: list[int]) -> None:
    one, other = DistributedCheckpointer(), DistributedCheckpointer()
    for step in (1, 2, 3):
        for name, checkpointer, state in (("one", one, base(step)), ("other", other, {"w": torch.full((2,), step)})):
            (tmp_path / name).mkdir(exist_ok=True)
            check(save(checkpointer, tmp_path / name, step, state), state)
    assert plans == [7, 2]


def test_a_save_in_another_root_is_planned_no_more(tmp_path: Path, plans: list[int]) -> None:
    """Of another length, and with letters that take several bytes."""
    checkpointer = DistributedCheckpointer()
    for step, name in enumerate(("a", "b" * 200, "Ünïcode \N{SNOWMAN}", "\N{GRINNING FACE}" * 40), start=1):
        (tmp_path / name).mkdir()
        check(save(checkpointer, tmp_path / name, step, base(step)), base(step))
    assert plans == [7]


class FailsAt(FileOperations):
    """Fails where a file of this name is made, or the step directory is moved to its place."""

    def __init__(self, name: str, error: BaseException | None = None) -> None:
        self.name = name
        self.error = error or OSError(errno.ENOSPC, "No space left on device", name)

    def create(self, path: Path) -> OutputFile:
        if path.name == self.name:
            raise self.error
        return super().create(path)

    def rename(self, source: Path, target: Path) -> None:
        if self.name == "rename" and "global_step_" in target.name:
            raise self.error
        super().rename(source, target)


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "index.json", "manifest.json", "rename"])
def test_a_save_after_one_that_failed_is_right(tmp_path: Path, name: str, later: bool) -> None:
    checkpointer = DistributedCheckpointer()
    long = {"number": "x" * 5000}
    for step in (1, 2):
        save(checkpointer, tmp_path, step, base(step))
    for failing, good in ((changed(3, **long), changed(4, **long)), (base(5), base(6)), (base(7), changed(8, **long))):
        with operations.use(FailsAt(name)), pytest.raises(CheckpointSaveError):
            save(checkpointer, tmp_path, 3, failing, later=later)
        check(save(checkpointer, tmp_path, 4, good, later=later), good)
        check(save(checkpointer, tmp_path, 5, good, later=later), good)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "index.json", "manifest.json"])
def test_a_save_after_one_that_was_interrupted_is_right(tmp_path: Path, name: str) -> None:
    checkpointer = DistributedCheckpointer()
    save(checkpointer, tmp_path, 1, base(1))
    with operations.use(FailsAt(name, KeyboardInterrupt())), pytest.raises((CheckpointSaveError, KeyboardInterrupt)):
        save(checkpointer, tmp_path, 2, changed(2, number="x" * 5000))
    after = changed(3, number="y" * 5000)
    check(save(checkpointer, tmp_path, 3, after), after)


# ---- several ranks -------------------------------------------------------------------------------------------------------


def _of_ranks(value: float, *, rows: int = 7, more: bool = False, text: str = "") -> dict[str, Any]:
    """Sharded, replicated, and each rank's own; what is asked for by name is on rank 1 only."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    own: dict[str, Any] = {"w": torch.full((3,), value + rank), "text": text if rank == 1 else ""}
    if more and rank == 1:
        own["more"] = torch.full((2,), value)
    if rank == 1:
        own["rows"] = torch.full((rows,), value)
    whole = torch.arange(15.0).reshape(5, 3) + value
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "replicated": distribute_tensor(whole, mesh, [Replicate()]),
        "same": torch.full((4,), value),
        f"rank {rank}": own,
    }


ON_RANK_1: list[dict[str, Any]] = [{}, {}, {"more": True}, {"more": True}, {}, {"rows": 9}, {"rows": 9}]
ON_RANK_1 += [{"text": "x" * 3000}, {"text": "y" * 3000}, {"text": "z"}, {}, {}]


def _save_all(folder: str, embedded: bool) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        made = count_plans(patch)
        checkpointer = DistributedCheckpointer(extra_state_per_rank=not embedded)
        for step, options in enumerate(ON_RANK_1, start=1):
            state = {"model": _of_ranks(float(step), **options), "extra_state": {"value": (step, dist.get_rank())}}
            checkpointer.save(f"{folder}/global_step_{step}", state, global_step=step, save_async=step % 3 == 0)
        checkpointer.maybe_wait_for_async_save()
        return made


@pytest.mark.parametrize("embedded", [False, True], ids=["files", "embedded"])
def test_one_ranks_change_is_seen_by_all(tmp_path: Path, embedded: bool) -> None:
    made = run_ranks(_save_all, 2, str(tmp_path), embedded)
    # At the first, the third, the fifth, the sixth and the eighth; a text's length is no matter of the plan.
    assert [len(of_rank) for of_rank in made] == [5, 5]
    for step, options in enumerate(ON_RANK_1, start=1):
        whole = torch.arange(15.0).reshape(5, 3) + step
        expected: dict[str, Any] = {"sharded": whole, "replicated": whole, "same": torch.full((4,), float(step))}
        expected["rank 0"] = {"w": torch.full((3,), float(step)), "text": ""}
        expected["rank 1"] = {"w": torch.full((3,), step + 1.0), "text": options.get("text", "")}
        if options.get("more"):
            expected["rank 1"]["more"] = torch.full((2,), float(step))
        expected["rank 1"]["rows"] = torch.full((options.get("rows", 7),), float(step))
        dcp_to_torch_save(tmp_path / f"global_step_{step}", tmp_path / "one.pt")
        found = torch.load(tmp_path / "one.pt", weights_only=True)
        assert same(found["model"], expected), step
        attempt = manifest_content(tmp_path / f"global_step_{step}")["attempt"]
        assert found["save_id"] == {"rank_0": attempt, "rank_1": attempt}
        live = {"model": zeros(expected)}
        extra = DistributedCheckpointer().load(
            str(tmp_path / f"global_step_{step}"), live, extra_state_skeleton={"value": None}
        )
        assert same(live["model"], expected)
        assert extra["value"] == (step, 0)


def _fail_on_rank_1(folder: str) -> bool:
    checkpointer = DistributedCheckpointer()
    for step, text in ((1, ""), (2, ""), (3, "x" * 2000), (4, "x" * 2000), (5, "x" * 2000)):
        name = "__1_0.distcp" if step == 3 else ""
        state = {"model": _of_ranks(float(step), text=text)}
        try:
            with operations.use(FailsAt(name)):
                checkpointer.save(f"{folder}/global_step_{step}", state, global_step=step)
        except CheckpointSaveError:
            assert step == 3
    return not Path(f"{folder}/global_step_3").exists()


def test_after_a_failure_on_one_rank_all_plan_anew(tmp_path: Path) -> None:
    assert run_ranks(_fail_on_rank_1, 2, str(tmp_path)) == [True, True]
    for step in (2, 4, 5):
        dcp_to_torch_save(tmp_path / f"global_step_{step}", tmp_path / "one.pt")
        model = torch.load(tmp_path / "one.pt", weights_only=True)["model"]
        assert same(model["sharded"], torch.arange(15.0).reshape(5, 3) + step)
        assert same(model["rank 1"]["rows"], torch.full((7,), float(step)))
        assert model["rank 1"]["text"] == ("x" * 2000 if step > 2 else "")


# ---- the description in which two texts are replaced ----------------------------------------------------------------------


def description() -> Metadata:
    entry = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32), torch.Size([2]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]
    )
    places = {
        MetadataIndex("w", torch.Size([0])): _StorageInfo("__0_0.distcp", 0, 100),
        MetadataIndex("v"): _StorageInfo("__0_0.distcp", 100, 9),
    }
    return Metadata({"w": entry, "v": BytesStorageMetadata()}, planner_data={"w": ("w",)}, storage_data=places)


TEXTS = (
    "",
    "a",
    "a" * 255,
    "b" * 256,
    "c" * 70_000,
    "Ünï \N{SNOWMAN} \N{GRINNING FACE}",
    "\udc80\n\0'\"",
    "w",
    "X\x05\0\0",
)


def test_every_text_can_take_the_place_of_directory_and_id() -> None:
    described = MetadataTemplate(description())
    for directory in TEXTS:
        for save_id in TEXTS:
            found = pickle.loads(b"".join(described.for_save(directory, save_id)))
            assert found.storage_meta == StorageMeta(checkpoint_id=directory, save_id=save_id)
            found.storage_meta = None
            assert found == description()
