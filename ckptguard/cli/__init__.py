"""The commands, one a file. `main` builds the application from the modules of this folder."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import typer


def build_app() -> typer.Typer:
    """The application with every command of this folder."""
    app = typer.Typer(
        name="ckptguard",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Audits, restores and proves training checkpoints before you resume from them.\n\n"
        "Start with: ckptguard audit RUN   then: ckptguard preflight RUN",
    )

    @app.callback(invoke_without_command=True)
    def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        if version:
            from importlib.metadata import version as installed

            typer.echo(f"ckptguard {installed('ckptguard')}")
            raise typer.Exit

    for info in sorted(pkgutil.iter_modules(__path__), key=lambda i: i.name):
        if not info.name.startswith("_"):
            importlib.import_module(f"ckptguard.cli.{info.name}").register(app)
    return app


def main() -> None:
    """Entry point. Usage errors are error documents too, where --json was asked for."""
    try:
        sys.exit(build_app()(standalone_mode=False) or 0)
    except typer.Abort:
        print("ckptguard: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - whatever it is, the exit status must say so
        # Typer brings a click of its own in some versions: usage errors are told by what they can do.
        usage = hasattr(error, "format_message")
        message = str(error.format_message()) if usage else f"unforeseen {type(error).__name__}: {error}"  # type: ignore[attr-defined]
        hint = "ckptguard COMMAND --help shows what it takes" if usage else "is the installation whole?"
        if "--json" in sys.argv:
            from ckptguard.cli._output import emit_json

            code = "usage" if usage else "internal"
            emit_json({"schema": 1, "error": {"code": code, "message": message, "hint": hint}})
        print(f"ckptguard: {message}\n  {hint}", file=sys.stderr)
        sys.exit(2)  # a crash must read neither as a verdict nor as a fresh start
