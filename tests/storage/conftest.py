"""Ways into the S3 test server for the store tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ckptguard.testing_s3 import SeaweedServer, fill


@pytest.fixture
def s3_client(s3_server: SeaweedServer) -> Any:
    return s3_server.client()


@pytest.fixture
def s3_fill(s3_client: Any, s3_bucket: str) -> Callable[[Mapping[str, bytes]], str]:
    """Puts objects into a fresh bucket and returns its URL."""

    def put(files: Mapping[str, bytes]) -> str:
        fill(s3_client, s3_bucket.removeprefix("s3://"), files)
        return s3_bucket

    return put
