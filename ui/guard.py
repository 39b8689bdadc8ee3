"""What stands before every route, the page's and Gradio's alike: a password where one is wanted, and strict headers."""

from __future__ import annotations

import base64
import binascii
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Gradio's page has inline scripts and styles, and makes functions of the handlers that run in the browser.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'self'; "
    "form-action 'self'"
)


class Guard:
    """ASGI middleware. `auth` is USER:PASSWORD for HTTP's basic authentication, or None."""

    def __init__(self, app: ASGIApp, auth: str | None = None) -> None:
        self._app, self._auth = app, auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass requests on, with the headers on their answers; those without the password get 401."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        if self._auth is None or self._knows(Headers(scope=scope).get("authorization", "")):
            await self._app(scope, receive, with_headers)
        else:
            challenge = {"WWW-Authenticate": 'Basic realm="DSpark", charset="UTF-8"'}
            await PlainTextResponse("A user and a password are needed.", 401, challenge)(scope, receive, with_headers)

    def _knows(self, header: str) -> bool:
        kind, _, encoded = header.partition(" ")
        try:
            given = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            return False
        return kind.lower() == "basic" and secrets.compare_digest(given, (self._auth or "").encode())
