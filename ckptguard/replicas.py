"""Is the copy of a run good? Pure decisions over two listings, what the store vouches for, and the clock.

`ckptguard.replica_look` gathers what is decided upon here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from shlex import quote

from ckptguard import units
from ckptguard.codes import finding
from ckptguard.model import Entry, Finding, Pointer, Severity
from ckptguard.places import join
from ckptguard.storage._base import DeletedObject, ExpiryRule, OpenUpload, Retention
from ckptguard.storage.checksums import Answer, Comparison

DAY = 86400.0
ORPHANED = DAY
"""An upload that nothing was added to for so long is not in progress any more."""
HORIZON = 3 * DAY
"""A rule that deletes the newest safe checkpoint within this time is an alarm; later it is worth knowing."""


class CopyState(StrEnum):
    """How far the copy of one file is."""

    ABSENT = "absent"
    UPLOADING = "uploading"
    PARTIAL = "partial"
    DELETED = "deleted"
    UNPROVEN = "unproven"
    PROVEN = "proven"
    DIFFERENT = "different"


COMPLETE = frozenset({CopyState.UNPROVEN, CopyState.PROVEN})


@dataclass(frozen=True, slots=True)
class FileCopy:
    """One file and its copy; `why` says by what it is proven, or what is known of it."""

    name: str
    size: int
    state: CopyState
    why: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointCopy:
    """One checkpoint and its copy. `modified` is that of the source."""

    path: str
    step: int | None
    modified: float
    files: tuple[FileCopy, ...]

    @property
    def order(self) -> tuple[int, float]:
        """Newer is greater: by step, where it is known, then by time."""
        return (-1 if self.step is None else self.step, self.modified)

    @property
    def complete(self) -> bool:
        return all(f.state in COMPLETE for f in self.files)

    @property
    def begun(self) -> bool:
        return any(f.state is not CopyState.ABSENT for f in self.files)

    def of(self, *states: CopyState) -> tuple[FileCopy, ...]:
        return tuple(f for f in self.files if f.state in states)


def file_copy(
    name: str,
    source: Entry,
    replica: Entry | None,
    *,
    upload: OpenUpload | None = None,
    deleted: DeletedObject | None = None,
    comparison: Comparison | None = None,
    now: float = 0.0,
) -> FileCopy:
    """What is known of one file's copy. `comparison` is None where nothing was compared but the sizes."""
    if replica is None:
        if upload is not None:
            done = f"{upload.parts} parts, {units.size(upload.bytes)} of {units.size(source.size)}"
            why = f"upload open for {units.duration(now - upload.started)}: {done}"
            return FileCopy(name, source.size, CopyState.UPLOADING, why)
        if deleted is not None:
            why = f"deleted {units.duration(now - deleted.deleted)} ago; version {deleted.version_id} is still there"
            return FileCopy(name, source.size, CopyState.DELETED, why)
        return FileCopy(name, source.size, CopyState.ABSENT)
    if replica.size != source.size:
        return FileCopy(name, source.size, CopyState.PARTIAL, f"{replica.size} of {source.size} bytes")
    if comparison is None or comparison.answer is Answer.UNKNOWN:
        return FileCopy(
            name, source.size, CopyState.UNPROVEN, comparison.by if comparison else "only sizes compared"
        )
    if comparison.answer is Answer.SAME:
        return FileCopy(name, source.size, CopyState.PROVEN, comparison.by)
    why = f"{comparison.by}: {comparison.expected} on the replica, {comparison.found} here"
    return FileCopy(name, source.size, CopyState.DIFFERENT, why)


def in_words(copy: CheckpointCopy) -> str:
    """How far the copy of a checkpoint is: how many files are proven and by what, and how many are not."""
    counts = {state: len(copy.of(state)) for state in CopyState}
    ways = ", ".join(sorted({f.why for f in copy.of(CopyState.PROVEN) if f.why}))
    parts = [
        f"{count} {state}" + (f" by {ways}" if state is CopyState.PROVEN and ways else "")
        for state, count in counts.items()
        if count
    ]
    total = f"{len(copy.files)} files" if len(copy.files) != 1 else "1 file"
    return f"{total}: {'; '.join(reversed(parts))}"


# --- findings -----------------------------------------------------------------------------------------


def copy_findings(
    copies: Sequence[CheckpointCopy], replica: str, now: float, grace: float, *, here: str = "."
) -> Iterator[Finding]:
    """Findings on each checkpoint's copy; `here` is the source's root. What is younger than `grace` may be on its way."""
    newest = max((c.order for c in copies if c.begun), default=(-1, 0.0))
    for copy in copies:
        young = now - copy.modified < grace
        path = join(here, copy.path)
        if not copy.begun:
            if not young:
                yield _not_there(copy, path, replica, now, late=copy.order > newest)
            continue
        missing = copy.of(CopyState.ABSENT, CopyState.UPLOADING, CopyState.PARTIAL)
        if missing:
            yield finding(
                "upload-incomplete",
                copy.path,
                f"{len(missing)} of {len(copy.files)} files are not whole on {replica}: {_names(missing)}",
                f"ckptguard replicate {quote(path)} {quote(replica)}",
                severity=Severity.INFO if young else None,
            )
        wrong = copy.of(CopyState.DIFFERENT)
        if wrong:
            yield finding(
                "replica-mismatch",
                copy.path,
                f"{len(wrong)} files differ between here and {replica}: {_names(wrong)}",
                f"audit both sides, then: ckptguard repair {quote(path)} --from {quote(replica)}",
            )
        hidden = copy.of(CopyState.DELETED)
        if hidden:
            yield finding(
                "replica-mismatch",
                copy.path,
                f"{len(hidden)} files were deleted on {replica}, and their older versions are still there: {_names(hidden)}",
                "remove the delete markers (aws s3api delete-object --version-id MARKER) before a rule removes the versions",
            )
        unproven = copy.of(CopyState.UNPROVEN)
        if unproven and not (missing or wrong or hidden):
            yield finding(
                "unverifiable",
                copy.path,
                f"the copy on {replica} is there and not proven: {_names(unproven)}",
                "compare at --depth content",
            )


def _not_there(copy: CheckpointCopy, path: str, replica: str, now: float, late: bool) -> Finding:
    """An older checkpoint may have been pruned from the replica; a newer one should be there by now."""
    hint = f"ckptguard replicate {quote(path)} {quote(replica)}"
    if late:
        age = units.duration(now - copy.modified)
        return finding("upload-lag", copy.path, f"saved {age} ago and still not on {replica}", hint)
    return finding("upload-incomplete", copy.path, f"not on {replica}", hint, severity=Severity.INFO)


def upload_findings(
    uploads: Iterable[OpenUpload], now: float, limit: float = ORPHANED, *, running: bool = False
) -> Iterator[Finding]:
    """Multipart uploads that nobody goes on with: they cost storage and are no file. With `running`, the others too."""
    for upload in uploads:
        idle = now - max(upload.last_activity, upload.started)
        done = f"{upload.parts} parts, {units.size(upload.bytes)}"
        if idle >= limit:
            yield finding(
                "orphaned-multipart",
                upload.key,
                f"a multipart upload was begun {units.duration(now - upload.started)} ago and never completed: "
                f"{done}, nothing added for {units.duration(idle)}",
                "ckptguard prune RUN lists and aborts it; a lifecycle rule AbortIncompleteMultipartUpload does so by itself",
            )
        elif running:
            yield finding(
                "upload-incomplete",
                upload.key,
                f"being uploaded: {done} so far, begun {units.duration(now - upload.started)} ago",
                "look again when the upload is done",
                severity=Severity.INFO,
            )


def pointer_findings(
    pointers: Iterable[Pointer], complete: Mapping[str, bool], where: str, now: float, grace: float
) -> Iterator[Finding]:
    """Pointers on one side that are ahead of its data. `complete` tells of each checkpoint that either side has."""
    for pointer in pointers:
        if pointer.kind == "best":
            continue
        young = now - pointer.entry.modified < grace
        severity = Severity.INFO if young else None
        subject = f"{where}/{pointer.entry.key}"
        if pointer.resolved is None:
            yield finding(
                "dangling-pointer",
                subject,
                f"names {pointer.names!r}, which is not on {where}",
                severity=severity,
            )
        elif not complete.get(pointer.resolved, True):
            yield finding(
                "early-pointer",
                subject,
                f"names {pointer.resolved}, which is not complete on {where}",
                f"ckptguard replicate {quote(pointer.resolved)} {quote(where)}",
                severity=severity,
            )


def retention_findings(
    retention: Retention,
    path: str,
    files: Mapping[str, Entry],
    where: str,
    now: float,
    *,
    only: bool,
    horizon: float = HORIZON,
) -> Iterator[Finding]:
    """Rules of the store that will delete the newest safe checkpoint. `files` maps full keys to entries.

    `only`: no other safe checkpoint is known, so that losing it loses the run.
    """
    found = [
        (when, rule, key)
        for key, entry in files.items()
        for rule in retention.rules
        if (when := expires(rule, key, entry, retention)) is not None
    ]
    if found:
        when, rule, key = min(found, key=lambda f: f[0])
        left = when - now
        last = "the only safe checkpoint" if only else "the newest safe checkpoint"
        yield finding(
            "retention-risk",
            path,
            f"the lifecycle rule {rule.name!r} of {where} deletes {last} "
            + (f"in {units.duration(left)} (first {key})" if left > 0 else f"any time now ({key})"),
            f"ckptguard replicate {quote(join(where, path))} elsewhere, or change the rule",
            severity=None if left < horizon else Severity.INFO,
        )
    for question in retention.unknown:
        yield finding(
            "retention-risk",
            path,
            f"whether a rule of {where} deletes it could not be found out: {question}",
            "allow s3:GetLifecycleConfiguration, or ask who owns the bucket",
            severity=Severity.INFO,
        )


def expires(rule: ExpiryRule, key: str, entry: Entry, retention: Retention) -> float | None:
    """When a rule deletes an object, or None when it does not (or, for one that goes by tags, is not known to).

    In a versioned bucket an expiry only hides the object; it is lost when the rules for older versions catch up.
    """
    if rule.tagged or not key.startswith(rule.prefix) or entry.size < rule.min_size:
        return None
    if rule.max_size is not None and entry.size >= rule.max_size:
        return None
    when = (
        rule.date
        if rule.date is not None
        else entry.modified + rule.days * DAY
        if rule.days is not None
        else None
    )
    if when is not None and retention.lock_days is not None:
        when = max(when, entry.modified + retention.lock_days * DAY)
    return when


def _names(files: Sequence[FileCopy]) -> str:
    shown = ", ".join(f"{f.name} ({f.why})" if f.why else f.name for f in files[:3])
    return shown + (f" and {len(files) - 3} more" if len(files) > 3 else "")
