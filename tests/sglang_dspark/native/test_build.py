"""The kernel is compiled once and used again; where it cannot be, one sentence says why."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dspark.errors import InputError
from sglang_dspark.native import build


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "store"))
    return tmp_path / "store"


def refusal() -> str:
    with pytest.raises(InputError) as caught:
        build.load_kernel()
    sentence = str(caught.value)
    assert "\n" not in sentence and "--no-compile" in sentence
    return sentence


def test_it_is_compiled_once(store: Path, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    run = build._run

    def compile_nothing(command: list[str], what: str) -> bytes:
        commands.append(command)
        if "-o" not in command:
            return run(command, what)
        shutil.copy(kernel._name, command[command.index("-o") + 1])
        return b""

    monkeypatch.setattr(build, "_run", compile_nothing)
    said: list[str] = []
    for _ in range(2):
        library = build.load_kernel(said.append)
        assert library.dspark_forward
    assert sum("-o" in command for command in commands) == 1
    assert len(said) == 1 and said[0].startswith("Compiling kernel.cpp with ")
    (file,) = (store / "native").iterdir()
    assert file.name.startswith("kernel-") and file.suffix == ".so"

    # Other flags make another library.
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-ffunction-sections"))
    build.load_kernel(said.append)
    assert len(said) == 2 and len(list((store / "native").iterdir())) == 2


def test_there_is_no_compiler(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(store))
    assert build.find_compiler() is None
    assert "needs a C++ compiler" in refusal()
    assert not store.exists()


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_the_compiler_is_broken(compiler: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert build.find_compiler() == compiler
    assert refusal().startswith(f"{compiler} cannot compile kernel.cpp: ")
    assert not store.exists()


def test_the_source_does_not_compile(store: Path, kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text("int main() { return x; }\n")
    monkeypatch.setattr(build, "SOURCE", source)
    assert f"{source}:1:" in refusal()
    assert list((store / "native").iterdir()) == []


def test_there_is_nowhere_to_keep_it(tmp_path: Path, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "file"))
    assert f"cannot be stored in {tmp_path / 'file' / 'native'} (Not a directory)" in refusal()


WITHIN = """
#include "kernel.cpp"
extern "C" void each(const float* x, int count, float* exponentials, float* silus, uint16_t* narrowed) {
    for (int i = 0; i < count; i += 16) {
        floats v = load<floats>(x + i);
        store(exponentials + i, exponential(v < 0.0f ? v : -v));
        store(silus + i, silu(v));
        store(narrowed + i, narrow(v));
        for (int j = i; j < i + 16; ++j)
            if (narrow(x[j]) != narrowed[j]) narrowed[j] = 0xdead;
    }
}
"""


@pytest.mark.slow
def test_the_functions_of_one_number(kernel: Any, tmp_path: Path) -> None:
    """exp and silu to a few units of float32's last place, and rounding to bfloat16 as PyTorch does it."""
    shutil.copy(build.SOURCE, tmp_path / "kernel.cpp")
    (tmp_path / "within.cpp").write_text(WITHIN)
    compiler = build.find_compiler()
    assert compiler is not None
    build._run([compiler, *build.FLAGS, str(tmp_path / "within.cpp"), "-o", str(tmp_path / "within.so")], "within.cpp")
    spread = torch.logspace(-6, 1.93, 4096)
    x = torch.cat([spread, -spread, torch.linspace(-87, 87, 8192), torch.zeros(16)])
    exponentials, silus = torch.empty_like(x), torch.empty_like(x)
    narrowed = torch.empty(len(x), dtype=torch.uint16)
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (x, exponentials, silus, narrowed)]
    ctypes.CDLL(str(tmp_path / "within.so")).each(addresses[0], len(x), *addresses[1:])
    torch.testing.assert_close(exponentials.double(), (-x.abs()).double().exp(), rtol=2e-6, atol=0)
    torch.testing.assert_close(silus.double(), torch.nn.functional.silu(x.double()), rtol=2e-6, atol=0)
    assert torch.equal(narrowed.view(torch.bfloat16), x.bfloat16())


def runs_here(flag: str) -> bool:
    compiler = build.find_compiler()
    cpu = Path("/proc/cpuinfo")
    if compiler is None or not cpu.is_file() or not {"avx2", "fma", "bmi2"} <= set(cpu.read_text().split()):
        return False
    return subprocess.run([compiler, flag, "-E", "-x", "c++", "/dev/null"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not runs_here("-march=x86-64-v3"), reason="this machine cannot run x86-64-v3")
@pytest.mark.parametrize("small_head", [False, True])
def test_without_bfloat16_instructions(
    small_head: bool, make: Callable[..., Any], text: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arithmetic written out in float32 for processors that lack them: close to it, and bit-equal at any width."""
    model = make(qk_norm=True)
    quick = model.decoder(small_head=small_head).forward(text, 0, (0, 1))
    monkeypatch.setattr(
        build, "FLAGS", tuple("-march=x86-64-v3" if f.startswith("-march=") else f for f in build.FLAGS)
    )
    decoder = model.decoder(small_head=small_head, threads=2)
    plain = decoder.forward(text, 0, (0, 1))
    for ours, theirs in zip(plain, quick, strict=True):
        assert (ours - theirs).pow(2).mean().sqrt() < 0.012 * theirs.std()
    if not small_head:
        wanted = model.reference(text)[0]
        assert (plain[0] - wanted).pow(2).mean().sqrt() < 0.012 * wanted.std()
    for width in (1, 3, 8, 11):
        logits = torch.cat([decoder.forward(text[i : i + width], i)[0] for i in range(0, 61, width)])
        assert torch.equal(logits, plain[0]), width
