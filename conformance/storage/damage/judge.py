"""Builds the checkpoint to damage, and judges one damaged checkpoint against the promises."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from conformance.processes.forked_ranks import run_alone, run_ranks
from conformance.storage.damage import damage_kinds as kinds
from conformance.storage.damage.damage_kinds import Content, Damage, Material
from conformance.storage.workload import small_checkpoint as small
from conformance.storage.workload.small_checkpoint import Layout

OLDER, NEWEST = 10, 20
# The size of the smallest tensor that is a segment of its own.
_OWN_SEGMENT_BYTES = 32
Level = Literal["digest", "load"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one case. ``violations`` is empty when every promise held; ``message`` is what the library reported."""

    damage: Damage
    level: Level
    outcome: Literal["refused", "harmless", "silent", "broken"]
    fell_back: bool = False
    violations: tuple[str, ...] = ()
    message: str = ""
    stock_was_silent: bool | None = None


class NothingToDamage(RuntimeError):
    """The checkpoint to damage can't be saved, or does not load undamaged: the harness or the library is broken."""


# ---- the checkpoint -----------------------------------------------------------------------------------------------------


def build(folder: Path, layout: Layout) -> None:
    """Save, below ``folder``: ``root`` (steps 10 and 20), and three other saves of step 20.

    Raises:
        NothingToDamage: a save failed.
    """

    def save(name: str, steps: Sequence[int], variant: int) -> None:
        from hyper_resume.checkpoint import DistributedCheckpointer
        from hyper_resume.checkpoint.saving import stream

        # With this, such a small shard gets a segment per tensor, as a large one does. Set in this process only.
        stream.SMALL_BYTES = _OWN_SEGMENT_BYTES
        root = folder / name
        root.mkdir(exist_ok=True)
        checkpointer = DistributedCheckpointer(extra_state_per_rank=layout == "per_rank")
        checkpointer.begin_run(str(root), restored_from=None)
        for step in steps:
            small.save(checkpointer, root, step, variant)

    def two_ranks() -> None:
        save("root", (OLDER, NEWEST), 0)
        save("attempt", (NEWEST,), 1)
        save("equal", (NEWEST,), 0)

    folder.mkdir(parents=True, exist_ok=True)
    ends = [*run_ranks(two_ranks), *run_ranks(save, "alone", (NEWEST,), 0, world_size=1)]
    failed = [end.summary for end in ends if end.how != "returned"]
    if failed:
        raise NothingToDamage("; ".join(failed))


def material(folder: Path, layout: Layout) -> Material:
    """Read the directories of :func:`build` into memory."""
    root = folder / "root"
    return Material(
        layout=layout,
        newest=read_tree(root / f"global_step_{NEWEST}"),
        others={
            "older": read_tree(root / f"global_step_{OLDER}"),
            **{name: read_tree(folder / name / f"global_step_{NEWEST}") for name in ("attempt", "equal", "alone")},
        },
    )


def read_tree(directory: Path) -> Content:
    """Every file below ``directory``."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def write_tree(directory: Path, content: Content) -> None:
    """Make ``directory`` hold exactly ``content``."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name, data in content.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


def check_undamaged(folder: Path, layout: Layout) -> None:
    """Verify that the undamaged checkpoint loads; otherwise a refusal would mean nothing.

    Raises:
        NothingToDamage: it does not.
    """

    def load() -> str:
        live = small.destination()
        extra = _load(folder / "root" / f"global_step_{NEWEST}", live)
        return small.difference(live, small.expected(NEWEST)) or small.training_state_difference(extra, NEWEST, 0)

    end = run_alone(load)
    if end.how != "returned" or end.value:
        raise NothingToDamage(f"undamaged, {layout}: {end.summary} {end.value or ''}")


# ---- judging, in a process of its own -----------------------------------------------------------------------------------


class Judge:
    """Applies one damage after the other to a root of its own, and lets the library load it."""

    def __init__(self, root: Path, material: Material) -> None:
        """``root`` is a private copy that holds both steps."""
        self._root = root
        self._newest = root / f"global_step_{NEWEST}"
        self._material = material

    def at_digest_level(self, damage: Damage) -> Verdict:
        """Only what a load does before it reads values: verify every file against the manifest."""
        from hyper_resume.checkpoint.format import manifest
        from hyper_resume.errors import CheckpointMismatchError

        place = self._newest / damage.file
        place.write_bytes(kinds.damaged(damage, self._material)[damage.file])
        try:
            found = manifest.read_manifest(self._newest)
            complaints = [] if found is None else manifest.verify_files(self._newest, found, found.files, digests=True)
        except CheckpointMismatchError as error:
            complaints = [str(error)]
        finally:
            place.write_bytes(self._material.newest[damage.file])
        message = "; ".join(complaints)
        violations = self._missing_in_message(message, damage)
        if not message:
            return Verdict(damage=damage, level="digest", outcome="silent", violations=("loaded silently",))
        return Verdict(damage=damage, level="digest", outcome="refused", violations=tuple(violations), message=message)

    def _missing_in_message(self, message: str, damage: Damage) -> list[str]:
        """What is missing in the message of a refusal."""
        byte = kinds.reported_place(damage, self._material)
        spans = [(int(begin), int(end)) for begin, end in _PLACES.findall(message)]
        violations = [] if _names_one(message, damage) else ["file not named"]
        # One bit is damaged, so one place is named.
        if byte is not None and not (len(spans) == 1 and spans[0][0] <= byte < spans[0][1]):
            violations.append("place not told")
        return violations

    def by_loading(self, damage: Damage, *, ask_stock: bool) -> Verdict:
        """Load in full, by path and by LATEST."""
        content = kinds.damaged(damage, self._material)
        write_tree(self._newest, content)
        before = read_tree(self._root)
        outcome, message, violations = self._by_path(damage)
        if damage.kind in kinds.SHOWS_IN_SIZE and outcome == "refused":
            by_size, _, more = self._by_path(damage, verify="size")
            violations += [f"by size: {name}" for name in more] + ["by size: not noticed"] * (by_size != "refused")
        fell_back, more = self._by_latest(damage, outcome)
        violations += more
        if read_tree(self._root) != before:
            violations.append("a file was changed by reading")
        stock = None
        if ask_stock and _stock_reads(damage):
            stock = self._stock_is_silent()
        write_tree(self._newest, self._material.newest)
        return Verdict(
            damage=damage,
            level="load",
            outcome=outcome,
            fell_back=fell_back,
            violations=tuple(violations),
            message=message,
            stock_was_silent=stock,
        )

    def _by_path(self, damage: Damage, *, verify: Literal["digest", "size"] = "digest") -> tuple[Any, str, list[str]]:
        live = small.destination()
        before = small.live_digest(live)
        with small.collected_warnings() as warnings:
            try:
                extra = _load(self._newest, live, verify=verify)
            except Exception as error:  # noqa: BLE001  of which class it is, is judged
                message = f"{type(error).__name__}: {error}"
                violations = [] if type(error).__name__ in _RIGHT_ERRORS else ["wrong class of error"]
                violations += self._missing_in_message(message, damage)
                violations += [] if small.live_digest(live) == before else ["touched live state"]
                return "refused", message, violations
        wrong = small.difference(live, small.expected(NEWEST)) or small.training_state_difference(extra, NEWEST, 0)
        if wrong:
            return "silent", wrong, ["loaded silently"]
        message = "; ".join(warnings)
        violations = ["not noticed"] if damage.must_be_refused else []
        if damage.kind == "extra" and not _names_one(message, damage):
            violations.append("extra file not reported")
        return "harmless", message, violations

    def _by_latest(self, damage: Damage, outcome: str) -> tuple[bool, list[str]]:
        """Whether the older step was loaded, and what is wrong with that."""
        from hyper_resume.checkpoint import DistributedCheckpointer

        with small.collected_warnings() as warnings:
            try:
                found = DistributedCheckpointer().find_latest_checkpoint(str(self._root))
            except Exception as error:  # noqa: BLE001  there is a good step, so there is no right error
                return False, [f"no fall-back ({type(error).__name__})"]
        if found == str(self._newest):
            return False, [] if outcome != "refused" else ["LATEST took what a load by path refuses"]
        if found is None or Path(found) != self._root / f"global_step_{OLDER}":
            return False, ["no fall-back"]
        message = "; ".join(warnings)
        violations = (
            [] if self._newest.name in message and _names_one(message, damage) else ["fall-back without its reason"]
        )
        live = small.destination()
        try:
            extra = _load(Path(found), live)
        except Exception as error:  # noqa: BLE001  it is whole, so there is no right error
            return True, [*violations, f"fall-back does not load ({type(error).__name__})"]
        if small.difference(live, small.expected(OLDER)) or small.training_state_difference(extra, OLDER, 0):
            violations.append("fall-back loaded silently")
        return True, violations

    def _stock_is_silent(self) -> bool:
        """True if stock DCP loads without an error, and a value differs."""
        from torch.distributed.checkpoint.state_dict_loader import load

        live = small.destination()
        try:
            load(live, checkpoint_id=self._newest, no_dist=True)
        except BaseException:  # noqa: BLE001  its errors are not even Exceptions
            return False
        return bool(small.difference(live, small.expected(NEWEST)))


_PLACES = re.compile(r"(?:other bytes at |, )(\d+) to (\d+)")
_RIGHT_ERRORS = ("CheckpointMismatchError", "CheckpointNotFoundError")


def _names_one(message: str, damage: Damage) -> bool:
    return any(culprit.rsplit("/", 1)[-1] in message for culprit in damage.culprits)


def _stock_reads(damage: Damage) -> bool:
    """True for files that stock DCP reads: metadata and shards, without this library's training state."""
    return damage.layout == "per_rank" and (damage.file == kinds.METADATA or damage.file.endswith(".distcp"))


def _load(directory: Path, live: dict[str, Any], *, verify: Literal["digest", "size"] = "digest") -> dict[str, Any]:
    from hyper_resume.checkpoint import DistributedCheckpointer

    skeleton = dict.fromkeys(small.TRAINING_STATE_KEYS)
    return DistributedCheckpointer(verify=verify).load(str(directory), live, extra_state_skeleton=skeleton)
