"""Pure: hints with what they mean put in, so that their commands can be pasted."""

from __future__ import annotations

import re
import shlex


def meant(hint: str, run: str, checkpoint: str | None) -> str:
    """RUN and CHECKPOINT in a hint become the run and the checkpoint that it is about."""
    hint = re.sub(r"\bRUN\b", lambda _: shlex.quote(run), hint)
    return re.sub(r"\bCHECKPOINT\b", lambda _: shlex.quote(checkpoint), hint) if checkpoint else hint
