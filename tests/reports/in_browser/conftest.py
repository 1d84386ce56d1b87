"""A real browser: the system's Chromium, driven by Playwright, without a network.

Neither comes with this project's packages. Where one is missing these tests are not collected, and pytest's header says so.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reports.__main__ import main
from tests.reports.bench_folder import costed
from tests.reports.formulas import loss, single
from tests.reports.run_folder import RunFolder, refused_run, whole_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, ViewportSize

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = [
    name
    for name, there in (("playwright", importlib.util.find_spec("playwright")), ("chromium", CHROMIUM))
    if not there
]
collect_ignore_glob = ["test_*.py"] if MISSING else []
STEPS = 10_000


def pytest_report_header() -> str:
    return f"browser tests: not collected, missing: {', '.join(MISSING)}" if MISSING else f"browser tests: {CHROMIUM}"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


SIZE: ViewportSize = {"width": 1280, "height": 820}


@pytest.fixture(scope="session")
def _window(browser: Browser) -> Iterator[Page]:
    """One window for all tests that need none of their own: a new one costs as much as what is shown in it."""
    context = browser.new_context(viewport=SIZE, offline=True)
    yield context.new_page()
    context.close()


@pytest.fixture
def page(_window: Page) -> Iterator[Page]:
    """A window as a new one: no choice is kept from another test.

    It fails its test for any message on the console, any error, and any request but for files.
    """
    trouble: list[str] = []
    heard: dict[Any, Callable[[Any], None]] = {
        "console": lambda message: trouble.append(message.text),
        "pageerror": lambda error: trouble.append(str(error)),
        "request": lambda request: (
            None if request.url.startswith(("file:", "data:", "about:")) else trouble.append(request.url)
        ),
    }
    for event, hear in heard.items():
        _window.on(event, hear)
    yield _window
    if _window.url.startswith("file:"):
        _window.evaluate("localStorage.clear()")
    _window.goto("about:blank")
    _window.emulate_media(media="null", color_scheme="null")
    _window.set_viewport_size(SIZE)
    for event, hear in heard.items():
        _window.remove_listener(event, hear)
    assert trouble == []


def built(run: RunFolder, profile: str = "accept") -> str:
    """The address of the run's page."""
    assert main(["build", str(run.finish()), "--profile", profile]) != 2
    return (run.folder / "report" / "index.html").as_uri()


@pytest.fixture(scope="session")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(whole_run(tmp_path_factory.mktemp("accepted") / "run"))


@pytest.fixture(scope="session")
def priced(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An accepted run with benchmarks, which miss a goal."""
    run = whole_run(tmp_path_factory.mktemp("priced") / "run")
    costed(run.folder / "bench", source="f" * 40).finish()
    return built(run)


@pytest.fixture(scope="session")
def refused(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(refused_run(tmp_path_factory.mktemp("refused") / "run"))


@pytest.fixture(scope="session")
def incomplete(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(whole_run(tmp_path_factory.mktemp("incomplete") / "run", leave_out=["A6", "C7"]))


@pytest.fixture(scope="session")
def passed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A selection: one system test, whose program reported its configuration."""
    run = RunFolder(tmp_path_factory.mktemp("passed") / "run", suite="st", platform="cpu4")
    reported = {"training.max_steps": [25, "demo.yaml:9"], "checkpoint.is_async": [False, "default"]}
    run.resumed_case("D1", ranks=4, configured={"reference": reported})
    return built(run, "selection")


@pytest.fixture(scope="session")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A soak that differs from its reference after the 40th of its kills."""
    run = RunFolder(tmp_path_factory.mktemp("soaked") / "run", suite="soak", platform="cpu4")
    divergence = {"step": 41, "rank": 1, "bucket": "optimizer", "column": "loss"}
    divergence |= {"reference": repr(loss(41, 1)), "resumed": repr(single(loss(41, 1) + 2**-18))}
    bad = {"outcome": "fail", "reason": "step 41 is not the reference's", "divergence": divergence}
    run.soak("soak.demo", [*[{}] * 39, bad], "fail", "the life up to kill 41: step 41 is not the reference's")
    return built(run, "selection")


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two runs, of which one has a case that fails."""
    folder = tmp_path_factory.mktemp("compared")
    for name, outcome in (("before", "pass"), ("after", "fail")):
        run = RunFolder(folder / name, run_id=name)
        run.resumed_case("C9")
        run.case("A6", outcome)
        run.finish()
    assert main(["compare", str(folder / "before"), str(folder / "after"), "-o", str(folder / "page.html")]) == 1
    return (folder / "page.html").as_uri()


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> str:
    """10,000 steps; one loss, at step 4321, is another one."""

    def change(row: dict[str, object], rank: int) -> None:
        if row["global_step"] == 4_321:
            row["loss"] = single(float(str(row["loss"])) + 2**-18)

    run = RunFolder(tmp_path_factory.mktemp("long") / "run")
    run.resumed_case("C9", last=STEPS, kill=3_000, resume=2_000, change=change)
    return built(run)


def folder_of(address: str) -> Path:
    return Path(address.removeprefix("file://")).parent
