"""``hyper-resume verify | diff | prune | doctor`` on real checkpoints, of this library and of stock DCP."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from hyper_resume import cli
from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.history import retention
from hyper_resume.errors import CheckpointMismatchError
from tests.checkpoint.single_value import save


def _payload(step: int) -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(12, dtype=torch.float32).reshape(3, 4) + step, "bias": torch.zeros(3)},
        "extra_state": {"global_step": step, "epoch": 0, "rng_state": {"torch_cpu": torch.arange(9) * step}},
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1, 2 and 3, saved in this order."""
    checkpointer = DistributedCheckpointer()
    for step in (1, 2, 3):
        checkpointer.save(
            str(tmp_path / f"global_step_{step}"), _payload(step), global_step=step, metrics={"loss": abs(step - 2.0)}
        )
    return tmp_path


def _flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def _run(*argv: str) -> int:
    return cli.main(list(argv))


# ---- verify ---------------------------------------------------------------------------------------------------------


def test_verify_says_that_all_of_a_good_root_is_good(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("verify", str(root)) == 0
    out = capsys.readouterr().out
    assert out.count("good ") == 3
    assert out.splitlines()[-1] == f"LATEST: {root / 'global_step_3'}"


def test_verify_names_the_one_flipped_bit(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _flip(root / "global_step_3" / "__0_0.distcp", 2000)
    assert _run("verify", str(root)) == 1
    out = capsys.readouterr().out
    assert f"DAMAGED  {root / 'global_step_3'}" in out
    assert "__0_0.distcp: expected digest xxh3_128/table:" in out
    assert out.splitlines()[-1] == f"LATEST: {root / 'global_step_2'}"
    assert _run("verify", "--size-only", str(root)) == 0


def test_verify_prints_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "global_step_2" / "extra_state" / "extra_state_rank_0.pt").unlink()
    assert _run("verify", "--json", str(root)) == 1
    found = json.loads(capsys.readouterr().out)
    assert [bool(step["complaints"]) for step in found["steps"]] == [False, True, False]
    assert found["steps"][1]["complaints"] == ["extra_state/extra_state_rank_0.pt: it is missing"]
    assert (found["is_good"], found["latest"]) == (False, str(root / "global_step_3"))


def test_verify_reports_a_file_that_no_save_wrote(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "global_step_1" / "extra_state" / "extra_state_rank_7.pt").write_bytes(b"of another world")
    assert _run("verify", str(root / "global_step_1")) == 0
    assert "note: extra_state/extra_state_rank_7.pt: not in the manifest" in capsys.readouterr().out


def test_verify_reports_a_directory_under_another_steps_name(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "global_step_3").rename(root / "global_step_30")
    assert _run("verify", str(root / "global_step_30")) == 1
    assert "name says step 30, its manifest step 3" in capsys.readouterr().out


def test_verify_refuses_what_a_load_would_refuse_a_shard_that_the_manifest_does_not_know(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root / "global_step_3" / "manifest.json"
    content = {key: value for key, value in json.loads(path.read_text()).items() if key != "digest"}
    del content["files"]["__0_0.distcp"]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({**content, "digest": f"xxh3_128:{xxhash.xxh3_128_hexdigest(canonical)}"}))
    assert _run("verify", str(root / "global_step_3")) == 1
    assert "names files that its manifest does not know" in capsys.readouterr().out
    with pytest.raises(CheckpointMismatchError, match="names files that its manifest does not know"):
        DistributedCheckpointer().load(str(root / "global_step_3"), {"model": _payload(0)["model"]})


def test_verify_finds_a_flipped_bit_in_a_tensor_of_stock_dcp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = torch.arange(1000, dtype=torch.float32)
    dcp.save({"values": values}, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert _run("verify", str(tmp_path / "stock")) == 0
    assert "no manifest" in capsys.readouterr().out
    shard = tmp_path / "stock" / "__0_0.distcp"
    _flip(shard, shard.read_bytes().index(struct.pack("<f", 500.0)))
    loaded = {"values": torch.zeros(1000)}
    dcp.load(loaded, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert not torch.equal(loaded["values"], values), "stock DCP loads it in silence; else this test shows nothing"
    assert _run("verify", str(tmp_path / "stock")) == 1
    assert "__0_0.distcp: entry values at byte 0 does not have its checksum" in capsys.readouterr().out


def test_verify_runs_nothing_of_a_hostile_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "global_step_1"
    directory.mkdir()
    (directory / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    assert _run("verify", str(directory)) == 1
    assert "metadata can't be read" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


def test_verify_of_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        assert _run("verify", str(path)) == 1
        assert "nothing to verify" in capsys.readouterr().err


# ---- diff -----------------------------------------------------------------------------------------------------------


def test_diff_of_a_copy_is_equal(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(root / "global_step_2", root / "copy")
    assert _run("diff", str(root / "global_step_2"), str(root / "copy")) == 0
    assert capsys.readouterr().out == "equal, bit for bit\n"


def test_diff_names_bucket_entry_place_both_values_and_the_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = _payload(5), _payload(5)
    # 7.0 and the next float after it: one unit in the last place.
    other["model"]["weight"][0, 2] = torch.nextafter(torch.tensor(7.0), torch.tensor(8.0))
    other["extra_state"]["rng_state"]["torch_cpu"] = torch.arange(9) * 5 + torch.tensor([0] * 8 + [1])
    for name, payload in (("one", one), ("other", other)):
        DistributedCheckpointer().save(str(tmp_path / name), payload, global_step=5)
    assert _run("diff", str(tmp_path / "one"), str(tmp_path / "other")) == 1
    assert capsys.readouterr().out.splitlines() == [
        "model: model.weight [0, 2]: 7.0 (0x40e00000) | 7.000000476837158 (0x40e00001); 1 of 12 elements differ",
        "rng_state: rng_state of rank 0 torch_cpu[8]: 40 (0x0000000000000028) | 41 (0x0000000000000029); "
        "1 of 9 elements differ",
        "2 entries differ",
    ]


def test_diff_counts_bits_not_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def save(name: str, values: list[float]) -> None:
        payload = {"model": {"w": torch.tensor(values)}}
        DistributedCheckpointer().save(str(tmp_path / name), payload, global_step=1)

    save("zero", [0.0, float("nan")])
    save("minus", [-0.0, float("nan")])
    assert _run("diff", str(tmp_path / "zero"), str(tmp_path / "minus")) == 1
    assert "model.w [0]: 0.0 (0x00000000) | -0.0 (0x80000000); 1 of 2 elements differ" in capsys.readouterr().out


def test_diff_names_shapes_types_and_absent_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = {"model": {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}}
    theirs = {"model": {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16), "d": torch.zeros(2)}}
    DistributedCheckpointer().save(str(tmp_path / "one"), ours, global_step=1)
    DistributedCheckpointer().save(str(tmp_path / "other"), theirs, global_step=1)
    assert _run("diff", str(tmp_path / "one"), str(tmp_path / "other"), "--json") == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["entry"], one["first"], one["second"]) for one in found] == [
        ("model.a", "float32[2]", "float32[3]"),
        ("model.b", "float32[2]", "bfloat16[2]"),
        ("model.c", "float32[2]", "absent"),
        ("model.d", "absent", "float32[2]"),
    ]


def test_diff_of_a_damaged_directory_is_an_error_not_a_difference(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _flip(root / "global_step_2" / ".metadata", 100)
    assert _run("diff", str(root / "global_step_1"), str(root / "global_step_2")) == 1
    assert "not as it was written" in capsys.readouterr().err


# ---- prune ----------------------------------------------------------------------------------------------------------


def _steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step_")) for path in root.glob("global_step_*"))


def test_prune_deletes_what_is_not_kept(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("prune", str(root), "--keep-last", "1", "--dry-run") == 0
    assert _steps(root) == [1, 2, 3]
    assert capsys.readouterr().out.splitlines() == [f"would delete {root / f'global_step_{step}'}" for step in (1, 2)]
    assert _run("prune", str(root), "--keep-last", "1") == 0
    assert _steps(root) == [3]


def test_prune_keeps_the_best(root: Path) -> None:
    # The losses of steps 1, 2 and 3 are 1, 0 and 1.
    assert _run("prune", str(root), "--keep-best", "1") == 0
    assert _steps(root) == [2, 3]


def test_prune_never_deletes_for_its_rank_what_it_can_not_rank(tmp_path: Path) -> None:
    losses = {1: None, 2: 5.0, 3: 4.0, 4: None, 5: 6.0}
    for step, loss in losses.items():
        save(tmp_path, step, float(step), metrics={} if loss is None else {"loss": loss})
    assert _run("prune", str(tmp_path), "--keep-best", "1") == 0
    assert _steps(tmp_path) == [1, 3, 4, 5], "2 is outranked, 5 is the newest, 1 and 4 have no rank"


def test_prune_for_the_best_of_saves_without_any_metric_is_an_error_and_deletes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, float(step))
    assert _run("prune", str(tmp_path), "--keep-best", "1") == cli.EXIT_USAGE
    assert (
        "expected: saves that were made with keep_best; found: --metric loss, which none of 3"
        in capsys.readouterr().err
    )
    assert _steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_prune_by_a_metric_that_no_save_holds_is_an_error_that_names_those_that_they_hold(
    root: Path, dry: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("prune", str(root), "--keep-best", "1", "--keep-last", "1", "--metric", "lose", *dry) == cli.EXIT_USAGE
    told = capsys.readouterr().err
    assert "expected: --metric with one of loss; found: --metric lose, which none of 3 saves holds" in told
    assert _steps(root) == [1, 2, 3]


def test_prune_says_before_it_deletes_what_belongs_to_other_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        save(tmp_path, step, 0.0)
    fresh = DistributedCheckpointer()
    fresh.begin_run(str(tmp_path), restored_from=None)
    for step in (1, 2):
        save(tmp_path, step, 0.0, by=fresh)
    told_before: list[str] = []

    def prune(original: Any, *args: Any) -> Any:
        told_before.append(capsys.readouterr().out)
        return original(*args)

    monkeypatch.setattr(retention, "prune", functools.partial(prune, retention.prune))
    assert _run("prune", str(tmp_path), "--keep-last", "1") == 0
    assert told_before == [
        "prune counts and deletes across runs: LATEST does not continue 2 of these\n"
        f"deleting {tmp_path / 'global_step_10'} (of another run, or abandoned)\n"
        f"deleting {tmp_path / 'global_step_20'} (of another run, or abandoned)\n"
        f"deleting {tmp_path / 'global_step_1'}\n"
    ]
    assert _steps(tmp_path) == [2]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ((), "none of them"),
        (("--keep-last", "0"), "--keep-last 0"),
        (("--keep-every", "-1"), "--keep-every -1"),
        (("--keep-best", "-1", "--keep-last", "0"), "--keep-last 0, --keep-best -1"),
        (("--keep-best", "0"), "--keep-best 0"),
    ],
)
def test_prune_without_anything_to_keep_names_what_was_given_and_deletes_nothing(
    options: tuple[str, ...], found: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("prune", str(root), *options) == cli.EXIT_USAGE
    assert f"; found: {found};" in capsys.readouterr().err
    assert _steps(root) == [1, 2, 3]


def test_prune_leaves_nothing_in_a_directory_that_is_no_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "letter").write_text("dear")
    (tmp_path / "documents" / "global_step_1").mkdir()
    assert _run("prune", str(tmp_path / "documents"), "--keep-last", "1") == 0
    assert capsys.readouterr().out == "nothing to delete\n"
    assert sorted(path.name for path in (tmp_path / "documents").iterdir()) == ["global_step_1", "letter"]


def test_prune_of_a_copy_of_a_root_leaves_no_lock_there(root: Path) -> None:
    shutil.copytree(root, root / "copy", ignore=shutil.ignore_patterns(".writer.lock", ".staging"))
    assert _run("prune", str(root / "copy"), "--keep-last", "1") == 0
    assert _steps(root / "copy") == [3]
    assert not (root / "copy" / ".writer.lock").exists()


def test_prune_is_refused_while_a_run_saves_there(root: Path) -> None:
    # The kernel's lock is a process's; this one has it since the fixture saved.
    done = subprocess.run(
        [sys.executable, "-m", "hyper_resume.cli", "prune", str(root), "--keep-last", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 1
    assert "another run saves into this checkpoint_dir" in done.stderr
    assert _steps(root) == [1, 2, 3]


# ---- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_finds_a_good_root_good_and_leaves_it_as_it_was(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(str(path) for path in root.rglob("*"))
    assert _run("doctor", str(root)) == 0
    out = capsys.readouterr().out
    assert "LATEST means step 3; 3 step directories" in out
    assert "problem" not in out
    assert sorted(str(path) for path in root.rglob("*")) == before


class _Failing(operations.FileOperations):
    """A file system on which nothing can be made, or no file."""

    def __init__(self, number: int, operation: str) -> None:
        self.error = OSError(number, os.strerror(number))
        self.operation = operation

    def make_directory(self, path: Path) -> None:
        if self.operation == "directory":
            raise self.error
        super().make_directory(path)

    def create(self, path: Path) -> operations.OutputFile:
        raise self.error


@pytest.mark.parametrize("operation", ["directory", "file"])
@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free space on that file system"),
        (errno.EDQUOT, "free space, or ask for a larger quota"),
        (errno.EACCES, "fix the permissions"),
        (errno.EROFS, "mount it writable, or use another directory"),
        (errno.EIO, "look at the device and the kernel's log, or use another file system"),
    ],
)
def test_doctor_advises_by_what_is_wrong(
    root: Path, number: int, operation: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with operations.use(_Failing(number, operation)):
        assert _run("doctor", str(root)) == 1
    problems = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem")]
    assert problems
    for line in problems:
        assert os.strerror(number) in line
        assert line.endswith(f"what to do: {advice}")


def test_doctor_names_an_incomplete_step_and_a_bad_pointer(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "global_step_2" / ".metadata").unlink()
    (root / "latest_checkpoint_iteration.txt").write_text("three")
    assert _run("doctor", str(root)) == 1
    problems = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem")]
    assert len(problems) == 2
    assert "global_step_2 is incomplete: .metadata: it is missing" in problems[0]
    assert "holds 'three', which is not a step number" in problems[1]


def test_doctor_of_a_directory_that_is_not_there_yet_makes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("doctor", str(tmp_path / "a" / "b")) == 0
    assert "does not exist yet" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_doctor_names_a_file_in_the_place_of_the_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert _run("doctor", str(tmp_path / "file")) == 1
    assert "is not a directory" in capsys.readouterr().out


def test_prune_keeps_what_latest_means_where_the_pointer_names_what_is_incomplete(tmp_path: Path) -> None:
    first = DistributedCheckpointer()
    first.begin_run(str(tmp_path), restored_from=None)
    for step in (10, 20, 30):
        save(tmp_path, step, float(step), by=first)
    other = DistributedCheckpointer()
    other.begin_run(str(tmp_path), restored_from=None)
    for step in (5, 15):
        save(tmp_path, step, float(step), by=other)
    other.begin_run(str(tmp_path), restored_from=str(tmp_path / "global_step_30"))
    (tmp_path / "global_step_30" / "__0_0.distcp").unlink()
    assert cli.main(["prune", str(tmp_path), "--keep-last", "1"]) == 0
    found = DistributedCheckpointer().find_latest_checkpoint(str(tmp_path))
    assert found == str(tmp_path / "global_step_20")
