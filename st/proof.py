"""A proof as data: a short script of legs with their faults, read from YAML.

What the script expects (``resumes_at``) stays here and in the judge; the trainer never sees it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from conformance.check import COLUMNS
from st.supervisor import Fault

_PROOF_KEYS = {"id", "title", "config", "ranks", "script"}
_OPTIONAL_PROOF_KEYS = {"overrides", "may_be_constant"}
_LEG_KEYS = {
    "reference": (set[str](), {"overrides"}),
    "interrupted": ({"fault"}, {"overrides"}),
    "resumed": ({"restore_from", "resumes_at"}, {"fault", "overrides"}),
}
# The harness sets these itself, leg by leg.
_OWN_FIELDS = ("checkpoint.checkpoint_dir", "checkpoint.restore_from", "trajectory.dir", "trajectory.digests")


class ProofError(ValueError):
    """A proof file is wrong; the message names file and key."""


@dataclass(frozen=True, kw_only=True)
class LegScript:
    """One line of the script. ``overrides`` are for this leg alone."""

    leg: Literal["reference", "interrupted", "resumed"]
    label: str
    overrides: tuple[str, ...]
    fault: Fault | None
    restore_from: str | None
    resumes_at: int | None


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What a proof file says. ``config`` is absolute; ``may_be_constant`` names columns that need not vary."""

    path: Path
    id: str
    title: str
    config: Path
    overrides: tuple[str, ...]
    ranks: int
    may_be_constant: tuple[str, ...]
    script: tuple[LegScript, ...]


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice; PyYAML itself keeps the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
        if repeated:
            raise yaml.constructor.ConstructorError(None, None, f"repeated key {repeated}", node.start_mark)
        return super().construct_mapping(node, deep)


def load_proof(path: Path) -> Proof:
    """Read a proof file.

    Raises:
        ProofError: it is missing or not YAML, a key is unknown, missing or of the wrong type, or the script makes no
            sense (no reference first, a leg that is neither killed nor the last one, ...).
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # a SafeLoader
    except (OSError, yaml.YAMLError) as error:
        raise ProofError(f"{path}: {error}") from error
    _require_keys(data, _PROOF_KEYS, _OPTIONAL_PROOF_KEYS, str(path))
    config = (path.parent / _text(data, "config", path)).resolve()
    if not config.is_file():
        raise ProofError(f"{path}: config: no file {config}")
    may_be_constant = _texts(data, "may_be_constant", path)
    if not set(may_be_constant) <= set(COLUMNS):
        raise ProofError(f"{path}: may_be_constant: {list(may_be_constant)} are not all of {sorted(COLUMNS)}")
    identifier = _text(data, "id", path)
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", identifier):
        raise ProofError(f"{path}: id must be lower-case words joined by hyphens, not {identifier!r}")
    return Proof(
        path=path,
        id=identifier,
        title=_text(data, "title", path),
        config=config,
        overrides=_overrides(data, str(path)),
        ranks=_number(data, "ranks", str(path), minimum=1),
        may_be_constant=may_be_constant,
        script=_script(data["script"], path),
    )


def _script(data: Any, path: Path) -> tuple[LegScript, ...]:
    if not isinstance(data, list):
        raise ProofError(f"{path}: script must be a list of legs")
    legs = [_leg(item, f"{path}: script[{index}]") for index, item in enumerate(data)]
    kinds = [leg.leg for leg in legs]
    if len(kinds) < 3 or kinds[:2] != ["reference", "interrupted"] or set(kinds[2:]) != {"resumed"}:
        raise ProofError(f"{path}: script must be reference, interrupted, resumed ..., not {kinds}")
    for index, leg in enumerate(legs[2:], start=2):
        is_last = index == len(legs) - 1
        if is_last != (leg.fault is None):
            problem = (
                "the last leg runs to the end, without a fault" if is_last else "every leg but the last needs a fault"
            )
            raise ProofError(f"{path}: script[{index}]: {problem}")
    if len(kinds) == 3:
        return tuple(legs)
    return (*legs[:2], *(replace(leg, label=f"resumed-{number}") for number, leg in enumerate(legs[2:], start=1)))


def _leg(data: Any, place: str) -> LegScript:
    kind = data.get("leg") if isinstance(data, dict) else None
    if kind not in _LEG_KEYS:
        raise ProofError(f"{place}: leg must be one of {sorted(_LEG_KEYS)}, not {kind!r}")
    required, optional = _LEG_KEYS[kind]
    _require_keys(data, {"leg"} | required, optional, place)
    if data.get("restore_from", "LATEST") != "LATEST":
        raise ProofError(f"{place}: restore_from must be LATEST, not {data['restore_from']!r}")
    return LegScript(
        leg=cast(Literal["reference", "interrupted", "resumed"], kind),
        label=kind,
        overrides=_overrides(data, place),
        fault=_fault(data["fault"], place) if "fault" in data else None,
        restore_from=data.get("restore_from"),
        resumes_at=_number(data, "resumes_at", place, minimum=1) if "resumes_at" in data else None,
    )


def _fault(data: Any, place: str) -> Fault:
    place += ": fault"
    if not isinstance(data, dict) or data.get("kind") != "kill":
        raise ProofError(f"{place}: kind must be kill")
    _require_keys(data, {"kind"}, {"after_step", "after_save"}, place)
    moments = [key for key in ("after_step", "after_save") if key in data]
    if len(moments) != 1:
        raise ProofError(f"{place}: give exactly one of after_step and after_save")
    moment = cast(Literal["after_step", "after_save"], moments[0])
    return Fault(kind="kill", moment=moment, step=_number(data, moment, place, minimum=1))


def _overrides(data: dict[str, Any], place: str) -> tuple[str, ...]:
    overrides = _texts(data, "overrides", place)
    for override in overrides:
        name, equals, _ = override.removeprefix("--").partition("=")
        if not override.startswith("--") or not equals:
            raise ProofError(f"{place}: overrides: {override!r} is not of the form --dotted.path=value")
        if name in _OWN_FIELDS:
            raise ProofError(f"{place}: overrides: {name} is set by the harness, leg by leg")
    return overrides


def _require_keys(data: Any, required: set[str], optional: set[str], place: str) -> None:
    if not isinstance(data, dict):
        raise ProofError(f"{place}: expected keys {sorted(required)}, found {data!r}")
    unknown, missing = sorted(set(map(str, data)) - required - optional), sorted(required - set(data))
    if unknown or missing:
        known = sorted(required | optional)
        raise ProofError(f"{place}: unknown keys {unknown}, missing keys {missing}; known are {known}")


def _text(data: dict[str, Any], key: str, place: object) -> str:
    value = data[key]
    if not isinstance(value, str) or not value.strip():
        raise ProofError(f"{place}: {key} must be a text, not {value!r}")
    return value


def _texts(data: dict[str, Any], key: str, place: object) -> tuple[str, ...]:
    value = data.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ProofError(f"{place}: {key} must be a list of texts, not {value!r}")
    return tuple(value)


def _number(data: dict[str, Any], key: str, place: str, *, minimum: int) -> int:
    value = data[key]
    if type(value) is not int or value < minimum:
        raise ProofError(f"{place}: {key} must be a whole number from {minimum}, not {value!r}")
    return value
