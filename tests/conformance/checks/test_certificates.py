"""The check on restore certificates passes on right evidence, fails on wrong evidence, and is an error on none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.checks.certificates import certified_buckets
from conformance.records.evidence import Evidence
from hyper_resume.state.certificate import Certificate, certify_bucket
from tests.conformance.evidence_made import evidence, leg, status

WANTED = {"exact": ["model"], "degraded": ["optimizer"], "absent": ["stateful"]}


def printed(tmp_path: Path, *verdicts: Any, ranks: int = 1) -> Evidence:
    """A leg whose log has a certificate, as the library writes one."""
    certificate = Certificate(
        path="a/global_step_2",
        global_step=2,
        start_epoch=0,
        start_step=2,
        world_size=ranks,
        verified="digest",
        created_at="2026-01-01T00:00:00+00:00",
        parts=tuple(certify_bucket(**verdict) for verdict in verdicts),
    )
    text = "\n  ".join(certificate.lines())
    line = {"kind": "log", "level": "INFO", "message": f"Restore certificate of {certificate.path}:\n  {text}"}
    return evidence(leg(tmp_path, events=[[line]]))


def part(bucket: str, rank: int = 0, **found: Any) -> dict[str, Any]:
    return {"bucket": bucket, "rank": rank, "saved": ("a", "a"), "loaded": "b", "live": "b", **found}


GOOD = (part("model"), part("optimizer", reasons=["it starts fresh"]), part("stateful", absent="neither has any"))


def test_certifies(tmp_path: Path) -> None:
    found = printed(tmp_path, *GOOD)
    assert (
        status(found, "certifies", leg="resumed", reasons=["saved = loaded = live", "fresh"], **WANTED)[0] == "passed"
    )
    assert status(found, "certifies", leg="resumed", reasons=["another word"], **WANTED) == ("failed", "policy")
    assert status(found, "certifies", leg="resumed", exact=["model"], absent=["stateful"]) == ("failed", "optimizer")


@pytest.mark.parametrize(
    ("verdicts", "blamed"),
    [
        ((*GOOD[:2], part("stateful")), "stateful"),
        ((part("model", live="c"), *GOOD[1:]), "model"),
        (GOOD[:2], "stateful"),
        ((*GOOD, part("rng_state")), "rng_state"),
    ],
)
def test_certifies_sees_every_other_verdict(tmp_path: Path, verdicts: Any, blamed: str) -> None:
    assert status(printed(tmp_path, *verdicts), "certifies", leg="resumed", **WANTED) == ("failed", blamed)


def test_certifies_sees_that_ranks_differ(tmp_path: Path) -> None:
    same = printed(tmp_path / "same", part("model"), part("model", 1), ranks=2)
    other = printed(tmp_path / "other", part("model"), part("model", 1, live="c"), ranks=2)
    assert status(same, "certifies", leg="resumed", exact=["model"])[0] == "passed"
    assert status(other, "certifies", leg="resumed", exact=["model"]) == ("failed", "model")


def test_certifies_fails_without_a_certificate_and_can_not_judge_without_a_wish(tmp_path: Path) -> None:
    found = evidence(leg(tmp_path))
    assert status(found, "certifies", leg="resumed", exact=["model"]) == ("failed", "model")
    assert status(found, "certifies", leg="resumed")[0] == "error"


def test_a_bucket_with_declared_differences_is_exact_and_not_the_same_run(tmp_path: Path) -> None:
    found = printed(tmp_path, part("model"), part("optimizer", overridden=["optimizer.lr: 0.1 -> 0.2"]))
    reasons = ["overridden: optimizer.lr: 0.1 -> 0.2"]
    assert status(found, "certifies", leg="resumed", exact=["model", "optimizer"], reasons=reasons)[0] == "passed"
    assert certified_buckets(found.leg("resumed")) == {"model": "exact", "optimizer": "not exact"}
