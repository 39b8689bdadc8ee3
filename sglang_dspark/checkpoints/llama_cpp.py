"""llama.cpp GGUF: architecture `dflash`, or `dspark` of an early fork, with the same fields under that prefix.

| field | what it is |
|---|---|
| dflash.block_size | rows of a block |
| dflash.target_layers | k + 1 for the output of layer k: inputs of layers, 0 the embedding |
| dflash.sample_from_anchor | true where absent; llama.cpp's converter writes false where its source has no such key |
| dflash.has_confidence_head | informative: the tensors decide |
| tokenizer.ggml.* | the target's tokenizer, without which llama.cpp loads no file; .mask_token_id is the mask |
| dflash.embedding_length, .feed_forward_length, .block_count, .context_length, .attention.*, .rope.* | the backbone |
| dflash.vocab_size | the target's; d2t [draft] holds target ids where the draft's own vocabulary is smaller |
| sglang_dspark.num_target_layers | not llama.cpp's own; written here so that files can be judged without the target |

Tensors: `NAMES`. Norms, biases and the confidence head are F32. The Markov head is vanilla, the confidence head always
sees W1[x] (a head that does not is written with zeros there, which is the same), and a block longer than block_size
silently skips the Markov head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from sglang_dspark.checkpoints.drafts import D2T, Draft, Format, Listed, Reading
from sglang_dspark.checkpoints.gguf_file import Kind, Long, encode, quantised, stored_size
from sglang_dspark.checkpoints.outputs import Loss, Output, OutTensor, Request
from sglang_dspark.checkpoints.tensors import Readable
from sglang_dspark.draft.config import DraftConfig, Rope
from sglang_dspark.errors import InputError

ARCHITECTURES = ("dflash", "dspark")
TAPS = "sglang_dspark.num_target_layers"
NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    D2T: D2T,
}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_BACK = {v: k for k, v in NAMES.items()}
_LAYER_BACK = {v: k for k, v in LAYER_NAMES.items()}


def recognises(raw: Mapping[str, Any]) -> bool:
    """A GGUF file of one of the architectures."""
    return raw.get("general.architecture") in ARCHITECTURES


def rename(name: str) -> str:
    """DeepSpec's name."""
    match name.split("."):
        case ["blk", number, part, "weight"] if part in _LAYER_BACK:
            return f"layers.{number}.{_LAYER_BACK[part]}.weight"
        case _:
            return _BACK.get(name, name)


def stored_name(name: str) -> str:
    """llama.cpp's name."""
    match name.split("."):
        case ["layers", number, *part, "weight"] if ".".join(part) in LAYER_NAMES:
            return f"blk.{number}.{LAYER_NAMES['.'.join(part)]}.weight"
        case _:
            return NAMES[name]


def read(raw: Mapping[str, Any], tensors: Listed) -> Reading:
    """Undo the prefix, the single precision of numbers and the shift of the layers."""
    arch = raw["general.architecture"]

    def get(name: str) -> Any:
        value = raw.get(f"{arch}.{name}")
        return shortest(value) if isinstance(value, float) else value

    shapes = {name: t.shape for name, t in tensors.items()}
    rank = next((s[-1] for s in [shapes.get("markov_w1.weight", ())] if s), 0)
    tokens = raw.get("tokenizer.ggml.tokens")
    counted = tokens.count if isinstance(tokens, Long) else len(tokens) if isinstance(tokens, list) and tokens else None
    ids, window, pattern = (
        get("target_layers"),
        get("attention.sliding_window"),
        get("attention.sliding_window_pattern"),
    )
    fields: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": get("vocab_size") or counted or next(iter(shapes.get("markov_w1.weight", ())), None),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "hidden_act": "silu",
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "rope_parameters": _rope(get),
        "block_size": get("block_size"),
        "mask_token_id": raw.get("tokenizer.ggml.mask_token_id"),
        "target_layer_ids": [i - 1 if type(i) is int else i for i in ids] if isinstance(ids, list) else ids,
        "num_target_layers": raw.get(TAPS),
        "markov_rank": rank,
        "markov_head_type": get("markov_head_type") or "vanilla",
        "enable_confidence_head": "conf_proj.weight" in shapes,
        "confidence_head_with_markov": "conf_proj.weight" in shapes,
        "tie_word_embeddings": False,
        "draft_vocab_size": next(iter(shapes.get(D2T, ())), None),
    }
    if window and isinstance(pattern, list):
        fields |= {
            "use_sliding_window": True,
            "sliding_window": window,
            "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in pattern],
        }
    unsupported = []
    if get("hyper_connection.count"):
        unsupported.append("Its backbone is DeepSeek-V4's, which no engine of this package computes.")
    if get("attention.causal"):
        unsupported.append("Its block is causal, which no engine of this package computes.")
    if get("attention.value_length") not in (None, get("attention.key_length")):
        unsupported.append("Its keys and values have different sizes, which no engine of this package computes.")
    if get("selector_rank"):
        unsupported.append("It is a DFlash2 draft, which no engine of this package computes.")
    spelled = {
        "block_size": f"{arch}.block_size",
        "target_layer_ids": f"{arch}.target_layers",
        "mask_token_id": "tokenizer.ggml.mask_token_id",
        "num_target_layers": TAPS,
    }
    return Reading(fields, spelled, get("sample_from_anchor") is not False, tuple(unsupported))


def shortest(value: float) -> float:
    """The number of fewest digits that is `value` in single precision: 1e-06, not 9.999999974752427e-07."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value


def _rope(get: Any) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": get("rope.freq_base") or 10000.0}
    kind = get("rope.scaling.type")
    if kind not in (None, "none"):
        rope |= {"rope_type": kind, "factor": get("rope.scaling.factor")}
        original = get("rope.scaling.original_context_length")
        rope |= {"original_max_position_embeddings": original} if original is not None else {}
    return rope


def write(draft: Draft, config: DraftConfig, request: Request) -> Output:
    """One file, named after its folder by what writes it. Raises InputError for what `dflash` cannot compute."""
    if config.backbone != "qwen3" or config.activation != "silu":
        what = "Gemma 4 backbone" if config.backbone != "qwen3" else f"'{config.activation}' activation"
        raise InputError(f"{draft.name} has a {what}, which llama.cpp's dflash architecture does not have.")
    if config.target_layer_ids[-1] == config.num_target_layers - 1:
        raise InputError(
            f"{draft.name} taps the output of the last of {config.num_target_layers} layers, but llama.cpp taps inputs"
            " of layers only."
        )
    if request.tokenizer_size not in (None, config.vocab_size):
        raise InputError(
            f"{draft.name} has a vocabulary of {config.vocab_size}, but the tokenizer of {request.target_name} has"
            f" {request.tokenizer_size} tokens; give the target that it was trained for."
        )
    kept, losses = representable(config)
    if not request.tokenizer:
        text = "there is no tokenizer to write, and llama.cpp loads no file without one; give --target TARGET.gguf"
        losses = [Loss("tokenizer", text), *losses]
    names = [n for n in draft.tensors if not _dropped(n, kept)]
    tensors = [_tensor(n, draft.tensors[n], config, request) for n in sorted(names)]
    return Output({}, tensors, losses, _fields(draft, kept, request))


def representable(config: DraftConfig) -> tuple[DraftConfig, list[Loss]]:
    """What is left of a Qwen3 draft's `config` in this format, and what is lost."""
    losses = []
    if config.markov_head_type in ("gated", "rnn"):
        losses.append(
            Loss(
                "markov-head",
                f"llama.cpp has no {config.markov_head_type} Markov head, so drafts would be"
                " those of the backbone alone",
            )
        )
        config = replace(config, markov_head_type="none", markov_rank=0, confidence_with_markov=False)
    if config.confidence and not config.markov_rank:
        losses.append(Loss("confidence-head", "llama.cpp has no confidence head without a vanilla Markov head"))
        config = replace(config, confidence=False)
    if config.attention_bias:
        losses.append(Loss("attention-bias", "llama.cpp's dflash has no biases in attention, so drafts would be worse"))
        config = replace(config, attention_bias=False)
    if not _expressible(config.attention[0].rope):
        losses.append(
            Loss(
                "rope-scaling",
                f"'{config.attention[0].rope.type}' rope cannot be written for llama.cpp, so"
                " drafts would be worse at long contexts",
            )
        )
        config = replace(config, attention=tuple(replace(a, rope=Rope(theta=a.rope.theta)) for a in config.attention))
    return config, losses


def _expressible(rope: Rope) -> bool:
    known = {"default": set(), "linear": {"factor"}, "yarn": {"factor", "original_max_position_embeddings"}}
    parameters = {k for k, v in rope.parameters.items() if (k, v) != ("partial_rotary_factor", 1.0)}
    return rope.type in known and parameters == known[rope.type]


def _dropped(name: str, kept: DraftConfig) -> bool:
    return (
        (name.startswith("markov_head.") and not kept.markov_rank)
        or (name.startswith("confidence_head.") and not kept.confidence)
        or (name.endswith("_proj.bias") and name.startswith("layers."))
    )


def _tensor(name: str, tensor: Readable, config: DraftConfig, request: Request) -> OutTensor:
    if name == D2T:
        return OutTensor(D2T, tensor.shape, "I64", tensor.count * 8, (_plain(c, "I64") for c in tensor.chunks()))
    shape, pad = tensor.shape, None
    if name == "confidence_head.proj.weight" and not config.confidence_with_markov:
        pad = torch.zeros(config.markov_rank)
        shape = (1, shape[-1] + config.markov_rank)
    kind = _type(name, tensor, request)
    chunks = tensor.chunks() if pad is None else chain(tensor.chunks(), [pad])
    size = stored_size(kind, math.prod(shape))
    return OutTensor(stored_name(name), shape, kind, size, _cast(name, chunks, kind))


def _plain(values: torch.Tensor, kind: str) -> bytes:
    return quantised(values, kind)


def _type(name: str, tensor: Readable, request: Request) -> str:
    """The GGUF type for a tensor: F32 where llama.cpp needs it, else what was asked for, else what is stored."""
    if len(tensor.shape) < 2 or name.startswith("confidence_head."):
        return "F32"
    asked = request.types["markov" if name.startswith("markov_head.") else "backbone"]
    if asked == "Q8_0" and tensor.columns % 32:
        raise InputError(
            f"'{name}' has rows of {tensor.columns}, but q8_0 packs 32 elements; choose f16 or bf16 for it."
        )
    kept = {torch.bfloat16: "BF16", torch.float16: "F16"}.get(tensor.dtype, "F32")
    return asked or kept


def _cast(name: str, chunks: Iterator[torch.Tensor] | chain[torch.Tensor], kind: str) -> Iterator[bytes]:
    for chunk in chunks:
        if kind == "F16" and bool((chunk.to(torch.float16).isinf() & chunk.isfinite()).any()):
            raise InputError(f"'{name}' holds numbers beyond the range of f16; choose bf16 for it.")
        if kind == "Q8_0" and not bool(chunk.isfinite().all()):
            raise InputError(f"'{name}' holds numbers that are not finite, which q8_0 cannot; choose bf16 for it.")
        yield quantised(chunk, kind)


def _fields(draft: Draft, config: DraftConfig, request: Request) -> list[bytes]:
    a = config.attention[0]
    u32 = {
        "block_count": config.layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": a.heads,
        "attention.head_count_kv": a.kv_heads,
        "attention.key_length": a.head_dim,
        "attention.value_length": a.head_dim,
        "rope.dimension_count": a.head_dim,
        "vocab_size": config.vocab_size,
        "block_size": config.block,
    }
    fields = [
        encode("general.architecture", Kind.STRING, "dflash"),
        encode("general.quantization_version", Kind.UINT32, 2),
        *(encode(f"dflash.{name}", Kind.UINT32, value) for name, value in u32.items()),
        encode("dflash.attention.layer_norm_rms_epsilon", Kind.FLOAT32, config.eps),
        encode("dflash.rope.freq_base", Kind.FLOAT32, a.rope.theta),
        encode("dflash.target_layers", Kind.ARRAY, [k + 1 for k in config.target_layer_ids]),
        encode("dflash.sample_from_anchor", Kind.BOOL, draft.reading.anchor_first is not False),
        encode("dflash.has_confidence_head", Kind.BOOL, config.confidence),
        encode(TAPS, Kind.UINT32, config.num_target_layers),
    ]
    windows = [layer.window for layer in config.attention]
    if any(windows):
        fields.append(encode("dflash.attention.sliding_window", Kind.UINT32, max(w or 0 for w in windows)))
        pattern = [w is not None for w in windows]
        fields.append(encode("dflash.attention.sliding_window_pattern", Kind.ARRAY, pattern, Kind.BOOL))
    if a.rope.type != "default":
        p = a.rope.parameters
        fields.append(encode("dflash.rope.scaling.type", Kind.STRING, a.rope.type))
        fields.append(encode("dflash.rope.scaling.factor", Kind.FLOAT32, p["factor"]))
        if (original := p.get("original_max_position_embeddings")) is not None:
            fields.append(encode("dflash.rope.scaling.original_context_length", Kind.UINT32, original))
    fields += request.tokenizer or [encode("tokenizer.ggml.model", Kind.STRING, "none")]
    return [*fields, encode("tokenizer.ggml.mask_token_id", Kind.UINT32, config.mask_token_id)]


FORMAT = Format("gguf", "llama.cpp GGUF draft", recognises, read, rename, write=write)
