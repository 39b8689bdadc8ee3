"""The watchdog stops a run with a reason, on fake roots and on a real process that is short of memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from local_runner.placement.plan import Thresholds
from local_runner.watchdog import Watchdog

GIB = 1 << 30
CALM = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


class Host:
    """A fake root that changes while it is watched."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/pressure").mkdir(parents=True)
        self.set()

    def set(self, available: float = 50, swap_free: float = 8, pressure: str = CALM) -> None:
        rows = {"MemTotal": 120, "MemAvailable": available, "SwapTotal": 8, "SwapFree": swap_free}
        text = "".join(f"{k}: {int(v * GIB) >> 10} kB\n" for k, v in rows.items())
        (self.root / "proc/meminfo").write_text(text)
        (self.root / "proc/pressure/memory").write_text(pressure)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def watch(host: Host) -> Watchdog:
    return Watchdog(Thresholds(available=6 * GIB), threading.Event(), root=host.root, every_s=0.005)


def test_a_calm_host_is_left_alone(host: Host) -> None:
    dog = watch(host)
    assert dog.check() and dog.check()
    assert not dog.cancelled.is_set() and dog.reason == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"available": 5.5}, "5632 MiB of memory are left, below the 6144 MiB kept free"),
        ({"swap_free": 7.5}, "512 MiB went to swap"),
        ({"pressure": CALM.replace("full avg10=0.00", "full avg10=11.50")}, "all tasks waited for memory 12 %"),
        ({"pressure": CALM.replace("some avg10=0.00", "some avg10=55.00")}, "tasks waited for memory 55 %"),
    ],
)
def test_each_threshold_stops_with_its_reason(host: Host, changes: dict[str, float | str], said: str) -> None:
    dog = watch(host)
    assert dog.check()
    host.set(**changes)  # type: ignore[arg-type]
    assert not dog.check()
    assert dog.cancelled.is_set() and said in dog.reason and "dspark plan" in dog.reason


def test_swap_that_was_used_before_is_no_reason(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.set(swap_free=1)
    assert watch(host).check()


def test_a_roomy_control_group_does_not_hide_the_host(host: Host) -> None:
    """What a device allocates on unified memory is in no control group: the host's own figure has to be seen."""
    group = host.root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (host.root / "proc/self").mkdir()
    (host.root / "proc/self/mountinfo").write_text("31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n")
    (host.root / "proc/self/cgroup").write_text("0::/\n")
    (group / "memory.max").write_text(str(100 * GIB))
    (group / "memory.current").write_text(str(GIB))
    dog = watch(host)
    assert dog.check()
    host.set(available=3)
    assert not dog.check()


def test_the_first_reason_stays(host: Host) -> None:
    dog = watch(host)
    host.set(available=1)
    assert not dog.check()
    reason = dog.reason
    host.set()
    assert not dog.check() and dog.reason == reason


def test_the_thread_watches_and_ends(host: Host) -> None:
    with watch(host) as dog:
        host.set(available=1)
        assert dog.cancelled.wait(5)
    assert dog.reason and threading.active_count() >= 1
    assert not any(t.name == "memory watchdog" for t in threading.enumerate())


def test_it_ends_with_decoding_where_nothing_happened(host: Host) -> None:
    with watch(host) as dog:
        pass
    assert not dog.cancelled.is_set()
    assert not any(t.name == "memory watchdog" for t in threading.enumerate())


GREEDY = """
import sys, threading
from local_runner.placement.plan import Thresholds
from local_runner.watchdog import Watchdog

cancelled = threading.Event()
taken = []
with Watchdog(Thresholds(available=128 << 20), cancelled, every_s=0.005) as dog:
    while not cancelled.is_set():
        block = bytearray(4 << 20)
        block[::4096] = b"x" * len(block[::4096])
        taken.append(block)
        cancelled.wait(0.01)
print(len(taken), dog.reason)
"""


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="limits of a process are read from /proc")
def test_a_process_short_of_memory_stops_cleanly_before_it_is_refused() -> None:
    """Under a real limit on its data it takes memory without end, and ends in its own time with the reason."""
    import resource

    limit = 512 << 20
    result = subprocess.run(
        [sys.executable, "-c", GREEDY],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        env={"PATH": "", "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    blocks, reason = result.stdout.split(" ", 1)
    assert 0 < int(blocks) < 128, "stopped before the limit"
    assert "MiB of memory are left, below the 128 MiB kept free" in reason
