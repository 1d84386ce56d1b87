"""What a run is held against: the specification's ids, the definition of done, profiles, and each platform's required ids.

The ids that a platform requires are data of two rooms, the matrix (``conformance``) and the system tests (``st``), which share
ids: D1 is a case of both. A run that was made for a platform tells itself what that required of it; for the others they are
read from this checkout's YAML. Nothing of those rooms' code is needed for it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from conformance.plain_data import serial
from conformance.records import results
from reports.contents.text import Text

_FILE = Path(__file__).with_name("acceptance.yaml")
CHECKOUT = Path(results.__file__).parents[2]
# (suite, platform) -> the required ids, as patterns.
Told = Mapping[tuple[str, str], tuple[str, ...]]
# Suite -> where its cases are. A checkout without system tests requires none.
_SUITES = {"conformance": "cases", "st": "scenarios"}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Which platforms must be complete for a run to be accepted, and whether the sabotages must have been run.

    One that ``is_acceptance`` is not asks for nothing: it only says whether what was run passed.
    """

    title: Text
    platforms: tuple[str, ...]
    sabotages: bool
    is_acceptance: bool


@dataclass(frozen=True, kw_only=True)
class DoneRule:
    """One line of 9.5: what must pass where; ``stand_in`` is a platform that shows the same for want of the device.

    ``document`` is a file of the checkout that must be there.
    """

    id: str
    text: Text
    needs: tuple[str, ...]
    platform: str
    unit_tests: bool
    stand_in: str | None
    document: str | None


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The whole of ``acceptance.yaml``."""

    profiles: Mapping[str, Profile]
    platforms: Mapping[str, Text]
    classes: Mapping[str, Text]
    rows: Mapping[str, Text]
    done: tuple[DoneRule, ...]
    never_tested: tuple[Text, ...]


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A column of the matrix. ``required`` are (suite, case id); a pattern that no case matches stands for itself.

    ``later`` are those that this checkout requires and the run, when it was made, did not.
    """

    id: str
    title: Text
    device: str
    ranks: int
    required: tuple[tuple[str, str], ...]
    later: tuple[tuple[str, str], ...]

    def requires(self, base: str) -> tuple[tuple[str, str], ...]:
        """What it requires of one id with its sub-cases."""
        return tuple(name for name in self.required if base_of(name[1]) == base)


def load_acceptance(path: Path = _FILE) -> Acceptance:
    """Read ``acceptance.yaml``.

    Raises:
        SerialError: it is malformed.
    """
    return serial.build(Acceptance, _load(path), path.name)


def load_platforms(acceptance: Acceptance, told: Told, checkout: Path = CHECKOUT) -> tuple[Platform, ...]:
    """The platforms of both suites; one that both name is one column.

    Args:
        acceptance: for their names.
        told: what the runs at hand say was required of them, by suite and platform.
        checkout: whose YAML speaks for all others.
    """
    found: dict[str, Platform] = {}
    for suite, cases in _SUITES.items():
        if not (checkout / suite / "platforms.yaml").is_file():
            continue
        known = case_ids(checkout / suite / cases)
        for item in _load(checkout / suite / "platforms.yaml"):
            name, title = item["id"], Text(en=item["title"], zh=item["title"])
            today = expand(item["requires"], known)
            then = expand(told[suite, name], known) if (suite, name) in told else today
            before = found.get(name)
            found[name] = Platform(
                id=name,
                title=acceptance.platforms.get(name, title),
                device=item["device"],
                ranks=item["ranks"],
                required=(*(before.required if before else ()), *((suite, case_id) for case_id in then)),
                later=(*(before.later if before else ()), *((suite, one) for one in today if one not in then)),
            )
    return tuple(found.values())


def suite_of(header: str, reproduce: str) -> str:
    """The suite that a result's id belongs to: that of its run's header, and where that is no suite of cases (the controls of
    a run of sabotages; schema 1 has none) the one whose command runs it again.
    """
    return header if header in _SUITES else "st" if reproduce.startswith("python -m st ") else "conformance"


def case_ids(folder: Path) -> tuple[str, ...]:
    """Every case of a folder that is judged (a ``note`` is only observed)."""
    found = []
    for path in sorted(folder.glob("*.yaml")):
        found += [str(item["id"]) for item in _load(path) if item.get("level", "must") != "note"]
    return tuple(sorted(found, key=sort_key))


def expand(patterns: Sequence[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """The ids that any pattern names, in order; a pattern without a match is kept, so that it shows as missing."""
    names = {case_id for case_id in known if any(matches(case_id, pattern) for pattern in patterns)}
    names |= {pattern for pattern in patterns if not any(matches(case_id, pattern) for case_id in known)}
    return tuple(sorted(names, key=sort_key))


def matches(case_id: str, pattern: str) -> bool:
    """True when ``pattern`` is this id, its part before the dot, or a glob over it."""
    return pattern in (case_id, base_of(case_id)) or fnmatch.fnmatchcase(case_id, pattern)


def base_of(case_id: str) -> str:
    """``A8`` of ``A8.neither``."""
    return case_id.partition(".")[0]


def sort_key(case_id: str) -> tuple[str, int, str]:
    """A9 before A10, and a base id before its sub-cases; ids of another kind by their letters."""
    base, _, rest = case_id.partition(".")
    number = base[1:]
    return (base[:1], int(number), rest) if number.isdigit() else (base, 0, rest)


def _load(path: Path) -> Any:
    with path.open(encoding="utf-8") as file:
        return yaml.load(file, Loader=yaml.CSafeLoader)
