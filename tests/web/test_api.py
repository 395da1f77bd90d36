"""The API and its guard, asked over real HTTP: what is answered, what is refused, and that nothing leaks."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from ckptguard.testing_service import TOKEN, ServeProcess, until

WITH_TOKEN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def client(served: ServeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=10) as it:
        yield it


def get(client: httpx.Client, path: str) -> Any:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_run_says_what_is_at_risk_in_the_contracts_words(client: httpx.Client) -> None:
    (run,) = get(client, "/api/v1/runs")["items"]
    assert run == get(client, f"/api/v1/runs/{run['id']}")
    assert set(run["work_at_risk"]) == {"steps", "seconds", "gpu_hours", "newest_safe", "evidence"}
    assert run["work_at_risk"]["steps"] == 10
    assert run["work_at_risk"]["newest_safe"].endswith("/step_20.pt")
    assert run["resume_from"] == run["newest_safe"]
    assert run["checkpoints"] == {"exact": 2, "unsafe": 1}


def test_lists_are_paged_filtered_and_complete(client: httpx.Client) -> None:
    seen: list[int] = []
    cursor = ""
    while True:
        page = get(client, f"/api/v1/checkpoints?limit=1{cursor}")
        seen += [item["id"] for item in page["items"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert sorted(seen) == sorted(c["id"] for c in get(client, "/api/v1/checkpoints")["items"])
    (bad,) = get(client, "/api/v1/checkpoints?resume=unsafe&run=1")["items"]
    assert [
        f["code"] for f in get(client, f"/api/v1/findings?checkpoint={bad['id']}&severity=error")["items"]
    ] == ["crc-mismatch"]
    assert get(client, f"/api/v1/checkpoints/{bad['id']}")["findings"][-1]["effect"] in ("unsafe", "none")
    assert get(client, "/api/v1/checkpoints?since=2100-01-01T00:00:00Z")["items"] == []
    assert get(client, "/api/v1/checkpoints?run=99")["items"] == []


def test_the_alert_of_the_api_is_the_alert_that_was_sent(client: httpx.Client, served: ServeProcess) -> None:
    (alert,) = get(client, "/api/v1/alerts?state=firing")["items"]
    (sent,) = served.sent()
    same = set(sent) - {"work_at_risk"}
    assert {name: alert[name] for name in same} == {name: sent[name] for name in same}
    assert sent["url"] == f"{served.url}/checkpoints/{alert['checkpoint_id']}"
    assert httpx.get(sent["url"]).status_code == 200


def test_a_configured_job_runs_by_name_with_the_token_and_nothing_else_does(client: httpx.Client) -> None:
    assert client.post("/api/v1/jobs", json={"name": "scrub"}).status_code == 401
    assert (
        client.post(
            "/api/v1/jobs", json={"name": "scrub"}, headers={"Authorization": "Bearer no"}
        ).status_code
        == 401
    )
    answer = client.post("/api/v1/jobs", json={"name": "scrub"}, headers=WITH_TOKEN)
    assert answer.status_code == 202
    job = answer.json()["id"]
    until(lambda: get(client, f"/api/v1/jobs/{job}")["state"] == "done", 20, "it is done")
    assert client.post(f"/api/v1/jobs/{job}/cancel", headers=WITH_TOKEN).status_code == 409
    for body, status in (
        ({"name": "rm-rf"}, 404),
        ({"name": "audit"}, 422),
        ({"name": "audit", "run": 99}, 404),
        ({"name": "scrub", "recipe": "evil.py:go"}, 422),
        ({"name": "../../etc/passwd"}, 422),
    ):
        answer = client.post("/api/v1/jobs", json=body, headers=WITH_TOKEN)
        assert (answer.status_code, answer.json()["schema"]) == (status, 1), body


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("GET", "/static/../app.py", {}, None, 404),
        ("GET", "/static/%2e%2e/app.py", {}, None, 404),
        ("GET", "/static/..%2f..%2fsettings.py", {}, None, 404),
        ("GET", "/api/v1/runs/../../etc/passwd", {}, None, 404),
        ("GET", "/api/v1/runs/99999999999999999999999", {}, None, 422),
        ("GET", "/api/v1/checkpoints?resume=' or 1=1 --", {}, None, 422),
        ("GET", "/api/v1/findings?code=%00", {}, None, 400),
        ("GET", "/api/v1/runs?cursor=abc", {}, None, 422),
        ("GET", "/api/v1/runs?limit=100000", {}, None, 422),
        ("GET", "/api/v1/runs?" + "x" * 9000, {}, None, 400),
        ("GET", "/", {"Host": "evil.example"}, None, 421),
        ("POST", "/api/v1/jobs", WITH_TOKEN, b"x" * 70_000, 413),
        ("POST", "/api/v1/jobs", WITH_TOKEN, b"\xff\xfe{", 422),
        ("POST", "/api/v1/jobs", WITH_TOKEN, b"[" * 5000, 422),
        ("POST", "/login", {"Origin": "http://evil.example"}, b"token=x", 403),
        ("POST", "/login", {"Sec-Fetch-Site": "cross-site"}, b"token=x", 403),
        ("DELETE", "/api/v1/runs/1", WITH_TOKEN, None, 405),
        ("PUT", "/api/v1/runs/1", {}, None, 401),
    ],
)  # fmt: skip
def test_what_should_not_be_asked_is_refused_with_a_document(
    client: httpx.Client, method: str, path: str, headers: dict[str, str], body: bytes | None, status: int
) -> None:
    answer = client.request(method, path, headers=headers, content=body)
    assert answer.status_code == status, answer.text
    if answer.headers["content-type"] == "application/json":
        assert answer.json()["error"]["code"] in ("usage", "denied", "not-found")


def test_a_body_that_lies_about_its_length_is_cut_off(served: ServeProcess) -> None:
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(
            b"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
            + f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
        )
        try:
            for _ in range(40):
                connection.sendall(b"1000\r\n" + b"a" * 0x1000 + b"\r\n")
            status = connection.recv(100)
        except OSError:
            status = b""
    assert b" 202 " not in status
    assert b" 500 " not in status
    assert served.get("/healthz")["status"] == "ok"


def test_a_session_needs_our_own_page_and_is_not_the_token(client: httpx.Client) -> None:
    answer = client.post("/login", data={"token": TOKEN, "next": "//evil.example"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert TOKEN not in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    held = {"Cookie": cookie.split(";")[0]}
    assert client.post("/jobs/run", data={"name": "housekeeping"}, headers=held).status_code == 303
    foreign = {**held, "Origin": "http://evil.example"}
    assert client.post("/jobs/run", data={"name": "housekeeping"}, headers=foreign).status_code == 403


def test_no_answer_shows_a_secret(client: httpx.Client, served: ServeProcess) -> None:
    for path in (
        "/",
        "/jobs",
        "/alerts",
        "/healthz",
        "/metrics",
        "/api/v1/runs",
        "/api/v1/jobs",
        "/openapi.json",
        "/login",
    ):
        answer = client.get(path)
        assert answer.status_code == 200
        assert TOKEN not in answer.text
        assert "catalog.db" not in answer.text
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_health_says_ok_and_the_openapi_names_every_route(client: httpx.Client) -> None:
    assert get(client, "/healthz") == {"status": "ok", "problems": []}
    assert set(get(client, "/openapi.json")["paths"]) == {
        "/healthz", "/metrics", "/api/v1/runs", "/api/v1/runs/{id}", "/api/v1/checkpoints", "/api/v1/checkpoints/{id}",
        "/api/v1/findings", "/api/v1/restores", "/api/v1/jobs", "/api/v1/jobs/{id}", "/api/v1/jobs/{id}/cancel",
        "/api/v1/alerts",
    }  # fmt: skip


def test_away_from_loopback_nothing_is_told_without_a_token(tmp_path, served: ServeProcess) -> None:
    config = {"runs": [{"path": str(tmp_path)}], "server": {"host": "0.0.0.0"}}
    with ServeProcess(tmp_path / "state", config) as open_wide:
        url = open_wide.url.replace("0.0.0.0", "127.0.0.1")
        for path in ("/", "/runs/1", "/api/v1/runs", "/metrics", "/openapi.json"):
            assert httpx.get(url + path).status_code == 401, path
            assert httpx.get(url + path, headers=WITH_TOKEN).status_code in (200, 404), path
        for path in ("/healthz", "/login", "/static/style.css"):
            assert httpx.get(url + path).status_code == 200, path


def test_listening_elsewhere_without_a_chosen_token_is_refused(tmp_path) -> None:
    config = {"runs": [{"path": str(tmp_path)}], "server": {"host": "0.0.0.0"}}
    process = ServeProcess(tmp_path / "state", config, environment={"CKPTGUARD_TOKEN": ""})
    with pytest.raises(AssertionError, match=r"listening on 0\.0\.0\.0 needs a token"):
        process.start()
    assert process.stop() == 2
    assert json.loads(process.config.read_text())["server"] == {"host": "0.0.0.0"}
