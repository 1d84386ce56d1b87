"""Accepted, refused or incomplete: the rule of the architecture, applied to the records, and the one sentence that says why.

A run is accepted when every id that the profile's platforms require is present with ``pass``, every calibration holds, every
sabotage that was put in is caught, and no part's own footer objects. Something that was seen to be wrong refuses the run; what
was not seen (missing, skipped, unsupported, not judged) leaves it incomplete. Unknown is never green.

A selection, of which nothing is required, is never accepted: at most it passed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from benchmarks.reporting.records import FailureRecord
from benchmarks.reporting.records import Report as Benchmarks
from conformance.records.comparison import Divergence
from conformance.records.results import OUTCOMES, CalibrationRecord, ResultRecord, SabotageRecord
from conformance.storage.records import Storage, corruption_violations, error_name
from reports.contents.document import CaseEntry, Finding, KillEntry, State, Verdict
from reports.contents.text import Text, same, say
from reports.judging.acceptance import Platform, Profile, base_of, sort_key
from reports.judging.cases import failed_kill
from reports.judging.matrix import required_states
from reports.reading.costs import commit_of
from reports.reading.read import Run
from reports.reading.redact import redact
from reports.reading.unit_tests import UnitTests

# The worst kind first; within a kind, findings are in the order of the cases.
_ORDER = (
    "false_exact",
    "fail",
    "unexpected_pass",
    "kill_fail",
    "tests",
    "storage",
    "sabotage_missed",
    "flaky",
    "known_fail",
    "footer",
    "error",
    "kill_error",
    "calibration",
    "unsupported",
    "skipped",
    "missing",
    "empty",
    "commits",
    "sabotaged",
    "no_sabotages",
    "nothing_run",
)
_LONGEST_REASON = 240
_FAILED = ("false_exact", "fail", "unexpected_pass", "known_fail")
_REFUSES = frozenset(_ORDER[:10])
_BUCKET_WORDS: Mapping[str, Text] = {
    "model": say("the model", "model"),
    "optimizer": say("the optimizer's state", "optimizer 状态"),
    "progress": say("the progress counters", "global_step/epoch"),
    "lr_scheduler": say("the lr scheduler", "lr_scheduler"),
    "train_dataloader": say("the data position", "数据读取位置"),
    "rng_state": say("the random streams", "随机数状态"),
}


def make_verdict(
    run: Run,
    profile: Profile,
    platforms: Sequence[Platform],
    cases: Sequence[CaseEntry],
    kills: Sequence[KillEntry],
) -> Verdict:
    """Judge a run. ``platforms`` are all that are known; the profile says which must be complete."""
    wanted = [platform for platform in platforms if platform.id in profile.platforms]
    states = {platform.id: required_states(platform, cases) for platform in wanted}
    findings = [
        *_case_findings(cases, kills),
        *_missing(wanted, states),
        *_flaky(cases),
        *_kill_findings([kill for kill in kills if not _is_explained(kill, cases)]),
        *_test_findings(run.tests),
        *_storage_findings(run.storage),
        *_cost_findings(run.costs),
        *_part_findings(run, profile, cases),
        *(_commits(run) if profile.is_acceptance else _nothing_run(run, cases, kills)),
    ]
    findings.sort(key=lambda finding: _ORDER.index(finding.kind))
    refused = any(finding.weight == "refused" for finding in findings)
    counts = Counter(case.outcome for case in cases)
    total = sum(len(own) for own in states.values())
    passed = sum(state in ("pass", "note") for own in states.values() for state in own.values())
    good: State = "accepted" if profile.is_acceptance else "passed"
    if refused:
        sentence = _how_many_failed(findings, cases, kills)
    elif findings:
        sentence = findings[0].text
    else:
        sentence = _all_is_well(total, cases) if profile.is_acceptance else _all_passed(run, cases, kills)
    return Verdict(
        state="refused" if refused else "incomplete" if findings else good,
        sentence=sentence,
        findings=tuple(findings),
        counts={name: counts.get(name, 0) for name in OUTCOMES},
        required=total,
        required_passed=passed,
    )


def _how_many_failed(findings: Sequence[Finding], cases: Sequence[CaseEntry], kills: Sequence[KillEntry]) -> Text:
    """What a refused run says first: how much failed, and the worst of it."""
    failed = sum(case.outcome in _FAILED for case in cases)
    bad_kills = sum(kill.outcome in ("false_exact", "fail") for kill in kills)
    counts = []
    if failed:
        counts.append(
            say("{count} of {total} cases failed", "{total} 个用例中有 {count} 个失败", count=failed, total=len(cases))
        )
    if bad_kills:
        counts.append(
            say(
                "{count} of {total} kills failed",
                "{total} 次中断中有 {count} 次失败",
                count=bad_kills,
                total=len(kills),
            )
        )
    if not counts:
        refusing = sum(one.weight == "refused" for one in findings)
        counts.append(say("Findings that refuse the run: {count}", "判为不通过的问题：{count} 个", count=refusing))
    return say(
        "{counts}. {first}", "{counts}。{first}",
        counts=Text(en=", ".join(one.en for one in counts), zh="，".join(one.zh for one in counts)), first=findings[0].text,
    )  # fmt: skip


def _all_is_well(required: int, cases: Sequence[CaseEntry]) -> Text:
    return say(
        "All {required} required results are there and pass; none of {count} cases failed, was skipped or could not be judged.",
        "必需的 {required} 项结果齐全且全部通过；共 {count} 个用例，无失败、无跳过、无未判定。",
        required=required, count=len(cases),
    )  # fmt: skip


def _all_passed(run: Run, cases: Sequence[CaseEntry], kills: Sequence[KillEntry]) -> Text:
    """The sentence of a selection: how much was run, and that this is no acceptance."""
    sabotages = sum(len(part.results.of(SabotageRecord)) for part in run.parts)
    counted = [("case", "个用例", len(cases)), ("kill", "次中断", len(kills)), ("sabotage", "个破坏", sabotages)]
    there = [(f"{count} {en}{'' if count == 1 else 's'}", f"{count} {zh}") for en, zh, count in counted if count]
    return say(
        "All that was run passes: {what}. This was a selection and is no acceptance.",
        "所运行的内容全部通过：{what}。这只是所选内容，不构成验收。",
        what=Text(en=", ".join(en for en, _ in there), zh="、".join(zh for _, zh in there)),
    )  # fmt: skip


def _nothing_run(run: Run, cases: Sequence[CaseEntry], kills: Sequence[KillEntry]) -> Iterator[Finding]:
    """A run in which nothing passed shows nothing."""
    caught = any(one.caught for part in run.parts for one in part.results.of(SabotageRecord))
    outcomes = {*(case.outcome for case in cases), *(kill.outcome for kill in kills)}
    if not caught and "pass" not in outcomes:
        yield _finding("nothing_run", "", say("Nothing was run that passes.", "没有任何通过的运行结果。"))


def _commits(run: Run) -> Iterator[Finding]:
    """Parts that were made of different commits together show neither commit; schema 1 records no commit."""
    commits = {commit_of(part.results.header.source) for part in run.parts} - {""}
    if len(commits) > 1:
        shown = ", ".join(sorted(commits))
        yield _finding("commits", shown, say(
            "The parts of this run were made of different commits ({shown}), so it shows no commit completely.",
            "本次运行的各部分来自不同的提交（{shown}），不能完整证明其中任何一个。", shown=shown,
        ))  # fmt: skip


def _finding(
    kind: str, subject: str, text: Text, anchor: str | None = None, divergence: Divergence | None = None
) -> Finding:
    weight: Literal["refused", "incomplete"] = "refused" if kind in _REFUSES else "incomplete"
    return Finding(kind=kind, weight=weight, subject=subject, text=text, anchor=anchor, divergence=divergence)


def _case_findings(cases: Sequence[CaseEntry], kills: Sequence[KillEntry]) -> Iterator[Finding]:
    """What is wrong with single cases; those with a divergence come first, because that leads to the cause."""
    for case in sorted(cases, key=lambda case: (case.divergence is None, case.level != "must")):
        if case.outcome in (*_FAILED, "error", "unsupported", "skipped"):
            story = _story(case, failed_kill(kills, case.part, case.case))
            yield _finding(case.outcome, case.key, story, case.anchor, case.divergence)
    names = sorted({case.sabotage for case in cases if case.sabotage})
    if names:
        yield _finding("sabotaged", ", ".join(names), say(
            "The sabotage {names} was put in on purpose; its passes say nothing about the trainer.",
            "本次运行故意植入了破坏 {names}；其“通过”不能说明训练器正确。", names=", ".join(names),
        ))  # fmt: skip


def _story(case: CaseEntry, kill: KillEntry | None) -> Text:
    if case.outcome == "fail" and case.divergence is not None:
        after = (
            say("{case}, kill {number}", "{case} 第 {number} 次中断", case=case.case, number=kill.number)
            if kill
            else None
        )
        return _difference(after or case.case, case.divergence)
    words = {
        "false_exact": say("is certified as exact and trains differently", "证书称完全一致，实际训练却不同"),
        "fail": say("fails", "失败"),
        "unexpected_pass": say("passes, though it is listed as known to fail", "列为已知失败，却通过了"),
        "known_fail": say("fails as known, and a known defect is still one", "按已知缺陷失败；已知缺陷仍是缺陷"),
        "error": say("could not be judged", "无法判定"),
        "unsupported": say(
            "was not run: the trainer or the machine lacks something", "未运行：训练器或机器缺少所需能力"
        ),
        "skipped": say("was skipped", "被跳过"),
    }
    # In a soak or a sweep the failed kill says more than the summary of all.
    name = (
        say("{case}, kill {number}", "{case} 第 {number} 次中断", case=case.case, number=kill.number)
        if kill
        else case.case
    )
    title, reason = (kill.what or kill.moment, kill.reason) if kill else (case.title, case.reason)
    return say(
        "{name} ({title}) {word}{reason}", "{name}（{title}）{word}{reason}",
        name=name, title=title, word=words[case.outcome],
        reason=say(": {reason}", "：{reason}", reason=_short(reason)) if reason else ".",
    )  # fmt: skip


def _short(reason: str) -> str:
    """As much as a sentence on the first screen can hold; the whole text is shown with the case."""
    return reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON].rsplit(" ", 1)[0] + " …"


def _difference(after: Text | str, found: Divergence) -> Text:
    return say(
        "{after}: after a resume rank {rank} differs from the uninterrupted run in {bucket}, first at step {step} ({column}).",
        "{after}：恢复后 rank {rank} 的{bucket}与未中断的运行不同；首次出现在第 {step} 步（{column}）。",
        after=after, bucket=_BUCKET_WORDS.get(found.bucket, same(found.bucket)),
        rank=found.rank, step=found.step, column=found.column,
    )  # fmt: skip


def _missing(platforms: Sequence[Platform], states: Mapping[str, Mapping[tuple[str, str], str]]) -> Iterator[Finding]:
    for platform in platforms:
        missing = [name for name, state in states[platform.id].items() if state == "missing"]
        if missing:
            bases = sorted({base_of(name) for _, name in missing}, key=sort_key)
            shown = ", ".join(bases[:12]) + (" …" if len(bases) > 12 else "")
            yield _finding("missing", platform.id, say(
                "{platform}: {count} of {total} required cases have no result ({shown}).",
                "{platform}：必需的 {total} 个用例中有 {count} 个没有结果（{shown}）。",
                platform=platform.title, count=len(missing), total=len(platform.required), shown=shown,
            ))  # fmt: skip


def _flaky(cases: Sequence[CaseEntry]) -> Iterator[Finding]:
    """Cases with several outcomes in one run: a resume that works only sometimes does not work."""
    outcomes: dict[tuple[str, str, str | None], set[str]] = {}
    for case in cases:
        outcomes.setdefault((case.part, f"{case.case} ({case.suite})", case.sabotage), set()).add(case.outcome)
    for (part, name, _), found in outcomes.items():
        if len(found) > 1:
            yield _finding("flaky", name, say(
                "{case} ({part}): repeats of it disagree: {found}.", "{case}（{part}）：多次运行结果不一致：{found}。",
                case=name, part=part, found=", ".join(sorted(found)),
            ))  # fmt: skip


def _is_explained(kill: KillEntry, cases: Sequence[CaseEntry]) -> bool:
    """True when the result of its soak or sweep is red too, and says why."""
    return any(
        case.part == kill.part and case.case == kill.key and case.outcome not in ("pass", "note") for case in cases
    )


def _kill_findings(kills: Sequence[KillEntry]) -> Iterator[Finding]:
    words = {
        "false_exact": say("is certified as exact and trains differently", "证书称完全一致，实际训练却不同"),
        "fail": say("was not survived", "未能正确恢复"),
        "error": say("could not be judged", "无法判定"),
    }
    for outcome, kind in (("false_exact", "false_exact"), ("fail", "kill_fail"), ("error", "kill_error")):
        bad = [kill for kill in kills if kill.outcome == outcome]
        if bad:
            first = min(bad, key=lambda kill: kill.divergence is None)
            yield _finding(kind, first.key, say(
                "{key}: kill {number} ({moment}, step {step}) {word}: {reason} ({count} of {total} kills).",
                "{key}：第 {number} 次中断（{moment}，第 {step} 步）{word}：{reason}（共 {total} 次中的 {count} 次）。",
                key=first.key, number=first.number, moment=first.moment, step=first.step,
                word=words[outcome], reason=first.reason, count=len(bad), total=len(kills),
            ), first.anchor, first.divergence)  # fmt: skip


def _test_findings(tests: Mapping[str, UnitTests]) -> Iterator[Finding]:
    """Tests that are no cases: only the acceptance criteria require them, but none of them may fail."""
    for name, found in tests.items():
        if not found.good:
            yield _finding("tests", name, say(
                "{name}: of {total} tests {bad} failed and {skipped} were skipped.",
                "{name}：{total} 项测试中 {bad} 项失败，{skipped} 项跳过。",
                name=name, bad=found.failures + found.errors, total=found.tests, skipped=found.skipped,
            ))  # fmt: skip


def _storage_findings(storage: Storage) -> Iterator[Finding]:
    broken: list[tuple[str, str, Mapping[str, int]]] = [
        *(
            (f"crash, {one.protocol}", f"{one.states} states after a crash", one.violations)
            for one in storage.crash_states
        ),
        *((f"power cut, {one.scenario}", f"{one.trials} power cuts", one.violations) for one in storage.power_cuts),
        *((error_name(one), f"{one.runs} failed operations", one.violations) for one in storage.operation_errors),
        *((one.kind, f"{one.tried} hostile inputs", one.violations) for one in storage.hostile),
        *(
            (one.kind, f"{one.tried} damaged checkpoints", corruption_violations(one))
            for one in storage.corruption
            if not one.loaded_silently
        ),
    ]
    for what, of, violations in broken:
        shown = ", ".join(f"{name} {count}" for name, count in violations.items() if count)
        if shown:
            yield _finding("storage", what, say(
                "{what}: of {of} some violate a guarantee ({shown}).", "{what}：{of} 中有违反承诺者（{shown}）。",
                what=what, of=of, shown=shown,
            ), "storage")  # fmt: skip
    for damage in storage.corruption:
        if damage.loaded_silently:
            yield _finding("storage", damage.kind, say(
                "{what}: {count} of {tried} damaged checkpoints were loaded as if nothing were wrong.",
                "{what}：{tried} 个损坏的 checkpoint 中有 {count} 个被当作完好加载。",
                what=damage.kind, count=damage.loaded_silently, tried=damage.tried,
            ), "storage")  # fmt: skip
    alive = [mutant.id for mutant in storage.mutants if mutant.is_missed]
    if alive:
        yield _finding("sabotage_missed", alive[0], say(
            "{count} of {total} mutants were not noticed ({first} …).", "{total} 个变异中有 {count} 个未被发现（{first} …）。",
            count=len(alive), total=len(storage.mutants), first=alive[0],
        ), "storage")  # fmt: skip
    for part in storage.parts:
        if part.status in ("missing", "error"):
            yield _finding("error", part.name, say(
                "{what}: the proof was not completed: {reason}.", "{what}：证明未能完成：{reason}。",
                what=part.name, reason=redact(part.reason) or part.status,
            ), "storage")  # fmt: skip


def _cost_findings(costs: Mapping[str, Benchmarks]) -> Iterator[Finding]:
    """Benchmarks that were not completed: their result is not known. A goal that was missed is no finding."""
    for report in costs.values():
        for one in report.of(FailureRecord):
            what = f"{one.benchmark}, {one.point}"
            yield _finding("error", what, say(
                "{what}: the benchmark was not completed: {reason}.", "{what}：基准测试未能完成：{reason}。",
                what=what, reason=_short(redact(one.reason).strip()),
            ), "costs")  # fmt: skip


def _part_findings(run: Run, profile: Profile, cases: Sequence[CaseEntry]) -> Iterator[Finding]:
    """Sabotages, calibrations, and what only a part's own footer says."""
    sabotages = [(part, one) for part in run.parts for one in part.results.of(SabotageRecord)]
    for part, one in sabotages:
        if not one.caught:
            yield _finding("sabotage_missed", one.id, say(
                "The sabotage {name} ({title}) was not noticed: {reason}.", "破坏 {name}（{title}）未被发现：{reason}。",
                name=one.id, title=one.title, reason=redact(one.reason) or part.name,
            ), "sabotages")  # fmt: skip
    if profile.sabotages and not sabotages:
        yield _finding("no_sabotages", profile.title.en, say(
            "No sabotage was put in, so nothing shows that this suite would have noticed a defect.",
            "没有植入任何破坏，无法证明本套件能够发现缺陷。",
        ))  # fmt: skip
    for part in run.parts:
        for pair in part.results.of(CalibrationRecord):
            if not pair.equal:
                yield _finding("calibration", pair.signature, say(
                    "{part}: two uninterrupted runs of one training differ ({reason}), so nothing exact can be judged there.",
                    "{part}：同一训练的两次未中断运行不一致（{reason}），无法做精确判定。",
                    part=part.name, reason=redact(pair.problem or (pair.divergence.column if pair.divergence else "")),
                ))  # fmt: skip
        explained = any(case.part == part.name and case.outcome not in ("pass", "note") for case in cases)
        explained |= any(not one.caught for one in part.results.of(SabotageRecord))
        results = part.results.of(ResultRecord)
        # The footer of a run of sabotaged cases alone always says no, and there is a finding for that.
        explained |= bool(results) and all(one.sabotage is not None for one in results)
        if not part.results.footer.accepted and not explained:
            yield _finding("footer" if results else "empty", part.name, say(
                "{part}: {reason}", "{part}：{reason}",
                part=part.name, reason=redact("; ".join(part.results.footer.reasons)) or "its footer says: not accepted",
            ))  # fmt: skip
