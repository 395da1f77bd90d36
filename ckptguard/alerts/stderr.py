"""`stderr`: a few lines of text, for a terminal or the journal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ckptguard.alerts._base import SinkError, headline, lines


def claims(spec: str) -> bool:
    return spec in ("stderr", "stderr:", "stderr://")


def open_sink(spec: str) -> StderrSink:
    return StderrSink()


class StderrSink:
    def send(self, alert: Mapping[str, Any]) -> None:
        text = "\n".join([f"ALERT {headline(alert)}", *(f"  {line}" for line in lines(alert))])
        try:
            print(text, file=sys.stderr, flush=True)
        except (OSError, ValueError) as error:
            raise SinkError("standard error is closed") from error
