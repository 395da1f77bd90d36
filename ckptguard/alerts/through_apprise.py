"""Any Apprise URL: Slack, Teams, e-mail, PagerDuty and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptguard.alerts._base import SinkError, headline, lines
from ckptguard.errors import MissingExtra, UsageError

LAST = True
"""Claims whatever no other sink does."""


def claims(spec: str) -> bool:
    return "://" in spec


def open_sink(spec: str) -> Apprise:
    try:
        import apprise
    except ImportError as error:
        raise MissingExtra("apprise", "serve", "this kind of alert") from error
    # Apprise's first word names the service and is no secret; the rest is.
    service = spec.partition("://")[0]
    sender = apprise.Apprise()
    if not sender.add(spec):
        raise UsageError(
            f"{service}://...: Apprise does not understand this URL",
            "see the list at github.com/caronc/apprise",
        )
    return Apprise(service, sender)


class Apprise:
    def __init__(self, service: str, sender: Any) -> None:
        self.service = service
        self._sender = sender

    def send(self, alert: Mapping[str, Any]) -> None:
        import apprise

        kinds = {"error": apprise.NotifyType.FAILURE, "warning": apprise.NotifyType.WARNING}
        kind = (
            apprise.NotifyType.SUCCESS
            if alert["state"] == "resolved"
            else kinds.get(str(alert["severity"]), apprise.NotifyType.INFO)
        )
        sent = self._sender.notify(title=headline(alert), body="\n".join(lines(alert)), notify_type=kind)
        if not sent:
            raise SinkError(f"{self.service}: Apprise could not deliver")
