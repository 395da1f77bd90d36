"""One run of a job: its progress, its log, and whether somebody wants it to stop."""

from __future__ import annotations

from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from ckptguard.catalog import jobs
from ckptguard.jobs.children import Cancelled, Child
from ckptguard.jobs.context import Context
from ckptguard.units import timestamp

MOST_LOG = 60_000
SAY_EVERY = 1.0


class Task:
    """Given to the function that does the job. `row` is its row in the catalog."""

    def __init__(self, context: Context, row: dict[str, Any], child: Child) -> None:
        self.context = context
        self.row = row
        self.child = child
        self._log: list[str] = []
        self._length = 0
        self._said = 0.0
        self._cancel = False
        self._share: float | None = None
        self._doing = ""

    @property
    def run_id(self) -> int | None:
        return None if self.row["run_id"] is None else int(self.row["run_id"])

    @property
    def log_text(self) -> str:
        return "".join(self._log)

    def log(self, line: str) -> None:
        """Add a line to the log that the page shows; the middle of an endless one is left out."""
        text = f"{timestamp(self.context.clock())} {line}\n"
        if self._length < MOST_LOG:
            self._log.append(text)
            self._length += len(text)
        elif self._log[-1] != "...\n":
            self._log.append("...\n")

    def say(self, doing: str, share: float | None = None) -> None:
        """Tell how far it is, from time to time. Raises Cancelled when it is to stop."""
        self._doing, self._share = doing, share
        if self.cancelled():
            raise Cancelled("cancelled")

    def cancelled(self) -> bool:
        """Whether to stop: asked for by a person, or because the service ends."""
        now = self.context.monotonic()
        if now - self._said >= SAY_EVERY and not self._cancel:
            self._said = now
            try:
                with self.context.catalog.write() as connection:
                    self._cancel = jobs.progress(
                        connection, self.row["id"], self._share, self._doing, self.log_text
                    )
            except SQLAlchemyError:
                # Progress is a courtesy; the work goes on without the database until its result is to be kept.
                return self.context.stopping.is_set()
        return self._cancel or self.context.stopping.is_set()
