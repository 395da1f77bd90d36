"""The configuration of the service: frozen models, unknown keys refused; the only reader of files and environment.

A YAML file is optional: `ckptguard serve RUN` works with the defaults below. `${NAME}` inside a value is replaced by
the environment variable NAME, so that no secret needs to stand in a file.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from ckptguard.errors import ConfigError
from ckptguard.model import Evidence, Severity
from ckptguard.units import parse_duration, parse_size

Seconds = Annotated[float, BeforeValidator(parse_duration)]
Bytes = Annotated[int, BeforeValidator(parse_size)]
# One run has one name: with a slash at its end it would be a second one.
Target = Annotated[str, Field(min_length=1), AfterValidator(lambda path: path.rstrip("/") or path)]
DEPTHS = (Evidence.LISTING, Evidence.STRUCTURE, Evidence.CONTENT)
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RunSettings(_Model):
    """One run to watch. All but `path` is optional and only sharpens what is said of it."""

    path: Target = Field(description="directory or s3://bucket/prefix")
    name: str | None = Field(default=None, description="how pages and alerts call it")
    total_steps: int | None = Field(
        default=None, gt=0, description="planned steps: tells a finished run from a stopped one"
    )
    gpus: int | None = Field(default=None, gt=0, description="turns lost hours into lost GPU-hours")
    recipe: str | None = Field(default=None, description="FILE.py:NAME, for restore validation")
    command: str | None = Field(
        default=None, description="the training command, for restore validation without a recipe"
    )
    metrics: str | None = Field(
        default=None, description="the log that the command writes, relative to {out}"
    )
    replicate_to: str | None = Field(default=None, description="where each safe checkpoint is copied to")
    keep: int | None = Field(
        default=None, gt=0, description="what the training's own rotation keeps (save_total_limit)"
    )


class WatchSettings(_Model):
    """How often a run is listed. File events make it faster where the file system has them."""

    every: Seconds = Field(default=5.0, gt=0)
    quiet_every: Seconds = Field(
        default=60.0, gt=0, description="for runs whose file events arrive, as a safety net"
    )
    events: bool = Field(default=True, description="use file events where the file system has them")
    settle: Seconds = Field(default=3.0, description="a checkpoint unchanged for so long may be complete")
    stall_after: Seconds = Field(
        default=600.0, gt=0, description="a save that did not grow for so long is stalled"
    )


class AuditSettings(_Model):
    """How new checkpoints are proven, and how often all of them again."""

    depth: Evidence = Evidence.CONTENT
    again_every: Seconds = Field(
        default=7 * 86400.0, gt=0, description="the deep audit of everything that is kept"
    )
    max_rate: Bytes | None = Field(default=None, gt=0)
    timeout: Seconds = Field(default=6 * 3600.0, gt=0)

    @model_validator(mode="after")
    def _reachable(self) -> AuditSettings:
        if self.depth not in DEPTHS:
            raise ValueError(f"depth must be one of {', '.join(DEPTHS)}; restores have their own section")
        return self


class ScrubSettings(_Model):
    """Every byte of every kept checkpoint is read again within `within`, at `max_rate` at most."""

    within: Seconds = Field(default=14 * 86400.0, gt=0)
    max_rate: Bytes = Field(default=50_000_000, gt=0)
    every: Seconds = Field(default=3600.0, gt=0, description="how often a portion is read")


class RestoreSettings(_Model):
    """Restore validation on a schedule, for the runs that have a recipe or a command."""

    every: Seconds = Field(default=86400.0, gt=0)
    pick: Literal["newest", "random", "every-nth"] = "newest"
    window: Seconds = Field(default=7 * 86400.0, gt=0, description="for random: how far back")
    nth: int = Field(
        default=10, gt=0, description="for every-nth: each Nth checkpoint of a run, as it appears"
    )
    steps: int = Field(default=8, gt=0)
    timeout: Seconds = Field(default=3600.0, gt=0)
    max_memory: Bytes | None = Field(default=None, gt=0)
    device: str = "auto"
    at_once: int = Field(default=1, gt=0)


class ReplicateSettings(_Model):
    """Copies of each new safe checkpoint, for the runs that name `replicate_to`."""

    max_rate: Bytes | None = Field(default=None, gt=0)
    timeout: Seconds = Field(default=6 * 3600.0, gt=0)
    late_after: Seconds = Field(default=3600.0, gt=0, description="a copy that is not there by then is late")


class PruneSettings(_Model):
    """Rotation by ckptguard. Off unless this section is there; plans only, unless `apply`."""

    every: Seconds = Field(default=86400.0, gt=0)
    options: tuple[str, ...] = Field(
        default=(), description="options of `ckptguard prune`, such as --keep-last 5"
    )
    apply: bool = False
    timeout: Seconds = Field(default=3600.0, gt=0)


class AlertSettings(_Model):
    """One sink, and what is routed to it."""

    sink: SecretStr
    name: str | None = Field(
        default=None, description="what health and pages call it; the URL itself is never shown"
    )
    severity: Severity = Severity.WARNING
    runs: tuple[str, ...] = Field(default=("*",), description="glob patterns of run paths or names")
    codes: tuple[str, ...] = ("*",)


class PolicySettings(_Model):
    """When a departure from a run's own habits becomes an alert, and how often it is said again."""

    remind_every: Seconds = Field(default=6 * 3600.0, gt=0)
    slow_factor: float = Field(default=3.0, gt=1, description="a save slower than so many times the usual")
    slow_seconds: Seconds = Field(default=10.0, description="and by at least so much")
    size_factor: float = Field(
        default=1.5, gt=1, description="a checkpoint so many times heavier or lighter than usual"
    )
    missed_factor: float = Field(
        default=2.0, gt=1, description="no save for so many of the usual intervals, while training"
    )
    missed_seconds: Seconds = Field(default=60.0, description="and later than due by at least so much")
    stopped_after: Seconds = Field(
        default=900.0, gt=0, description="a training that stopped with unsaved work"
    )
    saves_ahead: int = Field(default=3, gt=0, description="free space must last for so many saves")
    silence: Mapping[str, str] = Field(default_factory=dict, description="CODE: REASON@YYYY-MM-DD")

    @model_validator(mode="after")
    def _until_a_day(self) -> PolicySettings:
        for code, entry in self.silence.items():
            try:
                date.fromisoformat(entry.rpartition("@")[2] if "@" in entry else "")
            except ValueError:
                raise ValueError(f"silence.{code}: expected REASON@YYYY-MM-DD") from None
        return self

    def silent(self, code: str, today: date) -> bool:
        """Whether a code is silenced on a day."""
        until = self.silence.get(code, "").rpartition("@")[2]
        return bool(until) and today <= date.fromisoformat(until)


class ServerSettings(_Model):
    host: str = "127.0.0.1"
    port: int = Field(default=8437, ge=0, le=65535)
    token: SecretStr | None = Field(
        default=None, description="needed for write calls; and for all, unless on loopback"
    )
    url: str | None = Field(
        default=None, description="the address that people reach the pages at; goes into alerts"
    )


class Settings(_Model):
    """All of it."""

    runs: tuple[RunSettings, ...] = ()
    discover: tuple[str, ...] = Field(
        default=(), description="glob patterns; each directory that matches is a run"
    )
    db: SecretStr | None = Field(
        default=None, description="SQLAlchemy URL; default: SQLite in the user's state directory"
    )
    at_once: int = Field(default=2, gt=0, description="how many jobs work at the same time")
    follow_every: Seconds = Field(default=10.0, gt=0, description="how often the metric logs are read")
    retention: Seconds = Field(
        default=180 * 86400.0, gt=0, description="how long history is kept; the newest of each is"
    )
    watch: WatchSettings = WatchSettings()
    audit: AuditSettings = AuditSettings()
    scrub: ScrubSettings | None = ScrubSettings()
    restore: RestoreSettings = RestoreSettings()
    replicate: ReplicateSettings = ReplicateSettings()
    prune: PruneSettings | None = None
    alerts: tuple[AlertSettings, ...] = (AlertSettings(sink=SecretStr("stderr")),)
    policy: PolicySettings = PolicySettings()
    server: ServerSettings = ServerSettings()

    @model_validator(mode="after")
    def _one_run_once(self) -> Settings:
        paths = [run.path for run in self.runs]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        if twice:
            raise ValueError(f"runs: {twice[0]} is listed twice")
        return self


def load(path: Path, environment: Mapping[str, str] | None = None) -> Settings:
    """The settings in a YAML file. Raises ConfigError that names the file, the line and what is wrong there."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error
    return parse(text, str(path), os.environ if environment is None else environment)


class _Unset(dict[str, str]):
    """An environment in which a variable that is not set has a value that suits everywhere."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> str:
        return "1"


def load_policy(path: Path) -> PolicySettings:
    """The policy in a YAML file, for whoever has not the secrets that the rest of it names. Raises ConfigError as `load` does."""
    return load(path, _Unset(os.environ)).policy


def parse(text: str, name: str, environment: Mapping[str, str]) -> Settings:
    """The settings in YAML text. Raises ConfigError as `load` does."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from error
    lines: dict[tuple[str | int, ...], int] = {}
    try:
        values = _plain(node, (), lines, environment) if node is not None else {}
    except _Wrong as wrong:
        raise ConfigError(f"{name}:{wrong.line}: {wrong}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name}:1: expected keys such as `runs:`", "see configs/team.yaml for an example")
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problems = [_explain(problem, name, lines) for problem in error.errors()]
        raise ConfigError("\n".join(problems), "every key is described in docs/service.md") from None


class _Wrong(Exception):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


def _plain(
    node: yaml.Node,
    at: tuple[str | int, ...],
    lines: dict[tuple[str | int, ...], int],
    environment: Mapping[str, str],
) -> Any:
    """The node as plain data; remembers on which line each value stands."""
    line = node.start_mark.line + 1
    lines.setdefault(at, line)
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in values:
                raise _Wrong(key_node.start_mark.line + 1, f"{key!r} stands here twice")
            lines[(*at, key)] = key_node.start_mark.line + 1
            values[key] = _plain(value_node, (*at, key), lines, environment)
        return values
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*at, place), lines, environment) for place, item in enumerate(node.value)]
    value = yaml.SafeLoader("").construct_object(node, deep=True)
    if isinstance(value, str):
        return _expand(value, line, environment)
    return value if isinstance(value, int | float | bool) or value is None else str(node.value)


def _expand(value: str, line: int, environment: Mapping[str, str]) -> str:
    for variable in _VARIABLE.findall(value):
        if variable not in environment:
            raise _Wrong(line, f"the environment variable {variable} is not set")
    return _VARIABLE.sub(lambda match: environment[match[1]], value)


def _explain(problem: Any, name: str, lines: Mapping[tuple[str | int, ...], int]) -> str:
    """One line for the reader. The input is never repeated: it may be a secret."""
    at = tuple(problem["loc"])
    line = next((lines[at[:length]] for length in range(len(at), -1, -1) if at[:length] in lines), 1)
    where = ".".join(str(part) for part in at)
    if problem["type"] == "extra_forbidden":
        known = ", ".join(sorted(_keys(at[:-1]))) or "none"
        return f"{name}:{line}: unknown key {at[-1]!r}; known here: {known}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{name}:{line}: {where}: {message}" if where else f"{name}:{line}: {message}"


def _keys(at: tuple[str | int, ...]) -> Iterator[str]:
    """The keys that the model at a place has."""
    model: Any = Settings
    for part in at:
        if isinstance(part, int):
            continue
        found = list(_models(model.model_fields[part].annotation)) if part in model.model_fields else []
        if not found:
            return
        model = found[0]
    yield from model.model_fields


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models(inner)


# --- environment and state directory ------------------------------------------------------------------


def state_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Where the service keeps what is its own: `$CKPTGUARD_STATE`, else below the user's XDG state directory."""
    known = os.environ if environment is None else environment
    if known.get("CKPTGUARD_STATE"):
        return Path(known["CKPTGUARD_STATE"])
    base = known.get("XDG_STATE_HOME") or str(
        Path(known.get("HOME") or "~").expanduser() / ".local" / "state"
    )
    return Path(base) / "ckptguard"


def database_url(settings: Settings, environment: Mapping[str, str] | None = None) -> str:
    """The catalog's URL: the configuration's, `$CKPTGUARD_DB`, else SQLite in the state directory."""
    known = os.environ if environment is None else environment
    if settings.db is not None:
        return settings.db.get_secret_value()
    if known.get("CKPTGUARD_DB"):
        return known["CKPTGUARD_DB"]
    return f"sqlite:///{(state_directory(known) / 'catalog.db').absolute()}"


def server_token(settings: Settings, environment: Mapping[str, str] | None = None) -> str:
    """The token of the API: the configuration's, `$CKPTGUARD_TOKEN`, else one made once and kept for the user alone."""
    known = os.environ if environment is None else environment
    if settings.server.token is not None and settings.server.token.get_secret_value():
        return settings.server.token.get_secret_value()
    if known.get("CKPTGUARD_TOKEN"):
        return known["CKPTGUARD_TOKEN"]
    path = token_file(known)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text(encoding="ascii").strip()
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(32))
    return path.read_text(encoding="ascii").strip()


def token_is_given(settings: Settings, environment: Mapping[str, str] | None = None) -> bool:
    """Whether somebody chose the token: one that we made is known to this user alone."""
    known = os.environ if environment is None else environment
    chosen = settings.server.token is not None and settings.server.token.get_secret_value() != ""
    return chosen or bool(known.get("CKPTGUARD_TOKEN"))


def token_file(environment: Mapping[str, str] | None = None) -> Path:
    return state_directory(environment) / "token"
