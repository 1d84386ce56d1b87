"""Checks on order: the samples of one step, the data shares of several ranks, saves in the background."""

from __future__ import annotations

from conformance.checks.outcome import CHECKS, CheckOutcome, verdict
from conformance.checks.trajectories import joined
from conformance.records.evidence import Evidence, EvidenceError, LegEvidence

COMMITTED = "committed_"


@CHECKS.register(needs=("trajectory.samples",))
def sample_ids_are(evidence: Evidence, *, leg: str, step: int, ids: tuple[int, ...], rank: int = 0) -> CheckOutcome:
    """The samples of one step are these, in this order (computed by hand, not by a trainer)."""
    found = [
        record.sample_ids for record in evidence.leg(leg).trajectory.records.get(rank, ()) if record.global_step == step
    ]
    return verdict(
        found == [ids] or [list(item) for item in found] == [list(ids)],
        expected=f"step {step}: samples {list(ids)}",
        observed=f"{[list(item) for item in found]}" if found else f"no step {step}",
        blames="train_dataloader",
    )


@CHECKS.register(needs=("trajectory.samples",))
def shares_cover(
    evidence: Evidence,
    *,
    shares: tuple[tuple[str, ...], ...],
    samples: int,
    epochs: tuple[int, ...],
    repeated: int = 0,
) -> CheckOutcome:
    """Over all shares of the data, each epoch has every id, and ``repeated`` of them twice to fill the last share.

    A share lists the legs of one data-parallel rank, in their order.
    """
    problems = []
    records = [record for legs in shares for record in joined(evidence, legs)]
    if not records:
        raise EvidenceError("no leg trained a step")
    for epoch in epochs:
        ids = [number for record in records if record.epoch == epoch for number in record.sample_ids]
        missing = sorted(set(range(samples)) - set(ids))
        twice = len(ids) - len(set(ids))
        if missing or twice != repeated:
            problems.append(f"epoch {epoch}: {twice} handed out again, missing {missing[:8]}")
    return verdict(
        not problems,
        expected=f"epochs {list(epochs)}: all of {samples} ids, {repeated} of them again",
        observed="; ".join(problems) or "so it is",
        blames="train_dataloader",
    )


@CHECKS.register(needs=("trajectory.loss",))
def trains_steps(evidence: Evidence, *, leg: str, steps: tuple[int, ...]) -> CheckOutcome:
    """The leg trained exactly these steps, in this order, on every rank."""
    trajectory = evidence.leg(leg).trajectory
    found = {rank: [record.global_step for record in records] for rank, records in trajectory.records.items()}
    return verdict(
        bool(found) and all(own == list(steps) for own in found.values()),
        expected=f"steps {list(steps)}",
        observed="; ".join(f"rank {rank}: {own}" for rank, own in found.items()),
        blames="progress",
    )


@CHECKS.register(needs=("events.saved", "events.value"))
def saves_in_background(evidence: Evidence, *, leg: str, steps: tuple[int, ...]) -> CheckOutcome:
    """These saves finished while training went on, each before the next save began and before training ended.

    Needs ``hold_saves`` in the leg's ``given``, so that a save takes longer than the steps after it.
    """
    found = evidence.leg(leg)
    order = _order(found)
    if not steps or not any(name.startswith("committed") for name, _ in order):
        raise EvidenceError(f"leg {leg}: no save was held back (hold_saves), so the check could not have failed")
    saved = [step for name, step in order if name == "saved"]
    problems = []
    for step in steps:
        places = [
            place for place, (name, number) in enumerate(order) if number == step and name.startswith("committed")
        ]
        if len(places) != 1:
            problems.append(f"step {step}: finished {len(places)} times")
            continue
        if order[places[0]][0] != "committed beside training":
            problems.append(f"step {step}: {order[places[0]][0].removeprefix('committed ')}")
        later = [place for place, (name, number) in enumerate(order) if name == "saved" and number > step]
        if later and later[0] < places[0]:
            problems.append(f"step {step}: the save of step {order[later[0]][1]} began before it was finished")
        ends = [place for place, (name, _) in enumerate(order) if name == "end"]
        if ends and ends[0] < places[0]:
            problems.append(f"step {step}: training ended before it was finished")
    if not set(steps) <= set(saved):
        problems.append(f"saved {saved}")
    return verdict(
        not problems,
        expected=f"steps {list(steps)}: finished while training went on, one after the other, before the end",
        observed="; ".join(problems) or "so it is",
        blames="storage",
    )


def _order(leg: LegEvidence) -> list[tuple[str, int]]:
    """The saves and the end that rank 0 recorded, in order."""
    order = []
    for event in leg.all_events:
        if event.rank != 0:
            continue
        if event.kind == "saved":
            order.append(("saved", event.data["global_step"]))
        elif event.kind == "value" and event.data["name"].startswith(COMMITTED):
            step = int(event.data["name"].removeprefix(COMMITTED))
            order.append((f"committed {event.data['value']}", step))
        elif event.kind == "end":
            order.append(("end", event.data["global_step"]))
    return order
