"""The target: a llama.cpp context whose layers' outputs can be read, and whose cache remembers what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from local_runner.engines.gguf.context import Context, Floats, Model
from local_runner.engines.loop import PREFILL_CHUNK
from local_runner.engines.torch.target import TorchTarget
from sglang_dspark.errors import InputError

OUTPUTS = 64
"""Rows that a forward may give logits of, besides the last one of a prompt: room for any block."""

TAPPED = frozenset({"llama", "qwen3", "qwen3moe", "gemma4", "gpt-oss"})
"""Architectures whose layers' inputs the library hands out; asked of one that does not, it ends the process. Others
have their graph watched instead, which gives the same numbers and costs a call a node.
"""


class LlamaTarget(TorchTarget):
    """A target that llama.cpp computes. A forward takes `PREFILL_CHUNK` tokens at most."""

    def __init__(
        self, model: Model, architecture: str, context_length: int, threads: int, taps: tuple[int, ...]
    ) -> None:
        """`taps` are the layers that will ever be tapped. Raises InputError if they cannot be."""
        cpu = torch.device("cpu")
        super().__init__(model.vocab_size, model.layers, model.hidden_size, context_length, cpu)
        self.taps = taps
        self._computed = 0
        self._native = architecture in TAPPED
        self._nodes = {} if self._native else {f"l_out-{tap}".encode(): tap for tap in taps}
        self._outputs: dict[int, Floats] = {}
        self.context = Context(
            model,
            length=context_length,
            batch=PREFILL_CHUNK,
            outputs=OUTPUTS,
            threads=threads,
            node=self._watch if self._nodes else None,
        )
        library = model.library
        if self._native:
            for tap in taps:
                library.set_layer_input(self.context.pointer, tap + 1, True)
        elif taps:
            self._probe(architecture, taps)

    def features(self, count: int) -> Tensor:
        """The tapped outputs of the first `count` tokens of the last forward, [count, len(taps)·d]; fewer if it skipped
        some.
        """
        return torch.from_numpy(self.rows(count))

    def rows(self, count: int) -> Floats:
        """`features` as an array."""
        rows = count - self._skipped
        shape = (self._computed, self.hidden_size)
        if rows <= 0:
            return np.zeros((0, len(self.taps) * self.hidden_size), np.float32)
        if not self._native:
            return np.concatenate([self._outputs[tap].reshape(shape)[:rows] for tap in self.taps], 1)
        read, pointer = self.context.library.get_layer_input, self.context.pointer
        taken = [np.ctypeslib.as_array(read(pointer, tap + 1), shape)[:rows] for tap in self.taps]
        return np.concatenate(taken, 1)

    def _forget(self, length: int) -> None:
        super()._forget(length)
        self.context.cut(length)

    def _run(self, tokens: Sequence[int], last_only: bool) -> Tensor:
        wanted = 1 if last_only else len(tokens)
        self.context.decode(tokens, self.length, wanted)
        self._computed = len(tokens)
        return self.context.logits(wanted)

    def _watch(self, tensor: Any, ask: bool) -> bool:
        """Copy the outputs of tapped layers as they are computed."""
        if not self.taps:
            return False
        library = self.context.library
        name = library.tensor_name(tensor)
        if ask or name not in self._nodes:
            return name in self._nodes
        values = np.empty(library.tensor_bytes(tensor) // 4, np.float32)
        library.read_tensor(tensor, values.ctypes.data, 0, values.nbytes)
        self._outputs[self._nodes[name]] = values
        return True

    def _probe(self, architecture: str, taps: tuple[int, ...]) -> None:
        """Raise InputError unless a forward shows every tapped layer's output, a row for each token."""
        self.forward([0, 0])
        for tap in taps:
            if tap not in self._outputs or self._outputs[tap].size != 2 * self.hidden_size:
                raise InputError(
                    f"llama.cpp does not show the output of layer {tap} of a {architecture} model, which the draft was"
                    " trained on; use --engine torch, or decode without --draft."
                )
        self.reset()
