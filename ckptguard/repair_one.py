"""Repairs what a user named: looks at it, at its seal and at its replica, plans, and on request mends and looks again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptguard.errors import FormatError, NothingRecognised, Refused, TargetNotFound, UsageError
from ckptguard.inspect import Options, audit
from ckptguard.mending import apply_repair, drop_damaged
from ckptguard.model import Entry, Manifest, Resume, Verdict
from ckptguard.places import Place, in_its_run, join, place_of, split_name
from ckptguard.ports import Store
from ckptguard.repair import RepairPlan, plan_repair
from ckptguard.replica_look import list_tree
from ckptguard.seals import Seal, read_seal
from ckptguard.storage.local import LocalStore
from ckptguard.storage.opening import open_store
from ckptguard.units import timestamp

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Repaired:
    """What was found, and, where it was applied, what became of it. `kept`: where what was damaged lies now."""

    path: str
    replica: str
    plan: RepairPlan
    applied: bool
    kept: tuple[str, ...] = ()
    verdict: Verdict | None = None

    def document(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "checkpoint": self.path,
            "replica": self.replica,
            "found_by": self.plan.by,
            "damaged": [
                {"file": f.name, "bytes": f.fetched, "ranges": [list(r) for r in f.ranges], "size": f.size}
                for f in self.plan.damaged
            ],
            "bytes": self.plan.fetched,
            "applied": self.applied,
            "kept": list(self.kept),
            "resume": None if self.verdict is None else self.verdict.resume,
        }


def repair(
    target: str, replica: str, options: Options, *, apply: bool, say: Say = lambda text: None
) -> Repaired:
    """Plan the repair of a checkpoint on disk from its replica, and carry it out when `apply` is set.

    Raises Refused when the checkpoint is sound but differs from the replica (which of them is right is not for us to say),
    when it is being written, or when the replica cannot heal it; TargetNotFound, NothingRecognised, StoreError.
    """
    place = _local_place(target)
    store = open_store(place.run)
    assert isinstance(store, LocalStore)
    here = _manifest(store, place.key)
    path = here.path if here else place.key
    copies, copy = _replica(replica, path)
    seal = _seal(store, path, here, copies, copy)
    say(f"{target}: comparing with {seal[1]}")
    before = {f.name: f.entry for f in here.files} if here else {}
    plan = plan_repair(store, here, path, copies, copy, seal[0])
    if not plan.damaged:
        return Repaired(target, copies.url, plan, False)
    if here is not None:
        _must_be_damaged(target, plan, options)
    if plan.by == "replica":
        # Without a seal the replica is the only witness: it must be sound itself.
        say(f"{join(copies.url, copy.path)}: looking at the replica")
        _must_be_safe(join(copies.url, copy.path), options)
    if not apply:
        return Repaired(target, copies.url, plan, False)
    stamp = (timestamp(options.now()) or "").replace(":", "")
    say(f"{target}: mending {len(plan.damaged)} files")
    kept = apply_repair(store, plan, copies, before, stamp)
    verdict = _verdict(join(place.run, path), options)
    return Repaired(target, copies.url, plan, True, kept, verdict)


def drop(target: str) -> list[str]:
    """Remove what earlier repairs of a checkpoint kept of its damaged state."""
    place = _local_place(target)
    store = open_store(place.run)
    assert isinstance(store, LocalStore)
    return drop_damaged(store.root, place.key)


def _local_place(target: str) -> Place:
    if "://" in target:
        raise UsageError(
            f"{target}: only checkpoints on disk are repaired",
            "for a copy on S3: ckptguard replicate GOOD RUN --overwrite",
        )
    try:
        return place_of(target)
    except TargetNotFound:
        # All of it may be gone; its run must be there.
        home, name = split_name(target)
        return in_its_run(home, name)


def _manifest(store: Store, key: str) -> Manifest | None:
    for manifest in list_tree(store).checkpoints:
        if manifest.path == key or any(f.entry.key == key for f in manifest.files):
            return manifest
    return None


def _replica(replica: str, path: str) -> tuple[Store, Manifest]:
    """The replica's store and the copy in it: `replica` is the copy of the run, or that of the checkpoint itself."""
    candidates = [replica]
    if replica.rstrip("/").endswith(f"/{path}"):
        candidates.insert(0, replica.rstrip("/")[: -len(path) - 1])
    for url in candidates:
        store = open_store(url)
        copy = _manifest(store, path)
        if copy is not None:
            return store, copy
    raise NothingRecognised(
        f"{replica}: holds no checkpoint {path}", "name the copy of the run, or of this checkpoint"
    )


def _seal(
    store: Store, path: str, here: Manifest | None, copies: Store, copy: Manifest
) -> tuple[Seal | None, str]:
    """The run's own seal, or the one that went along with the copy; and what to call what is compared with."""
    for owner, manifest, name in ((store, here, "its seal"), (copies, copy, "the replica's seal")):
        try:
            seal = read_seal(owner, "", path)
        except FormatError:
            continue
        entries: dict[str, Entry] = {f.name: f.entry for f in manifest.files} if manifest else {}
        if seal is not None and seal.files and (not entries or not seal.stale_for(entries)):
            return seal, name
    return None, "the replica"


def _must_be_damaged(target: str, plan: RepairPlan, options: Options) -> None:
    verdict = _verdict(target, options)
    if verdict is None:
        return
    if verdict.resume is Resume.WRITING:
        raise Refused(f"{target}: is being written", "repeat when the save is done")
    if verdict.resume.safe and plan.by != "seal":
        names = ", ".join(f.name for f in plan.damaged[:3])
        raise Refused(
            f"{target}: differs from its replica in {names}, and is {verdict.resume} by itself: nothing shows that it is damaged",
            "audit the replica too; whichever is right: ckptguard replicate GOOD OTHER --overwrite",
        )


def _must_be_safe(path: str, options: Options) -> None:
    verdict = _verdict(path, options)
    if verdict is None or not verdict.resume.safe:
        raise Refused(
            f"{path}: is {'not a checkpoint' if verdict is None else verdict.resume} itself, so it heals nothing",
            "name another replica",
        )


def _verdict(path: str, options: Options) -> Verdict | None:
    try:
        reports = audit(path, options)
    except (NothingRecognised, TargetNotFound):
        return None
    return next((v for r in reports for v in r.checkpoints if v.path == path.rstrip("/")), None)
