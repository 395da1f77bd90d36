"""The job that reads every byte of every kept checkpoint again, a portion at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptguard.catalog import checkpoints, digests, findings, jobs
from ckptguard.catalog.runs import get_run
from ckptguard.jobs.assess import assess
from ckptguard.jobs.schedule import Extent, next_portion, portion
from ckptguard.jobs.task import Task
from ckptguard.units import size

GROUP = 256 << 20
"""About so many bytes are asked for at once: a service that is killed has to read no more than these again."""


def scrub(task: Task) -> str:
    """Read the stalest files within the budget of one period; what differs becomes a finding and an alert."""
    settings = task.context.settings.scrub
    if settings is None:
        return "switched off"
    with task.context.catalog.read() as connection:
        kept = {(f["checkpoint_id"], f["name"]): f for f in digests.kept_files(connection)}
    extents = [Extent(f["checkpoint_id"], f["name"], f["size"], f["read_at"]) for f in kept.values()]
    budget = portion(sum(e.size for e in extents), settings.within, settings.every, settings.max_rate)
    now = task.context.clock()
    # What was read in the first half of the period is fresh enough; a small catalog is not read around the clock.
    stale = [e for e in extents if now - e.read_at > settings.within / 2]
    chosen = next_portion(stale, budget) if stale else []
    if task.row["origin"] == "person" and not chosen:
        chosen = next_portion(extents, budget)
    done, bad = 0, 0
    for group in _groups(chosen):
        rows = [kept[(e.checkpoint, e.name)] for e in group]
        task.say(f"reading {rows[0]['path']}", done / max(1, sum(e.size for e in chosen)))
        bad += _group(task, rows, settings.max_rate)
        done += sum(e.size for e in group)
    return f"{size(done)} in {len(chosen)} files read again, {bad} bad"


def _groups(chosen: Sequence[Extent]) -> list[list[Extent]]:
    """Files of the same checkpoint together, in groups of bounded size."""
    groups: list[list[Extent]] = []
    for extent in sorted(chosen, key=lambda e: e.checkpoint):
        last = groups[-1] if groups else None
        if last and last[0].checkpoint == extent.checkpoint and sum(e.size for e in last) < GROUP:
            last.append(extent)
        else:
            groups.append([extent])
    return groups


def _group(task: Task, rows: Sequence[Mapping[str, Any]], max_rate: int) -> int:
    """Read some files of one checkpoint again and keep what came of it. Returns how many are bad."""
    context = task.context
    with context.catalog.read() as connection:
        run = get_run(connection, rows[0]["run_id"])
        known = {f["id"]: f for f in digests.remembered_files(connection, rows[0]["checkpoint_id"])}
    assert run is not None
    base = rows[0]["path"]
    lone = len(known) == 1 and base.rpartition("/")[2] == rows[0]["name"]
    files = [
        {**known[r["id"]], "key": base if lone else f"{base}/{r['name']}" if base else r["name"]}
        for r in rows
        if r["id"] in known
    ]
    answer = task.child.ask(
        {"do": "scrub", "target": run["target"], "max_rate": max_rate, "files": files},
        timeout=60.0 + 4 * sum(f["size"] for f in files) / max_rate,
        progress=lambda name, count: task.say(f"reading {name}"),
        cancelled=task.cancelled,
    )
    now = context.clock()
    bad = [one["finding"] for one in answer["files"] if one["outcome"] == "bad"]
    with context.catalog.write() as connection:
        for one in answer["files"]:
            if one["outcome"] == "good":
                digests.file_was_read(connection, one["id"], now)
        names = {f["name"] for f in files}
        before = findings.open_findings(connection, rows[0]["checkpoint_id"], "scrub")
        standing = [f for f in before if f["subject"] not in names]
        findings.sync_findings(
            connection, run["id"], rows[0]["checkpoint_id"], "scrub", [*standing, *bad], now
        )
        checkpoints.set_checkpoint(connection, rows[0]["checkpoint_id"], scrubbed_at=now)
        if any(f["effect"] in ("unsafe", "unknown") for f in bad):
            worst = "unsafe" if any(f["effect"] == "unsafe" for f in bad) else "unknown"
            checkpoints.set_checkpoint(connection, rows[0]["checkpoint_id"], resume=worst, as_complete=False)
            checkpoints.add_event(
                connection, run["id"], rows[0]["checkpoint_id"], now, worst, "found by scrubbing"
            )
        elif before and not standing:
            # The bytes are right again: only a new verdict may say so.
            checkpoints.set_checkpoint(connection, rows[0]["checkpoint_id"], judged_fingerprint="")
            jobs.enqueue(connection, "audit", now=now, run_id=run["id"], origin="scrub")
        assess(context, connection, run["id"])
    for one in bad:
        task.log(f"{base}: {one['code']}: {one['message']}")
    return len(bad)
