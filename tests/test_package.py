"""The package as a user meets it: what importing costs, its version, and the README's examples."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import hyper_resume

REPOSITORY = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.M | re.S)


def _python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("module", ["hyper_resume", "hyper_resume.config", "hyper_resume.errors", "hyper_resume.cli"])
def test_importing_this_module_does_not_import_torch(tmp_path: Path, module: str) -> None:
    ended = _python(
        tmp_path, "-c", f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    )
    assert (ended.stdout.strip(), ended.stderr) == ("[]", "")


def test_a_public_name_that_needs_no_torch_does_not_import_it(tmp_path: Path) -> None:
    code = (
        "import sys, hyper_resume; dir(hyper_resume); hyper_resume.CheckpointingConfig(save_steps=5); "
        "hyper_resume.ConfigError; print('torch' in sys.modules); hyper_resume.CheckpointerCallback; "
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    ended = _python(tmp_path, "-c", code)
    assert (ended.stdout.split(), ended.stderr) == (["False", "True", "False"], "")


@pytest.mark.parametrize("name", hyper_resume.__all__)
def test_a_public_name_resolves_and_is_documented(name: str) -> None:
    found = getattr(hyper_resume, name)
    assert name in dir(hyper_resume)
    if name != "__version__":
        assert (type(found) if name.isupper() else found).__doc__
        # The doc of a dataclass without one is its signature.
        assert not str(found.__doc__).startswith(f"{name}(")


def test_the_names_that_a_type_checker_sees_are_the_public_ones() -> None:
    tree = ast.parse(Path(hyper_resume.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert {*imported, "__version__"} == set(hyper_resume.__all__)
    for name, module in imported.items():
        assert getattr(import_module(str(module)), name) is getattr(hyper_resume, name)


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'hyper_resume' has no attribute 'Checkpointer'"):
        hyper_resume.Checkpointer  # noqa: B018
    assert sorted(set(hyper_resume.__all__)) == sorted(hyper_resume.__all__)


def test_the_version_is_that_of_pyproject() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert hyper_resume.__version__ == project["version"]


def test_the_readme_has_a_python_example() -> None:
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_python_example_of_the_readme_runs_as_it_stands(tmp_path: Path, block: str) -> None:
    ended = _python(tmp_path, "-W", "error::SyntaxWarning", "-c", block)
    assert ended.returncode == 0, ended.stderr


def test_tox_finds_exactly_the_environments_that_tox_ini_defines() -> None:
    """tox takes a line ``WORD: ...`` of any setting for a condition on the environment WORD, and then lists WORD too."""
    parser = configparser.ConfigParser(delimiters="=", comment_prefixes="#", interpolation=None)
    parser.read(REPOSITORY / "tox.ini", encoding="utf-8")
    defined = {name.removeprefix("testenv:") for name in parser.sections() if name.startswith("testenv:")}
    assert "crash" in defined
    assert {name.strip() for name in parser["tox"]["env_list"].split(",")} <= defined
    lines = [line for section in parser.sections() for value in parser[section].values() for line in value.splitlines()]
    conditions = [match.group(1) for line in lines if (match := re.match(r"\s*([\w.,{}!+-]+):(?:\s|$)", line))]
    assert conditions == []
