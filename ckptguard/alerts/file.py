"""`file:PATH`: one JSON object a line, appended and synced."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptguard.alerts._base import SinkError
from ckptguard.errors import UsageError


def claims(spec: str) -> bool:
    return spec.startswith("file:")


def open_sink(spec: str) -> FileSink:
    path = spec.removeprefix("file:").removeprefix("//")
    if not path:
        raise UsageError("file: needs a path", "for example file:/var/log/ckptguard-alerts.jsonl")
    return FileSink(Path(path))


class FileSink:
    """A line is one write, so that two services may share a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def send(self, alert: Mapping[str, Any]) -> None:
        line = json.dumps(dict(alert), ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if os.write(descriptor, line) != len(line):
                    raise SinkError(f"{self.path}: the line was cut short; is the disk full?")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SinkError(f"{self.path}: {error.strerror}") from error
