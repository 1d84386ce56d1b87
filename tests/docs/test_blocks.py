"""The code blocks of docs and READMEs: Python runs and prints what is shown, YAML loads, console commands exist."""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from conformance.matrix.case import parse_case
from conformance.matrix.platforms import load_platforms
from conformance.plain_data import serial
from conformance.plain_data.yaml_lines import load_yaml
from conformance.sabotages.catalogue import SabotageEntry
from hyper_resume import cli
from hyper_resume.config import RunConfig, load_config
from tests.docs import running
from tests.docs.markdown import PAGES, ROOT, Block, blocks
from tests.docs.running import Step

_NAMES = {page: str(page.relative_to(ROOT)) for page in PAGES}
_CLASS = re.compile(r"^- id: ([A-Z])\d", re.MULTILINE)
_CONFIGURATION = {field.name for field in dataclasses.fields(RunConfig)}


# ---- python ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    results = tmp_path_factory.mktemp("pages") / "steps.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.docs.running", str(results)]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=280)
    return [Step(**step) for step in json.loads(results.read_text(encoding="utf-8"))]


@pytest.mark.timeout(300)  # the first one waits for all pages
@pytest.mark.xdist_group("docs-blocks")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=_NAMES.__getitem__)
def test_python_blocks_run_and_print_what_is_shown(page: Path, steps: list[Step]) -> None:
    of_page = [step for step in steps if step.page == _NAMES[page]]
    assert of_page
    wrong = [
        f"{step.where}: {step.what}\n{step.error or 'shown:'}\n{step.expected}\nprinted:\n{step.printed}"
        for step in of_page
        if step.error or not step.is_as_shown
    ]
    assert not wrong, "\n\n".join(
        [*wrong, "(python -m tests.docs.running FILE --write puts what is printed into the pages)"]
    )


# ---- yaml -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [b for page in PAGES for b in blocks(page, "yaml")], ids=lambda block: block.where)
def test_yaml_blocks_are_read_by_their_real_loader(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "block.yaml"
    file.write_text(block.text, encoding="utf-8")
    content = load_yaml(file)
    if isinstance(content, dict) and set(content) <= _CONFIGURATION:
        load_config(file)
        return
    assert isinstance(content, list), f"{block.where}: neither a configuration nor a list of cases or sabotages"
    for item in content:
        if "script" in item:
            parse_case(item, file=file.name)
        else:
            serial.build(SabotageEntry, item, file.name)


# ---- console --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "console")], ids=_NAMES.__getitem__)
def test_console_commands_exist_and_take_these_words(page: Path) -> None:
    found = [(block, command) for block in blocks(page, "console") for command, _ in running.commands(block)]
    assert found
    wrong = [f"{block.where}: $ {command}\n  {problem}" for block, command in found for problem in _problems(command)]
    assert not wrong, "\n".join(wrong)


def _problems(line: str) -> Iterator[str]:
    words: list[str] = []
    # What stands in brackets may be left out.
    for word in [*shlex.split(re.sub(r"\[[^\]]*\]", "", line), comments=True), "&&"]:
        if word not in ("&&", ";", "|", "||"):
            words.append(word)
            continue
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words:
            yield from _problem_of(words)
        words = []


def _problem_of(words: list[str]) -> Iterator[str]:
    program, arguments = words[0], words[1:]
    if program in _PROGRAMS:
        yield from _PROGRAMS[program](arguments)
    elif program not in ("cd", "git", "pip", "chmod", "kill", "ls", "cat", "npu-smi", "sbatch"):
        yield f"{program}: no test knows this program"
    for word in arguments:
        if word.startswith(("examples/", "docs/", "tests/", ".ci/")) and not (ROOT / word.partition("::")[0]).exists():
            yield f"{word}: there is no such file"


def _hyper_resume(arguments: list[str]) -> Iterator[str]:
    yield from _parse(lambda: cli._parser()[0].parse_known_args(arguments))
    if arguments[:1] == ["train"] and (ROOT / arguments[1]).is_file():
        load_config(ROOT / arguments[1], [word for word in arguments[2:] if "." in word.partition("=")[0]])


def _torchrun(arguments: list[str]) -> Iterator[str]:
    if "--no-python" not in arguments:
        yield "torchrun is given a program, hence --no-python"
        return
    yield from _problem_of(arguments[arguments.index("--no-python") + 1 :])


def _python(arguments: list[str]) -> Iterator[str]:
    if arguments[0] != "-m":
        return
    module, words = arguments[1], arguments[2:]
    if importlib.util.find_spec(module) is None:
        yield f"{module}: there is no such module"
    elif module == "torch.distributed.run":
        yield from _torchrun(words)
    elif module in ("conformance", "conformance.storage", "st", "reports", "benchmarks"):
        yield from _parse(lambda: _parsed(module, words))
    elif module not in ("pip", "tests.docs.running", "benchmarks.subjects.nothing_when_off"):
        yield f"{module}: no test knows its words"


def _parsed(module: str, words: list[str]) -> Any:
    """What the command's own parser makes of ``words``; every command builds its parser before it does anything."""

    class Parsed(Exception):
        pass

    def stop(parser: argparse.ArgumentParser, words: Any = None, namespace: Any = None) -> Any:
        raise Parsed(real(parser, words, namespace))

    real = argparse.ArgumentParser.parse_args
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Parsed):
            importlib.import_module(f"{module}.__main__").main(words)


def _parse(parse: Callable[[], Any]) -> Iterator[str]:
    try:
        parse()
    except SystemExit as ending:
        if ending.code != 0:
            yield "its parser refuses these words"


def _tox(arguments: list[str]) -> Iterator[str]:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    environments = {name.partition(":")[2] for name in tox.sections() if name.startswith("testenv:")}
    if arguments[0] != "-e":
        yield "tox needs -e"
    for name in arguments[1].split(","):
        if name not in environments:
            yield f"tox.ini has no environment {name}"


def _pytest(arguments: list[str]) -> Iterator[str]:
    for option, word in itertools.pairwise(arguments):
        if option in ("-m", "--require") and word not in _markers():
            yield f"{word}: there is no such marker or platform"
    if not (ROOT / arguments[0]).exists():
        yield f"{arguments[0]}: there is no such folder"


@functools.cache
def _markers() -> frozenset[str]:
    """The platforms, and the classes of cases and scenarios."""
    folders = (ROOT / "conformance" / "cases", ROOT / "st" / "scenarios")
    letters = {
        found for folder in folders for file in folder.glob("*.yaml") for found in _CLASS.findall(file.read_text())
    }
    return frozenset({f"class_{letter.lower()}" for letter in letters} | {platform.id for platform in load_platforms()})


def _bash(arguments: list[str]) -> Iterator[str]:
    if not (ROOT / arguments[0]).is_file():
        yield f"{arguments[0]}: there is no such script"


_PROGRAMS = {
    "hyper-resume": _hyper_resume,
    "torchrun": _torchrun,
    "python": _python,
    "tox": _tox,
    "pytest": _pytest,
    "bash": _bash,
}


def test_what_is_wrong_with_a_command_is_found() -> None:
    assert list(_problems("hyper-resume verify DIR && tox -e ut")) == []
    for line in (
        "hyper-resume verfy DIR",
        "hyper-resume diff A",
        "python -m st list --chek",
        "python -m no_such_module",
        "tox -e no-such-environment",
        "pytest st -m cpu5",
        "bash examples/no-such.sh",
        "torchrun --no-python hyper-resume trian x.yaml",
        "frobnicate",
    ):
        assert list(_problems(line)), line


def test_a_mistake_in_yaml_is_not_passed(tmp_path: Path) -> None:
    broken = Block(page=PAGES[0], language="yaml", text="checkpoint: {save_step: 5}", line=1)
    with pytest.raises(Exception, match="save_steps"):
        test_yaml_blocks_are_read_by_their_real_loader(broken, tmp_path)
    assert yaml.safe_load(broken.text) == {"checkpoint": {"save_step": 5}}


def test_a_step_that_prints_something_else_is_not_as_shown() -> None:
    shown = Step(page="p", where="p:1", what="w", expected="step [...]\nend", printed="step 3, loss 0.5\nend\n")
    assert shown.is_as_shown
    assert not dataclasses.replace(shown, printed="step 3\nstopped\n").is_as_shown
