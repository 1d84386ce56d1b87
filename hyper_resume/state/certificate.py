"""The restore certificate: for each bucket and rank ``exact``, ``degraded (reason)`` or ``absent (reason)``.

``exact`` is measured: the live state, collected again after the restore, has the digest of the values that were read; and these
have the digest of the save, if the checkpoint contains it. Each part records which of the three digests were available.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hyper_resume.errors import CheckpointMismatchError, describe

SCHEMA_VERSION = 1
BUCKETS = ("model", "optimizer", "progress", "lr_scheduler", "train_dataloader", "rng_state", "stateful")
Verdict = Literal["exact", "degraded", "absent"]
_VERDICTS = ("exact", "degraded", "absent")
_DIFFERS_FROM_SAVED = "what was read differs from what was saved"
_DIFFERS_FROM_READ = "the live state after the restore differs from what was read"
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class BucketCertificate:
    """The result for one bucket on one rank.

    ``reason`` is "" if and only if the verdict is ``exact``. ``saved``, ``loaded`` and ``live`` are the digests at the save, of
    the values that were read, and of the live state after the restore; None if not available. ``overridden`` names what
    ``checkpoint.override_on_restore`` declares and differs; ``loaded`` and ``live`` then contain this run's values.
    """

    bucket: str
    rank: int
    verdict: Verdict
    reason: str = ""
    saved: str | None = None
    loaded: str | None = None
    live: str | None = None
    overridden: str = ""

    def as_plain(self) -> dict[str, Any]:
        """Return the fields; ``overridden`` only where something is, so that earlier versions read the others."""
        found = dataclasses.asdict(self)
        return found if self.overridden else {key: value for key, value in found.items() if key != "overridden"}


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The results of a whole restore. ``created_at`` is UTC, ISO 8601; ``verified`` is how the files were verified."""

    schema_version: int = SCHEMA_VERSION
    path: str
    global_step: int
    start_epoch: int
    start_step: int
    world_size: int
    verified: str
    created_at: str
    parts: tuple[BucketCertificate, ...]

    @property
    def is_exact(self) -> bool:
        """True if no bucket is degraded. A bucket may be absent if it was not requested, or if neither side has it."""
        return all(part.verdict != "degraded" for part in self.parts)

    def is_exact_at(self, bucket: str, rank: int) -> bool:
        """True if this bucket is exact on this rank."""
        return any(part.verdict == "exact" and (part.bucket, part.rank) == (bucket, rank) for part in self.parts)

    def degraded(self, bucket: str, reasons: Sequence[str]) -> Certificate:
        """Return the certificate with this bucket degraded on each rank that has a reason in ``reasons``, "" being none."""
        parts = tuple(
            dataclasses.replace(part, verdict="degraded", reason=reasons[part.rank])
            if part.bucket == bucket and part.verdict == "exact" and reasons[part.rank]
            else part
            for part in self.parts
        )
        return dataclasses.replace(self, parts=parts)

    def as_plain(self) -> dict[str, Any]:
        """Return dicts, lists and plain values that can be written as JSON."""
        parts = [part.as_plain() for part in self.parts]
        return {**dataclasses.asdict(dataclasses.replace(self, parts=())), "parts": parts}

    def lines(self) -> list[str]:
        """Return one line of text for each bucket and verdict."""
        result = []
        for bucket in dict.fromkeys(part.bucket for part in self.parts):
            groups: dict[str, list[int]] = {}
            for part in self.parts:
                if part.bucket == bucket:
                    groups.setdefault(_verdict_text(part), []).append(part.rank)
            for text, ranks in groups.items():
                where = "" if len(ranks) == self.world_size else f" on rank{'s'[: len(ranks) - 1]} {_rank_list(ranks)}"
                result.append(f"{bucket:<17}{text}{where}")
        return result


def certify_bucket(
    *,
    bucket: str,
    rank: int,
    absent: str = "",
    reasons: Iterable[str] = (),
    saved: tuple[str, str] | None = None,
    loaded: str | None = None,
    live: str | None = None,
    overridden: Iterable[str] = (),
) -> BucketCertificate:
    """Decide the verdict for one bucket on one rank.

    Args:
        bucket: name of the bucket.
        rank: number of the rank.
        absent: why there was nothing to restore; "" if there was something.
        reasons: known reasons why the restored state differs from the saved one.
        saved: the digests that the storage computed: at the save, and of the values that were read.
        loaded: digest of the values that were read.
        live: digest of the live state after the restore, in the same format as ``loaded``.
        overridden: differences that are declared as wanted.
    """
    why = list(reasons)
    if absent:
        return BucketCertificate(bucket=bucket, rank=rank, verdict="absent", reason="; ".join([absent, *why]))
    if saved is not None and saved[0] != saved[1]:
        why.append(_DIFFERS_FROM_SAVED)
    if not why and loaded is not None and live is not None and loaded != live:
        why.append(_DIFFERS_FROM_READ)
    return BucketCertificate(
        bucket=bucket,
        rank=rank,
        verdict="degraded" if why else "exact",
        reason="; ".join(why),
        saved=None if saved is None else saved[0],
        loaded=loaded,
        live=live,
        overridden="; ".join(overridden),
    )


def _verdict_text(part: BucketCertificate) -> str:
    if part.verdict != "exact" or part.overridden:
        overridden = [f"overridden: {part.overridden}"] if part.overridden else []
        return f"{part.verdict} ({'; '.join([*([part.reason] if part.reason else []), *overridden])})"
    digests = [name for name in ("saved", "loaded", "live") if getattr(part, name) is not None]
    return f"exact ({' = '.join(digests)})" if len(digests) > 1 else "exact (as read; its live state has no digest)"


def _rank_list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def encode(certificate: Certificate) -> str:
    """Return the certificate as JSON text."""
    return json.dumps(certificate.as_plain(), indent=1) + "\n"


def read_certificate(path: Path) -> Certificate:
    """Read a stored certificate.

    Raises:
        CheckpointMismatchError: it is not a certificate, or has a schema version that this library version does not read.
        OSError: it can't be read.
    """
    if path.stat().st_size > _MAX_BYTES:
        raise _unreadable(path, f"{path.stat().st_size} bytes")
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    version = plain.get("schema_version") if isinstance(plain, dict) else None
    if type(version) is not int or version != SCHEMA_VERSION:
        raise _unreadable(path, f"schema_version {version!r}")
    try:
        parts = tuple(_part(item) for item in plain["parts"])
        return Certificate(**{**_fields(Certificate, plain), "parts": parts})
    except (KeyError, TypeError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error


def _part(plain: Any) -> BucketCertificate:
    if isinstance(plain, dict):
        plain = {"overridden": "", **plain}
    part = BucketCertificate(**_fields(BucketCertificate, plain))
    if part.verdict not in _VERDICTS or (part.verdict == "exact") != (part.reason == ""):
        raise TypeError(f"verdict {part.verdict!r} with reason {part.reason!r}")
    return part


_FIELD_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "int": int,
    "str": str,
    "Verdict": str,
    "str | None": (str, type(None)),
    "tuple[BucketCertificate, ...]": list,
}


def _fields(kind: type[Any], plain: Any) -> dict[str, Any]:
    """Return ``plain`` if it has exactly the fields of ``kind``, each of its type."""
    wanted = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if not isinstance(plain, dict) or set(plain) != set(wanted):
        raise TypeError(f"fields {', '.join(map(str, plain)) if isinstance(plain, dict) else type(plain).__name__}")
    for name, annotation in wanted.items():
        if not isinstance(plain[name], _FIELD_TYPES[annotation]) or isinstance(plain[name], bool):
            raise TypeError(f"{name} is {plain[name]!r}")
    return plain


def _unreadable(path: Path, found: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        describe(
            "not a restore certificate that this version can read",
            where=str(path),
            expected=f"JSON with schema_version {SCHEMA_VERSION} and the fields of a certificate",
            found=found,
            do="read it with the version of hyper_resume that wrote it",
        )
    )
