"""A repository is judged from its headers: nothing but the ranges that are needed crosses the wire."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
import pytest
from checkpoint_kit import Make, converted
from huggingface_hub import constants

from sglang_dspark.checkpoints.doctor import examine, subject
from sglang_dspark.checkpoints.hub import HubRepo
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.checkpoints.targets import read_target
from sglang_dspark.errors import InputError

COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """Serves folders as repositories of one commit; counts the bytes of content that it sends."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Path] = {}
        self.sent: dict[str, int] = {}
        self.ranges = True
        self.status = 200


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        hub, parts = self.server, urlsplit(self.path).path.strip("/").split("/")
        if hub.status != 200:
            return self.answer(hub.status, b"{}")
        if parts[0] == "api":
            folder = hub.repos.get("/".join(parts[2:4]))
            if folder is None:
                return self.answer(404, b"{}")
            files = [{"rfilename": f.name, "size": f.stat().st_size} for f in folder.iterdir() if f.is_file()]
            return self.answer(200, json.dumps({"id": "x", "sha": COMMIT, "siblings": files}).encode())
        assert parts[2:4] == ["resolve", COMMIT]
        data = (hub.repos["/".join(parts[:2])] / parts[4]).read_bytes()
        first, last = (int(n) for n in self.headers["Range"].removeprefix("bytes=").split("-"))
        part = data[first : last + 1] if hub.ranges else data
        hub.sent[parts[4]] = hub.sent.get(parts[4], 0) + len(part)
        self.answer(206 if hub.ranges else 200, part)

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except ConnectionError:
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.hf_api, "ENDPOINT", address, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    yield server
    server.shutdown()
    server.server_close()


def test_a_pair_is_judged_from_headers(hub: Hub, make: Make, target: Path) -> None:
    folder = make(vocab_size=20_000)
    (target / "config.json").write_text((target / "config.json").read_text().replace(": 64", ": 20000"))
    hub.repos = {"me/draft": folder, "me/target": target}
    draft = read_draft(HubRepo("me/draft"))
    report = examine(subject(draft, read_target(HubRepo("me/target"))))
    local = examine(subject(read_draft(folder), read_target(target)))
    assert [(f.check, f.state) for f in report.findings] == [(f.check, f.state) for f in local.findings]
    assert report.sound and draft.name == f"me/draft@{COMMIT}"
    weights = (folder / "model.safetensors").read_bytes()
    assert hub.sent["model.safetensors"] == 8 + int.from_bytes(weights[:8], "little") < len(weights) / 100


def test_a_gguf_is_judged_from_its_header(hub: Hub, make: Make, tmp_path: Path) -> None:
    folder = converted(make(vocab_size=40_000), "gguf", tmp_path / "g")
    hub.repos = {"me/gguf": folder}
    draft = read_draft(HubRepo("me/gguf"))
    assert draft.config() == read_draft(folder).config()
    assert hub.sent["g.gguf"] < (folder / "g.gguf").stat().st_size / 2


def test_weights_can_be_read_in_parts(hub: Hub, make: Make) -> None:
    folder = make()
    hub.repos = {"me/draft": folder}
    theirs = read_draft(HubRepo("me/draft")).tensors["fc.weight"].rows(3, 7)
    assert theirs.equal(read_draft(folder).tensors["fc.weight"].rows(3, 7))


def test_a_hub_without_ranges_never_sends_more_than_is_kept(hub: Hub, make: Make) -> None:
    hub.repos, hub.ranges = {"me/draft": make()}, False
    with pytest.raises(InputError, match=r"does not serve parts of me/draft/model\.safetensors"):
        len(read_draft(HubRepo("me/draft")).tensors)


@pytest.mark.parametrize(
    ("repo", "status", "words"),
    [
        ("me/absent", 200, "refused me/absent \\(HTTP 404\\)"),
        ("me/draft", 401, "HTTP 401"),
        ("me/draft", 503, "HTTP 503"),
        ("not an id", 200, "cannot be a hub id"),
    ],
)
def test_refusals_are_one_sentence(repo: str, status: int, words: str, hub: Hub, make: Make) -> None:
    hub.repos, hub.status = {"me/draft": make()}, status
    with pytest.raises(InputError, match=words) as error:
        read_draft(HubRepo(repo))
    assert "\n" not in str(error.value)


def test_a_hub_that_is_not_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.shutdown()
    hub.server_close()
    with pytest.raises(InputError, match="cannot be reached for me/draft"):
        read_draft(HubRepo("me/draft"))
