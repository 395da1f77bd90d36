"""The command of `ckptguard run`, with its checkpoint put in: `{checkpoint}` and what stands between `{{` and `}}`. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckptguard.errors import UsageError

HOLE = "{checkpoint}"
# Within one argument only what holds the checkpoint is ours: other programs have their own braces.
_INSIDE = re.compile(r"\{\{((?:(?!\}\}).)*?\{checkpoint\}.*?)\}\}(?!\})", re.DOTALL)


def fill(command: Sequence[str], checkpoint: str | None) -> list[str]:
    """The arguments to start. `checkpoint` None is a fresh run: all between `{{` and `}}` is dropped.

    A group may stand alone (`{{ --resume {checkpoint} }}`), cling to its arguments (`{{--resume {checkpoint}}}`), or lie
    inside one argument (`bash -c 'train {{--resume {checkpoint}}}'`). Raises UsageError for a group that is never closed,
    and on a fresh run for a `{checkpoint}` outside of every group.
    """
    out: list[str] = []
    closing: str | None = None
    for argument in command:
        if closing is None and argument == "{{":
            closing = "alone"
            continue
        if closing is None and _INSIDE.search(argument):
            argument = _INSIDE.sub(lambda m: m[1] if checkpoint is not None else "", argument)
            if not argument.strip():
                continue
        elif closing is None and argument.startswith("{{") and argument.endswith("}}"):
            if checkpoint is not None:
                out.append(argument[2:-2])
            continue
        elif closing is None and argument.startswith("{{"):
            closing, argument = "attached", argument[2:]
        inside = closing is not None
        if closing == "alone" and argument == "}}":
            closing = None
            continue
        if closing == "attached" and argument.endswith("}}"):
            closing, argument = None, argument[:-2]
            if not argument:
                continue
        if not inside or checkpoint is not None:
            out.append(argument)
    if closing is not None:
        raise UsageError(f"{' '.join(command)}: '{{{{' is never closed by '}}}}'")
    if checkpoint is None and any(HOLE in a for a in out):
        raise UsageError(
            "this is a fresh run, and the command needs {checkpoint}",
            "put what a fresh run must not get between {{ and }}: {{--resume {checkpoint}}}",
        )
    return [a.replace(HOLE, checkpoint) for a in out] if checkpoint is not None else out
