"""The attention backend between SGLang's batches and plans, with the few things of a runner that it looks at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dspark.serving.attention import Kind, plan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang")]

HEADS, KV, SIZE, ROWS = 4, 2, 8, 60


@pytest.fixture
def backend() -> Any:
    """A backend over a full layer (0) and a sliding one (1), whose cache rows are numbered the other way round."""
    from sglang_dspark.serving.backend import CpuAttentionBackend

    made = CpuAttentionBackend.__new__(CpuAttentionBackend)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(ROWS, KV, SIZE, generator=generator) for _ in range(2))
    made.use_sliding_window_kv_pool = True
    made.req_to_token_pool = SimpleNamespace(req_to_token=torch.arange(ROWS).view(2, 30).int())
    made.token_to_kv_pool = SimpleNamespace(
        layers_mapping={0: (0, False), 1: (0, True)},
        translate_loc_from_full_to_swa=lambda rows: ROWS - 1 - rows,
        get_key_buffer=lambda layer: keys if layer == 0 else keys.flip(0),
        get_value_buffer=lambda layer: values if layer == 0 else values.flip(0),
        keys=keys,
        values=values,
    )
    return made


def layer(index: int = 0, **changes: Any) -> SimpleNamespace:
    from sglang.srt.layers.radix_attention import AttentionType

    shape = {"layer_id": index, "tp_q_head_num": HEADS, "qk_head_dim": SIZE, "v_head_dim": SIZE, "scaling": 0.4}
    kind = {"sliding_window_size": 3 if index else -1, "attn_type": AttentionType.DECODER}
    off = {"logit_cap": 0.0, "is_cross_attention": False, "use_irope": False}
    return SimpleNamespace(**{**shape, **kind, **off, **changes})


def batch(mode: str, lengths: list[int], **more: Any) -> SimpleNamespace:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(
        forward_mode=ForwardMode[mode],
        seq_lens=torch.tensor(lengths),
        req_pool_indices=torch.arange(len(lengths)),
        out_cache_loc=None,
        **more,
    )


def expected(backend: Any, q: Tensor, starts: list[int], widths: list[int], kind: Kind) -> Tensor:
    planned = plan(
        backend.req_to_token_pool.req_to_token, torch.arange(len(starts)), torch.tensor(starts), torch.tensor(widths)
    )
    pool = backend.token_to_kv_pool
    return planned.attend(q.view(-1, HEADS, SIZE), pool.keys, pool.values, kind).reshape(q.shape[0], -1)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("layout", [None, [3, 1]])
def test_verification(backend: Any, index: int, layout: list[int] | None) -> None:
    widths = layout or [3, 3]
    ragged = None if layout is None else SimpleNamespace(verify_lens=torch.tensor(layout, dtype=torch.int32))
    spec = SimpleNamespace(draft_token_num=3, ragged_verify_layout=ragged)
    q = torch.randn(sum(widths), HEADS * SIZE)
    verify = batch("TARGET_VERIFY", [9, 14], spec_info=spec)
    backend.init_forward_metadata(verify)
    got = backend.forward_extend(q, None, None, layer(index), verify)
    kind = Kind(0.4, True, 3 if index else None)
    torch.testing.assert_close(got, expected(backend, q, [9, 14], widths, kind))


def test_a_drafts_block_is_seen_both_ways(backend: Any) -> None:
    from sglang.srt.layers.radix_attention import AttentionType

    q = torch.randn(6, HEADS * SIZE)
    verify = batch("TARGET_VERIFY", [9, 14], spec_info=SimpleNamespace(draft_token_num=3, ragged_verify_layout=None))
    backend.init_forward_metadata(verify)
    got = backend.forward_extend(q, None, None, layer(attn_type=AttentionType.ENCODER_ONLY), verify)
    torch.testing.assert_close(got, expected(backend, q, [9, 14], [3, 3], Kind(0.4, False)))


def test_decoding_and_prefill(backend: Any) -> None:
    q = torch.randn(2, HEADS * SIZE)
    decode = batch("DECODE", [9, 14])
    backend.init_forward_metadata(decode)
    got = backend.forward_decode(q, None, None, layer(), decode)
    torch.testing.assert_close(got, expected(backend, q, [8, 13], [1, 1], Kind(0.4, True)))
    q = torch.randn(7, HEADS * SIZE)
    lengths = {"extend_prefix_lens": torch.tensor([4, 0]), "extend_seq_lens": torch.tensor([5, 2])}
    extend = batch("EXTEND", [9, 2], **lengths)
    backend.init_forward_metadata(extend)
    got = backend.forward_extend(q, None, None, layer(1), extend)
    torch.testing.assert_close(got, expected(backend, q, [4, 0], [5, 2], Kind(0.4, True, 3)))


@pytest.mark.parametrize(
    "changes, more", [({"logit_cap": 30.0}, {}), ({"use_irope": True}, {}), ({}, {"sinks": torch.zeros(4)})]
)
def test_what_it_does_not_compute_is_refused(backend: Any, changes: dict[str, Any], more: dict[str, Any]) -> None:
    decode = batch("DECODE", [9])
    backend.init_forward_metadata(decode)
    with pytest.raises(NotImplementedError, match="DSPARK on a CPU"):
        backend.forward_decode(torch.randn(1, HEADS * SIZE), None, None, layer(**changes), decode, **more)
