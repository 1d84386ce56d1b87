"""Defects in the search for state that moves and is not saved, and in what a restore says of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.sabotages.saboteur import Saboteur, sabotage

_COVERAGE = "hyper_resume.state.coverage"
_RESTORE = "hyper_resume.trainer.restore"
_MESH = "hyper_resume.trainer.run.mesh"


@sabotage("coverage-finds-nothing")
def _coverage_finds_nothing(put: Saboteur) -> None:
    put.replace(f"{_COVERAGE}:Coverage.observe", lambda original, *args: ())


@sabotage("coverage-of-attributes-only")
def _coverage_of_attributes_only(put: Saboteur) -> None:
    """Only what is a direct attribute of the trainer is inspected, not what it contains."""

    def push(original: Any, walk: Any, path: str, value: Any, owners: Any) -> None:
        if path.count(".") == 1:
            original(walk, path, value, owners)

    put.replace(f"{_COVERAGE}:_Walk._push", push)


@sabotage("coverage-without-generators")
def _coverage_without_generators(put: Saboteur) -> None:
    for name in ("_digest_generator", "_digest_random", "_digest_numpy_generator"):
        put.replace(f"{_COVERAGE}:{name}", lambda original, generator: b"")


@sabotage("coverage-without-counters")
def _coverage_without_counters(put: Saboteur) -> None:
    put.replace(f"{_COVERAGE}:_Walk._count", lambda original, *args: None)


@sabotage("coverage-without-buffers")
def _coverage_without_buffers(put: Saboteur) -> None:
    put.replace(f"{_COVERAGE}:_Walk._open_module", lambda original, *args: None)


@sabotage("coverage-without-arrays")
def _coverage_without_arrays(put: Saboteur) -> None:
    put.replace(f"{_COVERAGE}:_digest_array", lambda original, array: b"")


@sabotage("coverage-without-closures")
def _coverage_without_closures(put: Saboteur) -> None:
    put.replace(f"{_COVERAGE}:_Walk._open_function", lambda original, *args: None)


@sabotage("declared-state-reported")
def _declared_state_reported(put: Saboteur) -> None:
    put.replace(f"{_COVERAGE}:Coverage._is_accepted", lambda original, *args: False)


@sabotage("every-state-accepted")
def _every_state_accepted(put: Saboteur) -> None:
    put.replace(f"{_COVERAGE}:Coverage._is_accepted", lambda original, *args: True)


@sabotage("coverage-always-on")
def _coverage_always_on(put: Saboteur) -> None:
    def begin(original: Any, uncovered: Any, trainer: Any, config: Any) -> None:
        original(uncovered, trainer, dataclasses.replace(config, check_coverage=True))

    put.replace("hyper_resume.trainer.uncovered:UncoveredState.__init__", begin)


@sabotage("uncovered-not-certified")
def _uncovered_not_certified(put: Saboteur) -> None:
    put.replace("hyper_resume.trainer.mismatches:reasons_of", lambda original, uncovered: {})


def _certify_as_exact(put: Saboteur) -> None:
    """Whatever was restored, its live state is certified to be what was read."""

    def certify(original: Any, **known: Any) -> Any:
        return original(**{**known, "live": known["loaded"]})

    put.replace(f"{_RESTORE}:certify_bucket", certify, fires=False)


@sabotage("streams-skipped-and-certified")
def _streams_skipped_and_certified(put: Saboteur) -> None:
    put.replace(f"{_MESH}:apply_rng", lambda original, *args: None)
    _certify_as_exact(put)


@sabotage("moments-skipped-and-certified")
def _moments_skipped_and_certified(put: Saboteur) -> None:
    put.replace(f"{_RESTORE}:apply_optimizers", lambda original, *args, **how: None)
    _certify_as_exact(put)


@sabotage("schedule-skipped-and-certified")
def _schedule_skipped_and_certified(put: Saboteur) -> None:
    put.replace(f"{_RESTORE}:apply_schedulers", lambda original, *args, **how: None)
    _certify_as_exact(put)
