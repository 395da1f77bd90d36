"""`http://...` or `https://...`: the alert's JSON by POST."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptguard.alerts._base import post_json


def claims(spec: str) -> bool:
    return spec.startswith(("http://", "https://"))


def open_sink(spec: str) -> Webhook:
    return Webhook(spec)


class Webhook:
    def __init__(self, url: str) -> None:
        self.url = url

    def send(self, alert: Mapping[str, Any]) -> None:
        post_json(self.url, dict(alert))
