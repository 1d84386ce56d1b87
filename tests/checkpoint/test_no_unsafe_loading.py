"""No way leads from a file to code: not in the text of the library, and not in what it does when it loads."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

import hyper_resume
from hyper_resume.checkpoint import DistributedCheckpointer
from tests.checkpoint.payloads import payload, restore, same, sharded_tiny, train, training_state
from tests.ranks import run_ranks

# ---- the text -------------------------------------------------------------------------------------------------------

# Functions that run what a file says, and modules that are of no other use.
_FUNCTIONS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "yaml.unsafe_load",
    "yaml.unsafe_load_all",
    "yaml.full_load",
    "yaml.full_load_all",
    "yaml.Loader",
    "yaml.FullLoader",
    "yaml.UnsafeLoader",
    "torch.jit.load",
    "torch.hub.load",
    "os.system",
    "os.popen",
}
_MODULES = {
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "_pickle",
    "torch.distributed.checkpoint.format_utils",
}
# Only as a base class: each has a method that unpickles, which the subclass overrides.
_BASES = {"FileSystemReader": "read_metadata", "DefaultLoadPlanner": "load_bytes"}


def unsafe_places(source: str) -> Iterator[str]:
    """Every place of a module's source that could run what a file says."""
    tree = ast.parse(source)
    names = dict(_imported(tree))
    for node in ast.walk(tree):
        line = f"line {getattr(node, 'lineno', 0)}: "
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (line + name for name in modules if name in _MODULES)
        if isinstance(node, (ast.Name, ast.Attribute)) and (name := _full_name(node, names)) in _FUNCTIONS:
            yield line + name
        if isinstance(node, ast.Call):
            yield from (line + complaint for complaint in _call_complaints(node, _full_name(node.func, names)))
        if isinstance(node, ast.ClassDef):
            yield from (line + complaint for complaint in _class_complaints(node, names))


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _full_name(node: ast.AST, names: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join([names.get(node.id, node.id), *parts]) if isinstance(node, ast.Name) else ""


def _call_complaints(call: ast.Call, name: str) -> Iterator[str]:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    weights_only = given.get("weights_only")
    is_true = isinstance(weights_only, ast.Constant) and weights_only.value is True
    if (weights_only is not None or name == "torch.load") and not is_true:
        yield f"{name} without weights_only=True"
    if name in ("yaml.load", "yaml.load_all"):
        yield f"{name}"
    for flag in ("shell", "allow_pickle"):
        if flag in given:
            yield f"{name} with {flag}"
    if name.split(".")[-1] in _BASES:
        yield f"{name} itself"


def _class_complaints(node: ast.ClassDef, names: dict[str, str]) -> Iterator[str]:
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    for base in node.bases:
        needed = _BASES.get(_full_name(base, names).split(".")[-1])
        if needed and needed not in methods:
            yield f"{node.name} does not override {needed}"


def _modules() -> list[Path]:
    root = Path(hyper_resume.__file__).parent
    found = sorted(root.rglob("*.py"))
    assert len(found) > 30
    return found


@pytest.mark.parametrize("path", _modules(), ids=lambda path: "/".join(path.parts[-2:]))
def test_no_module_runs_what_a_file_says(path: Path) -> None:
    assert list(unsafe_places(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.load(f)",
        "import pickle as p\np.loads(b)",
        "from pickle import loads\nloads(b)",
        "from pickle import Unpickler as U\nU(f).load()",
        "import pickle\nclass A(pickle.Unpickler): pass",
        "import pickle\nread = pickle.loads",
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "import torch\ntorch.load(f, weights_only=flag)",
        "from torch import load\nload(f)",
        "read(f, weights_only=False)",
        "import marshal",
        "import shelve",
        "from dill import loads",
        "eval(text)",
        "exec(text)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import yaml\nyaml.full_load(text)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "from torch.distributed.checkpoint import FileSystemReader\nFileSystemReader(path)",
        "from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner as D\nclass A(D): pass",
        "import torch.distributed.checkpoint as dcp\nclass A(dcp.FileSystemReader):\n    def read_data(self): pass",
    ],
)
def test_each_unsafe_way_is_found(source: str) -> None:
    assert list(unsafe_places(source))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.dumps(x)",
        "import torch\ntorch.load(f, weights_only=True)",
        "import yaml\nyaml.safe_load(text)",
        "import json\njson.loads(text)",
        "import re\nre.compile(text)",
        "class A(FileSystemReader):\n    def read_metadata(self): pass",
    ],
)
def test_safe_ways_are_not(source: str) -> None:
    assert list(unsafe_places(source)) == []


# ---- what happens ---------------------------------------------------------------------------------------------------

_STOCK = {
    FileSystemReader.read_metadata.__code__: "FileSystemReader.read_metadata",
    FileSystemReader.read_data.__code__: "FileSystemReader.read_data",
    DefaultLoadPlanner.load_bytes.__code__: "DefaultLoadPlanner.load_bytes",
}


class _Watch:
    """Sees names that ``pickle`` looks up, and calls of stock functions that unpickle. For a process that ends after it.

    A message from another rank is a pickle too; ranks trust each other, so what is looked up on its way is left out.
    """

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._is_on = True
        sys.addaudithook(self._audit)
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_on and event == "pickle.find_class" and not _is_message(sys._getframe(1)):
            self.found.add(f"pickle looked up {arguments[0]}.{arguments[1]}")

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in _STOCK:
            self.found.add(_STOCK[frame.f_code])

    def off(self) -> set[str]:
        self._is_on = False
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as documented
        return self.found


def _is_message(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "_tensor_to_object":
            return True
        frame = frame.f_back
    return False


def _save_and_load(folder: str, kind: str) -> tuple[set[str], bool]:
    """A full save and load, watched; and whether the load brought back what was saved."""
    model = sharded_tiny(1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    checkpointer = DistributedCheckpointer(extra_state_per_rank=kind != "embedded")
    path = f"{folder}/global_step_2"
    saved = payload(model, optimizer, None if kind == "stock" else 2)
    watch = _Watch()
    if kind == "stock":
        dcp.save(saved, checkpoint_id=path)
    else:
        checkpointer.save(path, saved, global_step=2, save_async=kind == "async")
        checkpointer.maybe_wait_for_async_save()
    other = sharded_tiny(9)
    again = torch.optim.AdamW(other.parameters())
    state = restore(checkpointer, path, other, again, with_training_state=kind != "stock")
    found = watch.off()
    is_same = same(payload(other, again)["model"], payload(model, optimizer)["model"])
    return found, is_same and (kind == "stock" or same(state["rng_state"], training_state(2)["rng_state"]))


@pytest.mark.parametrize("kind", ["per rank", "embedded", "async", "stock"])
def test_a_load_never_unpickles_a_file(kind: str, tmp_path: Path) -> None:
    for found, is_same in run_ranks(_save_and_load, 2, str(tmp_path), kind):
        assert found == set()
        assert is_same


def _load_with_stock(folder: str) -> set[str]:
    state = {"weight": torch.zeros(3), "step": 0, "betas": (0.9, 0.95)}
    dcp.save(state, checkpoint_id=folder)
    watch = _Watch()
    dcp.load(state, checkpoint_id=folder)
    return watch.off()


def test_the_watch_sees_a_load_by_stock(tmp_path: Path) -> None:
    for found in run_ranks(_load_with_stock, 2, str(tmp_path)):
        assert set(_STOCK.values()) <= found
        assert "pickle looked up torch.distributed.checkpoint.metadata.Metadata" in found
