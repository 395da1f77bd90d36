"""Every error that ckptguard raises on purpose: one root, and each class knows its exit status and its error code."""

from __future__ import annotations


class CkptguardError(Exception):
    """Root of all deliberate errors. `error_code` is the one of the `--json` error document."""

    exit_code = 2
    error_code = "internal"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(CkptguardError):
    """The command was called in a way that cannot work."""

    error_code = "usage"


class TargetNotFound(CkptguardError):
    """The target does not exist."""

    error_code = "not-found"


class NothingRecognised(CkptguardError):
    """The target exists, and nothing in it is a checkpoint of any known layout."""

    error_code = "nothing-recognised"


class StoreError(CkptguardError):
    """A store could not be asked; the checkpoint is not blamed for it."""

    error_code = "unreachable"


class StoreDenied(StoreError):
    """The store refused: permissions, credentials."""

    error_code = "denied"


class KeyNotFound(StoreError):
    """A key that was listed, or expected, is not in the store."""

    error_code = "not-found"


class ShortRead(StoreError):
    """Fewer bytes came back than the listing promised: the file shrank, or the store lied."""


class ConfigError(CkptguardError):
    """A configuration file or environment variable is wrong; the message names the file and the line."""

    error_code = "config"


class MissingExtra(CkptguardError):
    """A job needs an optional dependency that is not installed."""

    error_code = "missing-extra"

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed",
            hint=f"pip install 'ckptguard[{extra}]'",
        )


class RecipeError(CkptguardError):
    """The user's recipe cannot be used; the checkpoint is not blamed for it."""

    error_code = "recipe"


class TimedOut(CkptguardError):
    """A time limit that the user gave, or that a child process has, was reached."""

    error_code = "timeout"


class OutOfMemory(CkptguardError):
    """A child process needed more memory than it was allowed."""

    error_code = "memory"


class Refused(CkptguardError):
    """A command will not do what was asked, because it would do harm. Exit status 1."""

    exit_code = 1
    error_code = "usage"


class FormatError(CkptguardError):
    """Bytes that are not what their container promises. Becomes a finding, never an exit status.

    `code` is a finding code of the contract: bad-header, truncated, out-of-bounds, size-mismatch.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
