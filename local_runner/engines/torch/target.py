"""Targets that PyTorch computes: a lean forward where there is one, the transformers model itself everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from local_runner.engines.torch.cache import PreallocatedCache, require_rollback
from local_runner.engines.torch.lean import LeanModel, head_size, is_lean, layer_weights
from sglang_dspark.errors import InputError
from sglang_dspark.native.decoder import Decoder, Shape


class TorchTarget:
    """What all targets of this package's engines share; see `local_runner.engines.base.Target`.

    `tokens` is what the cache holds. `keep` of them outlive the next `reset`: forwards then skip them, give rows of NaN
    where all of their tokens are skipped, and features of the others alone.
    """

    def __init__(
        self, vocab_size: int, layers: int, hidden_size: int, context_length: int, device: torch.device
    ) -> None:
        self.vocab_size, self.layers, self.hidden_size = vocab_size, layers, hidden_size
        self.context_length, self.device = context_length, device
        self.length = 0
        self.tokens: list[int] = []
        self.keep = self._skip = self._skipped = 0
        self.taps: tuple[int, ...] = ()
        """Decoder layers whose outputs the next forwards keep; -1 is the embedding."""
        self.embedding: Tensor
        """The token embedding [V, d], without any scale."""
        self.lm_head: Tensor
        """The output matrix [V, d]."""
        self.project: Callable[[Tensor], Tensor] | None = None
        """A quicker product with `lm_head` than with the plain matrix, if there is one."""
        self._features: Tensor | None = None

    def features(self, count: int) -> Tensor:
        """The tapped outputs of the first `count` tokens of the last forward, [count, len(taps)·d]; fewer if it skipped
        some.
        """
        rows = max(0, count - self._skipped)
        if not rows:
            return torch.zeros(0, len(self.taps) * self.hidden_size, device=self.device)
        if self._features is None:
            raise ValueError("no features: the target has no taps, or has not run")
        return self._features[:rows]

    def reset(self) -> None:
        """Forget the cached tokens but the first `keep`, which count as forgotten until forwards reach them."""
        self._forget(self.keep)
        self.length, self._skip, self.keep = 0, self.keep, 0

    def truncate(self, length: int) -> None:
        """Forget cached tokens from position `length` on, exactly."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} cached tokens to {length}")
        self.length = length
        self._forget(length)

    def forward(self, tokens: Sequence[int], last_only: bool = False) -> Tensor:
        """Append `tokens`; logits [len(tokens), V], or [1, V] of the last one."""
        if not 0 < len(tokens) <= self.context_length - self.length:
            raise ValueError(f"{len(tokens)} tokens after {self.length} do not fit in {self.context_length}")
        self._skipped = min(max(self._skip - self.length, 0), len(tokens))
        self.length += self._skipped
        rest = tokens[self._skipped :]
        if not rest:
            return torch.full((1 if last_only else len(tokens), self.vocab_size), torch.nan, device=self.device)
        self._skip = 0
        logits = self._run(rest, last_only)
        self.length += len(rest)
        self.tokens += rest
        return logits

    def _forget(self, length: int) -> None:
        """Let go of what the cache holds from position `length` on."""
        del self.tokens[length:]
        self._skip = min(self._skip, length)

    def _run(self, tokens: Sequence[int], last_only: bool) -> Tensor:
        """`forward` of `tokens`, none of which is skipped; keeps their features."""
        with torch.inference_mode():
            return self._compute(torch.tensor(tokens, device=self.device), last_only)

    def _compute(self, tokens: Tensor, last_only: bool) -> Tensor:
        raise NotImplementedError


class LeanTarget(TorchTarget):
    """A target computed by `LeanModel`. Takes `model` apart: its layers are gone afterwards."""

    def __init__(self, model: Any, context_length: int) -> None:
        config = model.config
        super().__init__(config.vocab_size, config.num_hidden_layers, config.hidden_size, context_length, model.device)
        with torch.no_grad():
            self.model = LeanModel(model, context_length)
        self.embedding, self.lm_head, self.project = self.model.embedding, self.model.head_weight, self.model.head

    def _compute(self, tokens: Tensor, last_only: bool) -> Tensor:
        logits: Tensor
        logits, self._features = self.model(tokens, self.length, self.taps, last_only)
        return logits


class NativeTarget(TorchTarget):
    """A target computed by the compiled kernel, for which `fits` holds. Takes `model` apart, like `LeanTarget`."""

    def __init__(self, model: Any, context_length: int, progress: Callable[[str], None]) -> None:
        config, inner = model.config, model.model
        super().__init__(config.vocab_size, config.num_hidden_layers, config.hidden_size, context_length, model.device)
        layers = []
        for index in range(self.layers):
            layers.append(layer_weights(inner.layers[index]))
            inner.layers[index] = None
        self.embedding, self.lm_head = inner.embed_tokens.weight, model.lm_head.weight
        positions = torch.arange(context_length)[None]
        cos, sin = (table[0] for table in inner.rotary_emb(torch.zeros(1, 1), positions))
        half = sin.shape[-1] // 2
        rope = torch.stack([cos, torch.cat([-sin[:, :half], sin[:, half:]], -1)])
        self._decoder = Decoder(
            _shape(config, context_length),
            layers,
            self.embedding,
            self.lm_head,
            inner.norm.weight,
            rope,
            causal=True,
            progress=progress,
        )

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether the kernel computes this model, on this device and in this precision."""
        here = model.device.type == "cpu" and model.dtype is torch.bfloat16
        return here and is_lean(model.config) and _shape(model.config, 1).fits()

    def _compute(self, tokens: Tensor, last_only: bool) -> Tensor:
        logits, self._features = self._decoder.forward(tokens, self.length, self.taps, last_only)
        return logits


def _shape(config: Any, capacity: int) -> Shape:
    return Shape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_size(config),
        inner=config.intermediate_size,
        vocab=config.vocab_size,
        capacity=capacity,
        eps=config.rms_norm_eps,
    )


class TransformersTarget(TorchTarget):
    """Any transformers causal LM with attention layers, run as it is; taps are read by hooks on its decoder layers."""

    def __init__(self, model: Any, context_length: int) -> None:
        config = model.config.get_text_config()
        require_rollback(config)
        super().__init__(config.vocab_size, config.num_hidden_layers, config.hidden_size, context_length, model.device)
        self.model = model
        self.embedding = model.get_input_embeddings().weight.detach()
        self.lm_head = model.get_output_embeddings().weight.detach()
        self._cache = PreallocatedCache(context_length)
        self._outputs: dict[int, Tensor] = {}
        for index, layer in enumerate(decoder_layers(model, config.num_hidden_layers)):
            layer.register_forward_hook(self._keep(index))
            if index == 0:
                layer.register_forward_pre_hook(self._keep_input, with_kwargs=True)

    def _forget(self, length: int) -> None:
        super()._forget(length)
        self._cache.truncate(length)

    def _keep(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if index in self.taps:
                self._outputs[index] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    def _keep_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if -1 in self.taps:
            self._outputs[-1] = (args[0] if args else kwargs["hidden_states"])[0]

    def _compute(self, tokens: Tensor, last_only: bool) -> Tensor:
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
            f"The decoder layers of {type(model).__name__} could not be told from its modules, so DSpark cannot tap it;"
            " choose another target."
        )
    return found[0]
