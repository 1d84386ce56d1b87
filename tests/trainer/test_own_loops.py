"""The README's loop in processes that end at once in the middle of it, with any loader, alone and on several ranks."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, blocks
from tests.trainer.readme_loop import LOADERS, STEPS, WRAPPERS, start, train_dataloader_reasons
from tests.warm_commands import run_module

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
DIED = 9
PROLOGUE = """\
import os, sys
SEED, STOP, HOW = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
"""
STEP = """\
        print("step", trainer.state.global_step, loss.item().hex(), flush=True)
        if trainer.state.global_step == STOP and HOW == "exit":
            os._exit(9)
"""
EPILOGUE = """\
print("end", *(p.detach().double().sum().item().hex() for p in model.parameters()), flush=True)
"""


def _program() -> str:
    """The README's loop, which also prints each step's loss, and ends, or signals itself, at a step."""
    (text,) = [block.text for block in blocks(ROOT / "README.md", "python")]
    changes = (
        (r"^(model = )", r"torch.manual_seed(SEED)\n\1"),
        (r"^        model\(batch\)(.*)\.backward\(\)$", r"        loss = model(batch)\1\n        loss.backward()"),
        (r"^(        trainer.state.global_step \+= 1)$", r"\1\n        if HOW == 'signal': signal_at(trainer)"),
        (r"^(        checkpointer.on_step_end\(\).*)$", r"\1\n" + STEP.rstrip("\n")),
    )
    for pattern, replacement in changes:
        text, count = re.subn(pattern, replacement, text, flags=re.M)
        assert count == 1, pattern
    signal = "def signal_at(trainer):\n    if trainer.state.global_step == STOP: os.kill(os.getpid(), 15)\n"
    return PROLOGUE + signal + text + "\n" + EPILOGUE


def _run(folder: Path, seed: int, stop: int = 0, how: str = "exit") -> tuple[int, list[str], str]:
    """Exit code, what was printed, and standard error of one start of the program."""
    done = run_module("loop", str(seed), str(stop), how, cwd=folder, environment=ENVIRONMENT, timeout_seconds=100)
    return done.returncode, done.stdout.splitlines(), done.stderr


def _folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    (folder / "loop.py").write_text(_program())
    return folder


def test_the_readmes_loop_ends_as_if_it_had_never_been_stopped(tmp_path: Path) -> None:
    code, reference, err = _run(_folder(tmp_path, "reference"), seed=1)
    assert code == 0, err
    assert len(reference) == 61
    folder = _folder(tmp_path, "stopped")
    # In the middle of an epoch at a save and behind one, at an epoch's edge, twice in one epoch; by a signal, which saves.
    for seed, (stop, first, how) in enumerate(
        [(10, 1, "exit"), (17, 11, "exit"), (20, 11, "exit"), (33, 21, "signal"), (38, 34, "exit"), (0, 34, "exit")], 1
    ):
        code, printed, err = _run(folder, seed=seed, stop=stop, how=how)
        last = {"signal": stop - 1, "exit": stop or 61}[how]
        assert printed == reference[first - 1 : last], f"stopped at step {stop}"
        assert code == (0 if not stop else 1 if how == "signal" else DIED), err
        assert ("PreemptedError" in err) is (how == "signal")


# ---- any loader, on several ranks

# Where the loop is ended, start by start; each epoch has four steps, and each step is saved.
STOPS = {"within an epoch": (2,), "at its edge": (4,), "twice in one": (5, 7)}
# Each loader, each kind of end and each number of ranks once; the whole product takes minutes.
COVERING = {
    ("torch", 4, "twice in one"),
    ("torch, 2 workers", 2, "at its edge"),
    ("StatefulDataLoader", 2, "within an epoch"),
    ("StatefulDataLoader, 2 workers", 1, "twice in one"),
    ("own", 4, "at its edge"),
    ("own, 2 workers", 1, "within an epoch"),
    ("torch, both", 1, "at its edge"),
    ("iterable data", 2, "within an epoch"),
    ("iterable data, persistent workers", 1, "at its edge"),
    ("accelerate", 2, "twice in one"),
}
PRODUCT = [
    pytest.param(*each, marks=() if each in COVERING else pytest.mark.nightly)
    for each in itertools.product(LOADERS, WRAPPERS, STOPS)
]


def test_the_covering_part_of_the_product_has_every_rank_count_end_and_loader_that_the_judgement_names() -> None:
    named = set(itertools.islice(LOADERS, 6))
    assert named <= {name for name, _, _ in COVERING}
    assert {(ranks, ends) for _, ranks, ends in COVERING} >= {
        (1, "twice in one"),
        (2, "twice in one"),
        (4, "twice in one"),
    }


@pytest.mark.parametrize(("name", "ranks", "ends"), PRODUCT)
def test_with_any_loader_on_any_number_of_ranks_it_ends_so_too(
    tmp_path: Path, name: str, ranks: int, ends: str
) -> None:
    reference = _reference(name, ranks, tmp_path)
    doubt = LOADERS[name].doubt
    folder, first, doubted = tmp_path / "stopped", 0, False
    for seed, stop in enumerate((*STOPS[ends], 0), 1):
        found = start(folder, name, ranks, seed=seed, stop=stop)
        # A certificate that is exact is followed by the uninterrupted run; what it doubts is the loader, for the right reason.
        reasons = train_dataloader_reasons(folder)[-1] if first else []
        doubted = any(reasons) or doubted
        assert all(doubt and doubt in reason for reason in reasons if reason)
        is_same = found == [of_rank[first : stop or None] for of_rank in reference]
        assert is_same or doubted, f"stopped at step {stop}"
        first = stop
    # Where an exact resume is impossible, the second one within a second epoch is doubted, and is another run.
    assert ends != "twice in one" or (doubted, is_same) == (bool(doubt), not doubt)


def _reference(name: str, ranks: int, folder: Path) -> list[list[str]]:
    """The records of the uninterrupted run, made once in a process."""
    if (name, ranks) not in REFERENCES:
        REFERENCES[name, ranks] = start(folder / "reference", name, ranks, seed=1)
    reference = REFERENCES[name, ranks]
    assert [len(of_rank) for of_rank in reference] == [STEPS] * ranks
    return reference


REFERENCES: dict[tuple[str, int], list[list[str]]] = {}
