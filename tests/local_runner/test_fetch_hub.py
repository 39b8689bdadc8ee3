"""Hub repositories, against a stand-in hub on loopback: pinned by the first pull, verified, refused in one sentence."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

REPO = Path(__file__).parents[2]
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": hashlib.sha256(b"weights").digest() * 20_000,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"a pickle",
    "modeling_tiny.py": b"print('code')",
    "README.md": b"# Tiny",
}
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
BIG = "model.safetensors"


class Hub(ThreadingHTTPServer):
    """Serves one repository, tiny/model, whose branch is at `main`; `refuse` answers all that is asked of its API."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: dict[str, dict[str, bytes]] = {"a" * 40: dict(FILES)}
        self.main = "a" * 40
        self.refuse: tuple[int, str] | None = None
        self.lfs_lies = False
        self.requests: list[tuple[str, str, str | None]] = []
        self.half_sent, self.go_on = threading.Event(), threading.Event()
        self.stop_half_way = False

    def served(self) -> set[str]:
        """The files whose content was sent."""
        return {path.rsplit("/", 1)[1] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path}


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        hub, path = self.server, urlsplit(self.path).path
        hub.requests.append((self.command, path, self.headers.get("Range")))
        parts = path.strip("/").split("/")
        if path.startswith("/api/"):
            if hub.refuse:
                status, code = hub.refuse
                return self.answer(status, b'{"error": "no"}', {"X-Error-Code": code} if code else {})
            if len(parts) < 6:
                return self.answer(404, b"{}")
            revision = parts[5]
            commit = hub.main if revision == "main" else revision
            if commit not in hub.commits:
                return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            files = hub.commits[commit]
            if parts[4] == "revision":
                siblings = [{"rfilename": name, **self.meta(name, body)} for name, body in files.items()]
                info = {"id": "tiny/model", "sha": commit, "siblings": siblings}
                return self.answer(200, json.dumps(info).encode())
            tree = [{"type": "file", "path": name, **self.meta(name, body)} for name, body in files.items()]
            return self.answer(200, json.dumps(tree).encode())
        commit, name = parts[3], parts[4]
        body = hub.commits[commit][name]
        headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
        return self.answer(206 if begin else 200, body[begin:], headers, slow=name == BIG and hub.stop_half_way)

    do_HEAD = do_GET

    def meta(self, name: str, body: bytes) -> dict[str, object]:
        meta: dict[str, object] = {"size": len(body), "oid": "0" * 40, "blobId": "0" * 40}
        if name == BIG:
            digest = "0" * 64 if self.server.lfs_lies else hashlib.sha256(body).hexdigest()
            meta["lfs"] = {"size": len(body), "oid": digest, "sha256": digest, "pointerSize": 100}
        return meta

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, slow: bool = False) -> None:
        self.send_response(status)
        for key, value in {
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if slow:
            half = len(body) // 2
            self.wfile.write(body[:half])
            self.wfile.flush()
            self.server.half_sent.set()
            self.server.go_on.wait(30)
            body = body[half:]
        try:
            self.wfile.write(body)
        except ConnectionError:
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING_FACE", "HUGGINGFACE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.go_on.set()
    server.shutdown()
    server.server_close()


PROGRAM = """
import shutil, sys
from local_runner.store import resolve
from sglang_dspark.errors import InputError
{before}
try:
    print(resolve("tiny/model", may_pull={may_pull}).target_path)
except InputError as error:
    sys.exit(str(error))
"""


def start(may_pull: bool = True, before: str = "") -> subprocess.Popen[str]:
    """Resolve tiny/model in a program of its own, because the hub's address is read when its library is imported."""
    command = [sys.executable, "-c", PROGRAM.format(may_pull=may_pull, before=before)]
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(may_pull: bool = True, before: str = "") -> Path:
    process = start(may_pull, before)
    out, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    return Path(out.strip())


def refused(may_pull: bool = True, before: str = "") -> str:
    process = start(may_pull, before)
    out, errors = process.communicate(timeout=30)
    assert (process.returncode, out, errors.count("\n")) == (1, "", 1), errors
    return errors.strip()


def record(tmp_path: Path) -> Path:
    return tmp_path / "home" / "hub" / "tiny--model@main.json"


def test_the_first_pull_fetches_safe_files_and_records_what_it_got(tmp_path: Path, hub: Hub) -> None:
    folder = run()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {name: FILES[name] for name in WANTED}
    assert hub.served() == WANTED
    data = json.loads(record(tmp_path).read_text())
    assert data["commit"] == "a" * 40
    assert data["files"] == {
        name: {"size": len(FILES[name]), "sha256": hashlib.sha256(FILES[name]).hexdigest()} for name in WANTED
    }
    assert {path.suffix for path in record(tmp_path).parent.iterdir()} == {".json", ".lock"}


PULL_WITHOUT_WRITING = """
from local_runner import fetch_hub, pairs, progress
fetch_hub.writing = None
fetch_hub.fetch_hub(pairs.HubSource("MIT", "tiny/model", "main"), progress.silent)
"""


def test_once_fetched_the_hub_is_not_asked_and_nothing_is_written(hub: Hub) -> None:
    folder = run()
    hub.requests.clear()
    assert run(before=PULL_WITHOUT_WRITING) == folder and run(may_pull=False) == folder
    assert hub.requests == []


def test_a_branch_that_moves_does_not_move_the_pair(tmp_path: Path, hub: Hub) -> None:
    first = run()
    hub.commits["b" * 40] = {**FILES, BIG: b"other weights"}
    hub.main = "b" * 40
    (tmp_path / "hf").rename(tmp_path / "elsewhere")
    assert run() == first and first.name == "a" * 40
    assert (first / BIG).read_bytes() == FILES[BIG]


def test_other_content_under_the_recorded_commit_is_refused(tmp_path: Path, hub: Hub) -> None:
    folder = run()
    hub.commits["a" * 40]["config.json"] = b'{"model_type": "spoof"}'
    (tmp_path / "hf").rename(tmp_path / "elsewhere")
    assert "config.json of tiny/model at commit aaaa" in refused()
    assert not (folder / "config.json").exists()


def test_content_that_the_hub_itself_did_not_promise_is_refused(tmp_path: Path, hub: Hub) -> None:
    hub.lfs_lies = True
    assert "model.safetensors of tiny/model" in refused()
    assert not record(tmp_path).exists()


def test_a_damaged_file_is_noticed_and_fetched_again(hub: Hub) -> None:
    folder = run()
    (folder / "config.json").resolve().write_bytes(b"{}")
    hub.requests.clear()
    assert "config.json is missing or damaged" in refused(may_pull=False)
    assert run() == folder and (folder / "config.json").read_bytes() == FILES["config.json"]
    assert hub.served() == {"config.json"}


def test_what_is_not_fetched_is_not_fetched_unasked(hub: Hub) -> None:
    assert refused(may_pull=False) == "tiny/model has not been fetched; fetch it first, or pass a local folder."
    assert hub.requests == []


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (403, "GatedRepo", "tiny/model is gated; accept its terms"),
        (401, "RepoNotFound", "no repository tiny/model that you may read"),
        (404, "RepoNotFound", "no repository tiny/model that you may read"),
        (404, "RevisionNotFound", "tiny/model has no revision 'main'"),
        (403, "", "refused tiny/model (HTTP 403)"),
        (503, "", "refused tiny/model (HTTP 503)"),
    ],
)
def test_refusals_are_one_sentence(tmp_path: Path, hub: Hub, status: int, code: str, says: str) -> None:
    hub.refuse = (status, code)
    assert says in refused()
    assert not record(tmp_path).exists()


@pytest.mark.parametrize(("name", "value"), [("HF_ENDPOINT", "http://127.0.0.1:9"), ("HF_HUB_OFFLINE", "1")])
def test_no_network_is_one_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert "The hub cannot be reached for tiny/model" in refused()


def test_a_repository_of_pickles_is_refused(hub: Hub) -> None:
    del hub.commits["a" * 40][BIG]
    assert "holds no safetensors weights" in refused()
    assert hub.served() == set()


def test_too_little_room_is_said_beforehand(hub: Hub) -> None:
    before = "shutil.disk_usage = lambda path: type('Usage', (), {'free': 1000})()"
    assert "Fetching tiny/model needs 640.0 kB in" in refused(before=before)
    assert hub.served() == set()


def test_a_hub_cache_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    assert "The download of tiny/model stopped (NotADirectoryError" in refused()
    assert not record(tmp_path).exists()


def test_settings_that_cannot_be_read_are_one_sentence(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file" / "hf"))
    assert "The hub's settings cannot be read" in refused()


def test_a_broken_record_is_named(tmp_path: Path, hub: Hub) -> None:
    run()
    record(tmp_path).write_text('{"repo": 1}')
    assert refused() == f"{record(tmp_path)} is not a record of a pull; delete it and pull again."


@pytest.mark.parametrize("victim", ["program", "downloader"])
def test_an_interrupted_download_keeps_whole_files_and_no_halves(tmp_path: Path, hub: Hub, victim: str) -> None:
    hub.stop_half_way = True
    process = start()
    assert hub.half_sent.wait(20)
    (child,) = psutil.Process(process.pid).children()
    cache = tmp_path / "hf" / "hub" / "models--tiny--model"
    while {path.name for path in (cache / "snapshots" / hub.main).iterdir()} != WANTED - {BIG}:
        time.sleep(0.02)
    assert list((cache / "blobs").glob("*.incomplete"))
    if victim == "program":
        process.send_signal(signal.SIGINT)
    else:
        child.kill()
    _, errors = process.communicate(timeout=15)
    assert process.returncode != 0 and not child.is_running() and not record(tmp_path).exists()
    assert not list((cache / "blobs").glob("*.incomplete"))
    if victim == "downloader":
        assert errors.startswith("The download of tiny/model stopped (exit code -9)")
    hub.stop_half_way = False
    hub.go_on.set()
    hub.requests.clear()
    assert (run() / BIG).read_bytes() == FILES[BIG]
    assert hub.served() == {BIG}
    assert {path.suffix for path in record(tmp_path).parent.iterdir()} == {".json", ".lock"}
