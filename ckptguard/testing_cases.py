"""Tables of known failures: how a run is damaged, and what must be said of it. For tests, here and of plug-ins."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptguard.inspect import Options, audit, preflight
from ckptguard.model import Finding, RunReport, Verdict
from ckptguard.testing_damage import untouched_times

LOOK = Options(grace=0.0, jobs=2)


@dataclass(frozen=True, slots=True)
class Case:
    """A run, damaged or only looking so, and the verdicts that it must get.

    `expect` names checkpoints by their last path component: "unsafe missing-file@part-2 bad-header?" wants this verdict,
    this code with this text in its subject, allows another one, and no further warning or error. "-": not listed.
    Checkpoints that are not named must be exact and without alarm. `run` holds the run's own warnings and errors in the
    same words. `resume` is the checkpoint to resume from, None where there is none. `safe`: the newest safe one, where that
    is another; `gate`: what preflight chooses, where history shows audit what preflight does not look at.
    """

    name: str
    make: Callable[[Path], object]
    expect: Mapping[str, str]
    resume: str | None
    run: str = ""
    safe: str | None = ""
    gate: str | None = ""

    def __str__(self) -> str:
        return self.name


def contradictions(case: Case, run: Path) -> list[str]:
    """Make the case in a copy of a run, look at it, and list everything that is not as it must be."""
    case.make(run)
    (report, *more) = audit(str(run), LOOK)
    found = list(_report(case, report))
    if more:
        found.append(f"{1 + len(more)} runs were found: {[r.root for r in (report, *more)]}")
    newest = case.resume if case.safe == "" else case.safe
    if not _is(report.newest_safe, newest):
        found.append(f"newest_safe is {report.newest_safe}, not {newest}")
    if not _is(report.resume_from, case.resume):
        found.append(f"audit would resume from {report.resume_from}, not {case.resume}")
    decision, chosen = preflight(str(run), LOOK), case.resume if case.gate == "" else case.gate
    if decision.decision != ("resume" if chosen else "stop") or not _is(decision.resume_from, chosen):
        found.append(f"preflight decides {decision.decision} {decision.resume_from}, not {chosen}")
    return found


def age(run: Path, order: Iterable[Path], *, newest: float = 1.7e9, apart: float = 600.0) -> None:
    """Give files and folders the times of saves that lie apart, the last given the newest. The rest is older."""
    for path in [run, *run.rglob("*")]:
        os.utime(path, (newest - 1e6, newest - 1e6), follow_symlinks=False)
    given = list(order)
    for place, path in enumerate(given):
        at = newest - apart * (len(given) - 1 - place)
        for each in [*path.rglob("*"), path]:
            os.utime(each, (at, at), follow_symlinks=False)


def at(where: str, damage: Callable[..., object], *more: Any) -> Callable[[Path], None]:
    """Damage one file or folder of the run, or all that a pattern names."""

    def make(run: Path) -> None:
        paths = sorted(run.glob(where)) if "*" in where else [run / where]
        assert paths, f"{where} names nothing in the run"
        for path in paths:
            damage(path, *more)

    return make


def copied(source: str, folder: str) -> Callable[[Path], None]:
    """Put a file of one checkpoint in the place of another's, which keeps its times."""

    def make(run: Path) -> None:
        target = run / folder / Path(source).name
        with untouched_times(target):
            shutil.copyfile(run / source, target)

    return make


def each(*makes: Callable[[Path], object]) -> Callable[[Path], None]:
    """One after the other."""

    def make(run: Path) -> None:
        for one in makes:
            one(run)

    return make


def _report(case: Case, report: RunReport) -> Iterator[str]:
    verdicts = {_last(v.path) or ".": v for v in report.checkpoints}
    for name in sorted({*verdicts, *case.expect}):
        wanted = case.expect.get(name, "exact")
        verdict = verdicts.get(name)
        if verdict is None:
            if wanted != "-":
                yield f"{name} is not listed"
        elif wanted == "-":
            yield f"{name} is listed: {_words(verdict)}"
        else:
            resume, *codes = wanted.split()
            if verdict.resume.value not in resume.split("|"):
                yield f"{name} is not {resume}: {_words(verdict)}"
            yield from _codes(name, codes, verdict.findings)
    yield from _codes("the run", case.run.split(), report.findings)


def _codes(where: str, wanted: list[str], findings: Iterable[Finding]) -> Iterator[str]:
    every = list(findings)
    unexplained = [f for f in every if f.loud]
    for word in wanted:
        code, _, subject = word.rstrip("?").partition("@")
        codes = code.split("|")
        fitting = [f for f in every if f.code in codes and subject in f.subject]
        if not fitting and not word.endswith("?"):
            yield f"{where}: no {word}; there are {[(f.code, f.subject) for f in every]}"
        unexplained = [f for f in unexplained if f.code not in codes]
    for one in unexplained:
        yield f"{where}: a false alarm: {one.code} {one.subject}: {one.message}"


def _is(path: str | None, wanted: str | None) -> bool:
    return _last(path) in (wanted.split("|") if wanted else (None,))


def _words(verdict: Verdict) -> str:
    return f"{verdict.resume} {[(f.code, f.severity.value, f.message) for f in verdict.findings]}"


def _last(path: str | None) -> str | None:
    return None if path is None else path.rpartition("/")[2]
