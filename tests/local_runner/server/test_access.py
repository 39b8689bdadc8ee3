"""Who may ask, how much, and in which form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from local_runner.server import app
from local_runner.server.guard import Guard

from .conftest import Running, user

Serve = Callable[..., Running]


def test_a_key_is_asked_for_everywhere_but_at_health(serve: Serve, engine: Any) -> None:
    running = serve(engine, api_key="secret")
    wrong: list[dict[str, str]] = [
        {}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Bearer secrets"},
    ]  # fmt: skip
    for headers in wrong:
        for path in ("/v1/models", "/dspark/snapshot", "/dspark/rounds", "/nowhere"):
            refused = running.http.get(path, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        body = {"messages": [user("hi")]}
        assert running.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 401
    assert running.http.get("/health").json() == {"status": "ok"}
    right = running.client.with_options(api_key="secret")
    assert right.chat.completions.create(model="default", messages=[user("hi")]).choices and len(engine.requests) == 1


def test_the_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("local_runner.server.guard.hmac.compare_digest", compare)
    guard = Guard(app=None, api_key="secret")  # type: ignore[arg-type]
    scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": [(b"authorization", b"Bearer s\xe9")]}
    assert guard._refusal(scope) is not None and compared == [("sé".encode(), b"secret")]


def test_other_names_are_not_answered(serve: Serve, engine: Any) -> None:
    running = serve(engine, hosts=frozenset({"localhost", "127.0.0.1", "::1"}))
    for host, status in (
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("[", 403),
    ):
        assert running.http.get("/health", headers={"Host": host}).status_code == status, host


def test_pages_of_other_sites_need_leave(serve: Serve, engine: Any) -> None:
    closed, opened = serve(engine), serve(engine, origins=["http://page.example"], api_key="secret")
    asking = {
        "Origin": "http://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    for running, allowed in ((closed, None), (opened, "http://page.example")):
        leave = running.http.options("/v1/chat/completions", headers=asking)
        assert leave.headers.get("access-control-allow-origin") == allowed
        assert leave.is_success == (allowed is not None)
    other = opened.http.options("/v1/chat/completions", headers=asking | {"Origin": "http://evil.example"})
    assert other.status_code == 400
    said = opened.http.get("/v1/models", headers={"Origin": "http://page.example", "Authorization": "Bearer secret"})
    assert said.headers["access-control-allow-origin"] == "http://page.example"
    # A form of another site can be sent without leave, but not as JSON.
    body = '{"messages": [{"role": "user", "content": "hi"}]}'
    form = closed.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "text/plain"})
    assert form.status_code == 415 and engine.requests == []


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}", b"{} {}"])
def test_what_is_not_json_is_refused(running: Running, body: bytes) -> None:
    refused = post(running, body)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_json"


def test_what_is_no_object_is_refused(running: Running) -> None:
    for body in (b"[]", b"1", b"null", b'"a"'):
        assert post(running, body).status_code == 400


def test_large_bodies_are_refused_however_they_come(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LARGEST_BODY", 1000)
    assert post(running, b'{"user": "' + b"a" * 1000 + b'"}').status_code == 413
    read = []

    def endless() -> Any:
        for _ in range(10_000):
            read.append(1)
            yield b" " * 100_000

    with contextlib.suppress(httpx.TransportError):  # the server hangs up on who does not stop
        assert post(running, endless()).status_code == 413
    assert len(read) < 10_000


def test_errors_of_routes_have_openais_shape(running: Running) -> None:
    for method, path, status in (("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)):
        refused = running.http.request(method, path)
        assert refused.status_code == status
        assert refused.json()["error"].keys() == {"message", "type", "param", "code"}


def post(running: Running, content: Any) -> httpx.Response:
    return running.http.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})
