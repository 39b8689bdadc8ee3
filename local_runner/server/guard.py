"""Who may ask: the key, the names that this server goes by, and what a page of another site cannot send unasked."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from local_runner.server.refusal import Refused

OPEN = "/health"
"""The route that needs no key."""


class Guard:
    """ASGI middleware.

    With a key every route but `/health` asks for it. `hosts` are the names in the header Host that are answered, or
    None for all: on loopback that keeps out pages whose own name was made to point here. A POST must be JSON, which
    pages of other sites cannot send unless their origin is allowed.
    """

    def __init__(self, app: ASGIApp, api_key: str | None = None, hosts: frozenset[str] | None = None) -> None:
        self._app, self._hosts = app, hosts
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or say why not."""
        refused = self._refusal(scope) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse(refused.body(), refused.status, refused.headers)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        if self._hosts is not None and _name(headers.get("host", "")) not in self._hosts:
            return Refused("This server does not go by that name; ask it as localhost.", status=403)
        kind, _, given = headers.get("authorization", "").partition(" ")
        knows = self._key is None or (
            kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._key)
        )
        if not knows and scope["path"] != OPEN:
            message = "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'."
            return Refused(message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] == "POST" and headers.get("content-type", "").split(";")[0].strip() != "application/json":
            return Refused("The request must have the content type application/json.", status=415)
        return None


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
