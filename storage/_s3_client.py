"""Makes the S3 client that a URL asks for: credentials, endpoint and region as every AWS tool finds them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ckptguard.errors import MissingExtra, UsageError

ANONYMOUS = "anonymous"


@dataclass(frozen=True, slots=True)
class S3Location:
    """Where an `s3://[PROFILE@]BUCKET[/PREFIX]` points. `prefix` has no slash at its ends."""

    bucket: str
    prefix: str
    profile: str | None = None

    def key(self, relative: str) -> str:
        """The full key of a key below the prefix."""
        return f"{self.prefix}/{relative}" if self.prefix and relative else self.prefix or relative

    def url(self, relative: str = "") -> str:
        return f"s3://{self.bucket}/{self.key(relative)}".rstrip("/")


def parse_url(url: str) -> S3Location:
    """Raises UsageError for what is no S3 URL."""
    scheme, mark, rest = url.partition("://")
    if scheme != "s3" or not mark:
        raise UsageError(f"{url}: not an S3 URL", "give s3://bucket/prefix")
    place, _, prefix = rest.partition("/")
    profile, at, bucket = place.rpartition("@")
    if not bucket or "?" in place:
        raise UsageError(f"{url}: names no bucket", "give s3://bucket/prefix")
    return S3Location(bucket, "/".join(p for p in prefix.split("/") if p), profile if at else None)


@dataclass(frozen=True, slots=True)
class S3Options:
    """How patient and how parallel a client is. Attempts and mode of retrying follow AWS_MAX_ATTEMPTS, AWS_RETRY_MODE."""

    connect_timeout: float = 10.0
    read_timeout: float = 60.0
    attempts: int = 6
    concurrency: int = 32
    page: int = 1000


def make_client(location: S3Location, options: S3Options) -> Any:
    """A boto3 client for this location. Raises MissingExtra without boto3.

    Making one costs a tenth of a second, so stores of the same profile share theirs, as long as the environment that it
    was made from is the same. A child process gets its own: connections must not be shared across a fork.
    """
    surroundings = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    return _client(location.profile, options, surroundings, os.getpid())


@lru_cache(maxsize=16)
def _client(
    profile: str | None, options: S3Options, surroundings: tuple[tuple[str, str], ...], process: int
) -> Any:
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
    except ImportError as error:
        raise MissingExtra("boto3", "s3", "reading s3:// URLs") from error

    anonymous = profile == ANONYMOUS
    session = boto3.Session(profile_name=None if anonymous else profile)
    settings = session._session.get_scoped_config()
    config = Config(
        connect_timeout=options.connect_timeout,
        read_timeout=options.read_timeout,
        max_pool_connections=options.concurrency,
        # Ranges carry no checksum of their own; whole objects are checked by ckptguard where it matters.
        response_checksum_validation="when_required",
        request_checksum_calculation="when_required",
        user_agent_extra="ckptguard",
        # Our own calls are right; checking them again costs as much as signing them.
        parameter_validation=False,
    )
    if anonymous:
        config = config.merge(Config(signature_version=UNSIGNED))
    if session._session.get_config_variable("max_attempts") is None:
        config = config.merge(Config(retries={"mode": "standard", "total_max_attempts": options.attempts}))
    region = session.region_name or "us-east-1"
    client = session.client("s3", region_name=region, config=config)
    nested = settings.get("s3")
    chosen = nested.get("addressing_style") if isinstance(nested, dict) else None
    if chosen is None and "amazonaws." not in client.meta.endpoint_url:
        # Other servers rarely have a DNS name per bucket.
        client = session.client(
            "s3", region_name=region, config=config.merge(Config(s3={"addressing_style": "path"}))
        )
    return client
