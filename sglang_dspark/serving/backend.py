"""The attention backend of the CPU platform: SGLang's batches as plans of `attention`."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sglang_dspark.serving.attention import Kind, Plan, plan


class CpuAttentionBackend(TorchNativeAttnBackend):  # type: ignore[misc]
    """Prefill, decoding and verification, for the target and for the draft's block."""

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self._plan: Plan | None = None
        self._translated: list[Tensor] | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan the batch once for all layers."""
        super().init_forward_metadata(forward_batch)
        self._plan = self._translated = None
        requests = forward_batch.req_pool_indices.long()
        if not requests.numel():
            return
        mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens
        if mode.is_target_verify():
            layout = getattr(forward_batch.spec_info, "ragged_verify_layout", None)
            same = torch.full_like(lengths, int(forward_batch.spec_info.draft_token_num))
            starts, widths = lengths, same if layout is None else layout.verify_lens[: lengths.numel()]
        elif mode.is_decode():
            starts, widths = lengths - 1, torch.ones_like(lengths)
        else:
            starts, widths = forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens
        together = mode.is_target_verify() or mode.is_decode()
        self._plan = plan(self.req_to_token_pool.req_to_token, requests, starts, widths, together)

    def _attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, batch: Any, save: bool, more: dict[str, Any]
    ) -> Tensor:
        unknown = [name for name, value in more.items() if value is not None]
        if layer.logit_cap or layer.is_cross_attention or layer.use_irope or unknown:
            raise NotImplementedError(
                "DSPARK on a CPU has no capped attention scores, cross-attention, attention in chunks"
                f" or {', '.join(unknown) or 'sinks'}; serve this target on a GPU."
            )
        if save and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        if self._plan is None:
            return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        window = layer.sliding_window_size
        kind = Kind(
            scale=layer.scaling,
            causal=layer.attn_type != AttentionType.ENCODER_ONLY,
            window=window if window is not None and window > -1 else None,
        )
        out = self._plan.attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            kind,
            self._slots(layer.layer_id),
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _slots(self, layer: int) -> list[Tensor] | None:
        """Cache rows in the numbering of the pool of sliding layers, for a layer that is one."""
        if not self.use_sliding_window_kv_pool or not self.token_to_kv_pool.layers_mapping[layer][1]:
            return None
        assert self._plan is not None
        if self._translated is None:
            translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
            self._translated = [translate(r.slots).long() for r in self._plan.rectangles]
        return self._translated

    def forward_extend(
        self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        """Rows q [n, heads · d] of prefill or verification -> [n, heads · dv]; keys and values are saved first."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, more)

    def forward_decode(
        self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        """One row a request, q [r, heads · d] -> [r, heads · dv]."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, more)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Asked for although nothing is captured."""
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value
