"""Targets that PyTorch computes: a lean forward where there is one, the transformers model itself everywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from local_runner.engines.torch.cache import PreallocatedCache, require_rollback
from local_runner.engines.torch.lean import LeanModel
from sglang_dspark.errors import InputError


class TorchTarget:
    """What all PyTorch targets share; see `local_runner.engines.base.Target`."""

    def __init__(
        self, vocab_size: int, layers: int, hidden_size: int, context_length: int, device: torch.device
    ) -> None:
        self.vocab_size, self.layers, self.hidden_size = vocab_size, layers, hidden_size
        self.context_length, self.device = context_length, device
        self.length = 0
        self.taps: tuple[int, ...] = ()
        """Decoder layers whose outputs the next forwards keep; -1 is the embedding."""
        self._features: Tensor | None = None

    @property
    def embedding(self) -> Tensor:
        """The token embedding [V, d], without any scale."""
        raise NotImplementedError

    @property
    def lm_head(self) -> Tensor:
        """The output matrix [V, d]."""
        raise NotImplementedError

    def features(self, count: int) -> Tensor:
        """The tapped outputs of the first `count` tokens of the last forward, [count, len(taps)·d]."""
        if self._features is None:
            raise ValueError("no features: the target has no taps, or has not run")
        return self._features[:count]

    def reset(self) -> None:
        """Forget the cached tokens."""
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Forget cached tokens from position `length` on, exactly."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} cached tokens to {length}")
        self.length = length

    def forward(self, tokens: Sequence[int], last_only: bool = False) -> Tensor:
        """Append `tokens`; logits [len(tokens), V], or [1, V] of the last one."""
        if self.length + len(tokens) > self.context_length:
            raise ValueError(f"{len(tokens)} tokens after {self.length} do not fit in {self.context_length}")
        # Not inference mode: what was compiled for ordinary tensors would be compiled anew for these.
        with torch.no_grad():
            logits = self._run(torch.tensor(tokens, device=self.device), last_only)
        self.length += len(tokens)
        return logits

    def _run(self, tokens: Tensor, last_only: bool) -> Tensor:
        raise NotImplementedError


class LeanTarget(TorchTarget):
    """A target computed by `LeanModel`. Takes `model` apart: its layers are gone afterwards."""

    def __init__(self, model: Any, context_length: int) -> None:
        config = model.config
        super().__init__(config.vocab_size, config.num_hidden_layers, config.hidden_size, context_length, model.device)
        with torch.no_grad():
            self.model = LeanModel(model, context_length)

    @property
    def embedding(self) -> Tensor:
        return self.model.embedding

    @property
    def lm_head(self) -> Tensor:
        return self.model.head_weight

    def _run(self, tokens: Tensor, last_only: bool) -> Tensor:
        logits, self._features = self.model(tokens, self.length, self.taps, last_only)
        return logits


class TransformersTarget(TorchTarget):
    """Any transformers causal LM with attention layers, run as it is; taps are read by hooks on its decoder layers."""

    def __init__(self, model: Any, context_length: int) -> None:
        config = model.config.get_text_config()
        require_rollback(config)
        super().__init__(config.vocab_size, config.num_hidden_layers, config.hidden_size, context_length, model.device)
        self.model = model
        self._cache = PreallocatedCache(context_length)
        self._outputs: dict[int, Tensor] = {}
        for index, layer in enumerate(decoder_layers(model, config.num_hidden_layers)):
            layer.register_forward_hook(self._keep(index))
            if index == 0:
                layer.register_forward_pre_hook(self._keep_input, with_kwargs=True)

    @property
    def embedding(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight.detach()
        return weight

    @property
    def lm_head(self) -> Tensor:
        weight: Tensor = self.model.get_output_embeddings().weight.detach()
        return weight

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._cache.truncate(length)

    def _keep(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if index in self.taps:
                self._outputs[index] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    def _keep_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if -1 in self.taps:
            self._outputs[-1] = (args[0] if args else kwargs["hidden_states"])[0]

    def _run(self, tokens: Tensor, last_only: bool) -> Tensor:
        out = self.model(
            input_ids=tokens[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
        )
        self._features = torch.cat([self._outputs[tap] for tap in self.taps], -1) if self.taps else None
        logits: Tensor = out.logits[0]
        return logits


def decoder_layers(model: Any, count: int) -> nn.ModuleList:
    """The decoder layers of a transformers causal LM. Raises InputError if they cannot be told."""
    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and name.rsplit(".", 1)[-1] in ("layers", "h", "blocks")
    ]
    if len(found) != 1:
        raise InputError(
            f"The decoder layers of {type(model).__name__} could not be told from its modules; DSpark cannot tap this target."
        )
    return found[0]
