"""The routes and what stands before them, without a browser."""

import base64
import json
import re
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from local_runner.options import Settings
from ui import routes, sources
from ui.app import HEAD, application
from ui.messages import Message
from ui.service import Service
from ui.sources import Local

KIT = runpy.run_path(str(Path(__file__).with_name("fake_demo.py")))
SETTINGS = Settings(max_new_tokens=24)
RACE = {"kind": "race", "conversation": [{"role": "user", "content": "Why <script>is</script> the sky blue?"}]}
HOST = "http://127.0.0.1"


def basic(user_and_password: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(user_and_password.encode()).decode()}"}


def follow(client: TestClient, id_: str, after: int = 0, **headers: str) -> list[Message]:
    """The run's messages, as its stream delivers them until it ends."""
    messages: list[Message] = []
    with client.stream("GET", f"/dspark/runs/{id_}/events", params={"after": after}, headers=headers) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in answer.iter_lines():
            name = line.removeprefix("event: ") if line.startswith("event: ") else name
            if line.startswith("data: ") and not name:
                messages += json.loads(line.removeprefix("data: "))
    assert name == "end"
    return messages


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    engine = KIT["fake_engine"]()
    monkeypatch.setattr(sources, "open_engine", lambda settings, say, **options: (engine, "fake-pair"))
    monkeypatch.setattr(sources, "_fetch", lambda settings, run: None)
    made = Service(Local(SETTINGS))
    yield made
    made.close()


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(application(service, SETTINGS), base_url=HOST) as made:
        yield made


def test_a_run_is_asked_for_followed_and_exported(client: TestClient) -> None:
    id_ = client.post("/dspark/runs", json=RACE).json()["id"]
    messages = follow(client, id_)
    assert [m["state"] for m in messages if m["type"] == "state"][-1] == "finished"
    assert next(m for m in messages if m["type"] == "verdict")["identical"] is True
    jsonl = client.get(f"/dspark/runs/{id_}/run.jsonl")
    lines = [json.loads(line) for line in jsonl.text.splitlines()]
    assert lines[0]["type"] == "run" and lines == messages[messages.index(lines[0]) :]
    page = client.get(f"/dspark/runs/{id_}/run.html")
    assert "DSparkView" in page.text and "<script>is</script>" not in page.text
    assert "Why <script>is</script> the sky" in client.get(f"/dspark/runs/{id_}/run.txt").text
    for answer, kind in ((jsonl, "jsonl"), (page, "html")):
        assert answer.headers["content-disposition"] == f'attachment; filename="dspark-run.{kind}"'
    assert client.get(f"/dspark/runs/{id_}/run.exe").status_code == 404


def test_a_stream_goes_on_where_it_was_cut(client: TestClient) -> None:
    id_ = client.post("/dspark/runs", json=RACE).json()["id"]
    messages = follow(client, id_)
    assert follow(client, id_, after=5) == messages[5:]
    assert follow(client, id_, **{"Last-Event-ID": "7"}) == messages[7:]
    assert follow(client, id_, **{"Last-Event-ID": "seven"}) == messages


def test_what_is_wrong_is_a_sentence(client: TestClient) -> None:
    answer = client.post("/dspark/runs", json=RACE | {"temperature": -2})
    assert answer.status_code == 400 and answer.json() == {"error": "'temperature' must be a number from 0 to 5."}
    for body, says in ((b"{", "not JSON"), (b"[" * 100_000, "not JSON"), (b'"' + b"x" * 10**6, "longer than")):
        answer = client.post("/dspark/runs", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and says in answer.json()["error"]
    assert client.get("/dspark/runs/unknown/events").status_code == 404
    assert client.post("/dspark/runs/unknown/cancel").status_code == 404
    assert client.get("/dspark/assets/..%2fapp.py").status_code == 404


def test_other_pages_cannot_ask_for_runs(client: TestClient) -> None:
    body = json.dumps(RACE)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert client.post("/dspark/runs", content=body, headers={"Content-Type": kind}).status_code == 415
    assert client.get("/dspark/machine", headers={"Host": "evil.example"}).status_code == 400
    assert client.get("/", headers={"Host": "evil.example:80"}).status_code == 400
    answer = client.options("/dspark/runs", headers={"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


GUARDED = [
    ("GET", "/"),
    ("GET", "/config"),
    ("GET", "/gradio_api/info"),
    ("GET", "/dspark/machine"),
    ("GET", "/dspark/assets/page.js"),
    ("POST", "/dspark/runs"),
    ("GET", "/dspark/runs/x/events"),
    ("POST", "/dspark/runs/x/cancel"),
    ("GET", "/dspark/runs/x/run.html"),
]


def test_a_password_guards_every_route(service: Service) -> None:
    right = "ada:sécret:1"
    wrong = ({}, basic("ada:secret"), basic("ada"), {"Authorization": "Basic %%"}, {"Authorization": "Bearer x"})
    with TestClient(application(service, SETTINGS, auth=right), base_url=HOST) as client:
        for method, path in GUARDED:
            for headers in wrong:
                answer = client.request(method, path, headers=headers)
                assert answer.status_code == 401 and "Basic" in answer.headers["www-authenticate"], path
            assert client.request(method, path, headers=basic(right)).status_code != 401, path


def test_every_answer_forbids_other_hosts(client: TestClient) -> None:
    for path in ("/", "/theme.css", "/dspark/assets/view.js", "/dspark/machine"):
        policy = client.get(path).headers["content-security-policy"]
        assert policy.startswith("default-src 'self'") and "http" not in policy


def test_the_page_names_no_other_host_in_what_it_loads(client: TestClient) -> None:
    tags = r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=[\"']([^\"']+)"
    own = re.findall(tags, HEAD)
    assert len(own) == len(routes.ASSETS)
    loaded = re.findall(tags, client.get("/").text) + own
    assert not [url for url in loaded if "//" in url]
    theme = client.get("/theme.css").text
    assert not re.search(r"""url\((?!["']?data:)|@import""", theme)
    for name in routes.ASSETS:
        text = client.get(f"/dspark/assets/{name}").text
        assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text), name


def test_prompts_reach_the_page_as_they_are(client: TestClient) -> None:
    id_ = client.post("/dspark/runs", json=RACE).json()["id"]
    run = next(m for m in follow(client, id_) if m["type"] == "run")
    assert run["prompt"] == RACE["conversation"][0]["content"]


def test_cancelling(service: Service, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, decode = threading.Event(), service.source.run
    monkeypatch.setattr(service.source, "run", lambda run: (go_on.wait(60), decode(run)))
    ids = [client.post("/dspark/runs", json=RACE).json()["id"] for _ in range(3)]
    assert client.post(f"/dspark/runs/{ids[2]}/cancel").status_code == 204
    assert [m["state"] for m in follow(client, ids[2])][-1] == "cancelled"
    go_on.set()
    assert [m["state"] for m in follow(client, ids[1]) if m["type"] == "state"][-1] == "finished"


BLOCKED = """
import socket, sys
class Refused(Exception): pass
def refuse(*args, **kwargs): raise Refused(args)
connect = socket.socket.connect
def local_only(self, address):
    host = address[0] if isinstance(address, tuple) else "127.0.0.1"
    if host not in ("127.0.0.1", "::1"):
        print("CONNECTED TO", address, flush=True)
        refuse(address)
    return connect(self, address)
socket.socket.connect = local_only
lookup = socket.getaddrinfo
def local_lookup(host, *args, **kwargs):
    if host not in ("127.0.0.1", "localhost", "::1", None):
        print("LOOKED UP", host, flush=True)
        refuse(host)
    return lookup(host, *args, **kwargs)
socket.getaddrinfo = local_lookup
"""


def test_the_program_makes_no_request_of_its_own() -> None:
    script = BLOCKED + (
        "from starlette.testclient import TestClient\n"
        "from local_runner.options import Settings\n"
        "from ui.app import application\nfrom ui.service import Service\nfrom ui.sources import Recorded\n"
        "service = Service(Recorded())\n"
        "with TestClient(application(service, Settings()), base_url='http://127.0.0.1') as client:\n"
        "    assert client.get('/').status_code == 200\n"
        "import time; time.sleep(1.5)\n"  # what is sent from a thread gets its chance
        "service.close(); print('quiet')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["quiet"], done.stdout + done.stderr


def test_the_first_answer_is_quick(client: TestClient) -> None:
    """Well below the 2 s of the first paint, of which the browser needs most."""
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        assert client.get("/").status_code == 200
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.5


def test_words_are_the_same_in_both_languages() -> None:
    from ui.words import table

    english, korean = table()["en"], table()["ko"]
    assert list(english) == list(korean)
    for name, text in english.items():
        names: list[Any] = [sorted(re.findall(r"\{(\w+)", t)) for t in (text, korean[name])]
        assert names[0] == names[1], name
