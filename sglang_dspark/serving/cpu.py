"""What the CPU platform changes in SGLang besides its kernels. Tensors elsewhere than on a CPU are never touched: these
hooks are applied only in processes of servers whose device is the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.serving.plugin import PLATFORM


def announce() -> None:
    """Make the attention backend known under its name."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if PLATFORM not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([PLATFORM])
    if PLATFORM not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.add_draft_attention_backend_choices([PLATFORM])

    @register_attention_backend(PLATFORM)  # type: ignore[untyped-decorator]
    def create(runner: Any) -> Any:
        from sglang_dspark.serving.backend import CpuAttentionBackend

        return CpuAttentionBackend(runner)


def native_kv_copy(pool: Any) -> None:
    """Have SGLang move cache rows in torch, instead of preparing a kernel for it."""
    pool.use_native_move_kv_cache = True
    pool._kv_copy_config = None


def plain_norm_rope(original: Callable[..., None], attention: Any, *args: Any, **kwargs: Any) -> None:
    """Build a draft's attention layer, then have it norm and rotate with separate operators."""
    original(attention, *args, **kwargs)
    attention.use_table_qk_norm_rope = False


def no_fused_write(draft: Any, pool: Any) -> None:
    """Have a draft's context written layer by layer."""
    return None


def ignore_streams(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """A CPU has no streams that a tensor could be in use on."""
    batch.seq_lens.record_stream = lambda stream: None
