"""A look at one run: reads its checkpoints, has them checked, and puts the report together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckptguard import verdicts
from ckptguard.checking import run_checkpoint_checks, run_run_checks, silence
from ckptguard.codes import CODES, finding
from ckptguard.curves.health import health_at
from ckptguard.discover import Run, find_checkpoints
from ckptguard.errors import FormatError, KeyNotFound, StoreError
from ckptguard.facts import Reader, Wanted
from ckptguard.judge import age_of, judge, newest_first, newest_safe, require, resume_from
from ckptguard.layouts._base import build_directory
from ckptguard.model import (
    CheckpointFacts,
    Coverage,
    Directory,
    Effect,
    Evidence,
    FileFacts,
    Finding,
    Health,
    LogRow,
    Manifest,
    Pointer,
    Resume,
    Role,
    RunReport,
    State,
    Verdict,
)
from ckptguard.ports import RunSubject, Store, Subject
from ckptguard.registry import layout_named, layouts
from ckptguard.scan import SEGMENT
from ckptguard.seals import Seal, read_seal
from ckptguard.targets import Opened, Options
from ckptguard.validators.foreign import strangers
from ckptguard.validators.pickle_safety import unsafe_names


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
        self._recorded: dict[str, Verdict | None] = {}
        self._unsafe: set[str] = set()

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

    def recorded(self, manifest: Manifest) -> Verdict | None:
        """A recorded verdict that may stand for this look, where such were asked for."""
        if self.options.max_age is None:
            return None
        if manifest.path not in self._recorded:
            known = verdicts.read(self.opened.store, self.run.root.path, manifest.path)
            fits = known is not None and known.fits(
                manifest, self.options.depth, self.now, self.options.max_age
            )
            self._recorded[manifest.path] = known.verdict if known is not None and fits else None
        return self._recorded[manifest.path]

    def read_enough(self, manifest: Manifest) -> CheckpointFacts | None:
        """The facts that a verdict needs: as deep as was asked, or the structure alone where a recorded verdict serves."""
        enough = self.options.depth if self.recorded(manifest) is None else Evidence.STRUCTURE
        return self.read(manifest, min(enough, self.options.depth))

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
        """The checkpoint's seal: below the run, or below its own folder, where a seal by the checkpoint's path lies."""
        for root in dict.fromkeys((self.run.root.path, manifest.path.rpartition("/")[0])):
            relative = manifest.path[len(root) + 1 :] if root else manifest.path
            try:
                seal = read_seal(self.opened.store, root, relative)
            except (FormatError, StoreError):
                continue
            if seal is not None:
                return seal
        return None

    def _changed(self, facts: CheckpointFacts) -> bool:
        store, files = self.opened.store, facts.manifest.files
        if store.traits.request_bytes and len(files) > 2:
            # A listing is one request; asking for each file would be one each.
            now = {e.key: e.identity for e in store.list(facts.manifest.path)}
            inside = [f.entry for f in files if f.entry.key.startswith(f"{facts.manifest.path}/")]
            if len(inside) == len(files):
                return any(now.get(e.key) != e.identity for e in inside)
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
        return next((m for m in find_checkpoints(self._relisted(), layouts()) if m.path == path), None)

    def _relisted(self) -> Directory:
        forget = getattr(self.opened.store, "forget", None)
        if forget is not None:
            forget()
        return build_directory(self.opened.store.list())

    def _pointers(self) -> tuple[Pointer, ...]:
        """The run's pointers. They are read after the listing: one that seems to name nothing may name what came since."""
        found = find_pointers(self.opened.store, self.run.root, self.manifests)
        if all(p.resolved is not None for p in found):
            return found
        root: Directory | None = self._relisted()
        for part in filter(None, self.run.root.path.split("/")):
            root = root.dirs.get(part) if root is not None else None
        # What was listed as a checkpoint and turned out to be none, such as a link that a copy made a text, may be a pointer.
        none = {m.path for m in self.run.checkpoints} - {m.path for m in self.manifests}
        again = [m for m in find_checkpoints(root, layouts()) if m.path not in none] if root else []
        later = find_pointers(self.opened.store, root, again) if root else ()
        nothing = {(p.entry.key, p.names) for p in later if p.resolved is None}
        return tuple(p for p in found if p.resolved is not None or (p.entry.key, p.names) in nothing)

    def grace(self, manifest: Manifest) -> float:
        """For how long after its last change an unfinished checkpoint counts as being written."""
        return self.options.grace

    # --- judging ------------------------------------------------------------------------------------

    def subject(self, facts: CheckpointFacts, siblings: Sequence[CheckpointFacts]) -> Subject:
        """What the checks look at."""
        return Subject(
            facts, tuple(siblings), self.log, self.now, self.grace(facts.manifest), self.opened.store, self.options.plan,
            frozenset(self._unsafe),
        )  # fmt: skip

    def verdict(
        self, facts: CheckpointFacts, siblings: Sequence[CheckpointFacts], more: Sequence[Finding] = ()
    ) -> Verdict:
        """Judge one among its siblings. Judged oldest first, none is compared with one found unsafe. `more` was found before."""
        grace = self.grace(facts.manifest)
        findings, coverage = run_checkpoint_checks(self.subject(facts, siblings))
        findings = [*findings, *more]
        earlier = self.recorded(facts.manifest) if facts.evidence < self.options.depth else None
        fresh = judge(
            facts,
            [silence(f, self.options.silenced) for f in findings],
            coverage,
            path=self.opened.shown(facts.path),
            now=self.now,
            grace=grace,
            required=self.options.require if earlier is None else None,
            health=health_at(self.log or facts.state.log, facts.step),
        )
        if fresh.resume is Resume.UNSAFE:
            self._unsafe.add(facts.path)
        if earlier is None:
            return fresh
        found = [silence(f, self.options.silenced) for f in earlier.findings]
        both = verdicts.combine(replace(earlier, findings=tuple(found)), fresh)
        return require(both, self.options.require)

    def unlooked(self, manifest: Manifest) -> Verdict:
        """A checkpoint that was only listed: it counts for nothing."""
        return Verdict(
            self.opened.shown(manifest.path), manifest.layout, manifest.step, Resume.UNKNOWN, Evidence.LISTING,
            len(manifest.files), manifest.size, {}, manifest.gaps, Coverage(), Health(), (), modified=manifest.modified,
        )  # fmt: skip

    def of_this_run(self, facts: Sequence[CheckpointFacts], verdicts: Sequence[Verdict]) -> list[Verdict]:
        """The verdicts without those on checkpoints that an older run left here: their numbers say nothing of this one."""
        older = {self.opened.shown(s.path) for s in strangers(facts, self.log) if s.older}
        return [v for v in verdicts if v.path not in older]

    def report(self, target: str, pairs: Sequence[tuple[CheckpointFacts | None, Verdict]]) -> RunReport:
        """The run's report from the verdicts on its checkpoints."""
        order = sorted(pairs, key=lambda p: age_of(p[1]))
        looked = [(f, v) for f, v in order if f is not None]
        pointers = self._pointers()
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
        findings += [
            finding(
                "replica-mismatch",
                self.opened.shown(key),
                f"{key} lies in several of the roots with different sizes; the one of the root that was named first was judged",
                "find out which node wrote it, and keep that one",
            )
            for key in self._in_conflict()
        ]
        if self.opened.only is not None:
            order = [(f, v) for f, v in order if v.path == self.opened.shown(self.opened.only)]
        said = [v for _, v in order]
        own = self.of_this_run([f for f, _ in looked], said)
        safe, best = newest_safe(own), resume_from(own, allow_lossy=self.options.allow_lossy)
        return RunReport(
            target=target,
            root=self.opened.shown(self.run.root.path),
            checkpoints=tuple(said),
            findings=tuple(findings),
            latest=latest_of(self.opened, pointers, said),
            newest_safe=None if safe is None else safe.path,
            resume_from=None if best is None else best.path,
        )

    def _in_conflict(self) -> list[str]:
        """Files of checkpoints that several roots of a union have, with different sizes."""
        conflicts: set[str] = getattr(self.opened.store, "conflicts", set())
        return sorted(conflicts & {f.entry.key for m in self.manifests for f in m.files})


def _is_broken(file: FileFacts) -> bool:
    return any(CODES[p.code].effect is Effect.UNSAFE and not p.effect for p in file.problems)


def is_checkpoint(facts: CheckpointFacts, only: str | None) -> bool:
    """Whether a lone file turned out to hold training state; what the user named is judged whatever it holds."""
    manifest = facts.manifest
    if manifest.path == only or not manifest.attributes.get("one_file"):
        return True
    if facts.evidence is Evidence.LISTING:
        return bool(manifest.certain or manifest.attributes.get("speaks"))
    if manifest.certain and any(unsafe_names(f) or _is_broken(f) for f in facts.files.values()):
        return True  # whatever else it holds, its name says that somebody may load it
    opened = all(f.tree is not None for f in facts.files.values())
    if manifest.attributes.get("bare") and not opened:
        # A file without an ending may be anything; what begins as torch writes and was cut short is a checkpoint.
        return any(p.code == "truncated" for f in facts.files.values() for p in f.problems)
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
