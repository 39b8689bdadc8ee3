import json
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest

from local_runner.options import Settings
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.errors import InputError
from ui.ask import Ask
from ui.messages import lane_rounds, lane_text
from ui.remote import Remote, compare
from ui.service import Run

WORDS = ["The", " lamp", " turns", " 🌊", " <b>", " slowly", "."]


def rounds(name: str) -> list[Round]:
    """WORDS in three rounds: the first token, then three of a block of three, then two after a rejected draft."""
    return [
        Round(name, 0, 9, 1, (), (), 0, 0, 0, (0,), None, 0.0, 0.05),
        Round(name, 1, 10, 0, (1, 2, 3), (0.9, 0.8, 0.7), 3, 3, 4, (1, 2, 3, 4), None, 0.002, 0.02),
        Round(name, 2, 14, 4, (5, 5, 5), (0.9, 0.2, 0.1), 2, 1, 6, (5, 6), "eos", 0.002, 0.02),
    ]


class SGLang(ThreadingHTTPServer):
    """As much of a server as is asked. Its flags plant what a test wants to see found."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.asked: dict[str, Any] = {}
        self.came = threading.Condition()
        self.plugin = self.texts = self.logprobs = True
        self.status = 200
        self.words = WORDS
        self.hold = threading.Event()
        self.hold.set()
        self.bad_events = self.lost = False

    def handle_error(self, *args: Any) -> None:
        """A client that hangs up is what some tests are about."""


class Handler(BaseHTTPRequestHandler):
    server: SGLang

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/detokenize":
            self._send(json.dumps({"text": ["".join(WORDS[t] for t in ids) for ids in body["tokens"]]}).encode())
            return
        with self.server.came:
            self.server.asked[body["rid"]] = body
            self.server.came.notify_all()
        if self.server.status != 200:
            self.send_error(self.server.status)
            return
        self._events()
        for number, word in enumerate(self.server.words):
            last = number == len(WORDS) - 1
            choice: dict[str, Any] = {"delta": {"content": word}, "finish_reason": "stop" if last else None}
            if body.get("logprobs") and self.server.logprobs:
                choice["logprobs"] = {"content": [{"token": word, "logprob": -0.1}]}
            self._event({"choices": [choice]})
        self._event("[DONE]")

    def do_GET(self) -> None:
        path = urlparse(self.path)
        if path.path != "/dspark/rounds" or not self.server.plugin:
            self.send_error(404)
            return
        name = parse_qs(path.query)["request"][0]
        with self.server.came:
            self.server.came.wait_for(lambda: name in self.server.asked, timeout=5)
        self._events()
        if self.server.lost:
            self.wfile.write(b'event: dropped\ndata: {"rounds": 2}\n\n')
        for round_ in rounds(name):
            data: dict[str, Any] = asdict(round_)
            if self.server.texts:
                ghosts = [WORDS[t] for t in round_.drafted]
                data = {"round": data, "pieces": [WORDS[t] for t in round_.committed], "ghosts": ghosts}
            self._event({"round": {"accepted": "x"}} if self.server.bad_events else data)
            self.server.hold.wait(10)

    def _events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def _event(self, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[SGLang]:
    with SGLang() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.hold.set()
        made.shutdown()


def ask(kind: Any = "race", **settings: Any) -> Run:
    made = Settings(**{"max_new_tokens": 32, "seed": 4, **settings})
    return Run(Ask(kind, made, ({"role": "user", "content": "Tell me of the sea."},)))


def test_a_race_on_one_server(server: SGLang) -> None:
    run = ask()
    Remote(server.url + "/").run(run)
    messages = run.after()
    assert [Round.from_dict(m["round"]) for m in messages if m.get("lane") == "dspark" and m["type"] == "round"] == (
        rounds(run.id + "-dspark")
    )
    assert lane_text(messages, "plain") == lane_text(messages, "dspark") == "".join(WORDS)
    assert len(lane_rounds(messages, "plain")) == len(WORDS) and lane_rounds(messages, "plain")[-1].stop == "eos"
    assert messages[-1]["identical"] is True and messages[-1]["speedup"] > 0
    plain, dspark = server.asked[run.id + "-plain"], server.asked[run.id + "-dspark"]
    assert plain["custom_params"] == {"dspark": False} and "custom_params" not in dspark
    shared = {"max_tokens": 32, "temperature": 0.0, "seed": 4, "stream": True}
    for body in (plain, dspark):
        assert shared.items() <= body.items()
        assert body["messages"] == [{"role": "user", "content": "Tell me of the sea."}]


def test_a_plain_server_beside_it_is_asked_as_it_is(server: SGLang) -> None:
    run = ask()
    with SGLang() as beside:
        threading.Thread(target=beside.serve_forever, daemon=True).start()
        beside.plugin = False
        beside.words = [*WORDS[:3], " 🌊", " <i>", " slowly", "."]
        Remote(server.url, beside.url).run(run)
        assert list(server.asked) == [run.id + "-dspark"] and list(beside.asked) == [run.id + "-plain"]
        assert "custom_params" not in beside.asked[run.id + "-plain"]
        beside.shutdown()
    verdict = run.after()[-1]
    assert verdict["identical"] is False
    assert verdict["first_difference"] == {"position": 4, "margin": None, "noise": None, "numerics": False}


def test_rounds_without_texts_are_detokenised(server: SGLang) -> None:
    server.texts = False
    run = ask()
    Remote(server.url).run(run)
    assert lane_text(run.after(), "dspark") == "".join(WORDS)
    drafted = [m for m in run.after() if m["type"] == "round" and m["ghosts"]][-1]
    assert drafted["ghosts"] == [" slowly"] * 3


def test_a_stream_without_tokens_is_told_in_pieces_of_text(server: SGLang) -> None:
    server.logprobs = False
    run = ask()
    Remote(server.url).run(run)
    assert lane_text(run.after(), "plain") == "".join(WORDS) and run.after()[-1]["identical"] is True


def test_a_chat_has_one_lane(server: SGLang) -> None:
    run = ask("chat")
    Remote(server.url).run(run)
    assert list(server.asked) == [run.id + "-dspark"]
    assert {m["lane"] for m in run.after() if m["type"] == "round"} == {"dspark"}


def test_sampled_answers_are_not_compared(server: SGLang) -> None:
    run = ask(temperature=0.7)
    Remote(server.url).run(run)
    assert run.after()[-1]["identical"] is None


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        ({"plugin": False}, "has no DSpark round stream"),
        ({"status": 503}, "answered 503"),
        ({"lost": True}, "lost rounds before they could be read"),
        ({"bad_events": True}, "sent a round that cannot be read: 'accepted' must be"),
    ],
)
def test_what_the_server_lacks_is_one_sentence(server: SGLang, planted: dict[str, Any], says: str) -> None:
    for name, value in planted.items():
        setattr(server, name, value)
    with pytest.raises(InputError, match=says):
        Remote(server.url).run(ask("chat"))


def test_a_server_that_is_not_there_or_not_one() -> None:
    with pytest.raises(InputError, match="cannot be reached"):
        Remote("http://127.0.0.1:9").run(ask())
    with pytest.raises(InputError, match="cannot be reached"):
        Remote("not a url").run(ask())


def test_a_run_is_cancelled_without_waiting_for_the_server(server: SGLang) -> None:
    server.hold.clear()
    run = ask("chat")
    working = threading.Thread(target=Remote(server.url).run, args=(run,))
    working.start()
    while not any(m["type"] == "round" for m in run.after()):
        assert working.is_alive()
    run.cancelled.set()
    working.join(timeout=20)
    assert not working.is_alive()
    assert len([m for m in run.after() if m["type"] == "round"]) < 3


def test_comparing_texts_counts_plain_tokens() -> None:
    assert compare(["a", "bc"], ["ab", "c"]) == (True, None)
    assert compare(["a", "bc", "d"], ["ab", "x"])[1] == {
        "position": 1,
        "margin": None,
        "noise": None,
        "numerics": False,
    }
    same, difference = compare(["a", "b"], ["a"])
    assert not same and difference is not None and difference["position"] == 1
