"""Copies a checkpoint away in the background after its save: a `ckptguard replicate` of its own, so that the training
neither waits for it nor shares its fate. How far it is stands in `RUN/.ckptguard/replication/x.json`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

from ckptguard.errors import CkptguardError
from ckptguard.seals import OURS
from ckptguard.storage.local import LocalStore

SCHEMA = 1
FOLDER = f"{OURS}/replication"


class Replicator:
    """Runs one replication after the other. States: queued, uploading, verified, failed.

    A state other than these two last ones whose `pid` is gone belongs to a process that was killed; `ckptguard replicate`
    continues where it stopped.
    """

    def __init__(self, run: Path, destination: str) -> None:
        self.run = run
        self.destination = destination
        self._store = LocalStore(run)
        self._queue: deque[str] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="ckptguard-replication", daemon=True)
        self._thread.start()

    def put(self, checkpoint: str) -> None:
        """Queue a checkpoint that is complete. Returns at once."""
        self._state(checkpoint, "queued")
        with self._wake:
            self._queue.append(checkpoint)
            self._wake.notify()

    def close(self) -> None:
        """Wait until everything that is queued was copied or failed."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                if not self._queue:
                    return
                checkpoint = self._queue.popleft()
            try:
                self._replicate(checkpoint)
            except (OSError, CkptguardError) as error:
                self._state(checkpoint, "failed", message=str(error))

    def _replicate(self, checkpoint: str) -> None:
        command = [
            sys.executable,
            "-m",
            "ckptguard",
            "replicate",
            str(self.run / checkpoint),
            self.destination,
            "--quiet",
        ]
        # A session of its own: the signal that stops the training must not tear the copy.
        said = self.run / FOLDER / f"{checkpoint}.log"
        said.parent.mkdir(parents=True, exist_ok=True)
        with said.open("wb") as errors:
            # Not a pipe: writing to it would fail once the training is gone.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            self._state(checkpoint, "uploading", pid=process.pid)
            status = process.wait()
        if status == 0:
            self._state(checkpoint, "verified")
            return
        lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
        # The command's own words begin with its name; what to do about them follows on a line of its own.
        named = [line.removeprefix("ckptguard: ") for line in lines if line.startswith("ckptguard: ")]
        message = (named or lines or [f"exit status {status}"])[-1]
        self._state(checkpoint, "failed", message=message, exit_status=status)

    def _state(self, checkpoint: str, state: str, **more: object) -> None:
        document = {
            "schema": SCHEMA,
            "checkpoint": checkpoint,
            "destination": self.destination,
            "state": state,
            "since": time.time(),
            **more,
        }
        self._store.put(f"{FOLDER}/{checkpoint}.json", json.dumps(document).encode() + b"\n")
