"""Replicates what a user named: checkpoints, or whole runs. Only what an audit calls safe is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ckptguard.errors import CkptguardError, NothingRecognised, Refused, StoreError
from ckptguard.inspect import Options, audit
from ckptguard.model import Resume, RunReport, Verdict
from ckptguard.places import Place, join, place_of
from ckptguard.ports import WritableStore
from ckptguard.replica_look import Tree, list_tree
from ckptguard.replicate import RECEIPTS, Replica, replicate
from ckptguard.storage.opening import open_store, split_target

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one checkpoint: copied, present (it lay there already), refused, failed."""

    path: str
    destination: str
    state: str
    replica: Replica | None = None
    error: CkptguardError | None = None

    @property
    def exit_code(self) -> int:
        return 0 if self.error is None else self.error.exit_code

    def document(self) -> dict[str, Any]:
        copied = self.replica
        return {
            "path": self.path,
            "replica": self.destination,
            "state": self.state,
            "files": len(copied.files) if copied else 0,
            "bytes": copied.size if copied else 0,
            "bytes_sent": copied.sent if copied else 0,
            "proven_by": sorted({f.proven_by for f in copied.files}) if copied else [],
            "pointers": list(copied.pointers) if copied else [],
            "message": self.error.message if self.error else "",
            "hint": self.error.hint if self.error else "",
        }


@dataclass(frozen=True, slots=True)
class _Job:
    """One run with the keys of those of its checkpoints that are wanted, and the folder below the destination."""

    run: str
    keys: tuple[str, ...]
    below: str = ""
    whole: bool = False


def replicate_all(
    targets: Sequence[str],
    destination: str,
    options: Options,
    *,
    overwrite: bool = False,
    say: Say = lambda text: None,
) -> Iterator[Outcome]:
    """Copy each checkpoint, one after the other, oldest first. Raises TargetNotFound, NothingRecognised, StoreError
    when a source or the destination cannot be looked at; what happens to single checkpoints is in the outcomes.
    """
    for target in targets:
        for job in _jobs(target):
            yield from _run(job, join(destination, job.below), options, overwrite, say)


def _jobs(target: str) -> Iterator[_Job]:
    root, key = split_target(target)
    tree = list_tree(open_store(root))
    if not tree.checkpoints:
        raise NothingRecognised(
            f"{target}: nothing here is recognised as a checkpoint", "ckptguard audit RUN lists them"
        )
    if key or [m.path for m in tree.checkpoints] == [""]:
        place: Place = place_of(target)
        yield _Job(place.run, (place.key,))
        return
    for run in tree.runs:
        home = run.root.path
        keys = tuple(m.path[len(home) + 1 if home else 0 :] for m in run.checkpoints)
        yield _Job(join(root, home), keys, home, whole=True)


def _run(job: _Job, destination: str, options: Options, overwrite: bool, say: Say) -> Iterator[Outcome]:
    source = list_tree(open_store(job.run, max_rate=options.max_rate))
    wanted = [
        m for m in source.checkpoints if m.path in job.keys or any(f.entry.key in job.keys for f in m.files)
    ]
    if not wanted:
        raise NothingRecognised(
            f"{join(job.run, job.keys[0])}: not recognised as a checkpoint", "ckptguard audit RUN lists them"
        )
    # Asked before hours are spent on the source.
    to = open_destination(destination)
    next(iter(to.list(RECEIPTS)), None)
    target = job.run if job.whole else join(job.run, wanted[0].path)
    say(f"{target}: looking at {options.depth} before it is copied")
    verdicts = _verdicts(audit(target, options))
    for manifest in sorted(wanted, key=lambda m: (m.step is None, m.step or 0, m.modified)):
        path, there = join(job.run, manifest.path), join(destination, manifest.path)
        verdict = verdicts.get(path)
        if verdict is None and job.whole:
            continue  # what a save or a rotation left behind is no checkpoint
        if verdict is None or not verdict.resume.safe:
            if not (job.whole and verdict is not None and verdict.resume is Resume.WRITING):
                yield Outcome(path, there, "refused", error=_not_safe(path, verdict))
            continue
        say(f"{path}: copying to {there}")
        yield _copy(source, manifest, to, path, there, overwrite, options)


def _copy(
    source: Tree, manifest: Any, to: WritableStore, path: str, there: str, overwrite: bool, options: Options
) -> Outcome:
    try:
        done = replicate(
            source.store, manifest, to, pointers=source.pointers(), overwrite=overwrite, now=options.now()
        )
    except Refused as error:
        return Outcome(path, there, "refused", error=error)
    except StoreError as error:
        return Outcome(path, there, "failed", error=error)
    return Outcome(path, there, "copied" if done.sent or not done.size else "present", done)


def _verdicts(reports: Sequence[RunReport]) -> dict[str, Verdict]:
    return {v.path: v for r in reports for v in r.checkpoints}


def _not_safe(path: str, verdict: Verdict | None) -> Refused:
    """A copy of a broken checkpoint would look like a safety that is none, or replace the last good one."""
    if verdict is None:
        return Refused(f"{path}: not judged, so not copied", f"ckptguard audit {path}")
    why = "; ".join(f"{f.code}: {f.message}" for f in verdict.findings if f.loud)[:300]
    return Refused(
        f"{path} is {verdict.resume}, so it is not copied{': ' + why if why else ''}",
        f"ckptguard audit {path}" if verdict.resume is not Resume.WRITING else "repeat when the save is done",
    )


def open_destination(url: str) -> WritableStore:
    """The store to copy into; a local folder is made. Raises StoreError."""
    if "://" not in url:
        try:
            Path(url).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{url}: cannot be made: {error.strerror}", "check the path and its permissions"
            ) from error
    return cast(WritableStore, open_store(url))
