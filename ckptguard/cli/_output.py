"""What every command does with its result: one document on stdout, talk on stderr, the contract's exit statuses."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from ckptguard.errors import CkptguardError, UsageError

SCHEMA = 1


def emit_json(document: Any) -> None:
    """Print one JSON document and nothing else."""
    sys.stdout.write(json.dumps(document, indent=1, allow_nan=True, default=str) + "\n")
    sys.stdout.flush()


def say(text: str, *, quiet: bool = False) -> None:
    """A line for people, on stderr."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def fail(error: CkptguardError, as_json: bool) -> NoReturn:
    """Report a deliberate error and end with its exit status."""
    if as_json:
        emit_json(
            {
                "schema": SCHEMA,
                "error": {"code": error.error_code, "message": error.message, "hint": error.hint},
            }
        )
    say(f"ckptguard: {error.message}" + (f"\n  {error.hint}" if error.hint else ""))
    raise typer.Exit(error.exit_code)


@contextmanager
def guarded(as_json: bool) -> Iterator[None]:
    """Run a command's work: deliberate errors by their status, anything unforeseen with 2 and never a traceback."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except CkptguardError as error:
        fail(error, as_json)
    except KeyboardInterrupt:
        say("ckptguard: interrupted")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(2) from None
    except Exception as error:  # noqa: BLE001 - a crash must read neither as a verdict nor as a fresh start
        if os.environ.get("CKPTGUARD_TRACEBACK"):
            traceback.print_exc()
        fail(
            CkptguardError(
                f"unforeseen {type(error).__name__}: {error}",
                "this is a fault of ckptguard; set CKPTGUARD_TRACEBACK=1, run it again and report what it prints",
            ),
            as_json,
        )


def parsed(convert: Callable[[str], Any], text: str | None, option: str) -> Any:
    """The value of an option by a converter of `ckptguard.units`, or UsageError naming the option."""
    if text is None:
        return None
    try:
        return convert(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
