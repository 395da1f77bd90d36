"""Every sink against a real receiver on this machine; one that fails raises, so that the outbox tries again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ckptguard.alerts import open_sink
from ckptguard.alerts._base import SinkError
from ckptguard.errors import UsageError

ALERT = {
    "schema": 1,
    "key": "runs/a:checkpoint-20",
    "state": "firing",
    "severity": "error",
    "run": "runs/a",
    "checkpoint": "runs/a/checkpoint-20",
    "code": "crc-mismatch",
    "title": "checkpoint-20 of runs/a is unsafe",
    "message": "optimizer.pt: CRC differs",
    "hint": "ckptguard preflight runs/a",
    "first_seen": "2026-01-01T00:00:00Z",
    "work_at_risk": {
        "steps": 12,
        "seconds": 90.0,
        "gpu_hours": 0.2,
        "newest_safe": "runs/a/checkpoint-10",
        "evidence": "content",
    },
    "url": "http://127.0.0.1:8437/checkpoints/2",
}


class Receiver:
    """A real HTTP server that keeps what it was sent and answers with `status`."""

    def __init__(self) -> None:
        self.got: list[tuple[str, object]] = []
        self.status = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((self.path, json.loads(body)))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    it = Receiver()
    yield it
    it.server.shutdown()
    it.server.server_close()


def test_a_webhook_gets_the_alert_as_it_is(receiver: Receiver) -> None:
    open_sink(f"{receiver.url}/hook").send(ALERT)
    assert receiver.got == [("/hook", ALERT)]


def test_the_alertmanager_gets_its_own_form_and_an_end_when_resolved(receiver: Receiver) -> None:
    sink = open_sink(f"alertmanager:{receiver.url}/")
    sink.send(ALERT)
    sink.send({**ALERT, "state": "resolved"})
    (path, [firing]), (_, [resolved]) = receiver.got
    assert path == "/api/v2/alerts"
    assert firing["labels"]["alertname"] == "crc-mismatch"
    assert firing["labels"] == resolved["labels"]
    assert firing["annotations"]["work_at_risk"].startswith(
        "12 steps, 1 min 30 s, 0.2 GPU-hours; since runs/a/"
    )
    assert firing["endsAt"] > resolved["endsAt"] > firing["startsAt"]


def test_apprise_delivers_to_its_services(receiver: Receiver) -> None:
    open_sink(receiver.url.replace("http://", "json://")).send(ALERT)
    (_, body), *_ = receiver.got
    assert body["title"] == "ERROR checkpoint-20 of runs/a is unsafe"
    assert "do: ckptguard preflight runs/a" in body["message"]


@pytest.mark.parametrize("form", ["{}/secret", "alertmanager:{}", "json:{}"])
def test_a_refusal_raises_and_names_no_secret(receiver: Receiver, form: str) -> None:
    receiver.status = 500
    url = receiver.url.removeprefix("http:") if form.startswith("json") else receiver.url
    with pytest.raises(SinkError) as caught:
        open_sink(form.format(url)).send(ALERT)
    assert "secret" not in caught.value.message


def test_nobody_there_raises(receiver: Receiver) -> None:
    receiver.server.shutdown()
    receiver.server.server_close()
    with pytest.raises(SinkError, match=r"127\.0\.0\.1: ConnectError"):
        open_sink(f"{receiver.url}/secret").send(ALERT)


def test_a_file_gets_one_line_an_alert_and_a_full_disk_raises(tmp_path) -> None:
    path = tmp_path / "deep" / "alerts.jsonl"
    sink = open_sink(f"file:{path}")
    sink.send(ALERT)
    sink.send({**ALERT, "state": "resolved", "title": "line\nbreak"})
    assert [json.loads(line)["state"] for line in path.read_text().splitlines()] == ["firing", "resolved"]
    with pytest.raises(SinkError, match="No space left"):
        open_sink("file:/dev/full").send(ALERT)


def test_stderr_says_what_it_costs_and_what_to_do(capsys) -> None:
    open_sink("stderr").send(ALERT)
    text = capsys.readouterr().err
    assert text.startswith("ALERT ERROR checkpoint-20 of runs/a is unsafe\n")
    assert "at risk: 12 steps" in text
    assert "do: ckptguard preflight runs/a" in text


@pytest.mark.parametrize("spec", ["nonsense", "file:", "alertmanager:localhost", "no-such-service://token"])
def test_what_is_no_sink_is_refused_without_repeating_it(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_sink(spec)
    assert "token" not in caught.value.message
