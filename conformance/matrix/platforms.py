"""Class E: which ids each platform requires, from ``platforms.yaml``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from conformance.matrix.case import CLASSES, Case, matches
from conformance.plain_data import serial
from conformance.plain_data.suggestions import hint
from conformance.plain_data.yaml_lines import load_yaml

PLATFORMS_FILE = Path(__file__).parents[1] / "platforms.yaml"


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A kind of machine that cases run on.

    ``requires`` lists ids; a base id (``A8``) stands for all its sub-cases, ``F*`` for all of class F. Each must exist.
    ``ranks`` is the largest number of processes that a case may have here.
    """

    id: str
    title: str
    device: Literal["cpu", "cuda", "npu"]
    ranks: int
    spec: str
    requires: tuple[str, ...]

    def takes(self, case: Case) -> bool:
        """True when the platform requires this case."""
        return any(matches(case.id, pattern) for pattern in self.requires)

    def missing(self, cases: Iterable[Case]) -> list[str]:
        """The required ids that no case has."""
        ids = [case.id for case in cases]
        return [pattern for pattern in self.requires if not any(matches(known, pattern) for known in ids)]


def load_platforms(path: Path = PLATFORMS_FILE) -> tuple[Platform, ...]:
    """Read the platforms.

    Raises:
        SerialError: an entry is malformed, an id stands twice, or a required id is of no known class.
    """
    platforms = tuple(
        serial.build(Platform, item, f"{path.name}:{getattr(item, 'line', 1)}") for item in load_yaml(path)
    )
    names = [platform.id for platform in platforms]
    for platform in platforms:
        where = f"{path.name}: {platform.id}"
        if names.count(platform.id) > 1:
            raise serial.SerialError(f"{where}: stands twice")
        for pattern in platform.requires:
            if platform.requires.count(pattern) > 1 or pattern[0] not in CLASSES:
                raise serial.SerialError(f"{where}: {pattern!r} stands twice or is of no class")
    return platforms


def find_platform(name: str, platforms: Iterable[Platform]) -> Platform:
    """Return the platform called ``name``.

    Raises:
        SerialError: there is no such platform.
    """
    known = {platform.id: platform for platform in platforms}
    if name not in known:
        raise serial.SerialError(f"no platform is called {name!r}; {hint(name, known)}")
    return known[name]
