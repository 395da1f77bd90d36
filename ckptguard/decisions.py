"""One decision for all nodes and ranks of a start, kept as `RUN/.ckptguard/decisions/KEY.json`.

The first process claims the key, looks, and writes what it decided; all others wait for that and take it. A record is
written once and never replaced: when it expired, or when the one that claimed it died, all go on to the next generation
of the key. A record that cannot be read and a folder that cannot be written are errors, because ranks that resume from
different checkpoints train a model that nobody asked for.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ckptguard.errors import CkptguardError, KeyNotFound, Refused, StoreDenied, StoreError
from ckptguard.ports import WritableStore

SCHEMA = 1
FOLDER = ".ckptguard/decisions"
LIFETIME = 900.0
"""Seconds for which a decision serves. A start that nothing numbers must not take the one of hours ago."""
NEGATIVE = 60.0
"""A refusal or a failure serves those who wait for it, not the start after it was mended."""
KEPT = 7 * 86400.0
BEAT = 5.0
SILENCE = 120.0
"""Seconds without a sign of life after which the one that looks is taken for dead; above NFS caching times."""
MOST_GENERATIONS = 10_000


@dataclass(frozen=True, slots=True)
class Record:
    """What was decided. `checkpoint` is the path below the run, so that every node can mount the run where it likes.

    `error` is (code, message, hint) where the look failed: it failed for all.
    """

    decision: str
    checkpoint: str | None = None
    step: int | None = None
    reasons: tuple[str, ...] = ()
    error: tuple[str, str, str] | None = None
    made: float = 0.0
    expires: float = 0.0
    by: str = ""


class DecisionFailed(CkptguardError):
    """The process that decided for all could not; `error_code` is that of its own error."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.error_code = code


@dataclass(frozen=True)
class Agreement:
    """How processes that share a run agree. Clock and sleep are given, so that tests need no waiting."""

    store: WritableStore
    lifetime: float = LIFETIME
    silence: float = SILENCE
    now: Callable[[], float] = field(default=time.time)
    sleep: Callable[[float], None] = field(default=time.sleep)
    poll: float = 0.2

    def take(self, key: str, decide: Callable[[], Record]) -> tuple[Record, bool]:
        """(the decision, whether this process made it). Only one of those that ask for a key calls `decide`.

        Raises DecisionFailed where the look of the one that decided failed, StoreError where the folder cannot be
        written or read. What `decide` raises reaches the others.
        """
        for generation in range(MOST_GENERATIONS):
            name = f"{FOLDER}/{key}{f'.{generation}' if generation else ''}"
            record = self._read(f"{name}.json")
            if record is None and self._claim(f"{name}.claim"):
                record = self._decide(name, decide)
                if record is not None:
                    return record, True
            if record is None:
                record = self._wait(name)
            if record.expires > self.now():
                return _outcome(record), False
        raise StoreError(
            f"{key}: {MOST_GENERATIONS} decisions of this name are kept", f"remove {self.store.url}/{FOLDER}"
        )

    def write(self, key: str, record: Record) -> None:
        """Keep a decision under a key that nobody else uses, for the drop-ins of the command that is about to start."""
        self._keep(f"{FOLDER}/{key}.json", self._dated(record))

    # --- the one that decides -------------------------------------------------------------------------

    def _claim(self, key: str) -> bool:
        try:
            self.store.put(key, _sign(0), if_absent=True)
        except Refused:
            return False
        except StoreError as error:
            raise _unwritable(self.store.url, error) from error
        return True

    def _decide(self, name: str, decide: Callable[[], Record]) -> Record | None:
        """What was decided; None where the others took this process for dead meanwhile and go on without it."""
        try:
            with self._beating(f"{name}.claim"):
                record = self._dated(decide())
        except CkptguardError as error:
            self._keep(f"{name}.json", self._failed(error.error_code, error.message, error.hint))
            raise
        except BaseException as error:
            self._keep(
                f"{name}.json",
                self._failed("internal", f"the look ended with {type(error).__name__}: {error}", ""),
            )
            raise
        if not self._keep(f"{name}.json", record):
            return None
        self._tidy()
        return record

    @contextmanager
    def _beating(self, claim: str) -> Iterator[None]:
        """Signs of life while the look goes on: the others must be able to tell it from a process that was killed."""
        over = threading.Event()

        def beat() -> None:
            count = 0
            while not over.wait(BEAT):
                count += 1
                try:
                    self.store.put(claim, _sign(count))
                except StoreError:
                    continue  # the others will give up if this lasts

        thread = threading.Thread(target=beat, name="ckptguard-claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _dated(self, record: Record) -> Record:
        life = self.lifetime if record.decision in ("resume", "fresh") else min(NEGATIVE, self.lifetime)
        now = self.now()
        return replace(record, made=now, expires=now + life, by=_me())

    def _failed(self, code: str, message: str, hint: str) -> Record:
        return self._dated(Record("failed", error=(code, message, hint)))

    def _keep(self, key: str, record: Record) -> bool:
        """Write a record, once; False where one is there already."""
        body = {"schema": SCHEMA, **asdict(record)}
        try:
            self.store.put(key, json.dumps(body, indent=1).encode() + b"\n", if_absent=True)
        except Refused:
            return False
        except StoreError as error:
            raise _unwritable(self.store.url, error) from error
        return True

    def _tidy(self) -> None:
        """Remove what is long past; nobody minds if that fails."""
        try:
            for entry in list(self.store.list(FOLDER)):
                if entry.kind == "file" and self.now() - entry.modified > KEPT:
                    self.store.delete(entry.key)
        except StoreError:
            return

    # --- the others -----------------------------------------------------------------------------------

    def _fetch(self, key: str) -> bytes:
        """The bytes as they are now, not those of a descriptor from before."""
        forget: Callable[[], None] | None = getattr(self.store, "forget", None)
        if forget is not None:
            forget()
        return self.store.read(key)

    def _read(self, key: str) -> Record | None:
        try:
            body = json.loads(self._fetch(key))
        except KeyNotFound:
            return None
        except ValueError as error:
            raise StoreError(
                f"{self.store.url}/{key}: not a decision: {error}", "remove it and start again"
            ) from error
        return _parsed(body, f"{self.store.url}/{key}")

    def _wait(self, name: str) -> Record:
        """The record of the one that claimed the key, as soon as it is there; one that ends the key where it died."""
        last, since = b"", self.now()
        while True:
            record = self._read(f"{name}.json")
            if record is not None:
                return record
            try:
                sign = self._fetch(f"{name}.claim")
            except KeyNotFound:
                sign = b""
            if sign != last:
                last, since = sign, self.now()
            elif self.now() - since > self.silence:
                gone = f"{_who(last)} was deciding for all and gave no sign of life for {self.silence:g} s"
                self._keep(
                    f"{name}.json", replace(self._failed("timeout", gone, "start the job again"), expires=0.0)
                )
            else:
                self.sleep(self.poll)


def _outcome(record: Record) -> Record:
    if record.error is not None:
        code, message, hint = record.error
        raise DecisionFailed(
            code, f"{record.by or 'the process that decided'} could not decide: {message}", hint
        )
    return record


def _parsed(body: Any, where: str) -> Record:
    try:
        if body["schema"] != SCHEMA or body["decision"] not in ("resume", "stop", "fresh", "failed"):
            raise ValueError(f"schema {body['schema']}, decision {body['decision']!r}")
        error = body["error"]
        record = Record(
            body["decision"], body["checkpoint"], body["step"], tuple(body["reasons"]), None if error is None else tuple(error),
            float(body["made"]), float(body["expires"]), str(body["by"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as problem:
        raise StoreError(
            f"{where}: not a decision of this version: {problem}", "remove it and start again"
        ) from problem
    path = record.checkpoint
    leads_out = path is not None and (path.startswith("/") or ".." in path.split("/"))
    if (record.decision == "resume") != (path is not None) or leads_out:
        raise StoreError(
            f"{where}: not a decision: {record.decision} with checkpoint {path!r}",
            "remove it and start again",
        )
    return record


def _unwritable(url: str, error: StoreError) -> StoreError:
    kind = StoreDenied if isinstance(error, StoreDenied) else StoreError
    return kind(
        f"{url}/{FOLDER} cannot be written ({error.message}), so the nodes and ranks of this job cannot agree on one checkpoint",
        "make the run's directory writable, or decide once outside of the job: ckptguard preflight RUN",
    )


def _sign(count: int) -> bytes:
    return json.dumps({"by": _me(), "beat": count}).encode()


def _who(sign: bytes) -> str:
    try:
        return str(json.loads(sign)["by"])
    except (ValueError, KeyError, TypeError):
        return "another process"


def _me() -> str:
    return f"{socket.gethostname()} (pid {os.getpid()})"
