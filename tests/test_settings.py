"""The configuration: what is refused, and that the error names the line."""

from __future__ import annotations

import pytest

from ckptguard.errors import ConfigError
from ckptguard.model import Severity
from ckptguard.settings import Settings, database_url, parse, server_token
from ckptguard.units import duration, parse_duration, parse_size, size

FULL = """\
runs:
  - path: /runs/a
    total_steps: 1000
    gpus: 8
db: postgresql+psycopg://u:${PASSWORD}@db/ckptguard
watch:
  every: 2s
scrub:
  within: 7d
  max_rate: 20MB
alerts:
  - sink: https://hooks.example/x
    severity: error
"""


def test_a_full_file_is_read_with_its_units_and_secrets() -> None:
    settings = parse(FULL, "c.yaml", {"PASSWORD": "hush"})
    assert settings.runs[0].gpus == 8
    assert settings.watch.every == 2.0
    assert settings.scrub is not None
    assert (settings.scrub.within, settings.scrub.max_rate) == (604800.0, 20_000_000)
    assert settings.alerts[0].severity is Severity.ERROR
    assert database_url(settings, {}) == "postgresql+psycopg://u:hush@db/ckptguard"
    assert "hush" not in repr(settings)
    assert "hooks.example" not in repr(settings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs: []\nwatsch: {}\n", r"c\.yaml:2: unknown key 'watsch'; known here: .*watch"),
        ("watch:\n  every: 5s\n  evry: 5s\n", r"c\.yaml:3: unknown key 'evry'; known here: events, every"),
        ("runs:\n  - path: a\n  - pth: b\n", r"c\.yaml:3: (unknown key 'pth'|runs\.1\.path: Field required)"),
        ("watch:\n  every: soon\n", r"c\.yaml:2: watch\.every: expected a duration like 90s"),
        (
            "audit:\n\n  depth: replayed\n",
            r"c\.yaml:\d: audit: depth must be one of listing, structure, content",
        ),
        ("db: ${NOT_SET}\n", r"c\.yaml:1: the environment variable NOT_SET is not set"),
        ("a: 1\na: 2\n", r"c\.yaml:2: 'a' stands here twice"),
        ("runs: [\n", r"c\.yaml:2: not YAML"),
        ("- a\n", r"c\.yaml:1: expected keys"),
        (
            "policy:\n  silence:\n    odd-size: because\n",
            r"c\.yaml:\d: policy: silence\.odd-size: expected REASON@",
        ),
        ("runs: [{path: a}, {path: a}]\n", r"c\.yaml:1: runs: a is listed twice"),
        ("runs: [{path: a}, {path: a/}]\n", r"c\.yaml:1: runs: a is listed twice"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse(text, "c.yaml", {})


def test_an_error_never_repeats_a_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("server:\n  port: hush-hush\n  token: [hush-hush]\n", "c.yaml", {})
    assert "hush-hush" not in caught.value.message


def test_an_empty_file_is_the_defaults() -> None:
    assert parse("", "c.yaml", {}) == Settings()


def test_a_token_is_made_once_and_only_for_the_user(tmp_path) -> None:
    environment = {"CKPTGUARD_STATE": str(tmp_path / "state")}
    first = server_token(Settings(), environment)
    assert first == server_token(Settings(), environment)
    assert (tmp_path / "state" / "token").stat().st_mode & 0o077 == 0
    assert server_token(Settings(), {"CKPTGUARD_TOKEN": "mine"}) == "mine"


def test_units_are_read_and_written() -> None:
    assert [parse_duration(t) for t in ("90", "15m", "1.5h", "7d")] == [90, 900, 5400, 604800]
    assert [parse_size(t) for t in ("10", "4GiB", "50 MB")] == [10, 4 << 30, 50_000_000]
    assert [duration(s) for s in (0, 0.03, 200, 90061)] == ["0 s", "30 ms", "3 min 20 s", "1 d 1 h"]
    assert [size(n) for n in (999, 1.5e9)] == ["999 B", "1.5 GB"]
    for wrong in ("soon", "-5s", "5 parsecs", "nan"):
        with pytest.raises(ValueError, match="expected a duration"):
            parse_duration(wrong)
