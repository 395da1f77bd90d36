"""The process that reads checkpoints for the service: one request a line on stdin, answers as lines on stdout.

What reads untrusted bytes runs apart: it may be slow, big, or die, and neither the pages nor the alerts notice.
Started as `python -m ckptguard.jobs.child`; JSON both ways.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckptguard.errors import CkptguardError

PARENT_CHECK = 2.0
QUIET = 0.3
"""Seconds between two lines of progress."""


class _Talk:
    """Writes answers; progress at most every QUIET seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said = 0.0
        self._bytes = 0
        # Whatever a library prints must not break the protocol.
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def progress(self, name: str, count: int) -> None:
        with self._lock:
            self._bytes += count
            now = time.monotonic()
            if now - self._said < QUIET:
                return
            self._said = now
            self._line({"progress": {"file": name, "bytes": self._bytes}})

    def part(self, body: Mapping[str, Any]) -> None:
        """Something that is certain already, before the answer."""
        with self._lock:
            self._line({"part": body})

    def answer(self, body: Mapping[str, Any]) -> None:
        with self._lock:
            self._bytes = 0
            self._line(body)

    def _line(self, body: Mapping[str, Any]) -> None:
        try:
            self._out.write(json.dumps(body, separators=(",", ":"), default=str) + "\n")
            self._out.flush()
        except BrokenPipeError:
            # Nobody listens any more: the service ended, or gave this look up.
            os._exit(1)


def _audit(request: Mapping[str, Any], talk: _Talk) -> dict[str, Any]:
    from ckptguard.jobs.reading import audit

    return audit(request, talk.progress, talk.part)


def _scrub(request: Mapping[str, Any], talk: _Talk) -> dict[str, Any]:
    from ckptguard.jobs.reread import scrub_file
    from ckptguard.storage import open_store

    store = open_store(request["target"], max_rate=request.get("max_rate"))
    return {"files": [scrub_file(store, file, talk.progress) for file in request["files"]]}


REQUESTS: dict[str, Callable[[Mapping[str, Any], _Talk], dict[str, Any]]] = {
    "audit": _audit,
    "scrub": _scrub,
}


def main() -> None:
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.nice(5)
    talk = _Talk()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            talk.answer({"done": REQUESTS[request["do"]](request, talk)})
        except CkptguardError as error:
            talk.answer({"error": {"code": error.error_code, "message": error.message, "hint": error.hint}})
        except MemoryError:
            talk.answer(
                {"error": {"code": "memory", "message": "not enough memory for this look", "hint": ""}}
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the service must hear of it and go on
            talk.answer(
                {"error": {"code": "internal", "message": f"{type(error).__name__}: {error}", "hint": ""}}
            )


def _end_with(parent: int) -> None:
    """A service that was killed must leave no reader behind."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK)
    os._exit(1)


if __name__ == "__main__":
    main()
