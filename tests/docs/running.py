"""Run the pages: every ``python`` block, and every console command that runs a script which the page itself shows.

``python -m tests.docs.running RESULTS`` runs all pages and writes what came of each step as JSON; ``--write`` puts outputs that
have changed into the pages. torch is imported once, and each page runs in a fork of that process, in an empty folder:

- A block whose first line is ``# NAME.py`` is a script: it is written to that file. Other blocks run in one namespace a page.
- A ``text`` block right after a ``python`` block is what that block prints.
- In a ``console`` block ``$ python NAME.py ...`` runs such a script, and the lines below are what it prints.

In an expected output ``[...]`` stands for anything.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import runpy
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.docs.markdown import PAGES, ROOT, Block, blocks

# What pages import, at their first optimizer step and first save too: imported before the fork, so that no page pays for it.
_LOADED = (
    "hyper_resume.data",
    "hyper_resume.trainer.callbacks",
    "torch._dynamo",
    "torch.distributed._functional_collectives",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.tensor",
)
_SCRIPT = re.compile(r"# (?P<name>[\w-]+\.py)\n")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing that was run. ``expected`` is None where the page shows no output; ``error`` is "" when it ended well."""

    page: str
    where: str
    what: str
    expected: str | None
    printed: str
    error: str = ""

    @property
    def is_as_shown(self) -> bool:
        """True when it printed what the page says."""
        if self.expected is None:
            return True
        pattern = re.escape(self.expected).replace(re.escape("[...]"), ".*")
        return re.fullmatch(pattern, self.printed.rstrip("\n"), re.DOTALL) is not None


def main(words: list[str] | None = None) -> int:
    """Run all pages, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs.running", description=__doc__)
    parser.add_argument("results", type=Path, help="where the steps are written, as JSON")
    parser.add_argument("--write", action="store_true", help="put what was printed into the pages")
    arguments = parser.parse_args(words)
    for module in _LOADED:
        importlib.import_module(module)
    found = [step for page in PAGES if blocks(page, "python") for step in _in_fork(page)]
    arguments.results.write_text(json.dumps([asdict(step) for step in found]), encoding="utf-8")
    for step in found if arguments.write else ():
        if not step.is_as_shown and not step.error and step.expected:
            page = ROOT / step.page
            text = page.read_text(encoding="utf-8")
            page.write_text(text.replace(step.expected, step.printed.rstrip("\n"), 1), encoding="utf-8")
            print(f"{step.where}: written")
    return 0


def _in_fork(page: Path) -> list[Step]:
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        results = Path(folder, "results.json")
        child = os.fork()
        if child == 0:
            work = Path(folder, "work")
            work.mkdir()
            os.chdir(work)
            results.write_text(json.dumps([asdict(step) for step in _steps(page)]), encoding="utf-8")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0 or not results.exists():
            name = str(page.relative_to(ROOT))
            error = f"the page's process ended with {os.waitstatus_to_exitcode(status)}"
            return [Step(page=name, where=name, what="the page", expected=None, printed="", error=error)]
        return [Step(**step) for step in json.loads(results.read_text(encoding="utf-8"))]


def _steps(page: Path) -> Iterator[Step]:
    found = blocks(page)
    namespace = {"__name__": "page"}
    for block, after in zip(found, [*found[1:], None], strict=True):
        script = _SCRIPT.match(block.text)
        if block.language == "python" and script is not None:
            Path(script["name"]).write_text(block.text + "\n", encoding="utf-8")
        elif block.language == "python":
            yield _run_block(block, namespace, after.text if after and after.language == "text" else None)
        elif block.language == "console":
            yield from _run_commands(block)


def _run_block(block: Block, namespace: dict[str, object], expected: str | None) -> Step:
    printed, error = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile("\n" * (block.line - 1) + block.text, block.page.name, "exec"), namespace)
        except Exception:  # noqa: BLE001  # whatever a block raises is what is to be reported
            error = traceback.format_exc()
    return _step(block, block.text.partition("\n")[0], expected, printed.getvalue(), error)


def _run_commands(block: Block) -> Iterator[Step]:
    for command, expected in commands(block):
        words = shlex.split(command, comments=True)
        if words[:1] == ["python"] and Path(words[1]).is_file():
            printed, error = _run_script(words[1:])
            yield _step(block, command, expected, printed, error)


def commands(block: Block) -> list[tuple[str, str]]:
    """The commands of a ``console`` block, lines continued by a backslash joined, each with the output below it."""
    found: list[tuple[str, str]] = []
    for part in re.split(r"^\$ ", re.sub(r"\\\n\s*", "", block.text), flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        found.append((command, output.rstrip("\n")))
    return found


def _run_script(words: list[str]) -> tuple[str, str]:
    """Run a script in a fork; returns what it printed and, where it did not end as a shown command may, how."""
    with tempfile.TemporaryFile("w+") as output:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.argv[:] = words
            code = 1
            try:
                runpy.run_path(words[0], run_name="__main__")
                code = 0
            except BaseException:  # noqa: BLE001  # as a script of its own would end
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        printed = output.read()
    # A shell says so of a command that is killed.
    return (
        (printed + "Killed\n", "") if code == -signal.SIGKILL else (printed, "" if code == 0 else f"exit code {code}")
    )


def _step(block: Block, what: str, expected: str | None, printed: str, error: str) -> Step:
    page = str(block.page.relative_to(ROOT))
    return Step(page=page, where=block.where, what=what, expected=expected, printed=printed, error=error)


if __name__ == "__main__":
    sys.exit(main())
