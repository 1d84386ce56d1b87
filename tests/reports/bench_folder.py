"""Runs of benchmarks written line by line: what each figure must say is known without measuring anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SOURCE = "0123456789abcdef0123456789abcdef01234567"
SPEED = "save speed / raw write speed"
MEMORY = "peak extra memory of a save / payload (5% allowed for non-tensor data)"
# Seconds of five rounds, each next to a raw write of 1 s, and the ratios that follow.
SLOW = ((1.25, 1.0, 2.0, 1.6, 1.25), {"median": 0.8, "least": 0.5, "most": 1.0, "quartiles": (0.625, 0.8)})
QUICK = ((1.0, 1.0, 1.0, 1.25, 1.0), {"median": 1.0, "least": 0.8, "most": 1.0, "quartiles": (1.0, 1.0)})
SLOWER = ((4.0, 5.0, 4.0, 4.0, 4.0), {"median": 0.25, "least": 0.2, "most": 0.25, "quartiles": (0.25, 0.25)})


class BenchFolder:
    """A run of benchmarks in the making; its goals are a save at 0.9 of a raw write's speed, in 1.05 payloads of memory."""

    def __init__(self, folder: Path, *, source: str = SOURCE, smoke: bool = False, **header: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.counts = {"points": 0, "failures": 0, "met": 0, "not met": 0, "not measured": 0}
        self.lines: list[dict[str, Any]] = [
            {
                "record": "header",
                "schema": "hyper_resume.benchmark/1",
                "run_id": "20260301-110000",
                "smoke": smoke,
                "benchmarks": {"save": "Save of large tensors", "odd": "Something of one's own"},
                "sizes_gb": [0.25, 1.0],
                "repeat": 5,
                "worlds": [64],
                "ranks": [1],
                "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
                "system": "Linux x86_64",
                "machine": {"cpu": "A CPU", "cores": "2", "memory_bytes": str(3 * 2**30), "file_system": "ext4"},
                "threads": 1,
                "packages_digest": "feedfacefeedface",
                "environment": {"OMP_NUM_THREADS": "1", "HF_TOKEN": "s3cret"},
                "source": source,
                "argv": ["run", "--results", str(folder)],
                "started_at": "2026-03-01T11:00:00+00:00",
                **header,
            }
        ]

    def point(self, size: float, rounds: tuple[tuple[float, ...], dict[str, Any]], *, peak: int | None = None) -> None:
        """A save of ``size`` GB with its speed, and with its memory where ``peak`` bytes were weighed."""
        seconds, speed = rounds
        where = {"benchmark": "save", "point": f"{size:g} GB"}
        payload = int(size * 10**9)
        for contender, role, own, weighed in (
            ("raw write", "limit", [1.0] * 5, None),
            ("ours", "ours", list(seconds), peak),
        ):
            self.lines.append(
                {
                    "record": "measurement", **where, "axis": "payload in GB", "place": size, "contender": contender,
                    "role": role, "note": "", "payload_bytes": payload, "seconds": own, "settled_seconds": [],
                    "disk_bytes": None, "peak_bytes": weighed, "checked": role == "ours",
                }
            )  # fmt: skip
        self.figure(where, SPEED, "seconds", ["raw write"], "ours", speed, 5, ("at least", 0.9))
        share = dict.fromkeys(("median", "least", "most"), peak / payload) if peak else {}
        given = {**share, "quartiles": (share["median"],) * 2} if share else {}
        reason = "" if peak else "peak_bytes of ours was not measured"
        self.figure(where, MEMORY, "peak_bytes", ["ours"], "the payload", given, 1, ("at most", 1.05), reason)
        self.figure(where, "save: speedup over raw write", "seconds", ["raw write"], "ours", speed, 5, None)
        self.counts["points"] += 1

    def figure(
        self,
        where: dict[str, str],
        text: str,
        quantity: str,
        above: list[str],
        below: str,
        given: dict[str, Any],
        samples: int,
        goal: tuple[str, float] | None,
        reason: str = "",
    ) -> None:
        """A ratio as it must come out; ``given`` is empty where it was not measured."""
        lower, upper = given.get("quartiles", (None, None))
        status = "no goal"
        if goal is not None:
            relation, bound = goal
            status = "not measured"
            if given:
                good = given["median"] >= bound if relation == "at least" else given["median"] <= bound
                status = "met" if good else "not met"
            self.counts[status] += 1
        self.lines.append(
            {
                "record": "figure", **where, "text": text, "quantity": quantity, "above": above, "below": below,
                "median": given.get("median"), "least": given.get("least"), "most": given.get("most"),
                "lower_quartile": lower, "upper_quartile": upper, "samples": samples if given else 0,
                "relation": goal[0] if goal else None, "bound": goal[1] if goal else None,
                "status": status, "reason": reason,
            }
        )  # fmt: skip

    def failure(self, reason: str) -> None:
        """A point that broke off."""
        self.lines.append({"record": "failure", "benchmark": "save", "point": "4 GB", "reason": reason})
        self.counts["failures"] += 1

    def absence(self, contender: str, reason: str) -> None:
        """Somebody who was not there."""
        where = {"record": "absence", "benchmark": "save", "point": "1 GB"}
        self.lines.append({**where, "contender": contender, "reason": reason})

    def finish(self) -> Path:
        """Write the file with its footer; the folder."""
        self.lines.append({"record": "footer", "counts": self.counts, "seconds": 24.5})
        self.write()
        return self.folder

    def write(self) -> None:
        """Write the file as it is now."""
        (self.folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.lines))


def costed(folder: Path, **options: Any) -> BenchFolder:
    """Two sizes: the small one misses its speed, the large one meets it; the memory of the small one is within bounds."""
    run = BenchFolder(folder, **options)
    run.point(0.25, SLOW, peak=int(1.02 * 0.25e9))
    run.point(1.0, QUICK)
    run.absence("torchsnapshot", "torchsnapshot is not installed")
    return run
