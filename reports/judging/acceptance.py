"""What a run must show: the specification's ids, its acceptance criteria, profiles, and the ids that each platform requires.

The ids that a platform requires are data of the matrix (``conformance``) and of the system tests (``st``), which share ids: D1
is a case of both. The records of a run that was made for a platform name what the platform required then; for the others the
ids are read from this checkout's YAML. No code of those two packages is needed for it.
"""

from __future__ import annotations

import fnmatch
import functools
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
Recorded = Mapping[tuple[str, str], tuple[str, ...]]
# Suite -> where its cases are. A checkout without system tests requires none.
_SUITES = {"conformance": "cases", "st": "scenarios"}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Which platforms must be complete for a run to be accepted, and whether the sabotages must have been run.

    A profile whose ``is_acceptance`` is false requires nothing: it only says whether what was run passed.
    """

    title: Text
    platforms: tuple[str, ...]
    sabotages: bool
    is_acceptance: bool


@dataclass(frozen=True, kw_only=True)
class DoneRule:
    """One acceptance criterion of the specification: ``needs`` are the ids that must pass on each of ``platforms``.

    ``unit_tests``: the unit tests must pass too. ``stand_in``: a platform that shows the same where the device is not there.
    ``document``: a file of the checkout that must be there. ``one_trainer``: all results must be of one and the same trainer.
    """

    id: str
    text: Text
    needs: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    unit_tests: bool = False
    stand_in: str | None = None
    document: str | None = None
    one_trainer: bool = False

    @property
    def chapter(self) -> str:
        """The chapter of the specification that it belongs to: ``9.5`` of ``9.5.1``."""
        return ".".join(self.id.split(".")[:2])


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The whole of ``acceptance.yaml``."""

    profiles: Mapping[str, Profile]
    platforms: Mapping[str, Text]
    classes: Mapping[str, Text]
    rows: Mapping[str, Text]
    chapters: Mapping[str, Text]
    done: tuple[DoneRule, ...]
    never_tested: tuple[Text, ...]


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A column of the matrix. ``required`` are (suite, case id); a pattern that no case matches is kept as an id.

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
    return serial.build(Acceptance, _load(path), path.name, defaults=True)


def load_platforms(acceptance: Acceptance, recorded: Recorded, checkout: Path = CHECKOUT) -> tuple[Platform, ...]:
    """The platforms of both suites; one that both name is one column.

    Args:
        acceptance: for their names.
        recorded: what was required of the runs at hand by their own records, by suite and platform.
        checkout: its YAML holds what all other platforms require.
    """
    found: dict[str, Platform] = {}
    for suite, cases in _SUITES.items():
        if not (checkout / suite / "platforms.yaml").is_file():
            continue
        known = case_ids(checkout / suite / cases)
        for item in _load(checkout / suite / "platforms.yaml"):
            name, title = item["id"], Text(en=item["title"], zh=item["title"])
            today = expand(item["requires"], known)
            then = expand(recorded[suite, name], known) if (suite, name) in recorded else today
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
    """The suite that a result's id belongs to: that of its run's header. Where the header names no suite of cases (the controls
    of a run of sabotages, and every run of schema 1) it is the one whose command runs the case again.
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


# These files don't change while a report is made, and the ids of all cases are asked for again and again.
@functools.cache
def _load(path: Path) -> Any:
    status = path.stat()
    return _parse(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=128)
def _parse(path: Path, mtime_ns: int, size: int) -> Any:
    """The document, to be read only: a comparison judges two runs by the same files, and to parse them takes half the time."""
    with path.open(encoding="utf-8") as file:
        return yaml.load(file, Loader=yaml.CSafeLoader)
