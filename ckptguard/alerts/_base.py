"""What sinks share: posting JSON, and the words of an alert for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ckptguard.errors import CkptguardError, MissingExtra
from ckptguard.units import duration

TIMEOUT = 10.0


class SinkError(CkptguardError):
    """An alert was not taken; the outbox tries again."""

    error_code = "unreachable"


def post_json(url: str, body: Any) -> None:
    """POST and expect a 2xx. Raises SinkError that names the host and never the URL: its path may be a secret."""
    try:
        import httpx
    except ImportError as error:
        raise MissingExtra("httpx", "serve", "a webhook") from error
    host = urlsplit(url).hostname or "?"
    try:
        answer = httpx.post(url, json=body, timeout=TIMEOUT, follow_redirects=False)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise SinkError(f"{host}: {type(error).__name__}") from None
    if not 200 <= answer.status_code < 300:
        raise SinkError(f"{host} answered {answer.status_code}")


def at_risk(alert: Mapping[str, Any]) -> str:
    """One line: what it would cost if the job died now; empty where that is not known."""
    risk = alert.get("work_at_risk") or {}
    parts = []
    if risk.get("steps") is not None:
        parts.append(f"{risk['steps']} steps")
    if risk.get("seconds") is not None:
        parts.append(duration(risk["seconds"]))
    if risk.get("gpu_hours") is not None:
        parts.append(f"{risk['gpu_hours']} GPU-hours")
    if not parts:
        return ""
    safe = risk.get("newest_safe")
    since = f"since {safe} ({risk.get('evidence')})" if safe else "no checkpoint is proven safe"
    return f"{', '.join(parts)}; {since}"


def lines(alert: Mapping[str, Any]) -> list[str]:
    """The alert as lines of text, without its title."""
    rows = [
        ("", alert["message"]),
        ("checkpoint", alert.get("checkpoint")),
        ("since", alert.get("first_seen")),
        ("at risk", at_risk(alert)),
        ("do", alert.get("hint") if alert["state"] == "firing" else None),
        ("page", alert.get("url")),
    ]
    return [f"{name}: {value}" if name else str(value) for name, value in rows if value]


def headline(alert: Mapping[str, Any]) -> str:
    mark = "RESOLVED" if alert["state"] == "resolved" else str(alert["severity"]).upper()
    return f"{mark} {alert['title']}"
