"""Every change on disk below a folder is reported before it is made, by whichever function, and nothing that is no change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.recorded_changes import operations_of

PLAIN_OPEN = """
with open("root/a", "w") as file:
    file.write("héllo")
with open("root/a", "ab", buffering=0) as file:
    file.write(b"12")
    file.write(b"3")
with open(b"root/a", "r+") as file:
    file.read()
    file.truncate(2)
"""
PATHLIB = """
from pathlib import Path
one, other = Path(root) / "one", Path("root", "other")
one.mkdir()
(one / "x").write_bytes(b"abc")
(one / "x").replace(one / "y")
one.rename(other)
(other / "link").symlink_to("y")
(other / "twin").hardlink_to(other / "y")
(other / "empty").touch()
(other / "y").unlink()
(other / "z" / "zz").mkdir(parents=True)
(other / "z" / "zz").rmdir()
"""
OS_LEVEL = """
number = os.open("root/a", os.O_CREAT | os.O_WRONLY)
os.write(number, b"abc")
os.pwrite(number, b"d", 3)
os.writev(number, [b"e", b"f"])
os.fsync(number)
os.fdatasync(number)
os.ftruncate(number, 2)
os.close(number)
os.truncate("root/a", 1)
os.rename(src="root/a", dst="root/b")
os.link("root/b", "root/c")
os.remove("root/b")
os.makedirs("root/d/e")
os.removedirs("root/d/e")
"""
REMOVED_TREE = """
import shutil
os.makedirs("root/tree/branch")
open("root/tree/branch/leaf", "x").close()
shutil.rmtree("root/tree")
"""
TEMPORARY_AND_RENAMED = """
import tempfile
with tempfile.NamedTemporaryFile("w", dir="root", prefix="new-", delete=False) as file:
    file.write("abc")
    file.flush()
    os.fsync(file.fileno())
os.replace(file.name, "root/final")
number, name = tempfile.mkstemp(dir=root, prefix="new-")
with os.fdopen(number, "wb") as file:
    file.write(b"abcd")
os.rename(name, "root/final")
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        pytest.param(
            PLAIN_OPEN,
            [
                *(["create", "a", None], ["write", "a", 0]),
                *(["create", "a", 6], ["write", "a", 6], ["write", "a", 8]),
                *(["create", "a", 9], ["truncate", "a", 9]),
            ],
            id="plain open",
        ),
        pytest.param(
            PATHLIB,
            [
                *(["make directory", "one", None], ["create", "one/x", None], ["write", "one/x", 0]),
                *(["rename", "one/y", None], ["rename", "other", None]),
                *(["link", "other/link", None], ["link", "other/twin", None], ["create", "other/empty", None]),
                ["remove", "other/y", 3],
                # With parents, pathlib first tries without.
                *(["make directory", "other/z/zz", None], ["make directory", "other/z", None]),
                *(["make directory", "other/z/zz", None], ["remove directory", "other/z/zz", "directory"]),
            ],
            id="pathlib",
        ),
        pytest.param(
            OS_LEVEL,
            [
                *(["create", "a", None], ["write", "a", 0], ["write", "a", 3], ["write", "a", 4]),
                *(["fsync", "a", 5], ["fsync", "a", 5], ["truncate", "a", 5], ["truncate", "a", 2]),
                *(["rename", "b", None], ["link", "c", None], ["remove", "b", 1]),
                *(["make directory", "d", None], ["make directory", "d/e", None]),
                *(["remove directory", "d/e", "directory"], ["remove directory", "d", "directory"]),
                ["remove directory", ".", "directory"],  # tried, and in vain: it is not empty
            ],
            id="os",
        ),
        pytest.param(
            REMOVED_TREE,
            [
                *(["make directory", "tree", None], ["make directory", "tree/branch", None]),
                *(["create", "tree/branch/leaf", None], ["remove", "tree/branch/leaf", 0]),
                ["remove directory", "tree/branch", "directory"],
                ["remove directory", "tree", "directory"],
            ],
            id="shutil.rmtree",
        ),
        pytest.param(
            TEMPORARY_AND_RENAMED,
            [
                *(["create", "new", None], ["write", "new", 0], ["fsync", "new", 3], ["rename", "final", None]),
                *(["create", "new", None], ["write", "new", 0], ["rename", "final", 3]),
            ],
            id="a temporary file, renamed",
        ),
    ],
)
def test_a_change_is_told_before_it_is_made_and_in_order(tmp_path: Path, code: str, expected: list[Any]) -> None:
    told = [[what, re.sub(r"^new-\w+$", "new", where), there] for what, where, there in operations_of(tmp_path, code)]
    assert told == expected


def test_a_file_that_is_copied_in_is_told(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("abc")
    told = operations_of(tmp_path, "import shutil; shutil.copy2('source', 'root/copy')")
    # The kernel copies; the last call only learns that there is no more.
    assert told[:2] == [["create", "copy", None], ["write", "copy", 0]]
    assert {what for what, _, _ in told[2:]} <= {"write"}


def test_reading_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a").write_text("abc")
    code = """
from pathlib import Path
path = Path(root, "a")
path.read_text(), path.read_bytes(), path.stat(), os.listdir(root), list(Path(root).iterdir())
open("root/a").close()
with os.fdopen(os.open("root/a", os.O_RDONLY), "rb") as file:
    file.read()
os.close(os.open(root, os.O_RDONLY | os.O_DIRECTORY))
"""
    assert operations_of(tmp_path, code) == []


def test_nothing_outside_of_the_folder_is_told_and_what_leads_into_it_is(tmp_path: Path) -> None:
    code = """
import tempfile
from pathlib import Path
os.mkdir("rooted")
Path("rooted/a").write_text("a")
Path("root/../b").write_text("b")
os.rename("b", "c")
os.symlink("root/in", "pointing")
with tempfile.NamedTemporaryFile("w", dir=".") as file:
    file.write("c")
os.write(1, b"")
os.symlink("root", "way")
Path("way/in").write_text("in")
os.rename("way/in", "out")
"""
    assert operations_of(tmp_path, code) == [["create", "in", None], ["write", "in", 0], ["rename", "in", 2]]


IMPORTS = """
import torch
import torch.distributed.checkpoint as dcp
from hyper_resume.checkpoint import DistributedCheckpointer
"""
SAVES = """
state = {"w": torch.arange(3000.0), "v": torch.ones(2)}
with open(f"{root}/plain.pt", "wb") as file:
    torch.save(state, file)
dcp.save(state, checkpoint_id=f"{root}/dcp")
extra = {"global_step": 4, "epoch": 1, "rng_state": {"a": 7}}
for per_rank in (False, True):
    for is_async in (False, True):
        keeper = DistributedCheckpointer(extra_state_per_rank=per_rank)
        path = f"{root}/{per_rank}_{is_async}/global_step_4"
        keeper.save(path, {"model": dict(state), "extra_state": extra}, global_step=4, save_async=is_async)
        keeper.maybe_wait_for_async_save()
"""


def final(where: str) -> str:
    """The place that what is written at ``where`` is renamed to."""
    where = re.sub(r"[.]staging/global_step_4[.]\w+", "global_step_4", where)
    return re.sub(r"[.]staging/(latest_checkpoint_iteration[.]txt)[.]\w+|([.]metadata)[.]tmp", r"\1\2", where)


def test_every_file_of_a_real_save_is_told_to_its_last_byte_and_in_the_order_of_the_commit(tmp_path: Path) -> None:
    told = [(what, final(where), there) for what, where, there in operations_of(tmp_path, SAVES, imports=IMPORTS)]
    root = tmp_path / "root"
    sizes = {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}
    # Each save leaves shards, metadata, index, manifest, pointer and lock; two leave a file of training state too.
    assert len(sizes) == 1 + 2 + 4 * 6 + 2
    for name, size in sizes.items():
        own = [(what, there) for what, where, there in told if where == name]
        grown = [there for what, there in own if what == "write"]
        assert (own[0], grown[0], grown) == (("create", None), 0, sorted(grown)), name
        assert grown[-1] < size, name
    for kind in ("False_False", "False_True", "True_False", "True_True"):
        renamed = [where for what, where, _ in told if what == "rename" and where.startswith(kind)]
        names = ("global_step_4", "latest_checkpoint_iteration.txt")
        assert renamed == [f"{kind}/{name}" for name in names]
