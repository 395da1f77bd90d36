"""The sentences of a restore: numbers and differences as a reader wants them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckptguard.restore.model import Difference, RestoreReport

_KIND = {
    "dropped": "in the file, but not in the restored object",
    "defaulted": "in the restored object, but not in the file: it was left as built",
    "cast": "restored with another dtype",
    "reshaped": "restored with another shape",
    "changed": "restored with another value",
    "added": "settings of this library version that the file does not have; left as built",
}


def number(value: float | None) -> str:
    """Seven significant digits: enough to see single-precision differences."""
    return "none" if value is None else f"{value:.7g}"


def describe_differences(component: str, kind: str, members: Sequence[Difference]) -> str:
    """One sentence for all differences of one kind in one component, with the first few named."""
    first = members[0]
    if kind == "absent":
        return f"the checkpoint holds nothing for {component}: it was left as built ({first.restored})"
    if kind == "unused":
        return f"the checkpoint holds {component}, which the recipe does not restore: it was not compared"
    shown = "; ".join(_one(member) for member in members[:3])
    more = f"; and {len(members) - 3} more" if len(members) > 3 else ""
    count = "1 value is" if len(members) == 1 else f"{len(members)} values are"
    return f"{component}: {count} {_KIND[kind]}: {shown}{more}"


def _one(difference: Difference) -> str:
    name = difference.path or difference.component
    if difference.kind == "dropped":
        return f"{name} ({difference.saved})"
    if difference.kind in ("defaulted", "added"):
        return f"{name} = {difference.restored}"
    if difference.kind == "changed" and difference.saved == difference.restored:
        return f"{name} ({difference.saved}, other bytes{_size(difference)})"
    return f"{name}: expected {difference.saved}, found {difference.restored}{_size(difference)}"


def _size(difference: Difference) -> str:
    return f", largest difference {number(difference.size)}" if difference.size is not None else ""


def next_step(code: str, checkpoint: str) -> str:
    """What to do about a finding of a restore, as a command where there is one."""
    run = checkpoint.rstrip("/").rpartition("/")[0] or "."
    audit = f"see whether the file is damaged: ckptguard audit {checkpoint}"
    back = f"resume from another one: ckptguard preflight {run} names it"
    return {
        "restore-failed": f"{audit}; {back}",
        "state-mismatch": f"look at how it is loaded: what differs is named; {audit}",
        "probe-mismatch": f"{audit}; {back}",
        "batch-mismatch": "save and restore the data loader's position (torchdata's StatefulDataLoader has one), "
        "or skip the batches that were consumed",
        "rng-stream-mismatch": "save and restore the states of all random generators (python, numpy, torch, CUDA), "
        "last of all before the training goes on",
        "replay-divergence": f"{audit}; {back}",
    }[code]


# --- the result -------------------------------------------------------------------------------------------

_HEADLINE = {
    "continuous": "Continuous: the training goes on from here as it did.",
    "diverged": "Diverged: the restored training is not the one that was recorded.",
    "failed": "Failed: the checkpoint was not restored as it was saved.",
    "unproven": "Unproven: nothing speaks against it, and too little for it.",
}


def headline(report: RestoreReport) -> str:
    """The result in one sentence."""
    if report.bitwise:
        return "Continuous: the training goes on from here as it did, bit for bit."
    if report.result == "unproven" and any(f.loud for f in report.findings):
        return "Unproven: it differs, and it is not known whether it may."
    return _HEADLINE[report.result]


def reasons(report: RestoreReport) -> list[str]:
    """Why: one sentence for each thing that was proven or decided."""
    said = []
    if report.compared:
        verb = "compared with" if any(f.code == "state-mismatch" for f in report.findings) else "equal to"
        said.append(f"{report.compared:,} restored values were {verb} what the checkpoint holds.")
    if report.steps:
        good = sum(step.ok for step in report.steps)
        first, last = report.steps[0].step, report.steps[-1].step
        how = "exactly" if all(step.exact for step in report.steps) else "within tolerance"
        shown = "all" if good == len(report.steps) else f"{good} of"
        said.append(
            f"Steps {first} to {last} were replayed: {shown} {len(report.steps)} compared rows agree {how}."
        )
    against_wrong = any(f.subject == report.against for f in report.findings) or any(
        gap.check == "against" for gap in report.not_run
    )
    if report.against and report.result == "continuous" and not against_wrong:
        said.append(f"After replaying up to {report.against} the whole state was the one that it holds.")
    said += [f.message[:1].upper() + f.message[1:] + "." for f in report.findings if f.loud][:3]
    if report.result == "unproven" and report.not_run:
        said += [f"Not proven: {gap.check}: {gap.why}." for gap in report.not_run][:4]
    return said


def result_lines(report: RestoreReport) -> list[str]:
    """What the command prints: result, reasons, the compared steps, findings with their hints, gaps."""
    lines = [f"{report.checkpoint}: {headline(report)}"]
    lines += [f"  {line}" for line in reasons(report)]
    if report.steps:
        metrics = [
            m for m in ("loss", "grad_norm", "lr", "loss_scale") if any(m in s.logged for s in report.steps)
        ]
        rows = [["step", *(f"{m} logged" if at == 0 else "replayed" for m in metrics for at in (0, 1)), ""]]
        for step in report.steps:
            cells = [number(values.get(m)) for m in metrics for values in (step.logged, step.replayed)]
            rows.append(
                [str(step.step), *cells, "equal" if step.exact else "within" if step.ok else "DIFFERS"]
            )
        lines += ["", *_aligned(rows)]
    hints = list(dict.fromkeys(f.hint for f in report.findings if f.loud and f.hint))
    if hints:
        lines += ["", "What to do:", *(f"  {hint}" for hint in hints)]
    if report.not_run and report.result != "unproven":
        lines += ["", "Not proven:", *(f"  {gap.check}: {gap.why}" for gap in report.not_run)]
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
