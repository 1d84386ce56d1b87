"""The certificate of a restore: what makes a bucket exact, how it reads, and which files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hyper_resume.errors import CheckpointMismatchError
from hyper_resume.state.certificate import (
    SCHEMA_VERSION,
    BucketCertificate,
    Certificate,
    certify_bucket,
    encode,
    read_certificate,
)


def _certificate(*parts: BucketCertificate, world_size: int = 1) -> Certificate:
    return Certificate(
        path="checkpoints/global_step_3",
        global_step=3,
        start_epoch=0,
        start_step=3,
        world_size=world_size,
        verified="digest",
        created_at="2026-11-30T08:00:00.000001+00:00",
        parts=parts,
    )


# ---- verdicts


def test_equal_digests_at_save_load_and_afterwards_are_exact() -> None:
    part = certify_bucket(bucket="model", rank=0, saved=("a", "a"), loaded="x", live="x")
    assert (part.verdict, part.reason, part.saved, part.loaded, part.live) == ("exact", "", "a", "x", "x")


def test_a_live_state_that_differs_from_what_was_read_is_degraded() -> None:
    part = certify_bucket(bucket="model", rank=0, saved=("a", "a"), loaded="x", live="y")
    assert part.verdict == "degraded"
    assert "the live state after the restore differs" in part.reason


def test_what_was_read_otherwise_than_saved_is_degraded_even_where_the_live_state_equals_it() -> None:
    part = certify_bucket(bucket="model", rank=0, saved=("a", "b"), loaded="x", live="x")
    assert part.verdict == "degraded"
    assert part.reason == "what was read differs from what was saved"


def test_known_reasons_are_kept_and_told_together() -> None:
    part = certify_bucket(bucket="optimizer", rank=2, reasons=["one", "two"], loaded="x", live="y")
    assert (part.verdict, part.reason) == ("degraded", "one; two")


def test_what_is_absent_says_why_and_wins_over_digests() -> None:
    part = certify_bucket(bucket="optimizer", rank=0, absent="not asked for", loaded="x", live="y")
    assert (part.verdict, part.reason) == ("absent", "not asked for")
    assert _certificate(part).is_exact


# ---- lines


def test_ranks_of_one_verdict_share_a_line() -> None:
    parts = [
        *(certify_bucket(bucket="model", rank=rank, saved=("a", "a"), loaded="x", live="x") for rank in range(3)),
        certify_bucket(bucket="rng_state", rank=0, loaded="x", live="x"),
        *(certify_bucket(bucket="rng_state", rank=rank, reasons=["another seed"]) for rank in (1, 2)),
        *(certify_bucket(bucket="stateful", rank=rank, absent="not asked for") for rank in range(3)),
    ]
    assert _certificate(*parts, world_size=3).lines() == [
        "model            exact (saved = loaded = live)",
        "rng_state        exact (loaded = live) on rank 0",
        "rng_state        degraded (another seed) on ranks 1, 2",
        "stateful         absent (not asked for)",
    ]


# ---- the file


def test_a_certificate_reads_back_equal(tmp_path: Path) -> None:
    certificate = _certificate(
        certify_bucket(bucket="model", rank=0, saved=("a", "a"), loaded="x", live="x"),
        certify_bucket(bucket="optimizer", rank=0, reasons=["äöü"]),
        certify_bucket(bucket="stateful", rank=0, absent="not asked for"),
    )
    (tmp_path / "file.json").write_text(encode(certificate), encoding="utf-8")
    assert read_certificate(tmp_path / "file.json") == certificate
    assert json.loads(encode(certificate))["schema_version"] == SCHEMA_VERSION == 1


def _changed(change: Any) -> str:
    plain = json.loads(encode(_certificate(certify_bucket(bucket="model", rank=0, loaded="x", live="x"))))
    change(plain)
    return json.dumps(plain)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        "{}",
        _changed(lambda plain: plain.update(schema_version=2)),
        _changed(lambda plain: plain.update(schema_version="1")),
        _changed(lambda plain: plain.update(schema_version=True)),
        _changed(lambda plain: plain.pop("schema_version")),
        _changed(lambda plain: plain.pop("parts")),
        _changed(lambda plain: plain.update(parts=3)),
        _changed(lambda plain: plain.update(parts=[3])),
        _changed(lambda plain: plain.update(more=1)),
        _changed(lambda plain: plain.update(global_step="3")),
        _changed(lambda plain: plain.update(global_step=True)),
        _changed(lambda plain: plain["parts"][0].update(verdict="fine")),
        _changed(lambda plain: plain["parts"][0].update(verdict="degraded")),
        _changed(lambda plain: plain["parts"][0].update(reason="exact for a reason")),
        _changed(lambda plain: plain["parts"][0].update(live=3)),
        _changed(lambda plain: plain["parts"][0].pop("rank")),
    ],
)
def test_what_is_no_certificate_of_this_version_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(CheckpointMismatchError, match="not a restore certificate that this version can read") as caught:
        read_certificate(tmp_path / "file.json")
    assert str(tmp_path / "file.json") in str(caught.value)


def test_a_declared_difference_is_exact_and_named_and_a_certificate_of_an_earlier_version_is_read(
    tmp_path: Path,
) -> None:
    part = certify_bucket(bucket="optimizer", rank=0, saved=("a", "a"), loaded="b", live="b", overridden=["lr: 1 -> 2"])
    assert (part.verdict, part.reason, part.overridden) == ("exact", "", "lr: 1 -> 2")
    degraded = certify_bucket(bucket="model", rank=0, reasons=["other"], overridden=["p: 0 -> 1"])
    plain = certify_bucket(bucket="progress", rank=0, loaded="b", live="b")
    whole = _certificate(part, degraded, plain)
    assert whole.lines() == [
        "optimizer        exact (overridden: lr: 1 -> 2)",
        "model            degraded (other; overridden: p: 0 -> 1)",
        "progress         exact (loaded = live)",
    ]
    stored = json.loads(encode(whole))
    # Earlier versions know no such field, and refuse a certificate that has one.
    assert ["overridden" in one for one in stored["parts"]] == [True, True, False]
    file = tmp_path / "certificate.json"
    file.write_text(encode(whole))
    assert read_certificate(file) == whole
