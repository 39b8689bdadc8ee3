"""The machine as it is put together from memory and cards; each reported trouble with GB10 is a case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from local_runner.machine.gpus import Gpu
from local_runner.machine.here import cpu, measured, published, this_machine

Tree = Callable[[dict[str, str]], Path]
GIB = 1 << 30
GB10 = Gpu("NVIDIA GB10", 0, None, None, True)


def meminfo(total: float, available: float) -> dict[str, str]:
    rows = {"MemTotal": total, "MemAvailable": available, "SwapTotal": 16, "SwapFree": 16}
    return {"proc/meminfo": "".join(f"{k}: {int(v * GIB) >> 10} kB\n" for k, v in rows.items())}


def speed(device: str) -> tuple[float, str]:
    return (900e9 if device.startswith("cuda") else 80e9), "a test"


def test_gb10_is_one_pool_and_free_is_what_the_kernel_calls_available(tree: Tree) -> None:
    machine = this_machine(root=tree(meminfo(121.7, 90)), found=[GB10], bandwidth=speed)
    (pool,) = machine.pools
    assert (pool.kind, pool.device) == ("unified", "cuda:0")
    assert pool.free == 90 * GIB and machine.max_rows == 64
    assert machine.host is pool


def test_page_cache_does_not_count_as_used(tree: Tree) -> None:
    """cudaMemGetInfo says 3 GiB where the kernel would give up 90: the kernel is right."""
    card = Gpu("NVIDIA GB10", 0, int(121.7 * GIB), 3 * GIB, True)
    assert this_machine(root=tree(meminfo(121.7, 90)), found=[card], bandwidth=speed).pools[0].free == 90 * GIB


def test_available_memory_is_capped_by_what_the_device_addresses(tree: Tree) -> None:
    card = Gpu("NVIDIA Thor", 0, 60 * GIB, 50 * GIB, True)
    (pool,) = this_machine(root=tree(meminfo(121.7, 90)), found=[card], bandwidth=speed).pools
    assert (pool.size, pool.free) == (60 * GIB, 60 * GIB)


def test_a_container_caps_unified_memory_and_says_so(tree: Tree) -> None:
    files = {
        "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": str(32 * GIB),
        "sys/fs/cgroup/memory.current": str(2 * GIB),
    }
    machine = this_machine(root=tree(meminfo(121.7, 90) | files), found=[GB10], bandwidth=speed)
    assert machine.pools[0].free == 30 * GIB
    assert any("control group" in note for note in machine.notes)


def test_a_discrete_card_and_system_memory_fastest_first(tree: Tree) -> None:
    card = Gpu("NVIDIA GeForce RTX 4090", 0, 24 * GIB, 20 * GIB, False)
    machine = this_machine(root=tree(meminfo(64, 50)), found=[card], bandwidth=speed)
    assert [(p.name, p.kind, p.free) for p in machine.pools] == [
        ("gpu", "gpu", 20 * GIB),
        ("system", "system", 50 * GIB),
    ]
    assert machine.host.name == "system" and machine.max_rows is None


def test_two_cards_have_names_of_their_own(tree: Tree) -> None:
    cards = [Gpu("NVIDIA GeForce RTX 4090", i, 24 * GIB, 20 * GIB, False) for i in range(2)]
    machine = this_machine(root=tree(meminfo(64, 50)), found=cards, bandwidth=speed)
    assert [p.name for p in machine.pools] == ["gpu 0", "gpu 1", "system"]


def test_a_mac_is_one_pool_of_what_metal_keeps_resident(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    machine = this_machine(root=tree(meminfo(32, 30)), found=[], bandwidth=speed, system="darwin")
    (pool,) = machine.pools
    assert (pool.kind, pool.device, pool.size, pool.free) == ("unified", "mps", 24 * GIB, 24 * GIB)


def test_instruction_sets(tree: Tree) -> None:
    x86 = "model name : A Processor\nflags : fpu avx2 avx512f avx512_bf16 avx512_vnni amx_tile amx_bf16\n"
    found = cpu(tree({"proc/cpuinfo": x86}))
    assert found.name == "A Processor"
    assert found.instructions == ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx")
    assert cpu(tree({"proc/cpuinfo": "Features : fp asimd asimddp i8mm bf16 sve2\n"})).instructions == (
        "neon", "dotprod", "i8mm", "bf16", "sve2",
    )  # fmt: skip


def test_a_card_that_torch_cannot_use_has_the_vendors_figure() -> None:
    rate, source = measured("cuda:0=NVIDIA GB10")
    assert rate == 273e9 and "vendor" in source
    assert measured("cuda:0=NVIDIA Unheard-of") == (100e9, "assumed")
    assert published("") is None


@pytest.mark.slow
def test_this_machine_is_read_and_measured() -> None:
    machine = this_machine(found=[])
    assert machine.cpu.cores >= 1
    assert machine.pools[-1].source == "measured" and machine.pools[-1].bandwidth > 1e8
