"""Turns what an S3 client raises into errors that say what to do. No message carries a key, token or signature."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckptguard.errors import CkptguardError, KeyNotFound, Refused, StoreDenied, StoreError

EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
BAD_KEYS = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "UnrecognizedClientException"}
)
DENIED = frozenset(
    {"AccessDenied", "AllAccessDisabled", "403", "Forbidden", "AccountProblem", "UnauthorizedAccess"}
)
WRONG_REGION = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "301", "IllegalLocationConstraintException"}
)
BUSY = frozenset(
    {"SlowDown", "Throttling", "ThrottlingException", "503", "ServiceUnavailable", "RequestLimitExceeded"}
)
CONFLICT = frozenset({"PreconditionFailed", "412", "ConditionalRequestConflict", "409"})
GONE = frozenset({"NoSuchKey", "404", "NotFound", "NoSuchVersion"})

PERMISSIONS = {
    "ListObjectsV2": "s3:ListBucket",
    "HeadBucket": "s3:ListBucket",
    "HeadObject": "s3:GetObject",
    "GetObject": "s3:GetObject",
    "GetObjectAttributes": "s3:GetObjectAttributes",
    "PutObject": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "DeleteObject": "s3:DeleteObject",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListParts": "s3:ListMultipartUploadParts",
    "ListObjectVersions": "s3:ListBucketVersions",
    "GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
    "GetBucketVersioning": "s3:GetBucketVersioning",
    "GetObjectLockConfiguration": "s3:GetBucketObjectLockConfiguration",
}

_SECRETS = re.compile(
    r"(?i)\b(AWSAccessKeyId|X-Amz-[A-Za-z-]+|Signature|Credential|SignedHeaders|Authorization)=[^\s&\"',]+"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{8,}|//[^/\s@]+:[^/\s@]+@"
)


class ObjectChanged(StoreError):
    """The object is no longer the one that was listed: it was replaced during the look."""


def scrub(text: str) -> str:
    """The text without access keys, signatures and passwords in URLs."""
    return _SECRETS.sub(lambda m: "//" if m.group().startswith("//") else "(hidden)", text)


@contextmanager
def translated(operation: str, where: str) -> Iterator[None]:
    """Run an S3 call; what it raises comes out as one of ckptguard's errors. `where` is the object or bucket, as a URL."""
    try:
        yield
    except CkptguardError:
        raise
    except Exception as error:
        # Everything that botocore, urllib3 and the socket layer may raise is a store that could not be asked.
        raise translate(error, operation, where) from error


def translate(error: Exception, operation: str, where: str) -> CkptguardError:
    response: Mapping[str, Any] | None = getattr(error, "response", None)
    if isinstance(response, Mapping) and "Error" in response:
        return _answered(response, operation, where)
    return _unanswered(error, where)


def error_code(error: BaseException) -> str:
    """The S3 error code of an exception of the client's, or "" for one without."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, Mapping) else ""


def _answered(response: Mapping[str, Any], operation: str, where: str) -> CkptguardError:
    """An error that the server itself gave."""
    details = response["Error"]
    code, said = str(details.get("Code", "")), scrub(str(details.get("Message", "")))
    if code in ("NoSuchBucket",):
        return _no_bucket(where)
    if code in GONE:
        return _no_bucket(where) if operation == "HeadBucket" else KeyNotFound(f"{where}: no such object")
    if code in EXPIRED:
        return StoreDenied(
            f"{where}: the credentials have expired",
            "log in again (aws sso login), or renew the session token",
        )
    if code in BAD_KEYS:
        return StoreDenied(
            f"{where}: the server does not accept the credentials ({code})",
            "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the profile; and the endpoint",
        )
    if code == "RequestTimeTooSkewed":
        return StoreDenied(
            f"{where}: this machine's clock differs too much from the server's",
            "set the clock (timedatectl set-ntp true) and try again",
        )
    if code == "400":
        # A HEAD request is answered without the reason.
        return StoreDenied(
            f"{where}: refused without a reason (400): the session token has expired, or the region is wrong",
            "renew the credentials; set AWS_REGION to the region of the bucket",
        )
    if code in WRONG_REGION:
        region = (
            details.get("Region") or details.get("BucketRegion") or _header(response, "x-amz-bucket-region")
        )
        there = f"it is in {region}" if region else "it is in another one"
        return StoreError(
            f"{where}: asked in the wrong region; {there}",
            f"set AWS_REGION={region or 'the region of the bucket'}",
        )
    if code in DENIED:
        permission = PERMISSIONS.get(operation, operation)
        more = (
            " (or, without s3:ListBucket, that the object is not there)" if operation == "HeadObject" else ""
        )
        return StoreDenied(
            f"{where}: access denied: {permission} is not allowed{more}",
            f"allow {permission} in the policy of this user or role, and in that of the bucket and its key",
        )
    if code in CONFLICT:
        if operation == "GetObject":
            return ObjectChanged(f"{where}: replaced while it was read", "audit again when the save is done")
        return Refused(
            f"{where}: changed by someone else meanwhile; it was left as it is", "look again, then repeat"
        )
    if code in BUSY:
        return StoreError(
            f"{where}: the server asks to slow down ({code})", "repeat later, or with --max-rate"
        )
    if code == "InvalidObjectState":
        return StoreError(
            f"{where}: archived, not readable at once", "restore it from the archive storage class first"
        )
    return StoreError(
        f"{where}: {operation} failed: {code} {said}".rstrip(), "repeat; look at the server's own log"
    )


def _unanswered(error: Exception, where: str) -> CkptguardError:
    """An error of this side: credentials, configuration, network."""
    from botocore import exceptions as aws

    table: tuple[tuple[tuple[type[Exception], ...], Callable[[], CkptguardError]], ...] = (
        (
            (aws.NoCredentialsError, aws.PartialCredentialsError),
            lambda: StoreDenied(
                f"{where}: no credentials",
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket s3://anonymous@BUCKET",
            ),
        ),
        (
            (aws.TokenRetrievalError, aws.SSOTokenLoadError, aws.UnauthorizedSSOTokenError),
            lambda: StoreDenied(f"{where}: the login has expired", "log in again: aws sso login"),
        ),
        (
            (aws.CredentialRetrievalError, aws.MetadataRetrievalError),
            lambda: StoreDenied(
                f"{where}: the credentials could not be had", "check the profile's role or process"
            ),
        ),
        (
            (aws.ProfileNotFound,),
            lambda: StoreDenied(
                f"{where}: there is no such profile in the AWS configuration",
                "name a profile of ~/.aws/config before the @ of the URL",
            ),
        ),
        (
            (aws.SSLError,),
            lambda: StoreError(
                f"{where}: the server's certificate is not trusted", "set AWS_CA_BUNDLE to its authority"
            ),
        ),
        (
            (aws.ConnectTimeoutError, aws.EndpointConnectionError, aws.ProxyConnectionError),
            lambda: StoreError(
                f"{where}: the endpoint cannot be reached",
                "check AWS_ENDPOINT_URL_S3, the network and the proxy",
            ),
        ),
        (
            (aws.ReadTimeoutError,),
            lambda: StoreError(f"{where}: the server stopped answering", "repeat; look at the server's load"),
        ),
        (
            (aws.ParamValidationError,),
            lambda: StoreError(f"{where}: not a valid bucket or key", "check the URL: s3://BUCKET/PREFIX"),
        ),
    )
    for kinds, make in table:
        if isinstance(error, kinds):
            return make()
    if isinstance(error, ValueError) and "endpoint" in str(error).lower():
        return StoreError(
            f"{where}: {scrub(str(error))}", "the endpoint is a URL: AWS_ENDPOINT_URL_S3=https://HOST"
        )
    return StoreError(f"{where}: {type(error).__name__}: {scrub(str(error))}", "repeat; check the network")


def _no_bucket(where: str) -> StoreError:
    bucket = where.removeprefix("s3://").partition("/")[0]
    return KeyNotFound(
        f"{where}: there is no bucket {bucket}", "check the name, the endpoint and the account"
    )


def _header(response: Mapping[str, Any], name: str) -> str | None:
    value = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get(name)
    return str(value) if value else None
