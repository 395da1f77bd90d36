"""Brings alerts from the outbox to their sinks: at least once, oldest first, each sink on its own."""

from __future__ import annotations

from typing import Any

from ckptguard.catalog import outbox
from ckptguard.catalog.troubles import backoff
from ckptguard.jobs.context import Context, Route


def deliver(context: Context, route: Route) -> int:
    """Send what is due at one sink; returns how many were delivered. Raises SQLAlchemyError.

    A message is marked when it was taken, so that one which a crash interrupts is sent again, and only that one. After a
    failure nothing else is tried at this sink until it is due again: a dead sink costs one time-out, not fifty.
    """
    with context.catalog.read() as connection:
        messages = outbox.due(connection, route.name, context.clock())
    sent = 0
    for message in messages:
        if context.stopping.is_set():
            break
        error = _send(route, message["document"])
        now = context.clock()
        with context.catalog.write() as connection:
            if error is None:
                outbox.mark_sent(connection, message["id"], now)
            else:
                outbox.mark_failed(connection, message["id"], error, now + backoff(message["tries"]))
        if error is not None:
            context.health.bad(f"sink {route.name}", error)
            break
        context.health.good(f"sink {route.name}")
        sent += 1
    return sent


def _send(route: Route, document: dict[str, Any]) -> str | None:
    """None when it was taken, else why not."""
    try:
        route.sink.send(document)
    except Exception as error:  # noqa: BLE001 - a sink is somebody else's code: whatever it raises is a failed delivery
        return getattr(error, "message", None) or type(error).__name__
    return None
