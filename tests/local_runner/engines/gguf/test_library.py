"""Which library is accepted, and what is said of the others."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest

from local_runner.engines.gguf import library as module
from local_runner.engines.gguf.library import SYMBOLS, VERSION, check_version, find, load_library
from sglang_dspark.errors import InputError


def test_without_the_package_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.importlib.metadata, "version", missing)
    with pytest.raises(InputError, match=r"not installed; run pip install 'sglang-dspark\[gguf\]'\.$"):
        load_library.__wrapped__()


def test_another_version_is_refused() -> None:
    check_version(VERSION)
    with pytest.raises(InputError, match=r"made for llama-cpp-python 0\.3\.36, but 0\.3\.35 is installed"):
        check_version("0.3.35")


@pytest.mark.parametrize("spelling", range(3))
@pytest.mark.parametrize("symbol", [name for name, (names, *_) in SYMBOLS.items() if len(names) == 3])
def test_symbols_are_found_however_they_are_spelt(symbol: str, spelling: int) -> None:
    names, arguments, result = SYMBOLS[symbol]
    function = SimpleNamespace()
    assert find(symbol, names, arguments, result, (SimpleNamespace(**{names[spelling]: function}),)) is function
    assert function.argtypes == arguments and function.restype == result


def test_a_library_without_a_symbol_is_refused() -> None:
    names, arguments, result = SYMBOLS["set_nextn"]
    with pytest.raises(InputError, match="does not export llama_set_embeddings_nextn"):
        find("set_nextn", names, arguments, result, (SimpleNamespace(),))


def test_the_installed_library_is_the_right_one(library: Any) -> None:
    assert library is load_library() and callable(library.get_layer_input)
