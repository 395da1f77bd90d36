"""Who may ask what: hosts, tokens, sizes, and the headers of every answer."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "ckptguard_session"
MOST_BYTES = 64 << 10
MOST_QUERY = 8 << 10
READING = ("GET", "HEAD")
FREE = ("/healthz", "/login", "/static/")
"""Answered without a token everywhere: they tell nothing of any run."""

HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    # Not no-referrer: a form's Origin would be null then, and could not be told from another site's.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
)


def is_loopback(host: str) -> bool:
    """Whether a host name or address leads to this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def session_of(token: str) -> str:
    """What a browser keeps instead of the token: proves it, and is not it."""
    return hmac.new(token.encode(), b"ckptguard session", hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Policy:
    """`open_reading`: read calls need no token (we listen on this machine only). `hosts`: names that we answer to, () for any."""

    token: str
    open_reading: bool
    hosts: tuple[str, ...] = ()

    def is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.strip().encode(), self.token.encode())

    def proves(self, headers: Headers) -> str | None:
        """How a request proves that it knows the token: bearer, cookie, or not at all."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.is_token(given):
            return "bearer"
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return None
        held = cookies[COOKIE].value if COOKIE in cookies else ""
        if hmac.compare_digest(held.encode(), session_of(self.token).encode()):
            return "cookie"
        return None


class Guard:
    """Wraps the whole application, so that no route can be forgotten."""

    def __init__(self, app: ASGIApp, policy: Policy) -> None:
        self.app = app
        self.policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = self._refused(scope)
        if refused is not None:
            await _answer(send, *refused)
            return
        await self.app(scope, _bounded(receive), _with_headers(send, scope["path"]))

    def _refused(self, scope: Scope) -> tuple[int, str, str] | None:
        """(status, code, message) when the request must not go on."""
        headers = Headers(scope=scope)
        policy = self.policy
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        if policy.hosts and host not in policy.hosts and not is_loopback(host):
            # A page elsewhere whose name was made to lead here must not read what is here.
            return 421, "denied", "this address does not answer to that name"
        if (
            len(scope["query_string"]) > MOST_QUERY
            or b"%00" in scope["query_string"]
            or "\0" in scope["path"]
        ):
            return 400, "usage", "the request cannot be understood"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            return 413, "usage", f"a body may have {MOST_BYTES} bytes"
        if scope["path"].startswith(FREE):
            return None if self._from_here(headers, host) else (403, "denied", "sent from another site")
        proof = policy.proves(headers)
        if scope["method"] in READING:
            if proof is None and not policy.open_reading:
                return 401, "denied", "a token is needed: Authorization: Bearer TOKEN, or sign in at /login"
            return None
        if proof is None:
            return (
                401,
                "denied",
                "write calls need the token: Authorization: Bearer TOKEN, or sign in at /login",
            )
        if proof == "cookie" and not self._from_here(headers, host):
            return 403, "denied", "sent from another site"
        return None

    def _from_here(self, headers: Headers, host: str) -> bool:
        """Whether a browser says that one of our own pages sent this (a client that is no browser says nothing)."""
        site = headers.get("sec-fetch-site")
        if site is not None and site not in ("same-origin", "none"):
            return False
        origin = headers.get("origin")
        return origin is None or urlsplit(origin).hostname == host


def _bounded(receive: Receive) -> Receive:
    """A body that lies about its length, or states none, is cut off all the same."""
    seen = 0

    async def bounded() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MOST_BYTES:
            return {"type": "http.disconnect"}
        return message

    return bounded


def _with_headers(send: Send, path: str) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            cache = b"public, max-age=3600" if path.startswith("/static/") else b"no-store"
            message["headers"] = [*message["headers"], *HEADERS, (b"cache-control", cache)]
        await send(message)

    return sending


async def _answer(send: Send, status: int, code: str, message: str) -> None:
    body = json.dumps({"schema": 1, "error": {"code": code, "message": message, "hint": ""}}).encode()
    headers: Iterable[tuple[bytes, bytes]] = (
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *(((b"www-authenticate", b"Bearer"),) if status == 401 else ()),
        *HEADERS,
    )
    start: Mapping[str, object] = {"type": "http.response.start", "status": status, "headers": list(headers)}
    await send(dict(start))
    await send({"type": "http.response.body", "body": body})
