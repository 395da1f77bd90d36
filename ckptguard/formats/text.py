"""JSON and plain text files of a checkpoint: read whole, strictly."""

from __future__ import annotations

import json
from typing import Any

from ckptguard.errors import FormatError
from ckptguard.formats._base import Parsed, Source

MAX_JSON = 512 << 20
MAX_TEXT = 1 << 20


def read_json(source: Source) -> Parsed:
    """Parse a JSON file. Raises FormatError (truncated where the text just stops, else bad-header)."""
    if source.size > MAX_JSON:
        raise FormatError("bad-header", f"{source.size} bytes are too many for this JSON file")
    raw = source.read(0, source.size)
    if not raw.strip(b"\0"):
        raise FormatError("bad-header", f"all {len(raw)} bytes are zero")
    try:
        return Parsed("json", json.loads(raw.decode("utf-8-sig")))
    except UnicodeDecodeError as e:
        raise FormatError("bad-header", f"byte {e.start} is no UTF-8") from e
    except json.JSONDecodeError as e:
        text = e.doc
        cut = not text[e.pos :].strip() or e.msg.startswith("Unterminated string")
        raise FormatError(
            "truncated" if cut else "bad-header", f"the JSON breaks at byte {e.pos} of {len(raw)}: {e.msg}"
        ) from e
    except (RecursionError, ValueError) as e:
        raise FormatError("bad-header", f"the JSON cannot be read: {type(e).__name__}") from e


def read_text(source: Source) -> Parsed:
    """A short text file, decoded."""
    if source.size > MAX_TEXT:
        return Parsed("text")
    return Parsed("text", source.read(0, source.size).decode("utf-8", "replace"))


def as_object(tree: Any) -> dict[str, Any]:
    """The tree, where it is a JSON object; else an empty one."""
    return tree if isinstance(tree, dict) else {}
