import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from local_runner.options import Settings
from sglang_dspark.errors import InputError
from ui import service as module
from ui.ask import Ask
from ui.service import Run, Service

ASK = Ask("race", Settings(), ({"role": "user", "content": "hello"},))


class Steps:
    """A source that does a step each time it is let, and says who is running."""

    name = "steps"

    def __init__(self) -> None:
        self.running: list[Run] = []
        self.steps = threading.Semaphore(0)
        self.fails: Exception | None = None

    def run(self, run: Run) -> None:
        self.running.append(run)
        for step in range(3):
            while not self.steps.acquire(timeout=0.01):
                if run.cancelled.is_set():
                    return
            if self.fails:
                raise self.fails
            run.tell({"type": "step", "step": step, "of": run.ask.prompt})

    def machine(self) -> dict[str, Any]:
        return {}


def asked(text: str) -> Ask:
    return Ask("race", Settings(), ({"role": "user", "content": text},))


def until(condition: Callable[[], Any], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never"
        time.sleep(0.005)


def states(run: Run) -> list[tuple[str, int | None]]:
    return [(m["state"], m["position"]) for m in run.after() if m["type"] == "state"]


@pytest.fixture
def source() -> Steps:
    return Steps()


@pytest.fixture
def service(source: Steps) -> Iterator[Service]:
    made = Service(source)
    yield made
    made.close()


def test_visitors_wait_in_order_and_are_told_their_place(service: Service, source: Steps) -> None:
    runs = [service.submit(asked("a"))]
    until(lambda: source.running)
    runs += [service.submit(asked(text)) for text in "bc"]
    assert [states(run) for run in runs] == [[], [("queued", 1)], [("queued", 2)]]
    for _ in range(3):
        source.steps.release()
    until(lambda: len(source.running) == 2)
    assert source.running == runs[:2]
    assert states(runs[2])[-1] == ("queued", 1)
    for _ in range(6):
        source.steps.release()
    until(runs[2].done.is_set)
    assert [states(run)[-1][0] for run in runs] == ["finished"] * 3


def test_visitors_read_their_own_runs_only(service: Service, source: Steps) -> None:
    runs = [service.submit(asked(text)) for text in "ab"]
    for _ in range(6):
        source.steps.release()
    until(runs[1].done.is_set)
    for run, text in zip(runs, "ab", strict=True):
        steps = [m for m in run.after() if m["type"] == "step"]
        assert [(m["step"], m["of"]) for m in steps] == [(0, text), (1, text), (2, text)]
    assert runs[0].id != runs[1].id and len(runs[0].id) >= 24


def test_a_running_run_is_cancelled_between_steps(service: Service, source: Steps) -> None:
    first, second = service.submit(ASK), service.submit(ASK)
    source.steps.release()
    until(lambda: any(m["type"] == "step" for m in first.after()))
    service.cancel(first)
    until(first.done.is_set)
    assert states(first)[-1][0] == "cancelled"
    assert sum(m["type"] == "step" for m in first.after()) == 1
    until(lambda: source.running[-1] is second)


def test_a_waiting_run_frees_its_place_at_once(service: Service, source: Steps) -> None:
    first = service.submit(ASK)
    until(lambda: source.running)
    second, third = service.submit(ASK), service.submit(ASK)
    service.cancel(second)
    assert second.done.is_set() and states(second)[-1][0] == "cancelled"
    assert states(third) == [("queued", 2), ("queued", 1)]
    service.cancel(first)
    until(lambda: source.running[-1] is third)
    assert second not in source.running


def test_the_run_of_a_closed_page_is_cancelled(
    service: Service, source: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, stays = service.submit(ASK), service.submit(ASK)
    monkeypatch.setattr(module, "ABANDONED_S", 0.2)
    with stays.reader():
        with left.reader():
            time.sleep(1.3)
            assert not left.cancelled.is_set()
        until(left.done.is_set)
        assert states(left)[-1][0] == "cancelled" and not stays.cancelled.is_set()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (InputError("The prompt is too long; shorten it."), "The prompt is too long; shorten it."),
        (ValueError("/secret/path"), "Something went wrong inside (ValueError); the terminal shows where."),
    ],
)
def test_an_error_is_a_sentence_and_the_next_run_goes_on(
    service: Service, source: Steps, error: Exception, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source.fails = error
    failed = service.submit(ASK)
    source.steps.release()
    until(failed.done.is_set)
    assert failed.after()[-1] | {"text": text, "state": "error"} == failed.after()[-1]
    source.fails = None
    following = service.submit(ASK)
    for _ in range(3):
        source.steps.release()
    until(following.done.is_set)
    assert states(following)[-1][0] == "finished"


def test_what_a_message_takes_to_make_waits_until_it_is_read() -> None:
    run, made = Run(ASK), []
    run.tell({"type": "first"})
    run.tell(lambda: made.append(1) or [{"type": "second"}])
    run.tell({"type": "third"})
    assert not made
    assert [m["type"] for m in run.after()] == ["first", "second", "third"]
    assert [m["type"] for m in run.after(2)] == ["third"] and run.after(9) == []
    assert made == [1]


def test_memory_is_bounded(service: Service, source: Steps) -> None:
    for _ in range(module.KEPT_RUNS * 3):
        source.steps.release(3)
        last = service.submit(ASK)
        until(last.done.is_set)
    kept = [id_ for id_ in service._runs if service.find(id_)]
    assert len(kept) <= module.KEPT_RUNS + 1 and service.find(last.id) is last


def test_a_run_that_is_read_and_a_recording_are_kept(service: Service, source: Steps) -> None:
    recording = service.keep([{"type": "run"}], Settings())
    source.steps.release(3)
    read = service.submit(ASK)
    with read.reader():
        for _ in range(module.KEPT_RUNS + 3):
            source.steps.release(3)
            until(service.submit(ASK).done.is_set)
        assert service.find(read.id) is read
    assert service.find(recording.id) is recording


def test_too_many_are_told_to_come_back(service: Service, source: Steps) -> None:
    service.submit(ASK)
    until(lambda: source.running)
    for _ in range(module.MOST_WAITING):
        service.submit(ASK)
    with pytest.raises(InputError, match="waiting already; try again"):
        service.submit(ASK)


def test_following_a_run_costs_decoding_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker adds to a round is one append: two orders below the 3 % of a round of 5 ms that it may be."""
    run = Run(ASK)
    began = time.perf_counter()
    for _ in range(10_000):
        run.tell(lambda: [{"type": "round"}])
    assert (time.perf_counter() - began) / 10_000 < 0.03 * 0.005
