"""Pure: the life of a save, from successive looks at its files. A checkpoint being written is never called corrupt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ckptguard.model import Entry, Manifest


class Phase(StrEnum):
    """Where a save stands. What was proven of it is a fact of its own and stands beside."""

    STARTED = "started"
    GROWING = "growing"
    STALLED = "stalled"
    COMPLETE = "complete"
    FAILED = "failed"
    ROTATED = "rotated"
    VANISHED = "vanished"

    @property
    def open(self) -> bool:
        """Still being written, as far as anyone can tell."""
        return self in (Phase.STARTED, Phase.GROWING, Phase.STALLED)

    @property
    def gone(self) -> bool:
        return self in (Phase.ROTATED, Phase.VANISHED)


@dataclass(frozen=True, slots=True)
class Look:
    """What one listing shows of one checkpoint. `whole`: no mark of an unfinished save, nothing that is named is absent."""

    path: str
    layout: str
    step: int | None
    bytes: int
    files: int
    oldest: float
    modified: float
    fingerprint: str
    whole: bool


@dataclass(frozen=True, slots=True)
class Save:
    """What is known of one checkpoint's save. `changed_at`: when a look last saw it change, by our own clock."""

    path: str
    phase: Phase
    phase_since: float
    first_seen: float
    changed_at: float
    fingerprint: str
    bytes: int
    step: int | None
    completed_at: float | None = None
    watched: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """What a look changed: the save as it is now, and the events for its time line, oldest first."""

    save: Save
    events: tuple[tuple[str, str], ...] = ()


def look_of(manifest: Manifest) -> Look:
    """What a manifest shows to somebody who watches."""
    entries = [f.entry for f in manifest.files]
    return Look(
        path=manifest.path,
        layout=manifest.layout,
        step=manifest.step,
        bytes=manifest.size,
        files=len(entries),
        oldest=min((e.modified for e in entries), default=0.0),
        modified=manifest.modified,
        fingerprint=fingerprint(entries),
        whole=bool(entries) and manifest.finished and not manifest.temporary and not manifest.absences,
    )


def fingerprint(entries: Iterable[Entry]) -> str:
    """Changes when any file is replaced, added or removed: names, sizes, times and entity tags in one digest."""
    text = "\n".join(
        f"{e.key}\0{e.size}\0{e.modified!r}\0{e.etag or ''}" for e in sorted(entries, key=lambda e: e.key)
    )
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def advance(
    save: Save | None,
    look: Look | None,
    now: float,
    *,
    settle: float,
    stall_after: float,
    newer_complete: bool,
) -> Step | None:
    """The save after a look; None where nothing is known and nothing is seen.

    `newer_complete`: a complete checkpoint of a later step exists, so an open save will not be finished any more.
    A clock that jumped back makes ages negative: then nothing is concluded until time passes again.
    """
    if look is None:
        return _gone(save, now) if save is not None else None
    if save is None or save.phase.gone:
        return _appeared(look, now, settle)
    if look.fingerprint != save.fingerprint:
        return _changed(save, look, now)
    idle = now - save.changed_at
    if save.phase is Phase.COMPLETE or (save.phase is Phase.FAILED and not look.whole):
        return Step(save)
    if look.whole and idle >= settle:
        done = replace(save, phase=Phase.COMPLETE, phase_since=now, completed_at=look.modified)
        return Step(done, (("complete", f"{look.files} files"),))
    if not look.whole and newer_complete and idle >= settle:
        failed = replace(save, phase=Phase.FAILED, phase_since=now)
        return Step(failed, (("failed", "a later save is complete, this one never was"),))
    if not look.whole and idle >= stall_after and save.phase is not Phase.STALLED:
        return Step(
            replace(save, phase=Phase.STALLED, phase_since=now), (("stalled", f"no byte for {idle:.0f} s"),)
        )
    return Step(save)


def _appeared(look: Look, now: float, settle: float) -> Step:
    """A checkpoint that was not there at the last look. One that has lain still for long was complete before we came."""
    old = look.whole and now - look.modified > max(settle, 1.0) * 20
    save = Save(
        path=look.path,
        phase=Phase.COMPLETE if old else Phase.STARTED,
        phase_since=now,
        first_seen=now,
        changed_at=now,
        fingerprint=look.fingerprint,
        bytes=look.bytes,
        step=look.step,
        completed_at=look.modified if old else None,
        watched=not old,
    )
    return Step(save, (("found", "was there at the first look"),) if old else (("started", ""),))


def _changed(save: Save, look: Look, now: float) -> Step:
    rewritten = save.phase is Phase.COMPLETE
    grown = replace(
        save,
        phase=Phase.GROWING,
        phase_since=save.phase_since if save.phase is Phase.GROWING else now,
        first_seen=now if rewritten else save.first_seen,
        changed_at=now,
        fingerprint=look.fingerprint,
        bytes=look.bytes,
        step=look.step,
        completed_at=None,
        watched=True,
    )
    if rewritten:
        return Step(grown, (("rewritten", "changed after it was complete"),))
    return Step(grown, (("growing", ""),) if save.phase is not Phase.GROWING else ())


def _gone(save: Save, now: float) -> Step | None:
    if save.phase.gone:
        return None
    if save.phase is Phase.COMPLETE:
        return Step(replace(save, phase=Phase.ROTATED, phase_since=now), (("rotated", ""),))
    return Step(
        replace(save, phase=Phase.VANISHED, phase_since=now), (("vanished", "before it was complete"),)
    )


def inherit(started: Sequence[Save], vanished: Mapping[int, Save]) -> list[Save]:
    """Saves that were written under a temporary name and then renamed began when the temporary one did."""
    return [
        replace(save, first_seen=min(save.first_seen, vanished[save.step].first_seen))
        if save.step is not None and save.step in vanished
        else save
        for save in started
    ]


def seconds(save: Save, look: Look) -> float | None:
    """How long the save took, from its first byte to its last: seen by us, or told by the times of its files.

    Times of files are the storage's, ours are ours: they are never mixed, as clocks differ and jump. A single file that
    was there before we came tells nothing.
    """
    told = look.modified - look.oldest
    if save.watched and save.completed_at is not None:
        return max(0.0, save.changed_at - save.first_seen, told)
    return told if look.files > 1 else None
