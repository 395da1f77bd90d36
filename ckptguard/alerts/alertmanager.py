"""`alertmanager:URL`: the second version of the Alertmanager's API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ckptguard.alerts._base import at_risk, post_json
from ckptguard.errors import UsageError
from ckptguard.units import timestamp

HOLD = 7 * 86400.0
"""An alert that is not renewed ends by itself; ours ends when we say so, and reminders renew it long before this."""


def claims(spec: str) -> bool:
    return spec.startswith("alertmanager:")


def open_sink(spec: str) -> Alertmanager:
    url = spec.removeprefix("alertmanager:")
    if not url.startswith(("http://", "https://")):
        raise UsageError(
            "alertmanager: needs the URL of the server", "for example alertmanager:http://localhost:9093"
        )
    return Alertmanager(url.rstrip("/"))


class Alertmanager:
    def __init__(self, url: str) -> None:
        self.url = url

    def send(self, alert: Mapping[str, Any]) -> None:
        post_json(f"{self.url}/api/v2/alerts", [message(alert, time.time())])


def message(alert: Mapping[str, Any], now: float) -> dict[str, Any]:
    """The alert in the Alertmanager's words. Its labels stay the same for the same trouble."""
    labels = {
        "alertname": alert["code"],
        "run": alert["run"],
        "key": alert["key"],
        "severity": alert["severity"],
    }
    if alert.get("checkpoint"):
        labels["checkpoint"] = alert["checkpoint"]
    ends = now if alert["state"] == "resolved" else now + HOLD
    return {
        "labels": {name: str(value) for name, value in labels.items()},
        "annotations": {
            "summary": str(alert["title"]),
            "description": str(alert["message"]),
            "hint": str(alert["hint"]),
            "work_at_risk": at_risk(alert),
        },
        "startsAt": alert.get("first_seen"),
        "endsAt": timestamp(ends),
        "generatorURL": alert.get("url") or "",
    }
