"""Models and contexts of llama.cpp behind a few methods. Nothing here judges what it is given: `files` does, before."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from local_runner.engines.gguf.library import FLOATS, Library
from sglang_dspark.errors import InputError

Floats = NDArray[np.float32]
Node = Callable[[Any, bool], bool]
"""Called with each node of the graph: first asking whether it is wanted, then, if so, once it is computed."""

INTEGERS = ctypes.POINTER(ctypes.c_int32)


class Model:
    """The weights of one GGUF file. Raises InputError if the library cannot load it, or cannot decode with it."""

    def __init__(self, library: Library, path: Path, *, gpu: bool) -> None:
        self.library, self.path = library, path
        api = library.api
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = -1 if gpu else 0
        library.complaints.clear()
        self.pointer = api.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.pointer:
            raise InputError(f"llama.cpp cannot load {path}: {library.reason()}.")
        self._free = weakref.finalize(self, api.llama_model_free, self.pointer)
        vocabulary = api.llama_model_get_vocab(self.pointer)
        self.vocab_size = int(api.llama_vocab_n_tokens(vocabulary))
        self.mask_token = int(api.llama_vocab_mask(vocabulary))
        self.hidden_size = int(api.llama_model_n_embd(self.pointer))
        self.layers = int(api.llama_model_n_layer(self.pointer))
        self.trained_length = int(api.llama_model_n_ctx_train(self.pointer))

    def forgets(self) -> bool:
        """Whether its cache can be cut at any position, exactly: neither recurrent nor of another kind altogether."""
        api = self.library.api
        kinds = ("is_recurrent", "is_hybrid", "is_diffusion", "has_encoder")
        return not any(getattr(api, f"llama_model_{kind}")(self.pointer) for kind in kinds)


class Context:
    """A cache of one sequence of up to `length` tokens, and the forwards that fill it.

    A forward takes at most `batch` rows and gives logits of at most `outputs` of them. `width` is that of the vectors
    that `inject` takes. `other` is the context of the model whose embedding and lm_head this one borrows; it is kept
    alive. Raises InputError if there is no memory for it.
    """

    def __init__(
        self,
        model: Model,
        *,
        length: int,
        batch: int,
        outputs: int,
        threads: int,
        width: int = 0,
        other: Context | None = None,
        causal: bool = True,
        node: Node | None = None,
    ) -> None:
        self.model, self.batch, self.outputs, self.other = model, batch, outputs, other
        self.library = library = model.library
        api = library.api
        parameters = api.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = length, batch, batch
        parameters.n_outputs_max = outputs
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.swa_full = True  # a window's cache that was overwritten cannot be cut exactly
        parameters.no_perf = True
        if node is not None:
            watch = node
            self._callback = api.ggml_backend_sched_eval_callback(lambda tensor, ask, _: watch(tensor, ask))
            parameters.cb_eval = self._callback
        if other is not None:
            parameters.ctx_other = other.pointer
        library.complaints.clear()
        self.pointer: Any = api.llama_init_from_model(model.pointer, parameters)
        if not self.pointer:
            raise InputError(
                f"llama.cpp cannot make room for {length} tokens of {model.path.name}: {library.reason()}; lower"
                " --context-length."
            )
        self._free = weakref.finalize(self, api.llama_free, self.pointer)
        if not causal:
            api.llama_set_causal_attn(self.pointer, False)
        self._memory = api.llama_get_memory(self.pointer)
        self._ids, self._positions = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        self._vectors = np.zeros((batch, width), np.float32)
        self._wanted, self._ones = np.zeros(batch, np.int8), np.ones(batch, np.int32)
        self._sequence = (ctypes.c_int32 * 1)(0)
        first: Any = ctypes.cast(self._sequence, INTEGERS)
        self._sequences = (INTEGERS * (batch + 1))(*[first] * batch)  # ends with a null pointer

    def decode(self, tokens: Sequence[int], position: int, wanted: int) -> None:
        """Append `tokens` at `position`; the last `wanted` of them give logits."""
        count = len(tokens)
        if not (0 < count <= self.batch and wanted <= self.outputs):
            raise ValueError(f"{count} tokens and {wanted} rows of logits do not fit in a forward")
        self._ids[:count] = tokens
        self._forward(count, position, wanted, vectors=False)

    def inject(self, vectors: Floats, position: int) -> None:
        """Append the cache entries of `vectors` [n, width] at `position`, in as many forwards as it takes."""
        for start in range(0, len(vectors), self.batch):
            part = vectors[start : start + self.batch]
            self._vectors[: len(part)] = part
            self._forward(len(part), position + start, 0, vectors=True)

    def _forward(self, count: int, position: int, wanted: int, *, vectors: bool) -> None:
        self._positions[:count] = np.arange(position, position + count)
        self._wanted[:count] = 0
        self._wanted[count - wanted : count] = 1
        api = self.library.api
        batch = api.llama_batch()
        batch.n_tokens = count
        if vectors:
            batch.embd = self._vectors.ctypes.data_as(FLOATS)
        else:
            batch.token = self._ids.ctypes.data_as(INTEGERS)
        batch.pos, batch.n_seq_id = (a.ctypes.data_as(INTEGERS) for a in (self._positions, self._ones))
        batch.seq_id = ctypes.cast(self._sequences, ctypes.POINTER(INTEGERS))
        batch.logits = self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        self.library.complaints.clear()
        code = api.llama_decode(self.pointer, batch)
        if code:
            raise RuntimeError(f"llama_decode failed with {code}: {self.library.reason()}")

    def logits(self, rows: int) -> torch.Tensor:
        """The logits [rows, V] of the last forward, copied."""
        data = self.library.api.llama_get_logits(self.pointer)
        return torch.from_numpy(np.ctypeslib.as_array(data, (rows, self.model.vocab_size)).copy())

    def cut(self, position: int) -> None:
        """Forget everything from `position` on."""
        if not self.library.api.llama_memory_seq_rm(self._memory, 0, position, -1):
            raise RuntimeError(f"llama.cpp could not forget the tokens from position {position} on")
