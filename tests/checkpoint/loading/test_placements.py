"""The same tensors in other placements, on other meshes, by other ranks: read exactly, and never compared by local bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.errors import CheckpointMismatchError
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("four-ranks")

RANKS = 4
WHOLE = {
    "square": torch.arange(64, dtype=torch.float32).reshape(8, 8),
    "uneven": torch.arange(35, dtype=torch.float64).reshape(7, 5),
    "half": torch.arange(48).reshape(4, 12).to(torch.bfloat16),
}
LINE, GRID, TURNED = [0, 1, 2, 3], [[0, 1], [2, 3]], [[0, 2], [1, 3]]
LAYOUTS: dict[str, tuple[Any, list[Placement]]] = {
    "rows": (LINE, [Shard(0)]),
    "columns": (LINE, [Shard(1)]),
    "copies": (LINE, [Replicate()]),
    "rows backwards": ([3, 2, 1, 0], [Shard(0)]),
    "grid": (GRID, [Shard(0), Shard(1)]),
    "grid, dimensions swapped": (GRID, [Shard(1), Shard(0)]),
    "grid of swapped ranks": (TURNED, [Shard(0), Shard(1)]),
    "rows of two, copied": (GRID, [Shard(0), Replicate()]),
    "rows of two, copied by others": (TURNED, [Shard(0), Replicate()]),
}
# Each rank has the part that some rank had, so its digest at the save is known.
SAME_PARTS = {
    ("rows", "rows backwards"),
    ("grid", "grid of swapped ranks"),
    ("rows of two, copied", "rows of two, copied by others"),
}


class Layouts:
    """The states of this rank; each mesh is made once."""

    def __init__(self) -> None:
        self._meshes: dict[str, DeviceMesh] = {}

    def state(self, layout: str) -> dict[str, Any]:
        """The whole tensors in this layout; the parts are cut by hand."""
        return self._divided(layout, {name: self.part(layout, name) for name in WHOLE})

    def zeros(self, layout: str) -> dict[str, Any]:
        return self._divided(layout, {name: torch.zeros_like(self.part(layout, name)) for name in WHOLE})

    def part(self, layout: str, name: str) -> torch.Tensor:
        ranks, placements = LAYOUTS[layout]
        places = torch.tensor(ranks)
        part = WHOLE[name]
        for placement, size, place in zip(
            placements, places.shape, (places == dist.get_rank()).nonzero()[0], strict=True
        ):
            if isinstance(placement, Shard):
                chunks = part.chunk(size, placement.dim)
                part = chunks[place] if place < len(chunks) else part.narrow(placement.dim, 0, 0)
        return part.clone()

    def is_whole(self, layout: str, state: dict[str, Any]) -> bool:
        return all(torch.equal(tensor.to_local(), self.part(layout, name)) for name, tensor in state["model"].items())

    def _divided(self, layout: str, parts: dict[str, torch.Tensor]) -> dict[str, Any]:
        ranks, placements = LAYOUTS[layout]
        if str(ranks) not in self._meshes:
            self._meshes[str(ranks)] = DeviceMesh("cpu", ranks)
        mesh = self._meshes[str(ranks)]
        return {
            "model": {
                name: DTensor.from_local(
                    part, mesh, placements, run_check=False, shape=WHOLE[name].shape, stride=WHOLE[name].stride()
                )
                for name, part in parts.items()
            }
        }


def _directory(folder: str, layout: str) -> str:
    return f"{folder}/{list(LAYOUTS).index(layout)}/global_step_1"


def _every_layout_from_every_other(folder: str) -> dict[tuple[str, str], tuple[bool, bool]]:
    """(saved, loaded) -> whether every value is right, and whether it was compared with a digest of the save."""
    layouts, checkpointer = Layouts(), DistributedCheckpointer()
    found = {}
    for saved in LAYOUTS:
        checkpointer.save(_directory(folder, saved), layouts.state(saved), global_step=1)
    for saved in LAYOUTS:
        for loaded in LAYOUTS:
            live = layouts.zeros(loaded)
            checkpointer.load(_directory(folder, saved), live)
            report = checkpointer.last_load
            assert report is not None
            assert "model" in report.loaded
            found[saved, loaded] = (layouts.is_whole(loaded, live), "model" in report.saved)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def loads(folder: Path) -> list[dict[tuple[str, str], tuple[bool, bool]]]:
    return run_ranks(_every_layout_from_every_other, RANKS, str(folder))


def test_every_layout_is_read_exactly_from_every_other(loads: list[Any]) -> None:
    for of_rank in loads:
        assert len(of_rank) == len(LAYOUTS) ** 2
        assert [pair for pair, (is_right, _) in of_rank.items() if not is_right] == []


def test_digests_of_the_save_are_compared_where_a_rank_had_the_same_parts_and_nowhere_else(loads: list[Any]) -> None:
    same = {(one, other) for one, other in SAME_PARTS} | {(other, one) for one, other in SAME_PARTS}
    for of_rank in loads:
        compared = {pair for pair, (_, is_compared) in of_rank.items() if is_compared}
        assert compared == same | {(layout, layout) for layout in LAYOUTS}


def _reseal(directory: Path, change: Any) -> None:
    path = directory / "manifest.json"
    content = json.loads(path.read_bytes())
    change(content)
    del content["digest"]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({**content, "digest": f"xxh3_128:{xxhash.xxh3_128_hexdigest(canonical)}"}))


def _flipped(folder: str) -> dict[str, str]:
    """One number of what rank 3 wrote is another: the error of each layout, with ``verify=size``."""
    layouts = Layouts()
    directory = Path(folder) / "global_step_1"
    DistributedCheckpointer().save(str(directory), layouts.state("rows"), global_step=1)
    if dist.get_rank() == 0:
        # The last row of the square begins with 56.0; its bytes occur once in the file.
        shard = directory / "__3_0.distcp"
        content = shard.read_bytes()
        row = WHOLE["square"][7].numpy().tobytes()
        assert content.count(row) == 1
        shard.write_bytes(content.replace(row, row[:-1] + bytes([row[-1] ^ 1])))
    dist.barrier()
    errors = {}
    for layout in ("rows", "rows backwards", "columns", "grid"):
        live = layouts.zeros(layout)
        with pytest.raises(CheckpointMismatchError) as caught:
            DistributedCheckpointer(verify="size").load(str(directory), live)
        assert not any(tensor.to_local().any() for tensor in live["model"].values())
        errors[layout] = str(caught.value)
    return errors


def test_a_flipped_number_is_refused_in_every_layout_also_where_sizes_only_are_verified(tmp_path: Path) -> None:
    for errors in run_ranks(_flipped, RANKS, str(tmp_path)):
        # The part as it was saved has a digest; of other parts, the files' digests decide.
        for layout in ("rows", "rows backwards"):
            assert errors[layout].startswith("the model bucket was read otherwise than it was saved")
        for layout in ("columns", "grid"):
            assert errors[layout].startswith("the checkpoint is not as it was written")
            assert "__3_0.distcp" in errors[layout]


def _names_of_version_2(folder: str) -> tuple[bool, bool, str]:
    layouts = Layouts()
    directory = Path(folder) / "global_step_1"
    DistributedCheckpointer().save(str(directory), layouts.state("rows"), global_step=1)
    names = xxhash.xxh3_128(b"sequence 3" + b"".join(f"str 'model.{name}'".encode() for name in sorted(WHOLE)))

    def as_version_2(content: Any) -> None:
        content["format_version"] = 2
        del content["uncovered"]
        content["names"] = {str(rank): {"model": f"xxh3_128:{names.hexdigest()}"} for rank in range(RANKS)}
        if "break" in folder:
            content["buckets"]["2"]["model"] = f"xxh3_128/data:{'0' * 32}"

    if dist.get_rank() == 0:
        _reseal(directory, as_version_2)
    dist.barrier()
    checkpointer, live = DistributedCheckpointer(), layouts.zeros("rows")
    try:
        checkpointer.load(str(directory), live)
    except CheckpointMismatchError as error:
        return False, False, str(error)
    report = checkpointer.last_load
    assert report is not None
    return layouts.is_whole("rows", live), "model" in report.saved, ""


def test_a_manifest_of_version_2_is_compared_on_the_same_mesh_as_before(tmp_path: Path) -> None:
    assert run_ranks(_names_of_version_2, RANKS, str(tmp_path)) == [(True, True, "")] * RANKS
    for _, _, error in run_ranks(_names_of_version_2, RANKS, str(tmp_path / "break")):
        assert error.startswith("the model bucket was read otherwise than it was saved")
        assert "[rank 2]" in error
