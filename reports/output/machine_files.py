"""The files that machines read, of the same report and frames as the page: JSON, JUnit, CSV, Markdown and checksums."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd

from conformance.records.comparison import Divergence
from reports.contents.document import CaseEntry, Report, as_json
from reports.judging.acceptance import load_acceptance
from reports.judging.assemble import Assembled
from reports.judging.history import Trend
from reports.judging.rule_of_four import summarise
from reports.output.page import render
from reports.reading.frames import METRICS

PAGE, RESULTS = "index.html", "results.json"
CHECKSUMS = "SHA256SUMS"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MOST_FINDINGS = 20
_STATES = {"met": "met", "not_met": "not met", "not_run": "not complete"}


def make_files(assembled: Assembled, trend: Trend | None = None) -> dict[str, str]:
    """Every file of the report by name, checksums last."""
    files = {
        PAGE: render(assembled, trend),
        RESULTS: as_json(assembled.report),
        "junit.xml": make_junit(assembled.report),
        "metrics.csv": make_metrics(assembled.frames.steps),
        "samples.csv": make_samples(assembled.frames.steps),
        "summary.md": make_summary(assembled.report),
    }
    sums = [f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in sorted(files.items())]
    return {**files, CHECKSUMS: "".join(sums)}


def built_profile(folder: Path) -> str | None:
    """The profile of the report in ``folder``; None where there is no report, or none that can be read."""
    try:
        found = json.loads((folder / RESULTS).read_text(encoding="utf-8"))["profile"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and found in load_acceptance().profiles else None


def write_files(files: Mapping[str, str], folder: Path) -> None:
    """Write all files, or none: they are made in a temporary folder and moved when all are there."""
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".report-", dir=folder))
    try:
        for name, text in files.items():
            (staging / name).write_text(text, encoding="utf-8", newline="")
        for name in files:
            (staging / name).replace(folder / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


# ---- CSV ------------------------------------------------------------------------------------------------------------


def make_metrics(steps: pd.DataFrame) -> str:
    """One row per leg, rank, step and metric; ``value`` reads back to the same float, ``hex`` is it in hexadecimal."""
    heads = _heads(steps)
    lines = ["part,leg,rank,step,name,value,hex\n"]
    numbers = steps["step"].tolist()
    columns = {name: steps[name].tolist() for name in METRICS}
    for row, (head, step) in enumerate(zip(heads, numbers, strict=True)):
        for name, values in columns.items():
            value = values[row]
            lines.append(f"{head},{step},{name},{value!r},{value.hex()}\n")
    return "".join(lines)


def make_samples(steps: pd.DataFrame) -> str:
    """One row per leg, rank and step; ``sample_ids`` are dataset indices in the order of training, separated by spaces."""
    lines = ["part,leg,rank,step,epoch,batch_index,sample_ids\n"]
    columns = [steps[name].tolist() for name in ("step", "epoch", "batch_index", "sample_ids")]
    for head, step, epoch, batch, samples in zip(_heads(steps), *columns, strict=True):
        lines.append(f"{head},{step},{epoch},{batch},{' '.join(map(str, samples))}\n")
    return "".join(lines)


def _heads(steps: pd.DataFrame) -> list[str]:
    """``part,leg,rank`` of each row, as CSV."""
    if steps.empty:
        return []
    quoted = {name: _field(name) for column in ("part", "folder") for name in steps[column].cat.categories}
    pairs = zip(steps["part"].tolist(), steps["folder"].tolist(), steps["rank"].tolist(), strict=True)
    return [f"{quoted[part]},{quoted[folder]},{rank}" for part, folder, rank in pairs]


def _field(text: str) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow([text])
    return buffer.getvalue()


# ---- JUnit ----------------------------------------------------------------------------------------------------------


def make_junit(report: Report) -> str:
    """One suite per part, and one each for sabotages, kills, missing ids, and the verdict itself.

    What is skipped or missing is skipped here too. The verdict's own test case is red unless the run is accepted, so that no
    viewer shows green for an incomplete run.
    """
    root = ElementTree.Element("testsuites", name=report.title)
    for part in report.parts:
        suite = ElementTree.SubElement(root, "testsuite", name=part.name, timestamp=part.started_at[:19])
        _properties(suite, {"platform": part.platform, "adapter": part.adapter, **part.versions, **part.facts})
        for case in report.cases:
            if case.part == part.name:
                _junit_case(suite, case)
    _junit_others(root, report)
    for suite in root:
        _count(suite)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _junit_case(suite: ElementTree.Element, case: CaseEntry) -> None:
    name = {"classname": f"{case.part}.{case.case[0]}", "name": f"{case.key}: {case.title.en}"}
    test = ElementTree.SubElement(suite, "testcase", _clean(name), time=f"{case.seconds:.3f}")
    properties = {"spec": case.spec, "layout": case.layout, "reproduce": case.reproduce}
    if case.divergence is not None:
        properties["divergence"] = _place(case.divergence)
    _properties(test, properties)
    kind = {
        "false_exact": "failure",
        "fail": "failure",
        "unexpected_pass": "failure",
        "known_fail": "skipped",
        "error": "error",
        "unsupported": "skipped",
        "skipped": "skipped",
    }.get(case.outcome)
    if kind is not None:
        reason = case.reason or case.outcome
        made = ElementTree.SubElement(test, kind, message=_xml(f"{case.outcome}: {reason}"))
        made.text = _xml(f"{reason}\nblamed: {case.blamed}\n{case.reproduce}\n")


def _place(found: Divergence) -> str:
    return f"step {found.step}, rank {found.rank}, {found.bucket} ({found.column})"


def _junit_others(root: ElementTree.Element, report: Report) -> None:
    if report.sabotages:
        suite = ElementTree.SubElement(root, "testsuite", name="sabotages")
        for one in report.sabotages:
            attributes = {"classname": "sabotages", "name": f"{one.id}: {one.title}"}
            test = ElementTree.SubElement(suite, "testcase", _clean(attributes), time="0")
            if not one.caught:
                ElementTree.SubElement(test, "failure", message=_xml(f"not noticed: {one.reason}"))
    if report.kills:
        suite = ElementTree.SubElement(root, "testsuite", name="kills")
        for kill in report.kills:
            attributes = {"classname": f"kills.{kill.key}", "name": f"{kill.number}: {kill.what or kill.moment}"}
            test = ElementTree.SubElement(suite, "testcase", _clean(attributes), time=f"{kill.seconds:.3f}")
            if kill.divergence is not None:
                _properties(test, {"divergence": _place(kill.divergence)})
            if kill.outcome != "pass":
                kind = "failure" if kill.outcome in ("false_exact", "fail") else "error"
                ElementTree.SubElement(test, kind, message=_xml(kill.reason))
    _junit_verdict(root, report)


def _junit_verdict(root: ElementTree.Element, report: Report) -> None:
    """What a profile requires and was not run, and one test case for the verdict itself."""
    name, title = (
        ("required", "the run is accepted") if report.is_acceptance else ("selection", "all that was run passes")
    )
    suite = ElementTree.SubElement(root, "testsuite", name=name)
    for row in report.rows:
        for cell in row.cells:
            for lacking in cell.lacking:
                place = {"classname": f"required.{cell.platform}", "name": lacking}
                test = ElementTree.SubElement(suite, "testcase", place, time="0")
                ElementTree.SubElement(test, "skipped", message=cell.reason or "not-run")
    verdict = report.verdict
    test = ElementTree.SubElement(suite, "testcase", classname=name, name=title, time="0")
    if verdict.state not in ("accepted", "passed"):
        kind = "failure" if verdict.state == "refused" else "error"
        ElementTree.SubElement(test, kind, message=_xml(f"{verdict.state}: {verdict.sentence.en}"))


def _properties(element: ElementTree.Element, values: Mapping[str, str]) -> None:
    box = ElementTree.SubElement(element, "properties")
    for name, value in values.items():
        ElementTree.SubElement(box, "property", _clean({"name": name, "value": value}))


def _count(suite: ElementTree.Element) -> None:
    tests = suite.findall("testcase")
    suite.set("tests", str(len(tests)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(test.find(tag) is not None for test in tests)))
    suite.set("time", f"{sum(float(test.get('time', '0')) for test in tests):.3f}")


def _clean(attributes: Mapping[str, str]) -> dict[str, str]:
    return {name: _xml(value) for name, value in attributes.items()}


def _xml(text: str) -> str:
    """XML 1.0 has no place for most control characters, not even escaped."""
    return _NOT_XML.sub("\ufffd", text)


# ---- Markdown -------------------------------------------------------------------------------------------------------


def make_summary(report: Report) -> str:
    """A page for CI systems that show Markdown."""
    return "\n".join(_summary_lines(report)) + "\n"


def _summary_lines(report: Report) -> Iterator[str]:
    verdict = report.verdict
    yield f"# {verdict.state.upper()}: {_plain(report.title)}"
    yield ""
    yield _plain(verdict.sentence.en)
    yield ""
    counts = ", ".join(f"{count} {name}" for name, count in verdict.counts.items() if count)
    required = f"Required results that pass: {verdict.required_passed} of {verdict.required}. "
    yield f"{required if report.is_acceptance else ''}Cases: {counts or 'none'}."
    if report.sabotages:
        caught = sum(one.caught for one in report.sabotages)
        yield f"Sabotages caught: {caught} of {len(report.sabotages)}."
    if report.kills:
        yield f"Kills that pass: {sum(one.outcome == 'pass' for one in report.kills)} of {len(report.kills)}."
    four = summarise(report.cases)
    if four.total:
        not_held = [f"{question.replace('_', ' ')} {count}" for question, count in four.broken.items() if count]
        told = f"; by the others does not hold: {', '.join(not_held)}" if not_held else ""
        yield f"Restore certificates by which all four of the rule hold: {four.hold} of {four.total}{told}."
    goals = [goal for run in report.costs if not run.is_smoke for goal in run.goals]
    if goals:
        met = sum(goal.status == "met" for goal in goals)
        yield f"Cost goals met: {met} of {len(goals)}; they are not part of the verdict."
    if verdict.findings:
        yield ""
        yield "| weight | what | finding |"
        yield "|---|---|---|"
        for one in verdict.findings[:_MOST_FINDINGS]:
            yield f"| {one.weight} | {_plain(one.subject)} | {_plain(one.text.en)} |"
        if len(verdict.findings) > _MOST_FINDINGS:
            yield f"| | | {len(verdict.findings) - _MOST_FINDINGS} more |"
    bad = [case for case in report.cases if case.outcome in ("false_exact", "fail", "unexpected_pass", "error")]
    if bad:
        yield ""
        yield "```"
        yield from (case.reproduce.replace("`", "'") for case in bad[:_MOST_FINDINGS])
        yield "```"
    if not report.done:
        return
    yield ""
    yield "| criterion | state | evidence |"
    yield "|---|---|---|"
    for line in report.done:
        yield f"| {line.id} {_plain(line.text.en)} | {_STATES[line.state]} | {_plain(line.evidence.en)} |"


def _plain(text: str) -> str:
    """Text that Markdown takes as text, on one line."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]|#])", r"\\\1", " ".join(escaped.split()))
