"""llama.cpp's shared library: found, of the version that this engine was written for, and with every symbol it calls.

Half of these calls are no stable interface: another version may lack them, or mean something else by them. So the
version is checked, and the symbols are looked up before anything is loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from sglang_dspark.errors import InputError

VERSION = "0.3.36"
PACKAGE = "llama-cpp-python"
ERROR = 4
"""The level of errors in llama.cpp's log."""

POINTER, FLOATS = ctypes.c_void_p, ctypes.POINTER(ctypes.c_float)

Signature = tuple[tuple[str, ...], list[Any], Any]
"""The names that compilers give a symbol (C, Itanium, MSVC), its arguments and its result."""

SYMBOLS: dict[str, Signature] = {
    "set_layer_input": (
        (
            "llama_set_embeddings_layer_inp",
            "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
            "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
        ),
        [POINTER, ctypes.c_uint32, ctypes.c_bool],
        None,
    ),
    "get_layer_input": (
        (
            "llama_get_embeddings_layer_inp",
            "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
            "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
        ),
        [POINTER, ctypes.c_uint32],
        FLOATS,
    ),
    "set_nextn": (
        (
            "llama_set_embeddings_nextn",
            "_Z26llama_set_embeddings_nextnP13llama_contextbb",
            "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
        ),
        [POINTER, ctypes.c_bool, ctypes.c_bool],
        None,
    ),
    "get_nextn": (
        (
            "llama_get_embeddings_nextn",
            "_Z26llama_get_embeddings_nextnP13llama_context",
            "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
        ),
        [POINTER],
        FLOATS,
    ),
    "tensor_name": (("ggml_get_name",), [POINTER], ctypes.c_char_p),
    "tensor_bytes": (("ggml_nbytes",), [POINTER], ctypes.c_size_t),
    "read_tensor": (
        ("ggml_backend_tensor_get",),
        [POINTER, POINTER, ctypes.c_size_t, ctypes.c_size_t],
        None,
    ),
}


@dataclass(frozen=True, slots=True)
class Library:
    """`api` is llama-cpp-python's own bindings; the rest are the symbols that it does not bind."""

    api: Any
    set_layer_input: Callable[[Any, int, bool], None]
    get_layer_input: Callable[[Any, int], Any]
    set_nextn: Callable[[Any, bool, bool], None]
    get_nextn: Callable[[Any], Any]
    tensor_name: Callable[[Any], bytes]
    tensor_bytes: Callable[[Any], int]
    read_tensor: Callable[[Any, Any, int, int], None]
    complaints: deque[str]
    """The last errors of the library, which it would otherwise write to the terminal."""
    callback: Any
    """Keeps the log's callback alive."""

    def reason(self) -> str:
        """What it complained of first since `complaints` was cleared, to put into a sentence."""
        return self.complaints[0].rstrip(".") if self.complaints else "it gives no reason"


@cache
def load_library() -> Library:
    """The library, made quiet. Raises InputError if it is not installed, another version, or built differently."""
    try:
        version = importlib.metadata.version(PACKAGE)
        api = importlib.import_module("llama_cpp.llama_cpp")
        ggml = importlib.import_module("llama_cpp._ggml").libggml
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            "The gguf engine needs llama.cpp, which is not installed; run pip install 'sglang-dspark[gguf]'."
        ) from None
    except Exception as error:  # a shared library that cannot be loaded raises whatever the system calls it
        raise InputError(f"{PACKAGE} cannot be loaded ({error}); install it again.") from error
    check_version(version)
    found = {name: find(name, *signature, (api._lib, ggml)) for name, signature in SYMBOLS.items()}
    complaints: deque[str] = deque(maxlen=8)
    callback = api.llama_log_callback(lambda level, text, _: _note(complaints, level, text))
    api.llama_log_set(callback, ctypes.c_void_p(0))
    api.llama_backend_init()
    return Library(api=api, complaints=complaints, callback=callback, **found)


def check_version(version: str) -> None:
    """Raise InputError unless `version` is the one that this engine was written for."""
    if version != VERSION:
        raise InputError(
            f"The gguf engine was made for {PACKAGE} {VERSION}, but {version} is installed, whose calls may differ; run"
            f" pip install '{PACKAGE}=={VERSION}'."
        )


def find(what: str, names: tuple[str, ...], arguments: list[Any], result: Any, libraries: tuple[Any, ...]) -> Any:
    """The function of the first of `names` that one of `libraries` exports. Raises InputError if none does."""
    for library in libraries:
        for name in names:
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, result
                return function
    raise InputError(
        f"This build of {PACKAGE} does not export {names[0]} ({what.replace('_', ' ')}), which DSpark needs; install"
        f" {PACKAGE}=={VERSION} from its source distribution."
    )


def _note(complaints: deque[str], level: int, text: bytes) -> None:
    line = text.decode(errors="replace").strip()
    if level == ERROR and line:
        complaints.append(line)
