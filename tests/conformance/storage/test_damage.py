"""T2: the kinds of damage; and each oracle detects a library that is broken for it."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.processes.forked_ranks import Workers, run_alone
from conformance.storage.damage import corruption, damage_kinds
from conformance.storage.damage.damage_kinds import Damage, Material
from conformance.storage.damage.judge import Verdict, build, material

# One worker for all of it: what its fixtures make takes seconds.
pytestmark = pytest.mark.xdist_group("storage-corruption")


def made(files: dict[str, bytes]) -> Material:
    """A step directory with as much of a manifest as edits of it need."""
    entries = {name: {"size_bytes": len(content), "digest": "0" * 32, "rank": 0} for name, content in files.items()}
    manifest = {"step": 20, "attempt": "global_step_20.aa", "world_size": 2, "format_version": 1, "digest": "",
                "files": entries, "buckets": {"0": {"model": "00"}}}  # fmt: skip
    newest = {**files, "manifest.json": json.dumps(manifest).encode()}
    others = {name: {".metadata": b"other", "__0_0.distcp": b"old"} for name in ("older", "attempt", "equal", "alone")}
    return Material(layout="per_rank", newest=newest, others=others)


MADE = made(
    {".metadata": b"meta", "__0_0.distcp": bytes(range(1, 256)) * 5, "__1_0.distcp": bytes(reversed(range(256)))}
)


@pytest.fixture(scope="module")
def worker() -> Iterator[Workers]:
    with Workers(1, preload=["hyper_resume.checkpoint"]) as pool:
        yield pool


# ---- the damage, without a library --------------------------------------------------------------------------------------


def test_every_byte_of_every_file_is_flipped_once_and_nothing_else_changes() -> None:
    seen = set()
    for case in damage_kinds.flips(MADE, seed=3):
        content = damage_kinds.damaged(case, MADE)
        changed = {
            (file, offset)
            for file in content
            for offset, (one, other) in enumerate(zip(content[file], MADE.newest[file], strict=True))
            if one != other
        }
        assert len(changed) == 1
        ((file, offset),) = changed
        assert (content[file][offset] ^ MADE.newest[file][offset]).bit_count() == 1
        seen |= changed
    assert len(seen) == sum(map(len, MADE.newest.values()))


def test_truncations_are_as_many_as_asked_for_and_have_both_ends_of_each_file() -> None:
    cases = damage_kinds.truncations(MADE, seed=1, count=50)
    assert len({case.id for case in cases}) == 50
    for file, content in MADE.newest.items():
        lengths = {int(case.detail) for case in cases if case.file == file}
        assert {0, len(content) - 1} <= lengths
        assert max(lengths) < len(content)


def test_damage_that_changes_nothing_is_no_case() -> None:
    files = {".metadata": b"meta", "__0_0.distcp": b"\0" * 600, "__1_0.distcp": b"1" * 600}
    zeroed = [case for case in damage_kinds.others(made(files)) if case.kind == "zeroed sector"]
    assert {case.file for case in zeroed} == {".metadata", "__1_0.distcp", "manifest.json"}


def test_a_resealed_manifest_has_the_digest_of_what_it_says() -> None:
    case = Damage(layout="per_rank", kind="manifest resealed", file="__1_0.distcp", detail="file-size")
    manifest = json.loads(damage_kinds.damaged(case, MADE)["manifest.json"])
    assert manifest["files"]["__1_0.distcp"]["size_bytes"] == 257
    assert manifest["digest"] == damage_kinds.own_digest(manifest)
    edited = damage_kinds.damaged(dataclasses.replace(case, kind="manifest edited"), MADE)
    assert json.loads(edited["manifest.json"])["digest"] == ""


@pytest.mark.parametrize(
    "case",
    [
        Damage(layout="embedded", kind="zeroed sector", file="extra_state/extra_state_rank_1.pt", detail="2"),
        Damage(layout="per_rank", kind="manifest resealed", file="__1_0.distcp", detail="file-unlisted-and-broken"),
        Damage(layout="per_rank", kind="missing", file=".metadata"),
    ],
)
def test_an_id_is_enough_to_make_the_damage_again(case: Damage) -> None:
    assert damage_kinds.parse_id(case.id) == case


def test_an_id_of_another_tier_is_refused() -> None:
    with pytest.raises(ValueError, match="no id of this tier"):
        damage_kinds.parse_id("mutants:per_rank:flip:a:1.1")


def test_the_place_of_a_flip_is_asked_for_where_a_shards_table_can_tell_it() -> None:
    shard = bytes(100) + bytes(24) + struct.pack("<Q8s", 1, b"hrsegm01")
    material = made({".metadata": b"meta", "__0_0.distcp": shard, "__1_0.distcp": shard + shard[-40:]})
    expected_places = {
        case.id: damage_kinds.reported_place(case, material)
        for case in [
            *damage_kinds.flips(material, seed=3),
            *damage_kinds.truncations(material, 1, 20),
            *damage_kinds.others(material),
        ]
    }
    required = {name: place for name, place in expected_places.items() if place is not None}
    # Of the table itself, which is the last one, nothing tells where it is damaged.
    assert sorted(required.values()) == sorted([*range(100), *range(140)])
    assert all(name.startswith("corruption:per_rank:flip:__") for name in required)


# ---- the real library ---------------------------------------------------------------------------------------------------


def _examine(job: tuple[Callable[[], None] | None, list[tuple[str, str, str]]]) -> list[Verdict]:
    """Judge a few cases, in a process where ``break_it`` has broken the library."""
    break_it, places = job

    def life() -> list[Verdict]:
        with tempfile.TemporaryDirectory(prefix="test-") as folder:
            build(Path(folder), "per_rank")
            if break_it is not None:
                break_it()
            cases = [Damage(layout="per_rank", kind=kind, file=file, detail=detail) for kind, file, detail in places]
            return corruption.examine(Path(folder), "per_rank", cases, "load", ask_stock=False)

    end = run_alone(life, limit_seconds=60)
    assert end.how == "returned", f"{end.summary}\n{end.trace}"
    verdicts: list[Verdict] = end.value
    return verdicts


FLIPS = [("flip", "__1_0.distcp", f"{offset}.3") for offset in range(900, 3000, 300)]


def test_the_library_refuses_each_flip_and_falls_back(worker: Workers) -> None:
    (verdicts,) = worker.map(_examine, [(None, FLIPS)])
    assert [(one.outcome, one.fell_back, one.violations) for one in verdicts] == [("refused", True, ())] * len(FLIPS)


def test_stock_dcp_gets_the_same_files_and_is_silent_on_some(worker: Workers) -> None:
    (found,) = worker.map(_stock, [None])
    assert any(one.stock_was_silent for one in found)
    assert not any("loaded silently" in one.violations for one in found)


def _stock(_: None) -> list[Verdict]:
    with tempfile.TemporaryDirectory(prefix="test-") as folder:
        build(Path(folder), "per_rank")
        # The checkpoint of another attempt has the same names, shapes and sizes.
        case = Damage(layout="per_rank", kind="file of another attempt", file="__1_0.distcp")
        assert case in damage_kinds.others(material(Path(folder), "per_rank"))
        return corruption.examine(Path(folder), "per_rank", [case], "load")


def _verify_nothing() -> None:
    from hyper_resume.checkpoint.format import manifest
    from hyper_resume.checkpoint.loading import file_verification

    manifest.verify_files = file_verification.verify_files = lambda *args, **kwargs: []  # type: ignore[attr-defined]


def _places(_: None) -> tuple[Material, list[Verdict]]:
    with tempfile.TemporaryDirectory(prefix="test-") as folder:
        build(Path(folder), "per_rank")
        found = material(Path(folder), "per_rank")
        cases = [case for case in damage_kinds.flips(found, 5) if case.file == "__1_0.distcp"][::40]
        return found, corruption.examine(Path(folder), "per_rank", cases, "digest")


def test_each_flip_of_a_shard_is_told_by_a_place_of_few_bytes_that_has_it(worker: Workers) -> None:
    ((found, verdicts),) = worker.map(_places, [None])
    size = len(found.newest["__1_0.distcp"])
    (segments,) = struct.unpack("<Q", found.newest["__1_0.distcp"][-16:-8])
    # Else the one place could be the whole file, and nothing would be required.
    assert segments >= 10
    required = [one for one in verdicts if damage_kinds.reported_place(one.damage, found) is not None]
    assert len(required) > len(verdicts) * 0.9
    assert not any(one.violations for one in verdicts)
    spans = set()
    for one in required:
        ((begin, end),) = re.findall(r"other bytes at (\d+) to (\d+)", one.message)
        assert int(begin) <= int(one.damage.detail.partition(".")[0]) < int(end) < size
        spans.add((int(begin), int(end)))
    assert len(spans) > segments / 2


def _write_to_live_first() -> None:
    from hyper_resume.checkpoint import DistributedCheckpointer

    original = DistributedCheckpointer.load

    def load(self: Any, path: str, state: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        state["model"]["norm.weight"].zero_()
        return original(self, path, state, **kwargs)

    DistributedCheckpointer.load = load  # type: ignore[method-assign]


def _draw_a_random_number() -> None:
    import random

    from hyper_resume.checkpoint import DistributedCheckpointer

    original = DistributedCheckpointer.load

    def load(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        random.random()
        return original(self, *args, **kwargs)

    DistributedCheckpointer.load = load  # type: ignore[method-assign]


def _raise_instead(error: Exception) -> None:
    from hyper_resume.checkpoint import DistributedCheckpointer

    original = DistributedCheckpointer.load

    def load(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return original(self, *args, **kwargs)
        except Exception:  # noqa: BLE001  whatever it was, it becomes the wrong one
            raise error from None

    DistributedCheckpointer.load = load  # type: ignore[method-assign]


def _raise_a_value_error() -> None:
    _raise_instead(ValueError("__1_0.distcp is not right"))


def _raise_without_the_file() -> None:
    from hyper_resume.errors import CheckpointMismatchError

    _raise_instead(CheckpointMismatchError("something is wrong"))


def _find(found: Callable[[Path], str | None]) -> None:
    from hyper_resume.checkpoint import DistributedCheckpointer

    DistributedCheckpointer.find_latest_checkpoint = lambda self, root: found(Path(root))  # type: ignore[assignment, method-assign]


def _find_the_newest() -> None:
    _find(lambda root: str(root / "global_step_20"))


def _find_the_older_without_a_word() -> None:
    _find(lambda root: str(root / "global_step_10"))


def _find_nothing() -> None:
    _find(lambda root: None)


def _leave_a_file() -> None:
    def found(root: Path) -> str:
        (root / "seen").write_text("")
        return str(root / "global_step_10")

    _find(found)


def _report_another_place(change: Callable[[str], str]) -> None:
    from hyper_resume.checkpoint.format import segments

    original = segments.verify

    def verify(*args: Any) -> Any:
        complaint, proof = original(*args)
        return re.sub(r"\d+ to \d+", lambda found: change(found.group()), complaint), proof

    segments.verify = verify  # type: ignore[assignment]


def _report_no_place() -> None:
    _report_another_place(lambda place: "some place")


def _report_the_place_behind() -> None:
    _report_another_place(lambda place: f"{place.split()[-1]} to {1 << 30}")


def _report_two_places() -> None:
    _report_another_place(lambda place: f"{place}, 0 to 1")


def _end_the_process() -> None:
    import os

    from hyper_resume.checkpoint import DistributedCheckpointer

    DistributedCheckpointer.load = lambda self, *args, **kwargs: os._exit(3)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("break_it", "violation"),
    [
        (_verify_nothing, "loaded silently"),
        (_write_to_live_first, "touched live state"),
        (_draw_a_random_number, "touched live state"),
        (_raise_a_value_error, "wrong class of error"),
        (_raise_without_the_file, "file not named"),
        (_report_no_place, "place not told"),
        (_report_the_place_behind, "place not told"),
        (_report_two_places, "place not told"),
        (_find_the_newest, "LATEST took what a load by path refuses"),
        (_find_the_older_without_a_word, "fall-back without its reason"),
        (_find_nothing, "no fall-back"),
        (_leave_a_file, "a file was changed by reading"),
        (_end_the_process, "ended the process"),
    ],
)
def test_each_oracle_notices_a_library_that_is_broken_there(
    worker: Workers, break_it: Callable[[], None], violation: str
) -> None:
    # All bytes of one tensor's values are among the places, so that a silent load is one for sure.
    places = [("file of another attempt", "__1_0.distcp", "")] if break_it is _verify_nothing else FLIPS[:1]
    (verdicts,) = worker.map(_examine, [(break_it, places)])
    assert any(violation in one.violations for one in verdicts), verdicts


def test_a_size_check_that_is_gone_is_noticed_though_digests_still_hold(worker: Workers) -> None:
    (verdicts,) = worker.map(_examine, [(_pass_any_size, [("appended", "__1_0.distcp", "512")])])
    assert "by size: not noticed" in verdicts[0].violations


def _pass_any_size() -> None:
    from hyper_resume.checkpoint.format import lost_entries, manifest
    from hyper_resume.checkpoint.loading import buffers, file_verification

    original = manifest.verify_files

    def instead(*args: Any, digests: bool, **more: Any) -> list[str]:
        return original(*args, digests=True, **more) if digests else []

    for module in (manifest, file_verification, lost_entries):
        module.verify_files = instead  # type: ignore[attr-defined]
    # One process reads what two have saved, so the digests of the files would be compared in any case.
    buffers.LoadBuffers.needs_file_digests = lambda *_: False  # type: ignore[method-assign,assignment]


def test_a_smoke_run_has_a_record_for_each_kind_and_none_of_it_is_silent() -> None:
    size = corruption.Size(flips=200, loads=10, truncations=12, others=24)
    records = corruption.run(size=size, seed=1, workers=1)
    rows = {record.kind: record for record in records}
    assert rows[corruption.DIGEST_ROW].tried == 200
    assert rows[corruption.FLIP_ROW].tried == 10
    assert rows["truncated"].tried == 12
    assert sum(record.loaded_silently + record.touched_live_state for record in records) == 0
