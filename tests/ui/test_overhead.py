"""What the page takes from decoding: processor time, which other work on the machine does not change."""

import json
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from local_runner.options import Settings
from local_runner.pairs import DEFAULT_PAIR
from sglang_dspark.decoding.schedule import Fixed
from ui import sources
from ui.app import application
from ui.ask import Ask
from ui.service import Service
from ui.sources import Local

FAKE = runpy.run_path(str(Path(__file__).with_name("fake_demo.py")))["fake_engine"]
TOKENS = 300
ROUND_S = 0.005
"""A plain round of a model that decodes 200 tokens a second."""
MOST = 0.03
TRIES = 3
READER = """
import sys, urllib.request
urllib.request.install_opener(urllib.request.build_opener(urllib.request.ProxyHandler({})))
for line in urllib.request.urlopen(sys.argv[1]):
    if line.startswith(b"event: end"): print("read to its end")
"""


@pytest.fixture
def serve() -> Iterator[Callable[[Service], str]]:
    """serve(service): the address of the whole application."""
    stops: list[Callable[[], None]] = []

    def start(service: Service) -> str:
        config = uvicorn.Config(application(service, Settings()), port=0, log_config=None)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()

        def stop() -> None:
            service.close()
            server.should_exit = True
            thread.join(20)

        stops.append(stop)
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield start
    for stop in stops:
        stop()


def measure(engine: Any, service: Service, url: str) -> dict[str, float]:
    """Shares of the time of the rounds: of the deciding thread alone, and of all threads of the program."""
    telling = [0.0]

    def spent(call: Callable[..., Any]) -> float:
        began = time.process_time()
        call()
        return time.process_time() - began

    def decode_alone() -> None:
        decoding = settings.decoding()
        for lane in ("plain", "dspark"):
            rounds[lane] = list(engine.generate(decoding.request(engine, (20,), lane, lane)))

    def decode_for_the_page() -> None:
        run = service.submit(Ask("race", settings, ({"role": "user", "content": "x" * 20},)))
        tell = run.tell

        def timed(what: Any) -> None:
            began = time.thread_time()
            tell(what)
            telling[0] += time.thread_time() - began

        run.tell = timed  # type: ignore[method-assign]
        reader = [sys.executable, "-c", READER, f"{url}/dspark/runs/{run.id}/events"]
        with subprocess.Popen(reader, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.read() == "read to its end\n"

    settings = Settings(max_new_tokens=TOKENS)
    rounds: dict[str, list[Any]] = {}
    alone = spent(decode_alone)
    shown = spent(decode_for_the_page)
    decoded_s = ROUND_S * sum(map(len, rounds.values()))
    return {"between_rounds": telling[0] / decoded_s, "all_threads": max(0.0, shown - alone) / decoded_s}


def within(found: dict[str, float]) -> bool:
    return found["between_rounds"] <= MOST and found["all_threads"] / (os.cpu_count() or 1) <= MOST


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["scripted", "real"])
def test_a_page_that_watches_takes_3_percent_at_most(
    serve: Callable[[Service], str], monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    engine = FAKE(sleep_s=ROUND_S, plain_s=ROUND_S, dspark_s=ROUND_S)
    if tokenizer == "real":
        from local_runner.engines.text import TextStream
        from local_runner.engines.torch.load import load_tokenizer
        from local_runner.store import resolve_pair

        words = load_tokenizer(resolve_pair(DEFAULT_PAIR, may_pull=True).target_path)
        engine.decode = lambda ids: words.decode([500 + t for t in ids])
        engine.text_stream = lambda: TextStream(engine.decode)
    monkeypatch.setattr(sources, "open_engine", lambda settings, say, **options: (engine, "fake-pair"))
    monkeypatch.setattr(sources, "_fetch", lambda settings, run: None)
    service = Service(Local(Settings(schedule=str(Fixed()))))
    url = serve(service)
    measure(engine, service, url)
    for _ in range(TRIES):
        found = measure(engine, service, url)
        if within(found):
            break
    if folder := os.environ.get("DSPARK_RESULTS"):
        stored = {"round_s": ROUND_S, "tokens": TOKENS, "processors": os.cpu_count(), **found}
        Path(folder, f"ui_overhead_{tokenizer}.json").write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    assert within(found), found
