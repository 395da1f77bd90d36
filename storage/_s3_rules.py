"""Reads how a bucket keeps and deletes by itself: versions, object lock, lifecycle rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ckptguard.errors import StoreDenied, StoreError
from ckptguard.storage._base import ExpiryRule, Retention

Ask = Callable[[str], dict[str, Any]]


def read_retention(ask: Ask, prefix: str) -> Retention:
    """The rules that concern keys below `prefix`. `ask` calls an operation on the bucket.

    Raises StoreError when the server cannot be reached; a question that it refuses is named in the answer.
    """
    unknown: list[str] = []
    versioning = _answer(ask, "get_bucket_versioning", unknown)
    lock = _answer(ask, "get_object_lock_configuration", unknown).get("ObjectLockConfiguration", {})
    default = lock.get("Rule", {}).get("DefaultRetention", {})
    lifecycle = _answer(ask, "get_bucket_lifecycle_configuration", unknown)
    return Retention(
        rules=tuple(
            rule for raw in lifecycle.get("Rules", ()) for rule in _rules(raw) if _concerns(rule, prefix)
        ),
        versioned=versioning.get("Status") == "Enabled",
        lock_mode=default.get("Mode") or ("ENABLED" if lock.get("ObjectLockEnabled") == "Enabled" else None),
        lock_days=default.get("Days") or (default["Years"] * 365 if "Years" in default else None),
        unknown=tuple(unknown),
    )


def _answer(ask: Ask, operation: str, unknown: list[str]) -> dict[str, Any]:
    """An empty answer stands for "nothing is set", which servers report as an error."""
    try:
        return ask(operation)
    except StoreDenied as error:
        unknown.append(error.message)
    except StoreError as error:
        known = ("NoSuchLifecycleConfiguration", "ObjectLockConfigurationNotFoundError")
        if not any(code in error.message for code in known):
            unknown.append(error.message)
    return {}


def _rules(raw: dict[str, Any]) -> Iterator[ExpiryRule]:
    if raw.get("Status") != "Enabled":
        return
    chosen = raw.get("Filter", {})
    both = chosen.get("And", chosen)
    expiry = raw.get("Expiration", {})
    noncurrent = raw.get("NoncurrentVersionExpiration", {})
    if not ("Days" in expiry or "Date" in expiry or "NoncurrentDays" in noncurrent):
        return
    yield ExpiryRule(
        name=raw.get("ID", ""),
        prefix=both.get("Prefix", raw.get("Prefix", "")) or "",
        days=expiry.get("Days"),
        date=expiry["Date"].timestamp() if "Date" in expiry else None,
        noncurrent_days=noncurrent.get("NoncurrentDays"),
        tagged="Tag" in chosen or bool(both.get("Tags")),
        min_size=both.get("ObjectSizeGreaterThan", 0),
        max_size=both.get("ObjectSizeLessThan"),
    )


def _concerns(rule: ExpiryRule, prefix: str) -> bool:
    """Whether keys below `prefix` can begin with the rule's."""
    below = f"{prefix}/" if prefix else ""
    return below.startswith(rule.prefix) or rule.prefix.startswith(below)
