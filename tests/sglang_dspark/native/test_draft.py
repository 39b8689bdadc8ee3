"""A draft on the kernel proposes what the PyTorch draft model proposes."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_dspark.checkpoints.deepspec import read_config
from sglang_dspark.draft.load import TargetInfo, load_draft
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.native.decoder import pointer, tiles
from sglang_dspark.native.draft import NativeDraft

HIDDEN, VOCAB, RANK, BLOCK, CONTEXT = 48, 112, 32, 7, 60
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "hidden_act": "silu",
    "head_dim": 16,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "block_size": BLOCK,
    "mask_token_id": VOCAB - 1,
    "target_layer_ids": [0, 2, 3],
    "num_target_layers": 4,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
NO_MARKOV = {"markov_rank": 0, "markov_head_type": "none", "confidence_head_with_markov": False}

Load = Callable[..., DraftModel]


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "markov_head.markov_w1.weight": (VOCAB, RANK),
        "markov_head.markov_w2.weight": (VOCAB, RANK),
        "confidence_head.proj.weight": (1, HIDDEN + RANK),
        "confidence_head.proj.bias": (1,),
    }
    for layer in range(2):
        for name, shape in {
            "self_attn.q_proj": (96, HIDDEN),
            "self_attn.k_proj": (32, HIDDEN),
            "self_attn.v_proj": (32, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 96),
            "self_attn.q_norm": (16,),
            "self_attn.k_norm": (16,),
            "mlp.gate_proj": (80, HIDDEN),
            "mlp.up_proj": (80, HIDDEN),
            "mlp.down_proj": (HIDDEN, 80),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }.items():
            found[f"layers.{layer}.{name}.weight"] = shape
    return found


@pytest.fixture
def load(tmp_path: Path, kernel: Any) -> Load:
    """load(dtype, block, **config): a draft with random bfloat16 weights whose lm_head is far from undecided."""

    def make(dtype: torch.dtype = torch.bfloat16, block: int | None = None, **changes: Any) -> DraftModel:
        config = CONFIG | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        numbers = torch.Generator().manual_seed(3)
        tensors: dict[str, Tensor] = {}
        for name, shape in shapes().items():
            tensor = torch.randn(shape, generator=numbers) * shape[-1] ** -0.5
            tensors[name] = (1 + tensor if len(shape) == 1 and "norm" in name else 1.5 * tensor).bfloat16()
        if not config["markov_rank"]:
            tensors = {name: t for name, t in tensors.items() if "markov" not in name}
        if not config["confidence_head_with_markov"]:
            tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"][:, :HIDDEN].contiguous()
        if not config["enable_confidence_head"]:
            tensors = {name: t for name, t in tensors.items() if "confidence" not in name}
        save_file(tensors, tmp_path / "model.safetensors")
        embedding, lm_head = (torch.randn(VOCAB, HIDDEN, generator=numbers).bfloat16().to(dtype) for _ in range(2))
        target = TargetInfo(HIDDEN, VOCAB, 4, embedding, lm_head * 3, "tiny")
        cpu = torch.device("cpu")
        return load_draft(tmp_path, target, dtype=dtype, device=cpu, block=block, context_length=CONTEXT)

    return make


@pytest.fixture(scope="module")
def features() -> Tensor:
    return torch.randn(CONTEXT, 3 * HIDDEN, generator=torch.Generator().manual_seed(9)).bfloat16().float()


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).pow(2).mean().sqrt() / theirs.float().std())


FORMS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "no Markov head": NO_MARKOV,
    "no confidence head": {"enable_confidence_head": False, "confidence_head_with_markov": False},
    "confidence without Markov features": {"confidence_head_with_markov": False},
    "a smaller block": {"block": 3},
    "a block of one": {"block": 1},
}


@pytest.mark.parametrize("form", FORMS)
def test_it_drafts_what_the_model_drafts(form: str, load: Load, features: Tensor) -> None:
    """In exact arithmetic of the same weights; lm_head alone is rounded to int8."""
    exact, rough = load(torch.float32, **FORMS[form]), load(**FORMS[form])
    native = NativeDraft(load(**FORMS[form]))
    assert NativeDraft.fits(rough)
    rougher = []
    tokens = 0
    for position, count in ((1, 1), (17, 16), (40, 23), (60, 20)):
        for draft in (exact, rough, native):
            draft.observe(features[position - count : position], position - count)
            assert draft.length == position
        anchor = position % VOCAB
        theirs, ours, pytorch = (d.draft(anchor, position) for d in (exact, native, rough))
        parted = next((k for k, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if a != b), None)
        # From the first token that differs on, rows follow other tokens and cannot be compared.
        same = len(ours.tokens) if parted is None else parted + 1
        tokens += same
        assert error(ours.logits[:same], theirs.logits[:same]) < 0.025
        assert error(ours.hidden, theirs.hidden) < 0.015
        rougher.append(error(pytorch.hidden, theirs.hidden) > error(ours.hidden, theirs.hidden))
        assert ours.confidence_logits[:same] == pytest.approx(theirs.confidence_logits[:same], abs=0.03)
        assert len(ours.confidence_logits) == len(theirs.confidence_logits)
        if parted is not None:
            best, second = theirs.logits[parted].topk(2).values
            assert best - second < 0.03 * theirs.logits.std(), "the tokens part though the decision was clear"
    assert sum(rougher) >= 3
    assert tokens > 3 * exact.block


def test_each_logit_follows_the_chosen_token(load: Load, features: Tensor) -> None:
    """With `choose`, whatever it chooses; logits and confidence are those of the PyTorch model told the same."""
    chosen = [5, 111, 0, 17, 17, 63, 2]
    blocks = []
    for draft in (load(torch.float32), NativeDraft(load())):
        draft.observe(features[:20], 0)
        seen: list[Tensor] = []

        def choose(k: int, logits: Tensor, seen: list[Tensor] = seen) -> int:
            assert k == len(seen) and logits.shape == (VOCAB,)
            seen.append(logits.clone())
            return chosen[k]

        block = draft.draft(4, 20, choose)
        assert block.tokens == chosen
        assert torch.equal(torch.stack(seen), block.logits)
        blocks.append(block)
    assert error(blocks[1].logits, blocks[0].logits) < 0.025
    assert blocks[1].confidence_logits == pytest.approx(blocks[0].confidence_logits, abs=0.03)


@pytest.mark.parametrize("form", ["vanilla", "no Markov head"])
def test_choosing_the_argmax_is_choosing_nothing(form: str, load: Load, features: Tensor) -> None:
    native = NativeDraft(load(**FORMS[form]))
    native.observe(features[:20], 0)
    free = native.draft(4, 20)
    told = native.draft(4, 20, lambda k, logits: int(logits.argmax()))
    assert free.tokens == told.tokens
    assert torch.equal(free.logits, told.logits) and free.confidence_logits == told.confidence_logits
    assert free.tokens == free.logits.argmax(-1).tolist()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("vocab", [16, 112, 2048])
def test_the_first_of_equals_is_drafted(threads: int, vocab: int, make: Callable[..., Any]) -> None:
    """Small whole numbers are exact, and full of ties; numpy's argmax is the first of them."""
    decoder = make(vocab=vocab).decoder(threads=threads)
    numbers = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-2, 3, (9, vocab), generator=numbers).float()
    w1, w2 = (torch.randint(-1, 2, (vocab, 4), generator=numbers).bfloat16() for _ in range(2))
    laid_out, tokens, expected = tiles(w2), torch.tensor([vocab - 1] + [0] * 9), [vocab - 1]
    wanted = logits.clone()
    for k in range(9):
        wanted[k] += w2.float() @ w1[expected[-1]].float()
        expected.append(int(wanted[k].numpy().argmax()))
    addresses = [pointer(t) for t in (w1, laid_out, logits, tokens)]
    decoder.kernel.dspark_chain(ctypes.byref(decoder.model), *addresses[:2], 4, 9, *addresses[2:])
    assert tokens.tolist() == expected
    assert torch.equal(logits, wanted)


def test_threads_change_nothing(load: Load, features: Tensor) -> None:
    blocks = []
    for threads in (1, 2, 9):
        torch.set_num_threads(threads)
        native = NativeDraft(load())
        torch.set_num_threads(1)
        native.observe(features[:33], 0)
        blocks.append(native.draft(4, 33))
    for block in blocks[1:]:
        assert block.tokens == blocks[0].tokens and torch.equal(block.logits, blocks[0].logits)


def test_context_may_come_in_any_parts_and_be_taken_back(load: Load, features: Tensor) -> None:
    whole, parts = NativeDraft(load()), NativeDraft(load())
    parts.observe(features[:0], 0)
    whole.observe(features[:30], 0)
    wanted = whole.draft(9, 30)
    for start, end in ((0, 1), (1, 18), (18, 25)):
        parts.observe(features[start:end], start)
        parts.draft(3, end)  # a block leaves rows behind the context, which the next ones overwrite
    parts.observe(features[40:55], 25)
    parts.crop(22)
    parts.observe(features[22:30], 22)
    block = parts.draft(9, 30)
    assert block.tokens == wanted.tokens and torch.equal(block.logits, wanted.logits)
    parts.reset()
    parts.observe(features[:30], 0)
    assert torch.equal(parts.draft(9, 30).logits, wanted.logits)
    parts.crop(29)
    with pytest.raises(ValueError, match="the anchor is at 30 but the draft context has 29 rows"):
        parts.draft(9, 30)
    with pytest.raises(ValueError, match="do not continue"):
        parts.observe(features[:1], 30)
    with pytest.raises(ValueError, match="cannot crop"):
        parts.crop(30)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 8},
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn"},
        {"intermediate_size": 72},
    ],
)
def test_which_drafts_the_kernel_leaves_to_pytorch(changes: dict[str, Any], load: Load, tmp_path: Path) -> None:
    draft = load()
    assert NativeDraft.fits(draft)
    assert not NativeDraft.fits(load(torch.float32))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    draft.config = read_config(tmp_path)
    assert not NativeDraft.fits(draft)
