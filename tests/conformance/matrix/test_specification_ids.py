"""Every case and platform row that the specification requires exists."""

from __future__ import annotations

import pytest

from conformance.matrix.case import load_cases, matches
from conformance.matrix.platforms import load_platforms

SPECIFICATION = [
    f"{letter}{number}" for letter, last in (("A", 10), ("B", 7), ("C", 11), ("D", 5)) for number in range(1, last + 1)
]
# 8.2 E of the specification, row by row.
PLATFORMS = {
    "cpu-inline": [name for name in SPECIFICATION if name[0] in "AB"]
    + ["C1", "C3", "C4", "C5", "C6", "C9", "C10", "C11"],
    "cpu-data": ["C7", "C8"],
    "npu4": ["D1", "D3", "C2", "C7", "A4", "A5", "A6"],
    "npu8": ["D2"],
}


def test_every_id_of_the_specification_has_a_case_and_a_platform() -> None:
    cases, platforms = load_cases(), load_platforms()
    assert [name for name in SPECIFICATION if not any(matches(case.id, name) for case in cases)] == []
    required = {name for platform in platforms for name in platform.requires}
    assert sorted(set(SPECIFICATION) - required) == []


@pytest.mark.parametrize("name", sorted(PLATFORMS))
def test_a_platform_requires_what_the_specification_asks_of_it(name: str) -> None:
    (platform,) = [item for item in load_platforms() if item.id == name]
    assert sorted(set(PLATFORMS[name]) - set(platform.requires)) == []


def test_every_case_is_required_somewhere_and_fits_its_platform() -> None:
    cases, platforms = load_cases(), load_platforms()
    homeless = [case.id for case in cases if not any(platform.takes(case) for platform in platforms)]
    too_many = [
        f"{case.id} on {platform.id}"
        for platform in platforms
        for case in cases
        if platform.takes(case) and case.world_size > platform.ranks
    ]
    assert (homeless, too_many) == ([], [])
