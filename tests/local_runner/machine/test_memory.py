"""What containers, control groups and limits leave of the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from local_runner.machine.memory import Pressure, cgroups, memory, pressure

Tree = Callable[[dict[str, str]], Path]
GIB = 1 << 30
V2 = "31 23 0:28 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate\n"
V1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def host(total: int = 128, available: int = 100, swap_used: int = 0) -> dict[str, str]:
    free = 8 - swap_used
    rows = {"MemTotal": total, "MemFree": 2, "MemAvailable": available, "SwapTotal": 8, "SwapFree": free}
    return {"proc/meminfo": "".join(f"{k}:  {v * GIB >> 10} kB\n" for k, v in rows.items())}


def test_a_host_without_limits(tree: Tree) -> None:
    found = memory(tree(host(swap_used=3)))
    assert (found.total, found.available, found.host_available) == (128 * GIB, 100 * GIB, 100 * GIB)
    assert found.swap_used == 3 * GIB, "swap is told, and counts as memory nowhere"


def test_psutil_does_not_see_a_limit_far_above_us(tree: Tree) -> None:
    """Version 2: our own group has no limit, its grandparent has."""
    group = "sys/fs/cgroup/user.slice"
    root = tree(
        host()
        | {
            "proc/self/mountinfo": V2.format(top="/"),
            "proc/self/cgroup": "0::/user.slice/app/run\n",
            f"{group}/memory.max": f"{20 * GIB}\n",
            f"{group}/memory.high": "max\n",
            f"{group}/memory.current": f"{9 * GIB}\n",
            f"{group}/memory.stat": f"anon {5 * GIB}\ninactive_file {4 * GIB}\n",
            f"{group}/app/memory.max": "max\n",
            f"{group}/app/run/memory.max": "max\n",
        }
    )
    found = memory(root)
    assert found.total == 20 * GIB
    assert found.available == 15 * GIB, "of 9 GiB used, 4 are clean file pages that are given back"
    assert found.host_available == 100 * GIB


def test_the_tightest_of_several_groups_counts(tree: Tree) -> None:
    files = host() | {"proc/self/mountinfo": V2.format(top="/"), "proc/self/cgroup": "0::/a/b\n"}
    for name, limit, used in (("a", 30, 28), ("a/b", 10, 1)):
        files |= {
            f"sys/fs/cgroup/{name}/memory.max": str(limit * GIB),
            f"sys/fs/cgroup/{name}/memory.current": str(used * GIB),
        }
    root = tree(files)
    assert [g.limit // GIB for g in cgroups(root)] == [10, 30]
    assert memory(root).available == 2 * GIB, "the outer group is nearly full"
    assert memory(root).total == 10 * GIB


def test_memory_high_throttles_before_max(tree: Tree) -> None:
    group = "sys/fs/cgroup/job"
    files = {f"{group}/memory.max": str(50 * GIB), f"{group}/memory.high": str(8 * GIB), f"{group}/memory.current": "0"}
    root = tree(host() | {"proc/self/mountinfo": V2.format(top="/"), "proc/self/cgroup": "0::/job\n"} | files)
    assert memory(root).available == 8 * GIB


@pytest.mark.parametrize("path", ["/docker/abc", "/../../elsewhere", "/"])
def test_in_a_container_the_mount_is_a_part_of_the_tree(tree: Tree, path: str) -> None:
    """The path may be the host's, or lead out of the namespace: the mount itself is then what limits us."""
    files = {"sys/fs/cgroup/memory.max": str(6 * GIB), "sys/fs/cgroup/memory.current": str(GIB)}
    root = tree(
        host() | {"proc/self/mountinfo": V2.format(top="/docker/abc"), "proc/self/cgroup": f"0::{path}\n"} | files
    )
    assert memory(root).available == 5 * GIB


def test_version_1(tree: Tree) -> None:
    group = "sys/fs/cgroup/memory/docker/abc"
    root = tree(
        host()
        | {
            "proc/self/mountinfo": V1.format(top="/")
            + V1.replace("memory rw -", "cpu rw -").replace("rw,memory", "rw,cpu").format(top="/"),
            "proc/self/cgroup": "9:cpu:/docker/abc\n4:memory:/docker/abc\n0::/\n",
            f"{group}/memory.limit_in_bytes": str(12 * GIB),
            f"{group}/memory.usage_in_bytes": str(7 * GIB),
            f"{group}/memory.stat": f"cache {3 * GIB}\ntotal_inactive_file {2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        }
    )
    assert memory(root).available == 7 * GIB
    assert len(list(cgroups(root))) == 1, "a limit of about 2^63 is none"


def test_limits_of_the_process_itself_count(tree: Tree) -> None:
    limits = "Limit  Soft Limit  Hard Limit  Units\nMax data size  {0}  unlimited  bytes\n"
    limits += "Max address space  unlimited  unlimited  bytes\n"
    status = f"VmSize: {9 * GIB >> 10} kB\nVmData: {3 * GIB >> 10} kB\n"
    root = tree(host() | {"proc/self/limits": limits.format(4 * GIB), "proc/self/status": status})
    assert memory(root).available == GIB
    assert memory(root).total == 4 * GIB


def test_available_is_never_negative(tree: Tree) -> None:
    files = {"sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/memory.current": str(2 * GIB)}
    root = tree(host() | {"proc/self/mountinfo": V2.format(top="/"), "proc/self/cgroup": "0::/\n"} | files)
    assert memory(root).available == 0


def test_without_proc_psutil_tells(tree: Tree) -> None:
    assert memory(tree({"empty": ""})).total == psutil.virtual_memory().total


def test_pressure_is_the_worst_of_host_and_groups(tree: Tree) -> None:
    line = "some avg10={0} avg60=0.00 avg300=0.00 total=1\nfull avg10={1} avg60=0.00 avg300=0.00 total=1\n"
    root = tree(
        {
            "proc/self/mountinfo": V2.format(top="/"),
            "proc/self/cgroup": "0::/a\n",
            "proc/pressure/memory": line.format("3.50", "0.25"),
            "sys/fs/cgroup/a/memory.pressure": line.format("1.00", "12.00"),
        }
    )
    assert pressure(root) == Pressure(3.5, 12.0)


def test_a_kernel_without_pressure_information(tree: Tree) -> None:
    assert pressure(tree({"empty": ""})) is None


def test_this_machine_can_be_read() -> None:
    found = memory()
    assert 0 < found.available <= found.total and found.available <= found.host_available
