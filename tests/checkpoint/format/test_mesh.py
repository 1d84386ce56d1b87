"""Who has whose place: meshes that are the same for a rank's streams and samples, and meshes that are not."""

from __future__ import annotations

import pytest

from hyper_resume.checkpoint.format.mesh import (
    Mesh,
    covers,
    data_coordinate,
    mesh_from_plain,
    mesh_in_words,
    same_places,
)


def _mesh(*dimensions: tuple[str, int], ranks: tuple[int, ...] = ()) -> Mesh:
    return Mesh(names=tuple(name for name, _ in dimensions), shape=tuple(size for _, size in dimensions), ranks=ranks)


SAME: dict[str, tuple[Mesh | None, Mesh | None]] = {
    "plain and sharded": (None, _mesh(("dp_shard", 8))),
    "a dimension of one": (_mesh(("dp_shard", 8), ("tp", 1)), _mesh(("dp", 8))),
    "sharded and replicated": (_mesh(("dp_replicate", 2), ("dp_shard", 4)), None),
    "data parallelism divided under tensor parallelism": (
        _mesh(("dp_replicate", 2), ("dp_shard", 2), ("tp", 2)),
        _mesh(("fsdp", 4), ("tp", 2)),
    ),
    "the order of the ranks in the order of the dimensions": (
        _mesh(("tp", 2), ("dp", 4)),
        _mesh(("dp", 4), ("tp", 2), ranks=(0, 4, 1, 5, 2, 6, 3, 7)),
    ),
}
OTHER: dict[str, tuple[Mesh | None, Mesh | None]] = {
    "tensor parallelism": (None, _mesh(("dp", 4), ("tp", 2))),
    "dimensions swapped": (_mesh(("dp", 4), ("tp", 2)), _mesh(("tp", 2), ("dp", 4))),
    "names swapped": (_mesh(("dp", 2), ("tp", 4)), _mesh(("tp", 2), ("dp", 4))),
    "other sizes": (_mesh(("dp", 4), ("tp", 2)), _mesh(("dp", 2), ("tp", 4))),
    "ranks in another order": (None, _mesh(("dp", 8), ranks=(1, 0, 2, 3, 4, 5, 6, 7))),
    "tensor parallelism to context parallelism": (_mesh(("dp", 4), ("tp", 2)), _mesh(("dp", 4), ("cp", 2))),
}


@pytest.mark.parametrize("case", SAME)
def test_meshes_that_give_every_rank_the_same_place_are_the_same(case: str) -> None:
    one, other = SAME[case]
    assert same_places(one, other, 8)
    assert same_places(other, one, 8)


@pytest.mark.parametrize("case", OTHER)
def test_meshes_that_give_a_rank_another_place_are_not(case: str) -> None:
    one, other = OTHER[case]
    assert not same_places(one, other, 8)
    assert not same_places(other, one, 8)


@pytest.mark.parametrize(
    ("mesh", "coordinates"),
    [
        (None, [0, 1, 2, 3]),
        (_mesh(("dp", 4)), [0, 1, 2, 3]),
        (_mesh(("dp", 2), ("tp", 2)), [0, 0, 1, 1]),
        (_mesh(("tp", 2), ("dp", 2)), [0, 1, 0, 1]),
        (_mesh(("dp", 2), ("tp", 2), ranks=(0, 3, 1, 2)), [0, 1, 1, 0]),
        (_mesh(("tp", 4)), [0, 0, 0, 0]),
        (_mesh(("pp", 2), ("dp_replicate", 1), ("dp_shard", 2)), [0, 1, 0, 1]),
        (_mesh(("dp_replicate", 2), ("dp_shard", 2)), [0, 1, 2, 3]),
        (_mesh(("tensor_parallel", 2), ("data", 2)), [0, 1, 0, 1]),
        # Names that begin like others.
        (_mesh(("spare", 2), ("modules", 2)), [0, 1, 2, 3]),
    ],
)
def test_ranks_that_share_samples_have_one_coordinate(mesh: Mesh | None, coordinates: list[int]) -> None:
    assert [data_coordinate(mesh, rank, 4) for rank in range(4)] == coordinates


def test_a_mesh_in_words_names_dimensions_and_another_order() -> None:
    assert mesh_in_words(None, 4) == "data parallel 4"
    assert mesh_in_words(_mesh(("dp_shard", 2), ("tp", 2)), 4) == "dp_shard 2 x tp 2"
    assert mesh_in_words(_mesh(("dp", 2), ("tp", 2), ranks=(0, 2, 1, 3)), 4) == "dp 2 x tp 2 of ranks 0, 2, 1, 3"
    long = _mesh(("dp", 20), ranks=tuple(reversed(range(20))))
    assert mesh_in_words(long, 20).endswith("of ranks 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, ...")


def test_a_mesh_of_a_part_of_the_ranks_and_one_without_names_say_nothing_of_the_run() -> None:
    assert covers(None, 4)
    assert covers(_mesh(("dp", 2), ("tp", 2)), 4)
    assert not covers(_mesh(("tp", 2)), 4)
    assert not covers(_mesh(("dim_0", 4)), 4)


@pytest.mark.parametrize("mesh", [_mesh(("dp", 2), ("tp", 2)), _mesh(("dp", 2), ("tp", 2), ranks=(0, 2, 1, 3))])
def test_the_plain_form_reads_back(mesh: Mesh) -> None:
    assert mesh_from_plain(mesh.to_plain()) == mesh
    assert ("ranks" in mesh.to_plain()) == bool(mesh.ranks)
    assert mesh_from_plain(None) is None
