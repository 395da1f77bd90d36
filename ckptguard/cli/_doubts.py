"""What a configuration that can be read would still come to grief by: found before the service runs for weeks with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptguard.catalog.engine import check_url
from ckptguard.codes import ANOMALIES, CODES
from ckptguard.errors import CkptguardError
from ckptguard.settings import Settings, database_url, token_is_given
from ckptguard.web.security import is_loopback

PRUNES_BY = frozenset({"--keep-last", "--keep-every", "--keep-best"})
PRUNE_OPTIONS = PRUNES_BY | {"--replica", "--older-than", "--grace", "--depth"}


def doubts(settings: Settings) -> Iterator[str]:
    """A line for each; touches nothing but the names of files on this machine."""
    for code in settings.policy.silence:
        if code not in CODES and code not in ANOMALIES:
            yield f"policy.silence.{code}: no such code; docs/codes.md lists them"
    if not is_loopback(settings.server.host) and not token_is_given(settings):
        yield f"server.host {settings.server.host} needs a token that callers know: server.token or $CKPTGUARD_TOKEN"
    try:
        check_url(database_url(settings))
    except CkptguardError as error:
        yield f"db: {error.message}; {error.hint}"
    for run in settings.runs:
        file, colon, _ = (run.recipe or "").rpartition(":")
        if colon and file.endswith(".py") and not Path(file).is_file():
            yield f"runs: {run.path}: recipe {file}: no such file"
    if settings.prune is not None:
        yield from _prune(settings.prune.options, apply=settings.prune.apply)


def _prune(options: tuple[str, ...], *, apply: bool) -> Iterator[str]:
    given = {word.partition("=")[0] for option in options for word in option.split() if word.startswith("-")}
    for word in sorted(given - PRUNE_OPTIONS):
        yield f"prune.options: {word}: no such option; known: {', '.join(sorted(PRUNE_OPTIONS))}"
    if not given & PRUNES_BY:
        yield f"prune.options: nothing says what to keep; give one of {', '.join(sorted(PRUNES_BY))}"
