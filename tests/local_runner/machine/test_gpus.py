"""Graphics processors, by fakes of NVML and of torch.cuda."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from local_runner.machine.gpus import Gpu, gpus

GIB = 1 << 30


class NVMLError(Exception):
    """As in pynvml."""


class FakeNvml:
    """The calls of pynvml that are used. Cards are (name, memory); None raises, as GB10 does."""

    NVMLError = NVMLError

    def __init__(self, *cards: tuple[str, tuple[int, int] | None], driver: bool = True) -> None:
        self.cards, self.driver = cards, driver

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("driver not loaded")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return self.cards[handle][0].encode()

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        memory = self.cards[handle][1]
        if memory is None:
            raise NVMLError("not supported")
        return SimpleNamespace(total=memory[0], free=memory[1])


class FakeCuda:
    """The calls of torch.cuda that are used."""

    def __init__(self, name: str, integrated: bool, free: int, size: int) -> None:
        self.properties, self.memory = SimpleNamespace(name=name, is_integrated=integrated), (free, size)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def get_device_properties(self, index: int) -> Any:
        return self.properties

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.memory


def test_discrete_cards() -> None:
    nvml = FakeNvml(("NVIDIA GeForce RTX 4090", (24 * GIB, 20 * GIB)), ("NVIDIA GeForce RTX 3060", (12 * GIB, 1)))
    first, second = gpus(nvml)
    assert first == Gpu("NVIDIA GeForce RTX 4090", 0, 24 * GIB, 20 * GIB, False)
    assert (second.index, second.integrated) == (1, False)


def test_gb10_has_no_memory_fields() -> None:
    assert gpus(FakeNvml(("NVIDIA GB10", None))) == [Gpu("NVIDIA GB10", 0, None, None, True)]


def test_a_memory_of_nothing_is_no_memory() -> None:
    assert gpus(FakeNvml(("NVIDIA GB10", (0, 0)))) == [Gpu("NVIDIA GB10", 0, None, None, True)]


def test_without_a_driver_torch_is_asked() -> None:
    cuda = FakeCuda("NVIDIA GB10", True, 3 * GIB, 121 * GIB)
    assert gpus(FakeNvml(driver=False), cuda) == [Gpu("NVIDIA GB10", 0, 121 * GIB, 3 * GIB, True)]


def test_an_older_torch_does_not_say_integrated() -> None:
    cuda = FakeCuda("NVIDIA GB10", False, 3 * GIB, 121 * GIB)
    assert gpus(FakeNvml(driver=False), cuda)[0].integrated
    assert not gpus(FakeNvml(driver=False), FakeCuda("NVIDIA H200", False, 3 * GIB, 140 * GIB))[0].integrated


def test_no_card_at_all() -> None:
    assert gpus(FakeNvml(), SimpleNamespace(is_available=lambda: False)) == []
