"""A cache for transformers models that is allocated once, grows without copying, and forgets exactly."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from sglang_dspark.errors import InputError


class PreallocatedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [1, heads, capacity, size] of one layer, of which the first `length` rows are in use.

    Layers with a sliding window keep all rows too: masks hide what the window hides, and rows that a rejected draft
    pushed out of a window would be lost otherwise.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for states like these, [1, heads, n, size]."""

        def rows(like: Tensor) -> Tensor:
            return like.new_empty(1, like.shape[1], self.capacity, like.shape[-1])

        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = rows(key_states), rows(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states [1, heads, n, size]; return views of all that are kept."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        """Rows in use."""
        return self.length

    def get_max_length(self) -> int:
        """Rows that there is room for."""
        return self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Rows that attention will see, and the position of the first."""
        return self.length + query_length, 0


class PreallocatedCache(Cache):  # type: ignore[misc]
    """`PreallocatedLayer`s for as many layers as a model has."""

    def __init__(self, capacity: int) -> None:
        super().__init__(layer_class_to_replicate=partial(PreallocatedLayer, capacity))

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows."""
        for layer in self.layers:
            layer.length = min(layer.length, length)


def require_rollback(config: Any) -> None:
    """Raise InputError for a model with state that cannot be taken back, such as recurrent or convolution layers."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention", "attention"}
    if kinds:
        raise InputError(
            f"The target's layers of kind {', '.join(sorted(kinds))} cannot take back rejected tokens;"
            " choose a target with attention layers only."
        )
