"""The straight line: target → store → manifests → facts → findings → verdicts. Reads only; all effects are elsewhere."""

from __future__ import annotations

import posixpath
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ckptguard.codes import finding
from ckptguard.curves.health import health_at
from ckptguard.discover import Run, find_checkpoints, group_runs
from ckptguard.errors import (
    CkptguardError,
    FormatError,
    KeyNotFound,
    NothingRecognised,
    StoreError,
    TargetNotFound,
)
from ckptguard.facts import Progress, Reader, Wanted
from ckptguard.judge import judge, newest_first, newest_safe, resume_from
from ckptguard.layouts._base import build_directory
from ckptguard.model import (
    CheckpointFacts,
    Coverage,
    Directory,
    Effect,
    Evidence,
    Finding,
    Health,
    LogRow,
    Manifest,
    NotRun,
    Pointer,
    Resume,
    Role,
    RunReport,
    Severity,
    State,
    Verdict,
)
from ckptguard.ports import RunSubject, Store, Subject
from ckptguard.registry import checks, layout_named, layouts, run_checks
from ckptguard.scan import SEGMENT
from ckptguard.seals import Seal, read_seal

GRACE = 900.0
SHOWN_PER_FILE = 8


@dataclass(frozen=True, slots=True)
class Options:
    """How to look. `grace` in seconds; `max_rate` in bytes a second; `require` makes anything less proven unknown."""

    depth: Evidence = Evidence.CONTENT
    jobs: int | None = None
    grace: float = GRACE
    max_rate: float | None = None
    require: Evidence | None = None
    allow_lossy: bool = False
    plan: object = None
    silenced: frozenset[str] = frozenset()
    deadline: float | None = None
    now: Callable[[], float] = field(default=time.time)


@dataclass(frozen=True, slots=True)
class Opened:
    """A store with what was asked for in it. `prefix` is put before keys when paths are printed; `only` narrows the report."""

    store: Store
    prefix: str
    only: str | None = None

    def shown(self, key: str) -> str:
        return f"{self.prefix}{key}" if key else self.prefix.rstrip("/") or "."


@dataclass(frozen=True, slots=True)
class Decision:
    """What preflight decides. `resume_from` is None unless `decision` is "resume"."""

    decision: str
    resume_from: str | None
    report: RunReport | None
    reasons: tuple[str, ...] = ()


# --- opening ------------------------------------------------------------------------------------------


def open_target(target: str, options: Options) -> tuple[Opened, Directory, list[Manifest]]:
    """The store of a target, its listing and the checkpoints in it. A checkpoint named directly is seen among its siblings.

    Raises TargetNotFound, UsageError, StoreError.
    """
    from ckptguard.storage import open_store
    from ckptguard.storage.opening import split_target

    root, key = split_target(target)
    store = open_store(root, max_rate=options.max_rate)
    prefix = _prefix(root, target)
    if key:
        directory = build_directory(store.list())
        manifests = find_checkpoints(directory, layouts())
        named = next((m for m in manifests if any(f.entry.key == key for f in m.files)), None)
        return Opened(store, prefix, named.path if named else key), directory, manifests
    directory = build_directory(store.list())
    manifests = find_checkpoints(directory, layouts())
    if len(manifests) == 1 and manifests[0].path == "":
        parent, name = _split(target)
        if name:
            above = open_store(parent or ".", max_rate=options.max_rate)
            directory = build_directory(above.list())
            return (
                Opened(above, _prefix(parent or ".", parent), name),
                directory,
                find_checkpoints(directory, layouts()),
            )
    return Opened(store, prefix), directory, manifests


def _prefix(root: str, given: str) -> str:
    if not given or given == "." or (root == "." and "/" not in given):
        return ""
    return root.rstrip("/") + "/"


def _split(target: str) -> tuple[str, str]:
    """(folder, name) of a directory target; ("", "") where there is nothing above it."""
    plain = target.rstrip("/")
    if plain in ("", ".", "..") or plain.endswith("://"):
        return "", ""
    parent, name = posixpath.split(plain)
    if "://" in target and (not parent or parent.endswith(":/")):
        return "", ""
    return parent, name


# --- one run ------------------------------------------------------------------------------------------


class Look:
    """A look at one run: reads each checkpoint at most once per depth and runs the checks on it."""

    def __init__(self, opened: Opened, run: Run, options: Options, reader: Reader) -> None:
        self.opened = opened
        self.run = run
        self.options = options
        self.reader = reader
        self.now = options.now()
        listed, self.leftovers = split_leftovers(run.checkpoints, opened.only)
        self.manifests = listed
        self.facts: dict[str, CheckpointFacts] = {}
        self.gone: list[str] = []
        self._log: tuple[LogRow, ...] | None = None

    @property
    def log(self) -> tuple[LogRow, ...]:
        """The run's metric log, read once."""
        if self._log is None:
            from ckptguard.logs import read_logs

            self._log = (
                tuple(read_logs(self.opened.store, self.run.root))
                if self.options.depth > Evidence.LISTING
                else ()
            )
        return self._log

    def read(self, manifest: Manifest, depth: Evidence) -> CheckpointFacts | None:
        """The facts of a checkpoint, or None where it is none after all, or is gone."""
        known = self.facts.get(manifest.path)
        if known is not None and known.evidence >= depth:
            return known
        facts = self._read(manifest, depth)
        if facts is not None and self._changed(facts):
            again = self._listed_again(manifest.path)
            facts = self._read(again, depth) if again is not None else None
            if facts is not None and self._changed(facts):
                facts = replace(facts, changed=True)
        if facts is None:
            self.gone.append(manifest.path)
            return None
        if not is_checkpoint(facts, self.opened.only):
            self.manifests = [m for m in self.manifests if m.path != manifest.path]
            return None
        self.facts[manifest.path] = facts
        return facts

    def _read(self, manifest: Manifest, depth: Evidence) -> CheckpointFacts | None:
        seal = self._seal(manifest) if depth > Evidence.STRUCTURE else None
        blocks = {}
        if seal is not None and seal.block_size and SEGMENT % seal.block_size == 0:
            entries = {f.name: f.entry for f in manifest.files}
            blocks = {
                n: seal.block_size for n, s in seal.files.items() if n in entries and s.fits(entries[n])
            }
        files = self.reader.read(manifest, Wanted(depth, blocks))
        if manifest.files and all(any(p.code == "missing-file" for p in f.problems) for f in files.values()):
            return None
        for name in blocks:
            held = files[name]
            if seal is not None and held.blocks == seal.files[name].blocks:
                files[name] = replace(held, bytes_proven=seal.files[name].size)
        layout = layout_named(manifest.layout)
        state, broken = State(layout=manifest.layout), None
        if layout is not None:
            try:
                state = layout.interpret(manifest, files)
            except Exception as e:  # noqa: BLE001 - a layout that stumbles must not end the audit
                broken = f"{type(e).__name__}: {e}"
        if broken:
            state = replace(state, attributes={"broken_layout": broken})
        return CheckpointFacts(manifest, files, state, depth, seal)

    def _seal(self, manifest: Manifest) -> Seal | None:
        root = self.run.root.path
        relative = manifest.path[len(root) + 1 :] if root else manifest.path
        try:
            return read_seal(self.opened.store, root, relative)
        except (FormatError, StoreError):
            return None

    def _changed(self, facts: CheckpointFacts) -> bool:
        for file in facts.manifest.files:
            if file.entry.kind != "file":
                continue
            try:
                if self.opened.store.stat(file.entry.key).identity != file.entry.identity:
                    return True
            except KeyNotFound:
                return True
            except StoreError:
                continue
        return False

    def _listed_again(self, path: str) -> Manifest | None:
        forget = getattr(self.opened.store, "forget", None)
        if forget is not None:
            forget()
        directory = build_directory(self.opened.store.list())
        return next((m for m in find_checkpoints(directory, layouts()) if m.path == path), None)

    # --- judging ------------------------------------------------------------------------------------

    def verdict(self, facts: CheckpointFacts, siblings: Sequence[CheckpointFacts]) -> Verdict:
        subject = Subject(
            facts,
            tuple(siblings),
            self.log,
            self.now,
            self.options.grace,
            self.opened.store,
            self.options.plan,
        )
        findings, coverage = run_checkpoint_checks(subject)
        return judge(
            facts,
            [silence(f, self.options.silenced) for f in findings],
            coverage,
            path=self.opened.shown(facts.path),
            now=self.now,
            grace=self.options.grace,
            required=self.options.require,
            health=health_at(self.log or facts.state.log, facts.step),
        )

    def unlooked(self, manifest: Manifest) -> Verdict:
        """A checkpoint that was only listed: it counts for nothing."""
        return Verdict(
            self.opened.shown(manifest.path), manifest.layout, manifest.step, Resume.UNKNOWN, Evidence.LISTING,
            len(manifest.files), manifest.size, {}, manifest.gaps, Coverage(), Health(), (), modified=manifest.modified,
        )  # fmt: skip

    def report(self, target: str, pairs: Sequence[tuple[CheckpointFacts | None, Verdict]]) -> RunReport:
        """The run's report from the verdicts on its checkpoints."""
        order = sorted(
            pairs,
            key=lambda p: (
                p[1].step is not None,
                p[1].step or 0,
                p[1].attempt or 0,
                p[1].modified,
                p[1].path,
            ),
        )
        looked = [(f, v) for f, v in order if f is not None]
        pointers = find_pointers(self.opened.store, self.run.root, self.manifests)
        keyed = {f.path: v for f, v in looked}
        subject = RunSubject(
            self.run.root,
            tuple(f for f, _ in looked),
            tuple(keyed[f.path] for f, _ in looked),
            pointers,
            tuple(self.leftovers),
            self.log,
            self.now,
            self.options.grace,
        )
        findings = [silence(f, self.options.silenced) for f in run_run_checks(subject)]
        findings += [
            finding("debris", self.opened.shown(p), f"{p} was there when the look began and is gone now")
            for p in self.gone
        ]
        if self.opened.only is not None:
            order = [(f, v) for f, v in order if v.path == self.opened.shown(self.opened.only)]
        verdicts = [v for _, v in order]
        safe, best = newest_safe(verdicts), resume_from(verdicts, allow_lossy=self.options.allow_lossy)
        return RunReport(
            target=target,
            root=self.opened.shown(self.run.root.path),
            checkpoints=tuple(verdicts),
            findings=tuple(findings),
            latest=latest_of(self.opened, pointers, verdicts),
            newest_safe=None if safe is None else safe.path,
            resume_from=None if best is None else best.path,
        )


def is_checkpoint(facts: CheckpointFacts, only: str | None) -> bool:
    """Whether a lone file turned out to hold training state; what the user named is judged whatever it holds."""
    manifest = facts.manifest
    if manifest.path == only or not manifest.attributes.get("one_file"):
        return True
    if facts.evidence is Evidence.LISTING:
        return bool(manifest.certain or manifest.attributes.get("speaks"))
    opened = all(f.tree is not None for f in facts.files.values())
    if opened:
        holds = bool(facts.state.ema or facts.state.optimizers) or any(
            # Tensors with names of their own are data as well; parameters are named by their modules.
            manifest.attributes.get("speaks") or "." in name or name in ("weight", "bias")
            for name in facts.state.model
        )
        return holds or bool(
            manifest.certain
            and manifest.attributes.get("speaks")
            and not facts.state.attributes.get("no_training_state")
        )
    return manifest.certain


def split_leftovers(
    manifests: Iterable[Manifest], only: str | None = None
) -> tuple[list[Manifest], list[Manifest]]:
    """(checkpoints to list, left-overs): temporary and unfinished ones that a complete one has overtaken."""
    every = list(manifests)
    complete = [m for m in every if m.finished and not m.temporary]
    newest = max((m.step for m in complete if m.step is not None), default=None)
    latest = max((m.modified for m in complete), default=None)
    listed: list[Manifest] = []
    leftovers: list[Manifest] = []
    for manifest in every:
        overtaken = False
        if manifest.temporary:
            overtaken = (
                manifest.step <= newest
                if manifest.step is not None and newest is not None
                else latest is not None and manifest.modified < latest
            )
        elif (
            not manifest.attributes.get("one_file")
            and manifest.step is not None
            and newest is not None
            and manifest.step < newest
        ):
            weights = (
                *manifest.by_role(Role.MODEL),
                *manifest.by_role(Role.BUNDLE),
                *manifest.by_role(Role.SHARD),
            )
            overtaken = not manifest.finished or not weights
        (leftovers if overtaken and manifest.path != only else listed).append(manifest)
    return listed, leftovers


def run_checkpoint_checks(subject: Subject) -> tuple[list[Finding], Coverage]:
    """All checks that the evidence allows. A check that raises becomes a finding and a gap."""
    facts = subject.facts
    found: list[Finding] = []
    ran, not_run = 0, []
    for check in checks():
        if check.needs > facts.evidence:
            not_run.append(NotRun(check.name, f"needs evidence {check.needs}"))
            continue
        try:
            found += check.run(subject)
            ran += 1
        except CkptguardError as e:
            found.append(
                finding("unreadable", facts.path, f"the check {check.name} could not read what it needs: {e}")
            )
            not_run.append(NotRun(check.name, str(e)))
        except Exception as e:  # noqa: BLE001 - one check's fault must not hide the others' findings
            found.append(
                finding(
                    "check-failed", facts.path, f"the check {check.name} failed with {type(e).__name__}: {e}"
                )
            )
            not_run.append(NotRun(check.name, f"{type(e).__name__}: {e}"))
    broken = facts.state.attributes.get("broken_layout")
    if broken:
        found.append(
            finding(
                "check-failed",
                facts.path,
                f"the layout {facts.manifest.layout} failed on this checkpoint: {broken}",
            )
        )
    return collapse(found), coverage_of(facts, ran, not_run)


def coverage_of(facts: CheckpointFacts, ran: int, not_run: Sequence[NotRun]) -> Coverage:
    kinds = sorted(
        {
            f.kind
            for f in facts.files.values()
            if f.tensors and f.bytes_read and f.bytes_proven == 0 and f.checksummed == 0
        }
    )
    unprovable = ""
    if facts.evidence >= Evidence.CONTENT and kinds:
        unprovable = f"{', '.join(kinds)} payload: no checksum{'' if facts.seal else ', no seal'}"
    return Coverage(
        checks=ran,
        not_run=tuple(not_run),
        bytes_read=sum(f.bytes_read for f in facts.files.values()),
        bytes_proven=sum(f.bytes_proven for f in facts.files.values()),
        unprovable=unprovable,
    )


def collapse(findings: Iterable[Finding]) -> list[Finding]:
    """At most a few findings of one code for one file, the last of which counts the rest."""
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for one in dict.fromkeys(findings):
        groups[one.code, one.subject.partition(":")[0]].append(one)
    kept: list[Finding] = []
    for members in groups.values():
        worst = sorted(members, key=lambda f: (-f.effect.rank, -f.severity.rank))
        kept += worst[: SHOWN_PER_FILE - 1] if len(worst) > SHOWN_PER_FILE else worst
        if len(worst) > SHOWN_PER_FILE:
            rest = worst[SHOWN_PER_FILE - 1]
            kept.append(
                replace(rest, message=f"{rest.message} (and {len(worst) - SHOWN_PER_FILE} more like it)")
            )
    return kept


def silence(one: Finding, silenced: frozenset[str]) -> Finding:
    """A silenced finding is still listed, as information; its effect on the resume stays."""
    if one.code in silenced and one.severity > Severity.INFO:
        return replace(one, severity=Severity.INFO, message=f"{one.message} (silenced)")
    return one


def run_run_checks(subject: RunSubject) -> list[Finding]:
    found: list[Finding] = []
    for check in run_checks():
        try:
            found += check.run(subject)
        except Exception as e:  # noqa: BLE001
            found.append(
                finding(
                    "check-failed",
                    subject.root.path or ".",
                    f"the check {check.name} failed with {type(e).__name__}: {e}",
                    effect=Effect.NONE,
                )
            )
    return found


def find_pointers(store: Store, root: Directory, manifests: Sequence[Manifest]) -> tuple[Pointer, ...]:
    """The run's pointers, as each layout that is present keeps them, in the run's directory and where its checkpoints lie."""
    places = {root.path: root}
    for manifest in manifests:
        home = manifest.path.rpartition("/")[0]
        here: Directory | None = root
        for part in home[len(root.path) :].strip("/").split("/") if home != root.path else ():
            here = here.dirs.get(part) if here else None
        if here is not None:
            places[here.path] = here
    # A pointer that is a checkpoint file of its own (last.ckpt as a second save) names nothing.
    own = {f.entry.key for m in manifests for f in m.files}
    found: dict[str, Pointer] = {}
    names = {m.layout for m in manifests}
    for layout in layouts():
        if layout.name not in names and layout.name != "torch-file":
            continue
        for directory in places.values():
            try:
                for pointer in layout.pointers(directory, store.read):
                    if pointer.entry.key not in own or pointer.resolved != pointer.entry.key:
                        found.setdefault(pointer.entry.key, pointer)
            except StoreError:
                continue
    return tuple(p for p in found.values() if p.entry.key not in own)


def latest_of(opened: Opened, pointers: Sequence[Pointer], verdicts: Sequence[Verdict]) -> str | None:
    """What the framework itself would pick: what its pointer names, else the highest step, complete or not."""
    shown = {v.path for v in verdicts}
    for pointer in pointers:
        if (
            pointer.kind != "best"
            and pointer.resolved is not None
            and opened.shown(pointer.resolved) in shown
        ):
            return opened.shown(pointer.resolved)
    ordered = newest_first(verdicts)
    return ordered[0].path if ordered else None


# --- the commands' work -------------------------------------------------------------------------------


def audit(
    target: str, options: Options | None = None, progress: Progress | None = None
) -> tuple[RunReport, ...]:
    """Find and judge every checkpoint under a target; one report a run.

    Raises TargetNotFound, NothingRecognised, UsageError, StoreError.
    """
    options = options or Options()
    opened, directory, manifests = open_target(target, options)
    reports = []
    with Reader(opened.store, options.jobs, progress) as reader:
        for run in group_runs(directory, manifests):
            if opened.only is not None and all(m.path != opened.only for m in run.checkpoints):
                continue
            look = Look(opened, run, options, reader)
            facts = [f for m in list(look.manifests) if (f := look.read(m, options.depth)) is not None]
            pairs = [(f, look.verdict(f, facts)) for f in facts]
            if pairs or look.leftovers:
                reports.append(look.report(target, pairs))
    if not reports:
        raise NothingRecognised(
            f"{target}: nothing here is recognised as a checkpoint",
            "name the directory that holds the checkpoints, or a checkpoint itself",
        )
    return tuple(reports)


def preflight(target: str, options: Options | None = None, progress: Progress | None = None) -> Decision:
    """Decide from where to resume, newest first, and stop as soon as that is certain. Fails closed.

    Raises TargetNotFound, UsageError, StoreError.
    """
    options = options or Options(grace=0.0)
    opened, directory, manifests = open_target(target, options)
    runs = group_runs(directory, manifests)
    if not runs:
        if has_history(opened.store):
            return Decision(
                "stop", None, None, ("no checkpoint is left here, but the run is known to have had some",)
            )
        return Decision("fresh", None, None, ("no checkpoint was ever seen here",))
    with Reader(opened.store, options.jobs, progress) as reader:
        looks = [Look(opened, run, options, reader) for run in runs]
        look = max(looks, key=lambda x: max((m.step or -1 for m in x.manifests), default=-1))
        return _decide(target, look, options)


def _decide(target: str, look: Look, options: Options) -> Decision:
    order = sorted(look.manifests, key=lambda m: (m.step is not None, m.step or 0, m.modified), reverse=True)
    pairs: list[tuple[CheckpointFacts | None, Verdict]] = []
    chosen: Verdict | None = None
    for manifest in order:
        if options.deadline is not None and options.now() > options.deadline:
            break
        facts = look.read(manifest, options.depth)
        if facts is None:
            continue
        verdict = look.verdict(facts, [facts])
        if verdict.resume is Resume.LOSSY:
            # Alone, a checkpoint cannot tell what it lost from what its run never saves.
            siblings = [s for m in order if (s := look.read(m, Evidence.STRUCTURE)) is not None]
            verdict = look.verdict(facts, siblings)
        pairs.append((facts, verdict))
        chosen = resume_from([verdict], allow_lossy=options.allow_lossy)
        if chosen is not None:
            break
    seen = {f.path for f, _ in pairs if f is not None}
    pairs += [(None, look.unlooked(m)) for m in look.manifests if m.path not in seen]
    report = look.report(target, pairs)
    if chosen is None:
        if not look.manifests and not look.leftovers and not has_history(look.opened.store):
            return Decision("fresh", None, report, ("no checkpoint was ever seen here",))
        return Decision("stop", None, replace(report, resume_from=None), tuple(passed_over(report)))
    return Decision(
        "resume", chosen.path, replace(report, resume_from=chosen.path), tuple(passed_over(report))
    )


def passed_over(report: RunReport) -> list[str]:
    """Why each newer checkpoint was not chosen, newest first."""
    reasons = []
    for verdict in newest_first(report.checkpoints):
        if verdict.path == report.resume_from:
            break
        if verdict.evidence is Evidence.LISTING:
            continue
        worst = [f for f in verdict.findings if f.effect > Effect.NONE] or list(verdict.findings)
        words = "; ".join(f"{f.code}: {f.message}" for f in worst[:3])
        reasons.append(f"{verdict.path} is {verdict.resume}: {words}")
    return reasons


def has_history(store: Store) -> bool:
    """Whether seals, quarantine or recorded verdicts know of a checkpoint that is not there any more."""
    for folder in ("seals", "quarantine", "verdicts"):
        try:
            if any(e.kind == "file" for e in store.list(f".ckptguard/{folder}")):
                return True
        except (KeyNotFound, TargetNotFound):
            continue
    return False
