"""Makes what comes from checkpoints storable in every database: names and numbers in them are anybody's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Dialect, Text
from sqlalchemy.types import TypeDecorator


def words(text: str) -> str:
    """Text without NUL, which PostgreSQL refuses, and without the halves of characters that odd file names have."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def plain(value: Any) -> Any:
    """A JSON value without NaN and infinity (written as words) and with clean text."""
    if isinstance(value, str):
        return words(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {words(str(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def to_json(value: Any) -> str:
    return json.dumps(plain(value), separators=(",", ":"), default=str, allow_nan=False)


class Words(TypeDecorator[str]):
    """A text column that takes any string."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else words(value)
