"""The real service for tests: small checkpoints that torch wrote, and `ckptguard serve` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

TOKEN = "a-token-for-tests-4711"


def saves(steps: range, width: int = 32) -> dict[int, bytes]:
    """The bytes of one small torch checkpoint a step: model, AdamW state, scheduler, RNG, as a plain loop saves them."""
    import io

    import torch

    made: dict[int, bytes] = {}
    for step in steps:
        draw = torch.Generator().manual_seed(step)

        def noise(*shape: int, draw: torch.Generator = draw) -> torch.Tensor:
            return torch.randn(*shape, generator=draw)

        moments = {
            "step": torch.tensor(float(step)),
            "exp_avg": noise(width, width),
            "exp_avg_sq": noise(width, width) ** 2,
        }
        group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0]}
        state = {
            "model": {"weight": noise(width, width)},
            "optimizer": {"state": {0: moments}, "param_groups": [group]},
            "scheduler": {
                "last_epoch": step,
                "_step_count": step + 1,
                "base_lrs": [1e-3],
                "_last_lr": [1e-3],
            },
            "rng": torch.get_rng_state(),
            "step": step,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        made[step] = buffer.getvalue()
    return made


def flip(path: Path) -> None:
    """Change one bit in the middle of a file, as rot would: its time and size stay."""
    info = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """What `condition` gives as soon as it is true. Raises AssertionError with `what` when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)


class ServeProcess:
    """`ckptguard serve` with a configuration, on a free port. `kill` and `start` again keep the catalog."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], *, environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.config = folder / "config.yaml"
        self.alerts = folder / "alerts.jsonl"
        body = {
            "db": f"sqlite:///{folder / 'catalog.db'}",
            "alerts": [{"sink": f"file:{self.alerts}"}],
            "watch": {"every": 0.5, "settle": 0.5},
            "follow_every": 0.5,
            **config,
        }
        # JSON is YAML.
        self.config.write_text(json.dumps(body))
        self.environment = {
            **os.environ,
            "CKPTGUARD_TOKEN": TOKEN,
            "CKPTGUARD_STATE": str(folder),
            **(environment or {}),
        }
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> None:
        """Return when pages are answered. Raises AssertionError with what it said when it ends instead."""
        with (self.folder / "stderr.txt").open("a") as talk:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "ckptguard",
                    "serve",
                    "--config",
                    str(self.config),
                    "--port",
                    "0",
                    "--json",
                ],
                stdout=subprocess.PIPE,
                stderr=talk,
                text=True,
                env=self.environment,
            )
        assert self.process.stdout is not None
        text = ""
        for line in self.process.stdout:
            text += line
            if line.rstrip() == "}" and "url" in (document := json.loads(text)):
                self.url = document["url"]
                return
        raise AssertionError((self.folder / "stderr.txt").read_text()[-2000:])

    def get(self, path: str) -> Any:
        """The JSON at a path of the running service; that of an error too."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {TOKEN}"})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)

    def sent(self) -> list[dict[str, Any]]:
        """The alerts that came out so far."""
        if not self.alerts.exists():
            return []
        return [json.loads(line) for line in self.alerts.read_text().splitlines()]

    def kill(self) -> None:
        """As a crash would: at once, and nothing is put in order."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, sign: int) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(sign)
        status = process.wait(timeout=30)
        if process.stdout is not None:
            process.stdout.close()
        return status

    def __enter__(self) -> ServeProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
