"""``python -m st chaos``: an outside crash tester on the real trainer, ``ckpt-chaos`` of PyPI (the extra ``chaos``).

It knows nothing of this library. It runs ``hyper-resume train`` on ``st/chaos.yaml``, kills one copy of it at each of its file
events, resumes each from LATEST, and compares what came back with the uninterrupted run: every bucket of the last save, by its
digest. It judges too whether the resume began at the newest step that was complete.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

USAGE = 2
_CONFIG = Path(__file__).with_name("chaos.yaml")
_VERDICTS = "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"
_STEPS = 3
# Far more than there are: all of them.
_ALL_POINTS = 10_000


def add(verbs: Any) -> None:
    """Add the command to the parser's ``verbs``."""
    chaos = verbs.add_parser("chaos", help="let ckpt-chaos kill a training at every file event", allow_abbrev=False)
    chaos.add_argument(
        "--max-points", type=int, default=_ALL_POINTS, help="try only so many, evenly spread; all by default"
    )
    chaos.add_argument("--modes", default="before,torn,term", help="how it is killed (default: before,torn,term)")
    chaos.add_argument("--jobs", type=int, default=2, help="how many copies run at a time (default 2)")
    chaos.add_argument("--results", type=Path, help="the folder of all runs; default results/chaos-TIME")
    chaos.set_defaults(do=_run)


def _run(options: argparse.Namespace, words: list[str]) -> int:
    try:
        importlib.import_module("ckpt_chaos")
    except ImportError:
        print("error: ckpt-chaos is not installed; what to do: pip install 'hyper_resume[chaos]'", file=sys.stderr)
        return USAGE
    work = options.results or Path("results") / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}"
    return subprocess.run(command(work, options.max_points, options.modes, options.jobs), check=False).returncode


def command(work: Path, max_points: int, modes: str, jobs: int) -> list[str]:
    """Return the tester's command line; it exits with 0 if every point passed."""
    tester = [sys.executable, "-m", "ckpt_chaos", "run", "--work", str(work), "--fail-on", _VERDICTS]
    how = ["--max-points", str(max_points), "--modes", modes, "--jobs", str(jobs)]
    # Sizes are not compared: the id of a save is in its files, and so is the path of the root.
    steps = ["--checkpoint-glob", "{out}/global_step_*", "--ckpt-ignore-size"]
    steps += ["--step-regex", r"Checkpoint loaded successfully: .*global_step=(\d+)"]
    result = ["--result-cmd", f"{sys.executable} -m st.chaos {{out}}"]
    training = [sys.executable, "-m", "hyper_resume.cli", "train", str(_CONFIG), "--checkpoint.checkpoint_dir={out}"]
    return [*tester, *how, *steps, *result, "--", *training]


def result_of(root: Path) -> str:
    """Return the digests of every bucket of the last step, as text that is equal for equal trainings.

    Raises:
        OSError: that step was not saved.
    """
    manifest = json.loads((root / f"global_step_{_STEPS}" / "manifest.json").read_text())
    return json.dumps({"step": manifest["step"], "buckets": manifest["buckets"]}, sort_keys=True)


if __name__ == "__main__":
    print(result_of(Path(sys.argv[1])))
