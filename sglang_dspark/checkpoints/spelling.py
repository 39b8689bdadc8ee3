"""DeepSpec's spelling of a draft's configuration, into which every format is translated, read into a `DraftConfig`;
and the tensors, by DeepSpec's names, that belong to one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dspark.checkpoints.fields import Fields
from sglang_dspark.checkpoints.words import brief, cut
from sglang_dspark.draft.config import Attention, DraftConfig, Rope
from sglang_dspark.errors import InputError

ARCHITECTURES = {"Qwen3DSparkModel": "qwen3", "LingDSparkModel": "qwen3", "Gemma4DSparkModel": "gemma4"}
MAX_LAYERS, MAX_BLOCK = 1000, 1000
OPTIONAL = ("embed_tokens.weight", "lm_head.weight")
"""Copies of the target's tables, which a checkpoint may leave out."""

# Features of Gemma 4 targets that no draft of this format has, with the value that switches each off.
GEMMA4_ABSENT: dict[str, tuple[Any, ...]] = {
    "enable_moe_block": (False, None),
    "hidden_size_per_layer_input": (0, None),
    "num_kv_shared_layers": (0, None),
    "use_bidirectional_attention": (None, "vision"),
}
GEMMA4_ROPE: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
GEMMA4_GLOBAL_HEAD_DIM = 512
"""What Gemma 4 means where `global_head_dim` is not given."""


def parse_config(fields: Fields) -> DraftConfig:
    """What `fields`, in this format's spelling, describe. Raises InputError that names the field that is missing,
    malformed or not supported.
    """
    path, architectures = fields.path, fields.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    known = [a for a in listed if isinstance(a, str) and a in ARCHITECTURES]
    if len(known) != 1:
        raise InputError(
            f"{path} names the architecture {brief(architectures)}; a DeepSpec draft is a {' or '.join(ARCHITECTURES)}."
        )
    backbone = ARCHITECTURES[known[0]]
    rank = fields.integer("markov_rank", least=0)
    confidence = fields.flag("enable_confidence_head")
    softcap = fields.get("final_logit_softcapping")
    try:
        return DraftConfig(
            backbone=backbone,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            attention=_gemma4_attention(fields) if backbone == "gemma4" else _qwen3_attention(fields),
            activation=fields.text("hidden_activation") if backbone == "gemma4" else fields.text("hidden_act"),
            eps=fields.number("rms_norm_eps"),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            block=fields.integer("block_size", most=MAX_BLOCK),
            mask_token_id=fields.integer("mask_token_id", least=0),
            target_layer_ids=tuple(fields.listed("target_layer_ids", int)),
            num_target_layers=fields.integer("num_target_layers"),
            markov_head_type=fields.text("markov_head_type").lower() if rank else "none",
            markov_rank=rank,
            confidence=confidence,
            confidence_with_markov=confidence and fields.flag("confidence_head_with_markov"),
            attention_bias=fields.flag("attention_bias", False),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            softcap=fields.number("final_logit_softcapping") if softcap is not None and backbone == "gemma4" else None,
        )
    except ValueError as error:
        raise InputError(f"{path} describes no draft that can run: {cut(str(error))}.") from error


def _qwen3_attention(fields: Fields) -> tuple[Attention, ...]:
    layers, heads = fields.integer("num_hidden_layers", most=MAX_LAYERS), fields.integer("num_attention_heads")
    window = fields.integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    first_sliding = fields.integer("max_window_layers", 28, least=0) if window else layers
    derived = ["full_attention" if i < first_sliding else "sliding_attention" for i in range(layers)]
    legacy = {"rope_theta": fields.get("rope_theta"), **fields.mapping("rope_scaling")}
    rope = _rope(fields, fields.mapping("rope_parameters") or legacy)
    return tuple(
        Attention(
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", fields.integer("hidden_size") // heads),
            rope=rope,
            window=window if sliding else None,
        )
        for sliding in _sliding(fields, layers, derived, window)
    )


def _gemma4_attention(fields: Fields) -> tuple[Attention, ...]:
    for name, off in GEMMA4_ABSENT.items():
        if fields.get(name) not in off:
            raise InputError(
                f"'{name}' is {brief(fields.get(name))} in {fields.path}, which no supported Gemma 4 draft has."
            )
    layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    window = fields.integer("sliding_window", 512)
    # Five sliding layers, then a full one, as Gemma 4 itself has where its config does not say.
    derived = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(layers)]
    sliding = _sliding(fields, layers, derived, window)
    return tuple(_gemma4_layer(fields, i, window if sliding[i] else None) for i in range(layers))


def _gemma4_layer(fields: Fields, layer: int, window: int | None) -> Attention:
    """One layer of either spelling: `global_*` fields at the root, or what differs in `per_layer_config`."""
    override = Fields(Fields(fields.mapping("per_layer_config"), fields.path).mapping(str(layer)), fields.path)
    head_dim, kv_heads = fields.integer("head_dim"), fields.integer("num_key_value_heads")
    full = window is None
    k_eq_v = full and fields.flag("attention_k_eq_v", False)
    if full and not fields.get("per_layer_config"):
        head_dim = fields.integer("global_head_dim", GEMMA4_GLOBAL_HEAD_DIM)
        kv_heads = fields.integer("num_global_key_value_heads", kv_heads) if k_eq_v else kv_heads
    kind = "full_attention" if full else "sliding_attention"
    ropes = Fields(fields.mapping("rope_parameters"), fields.path)
    return Attention(
        heads=fields.integer("num_attention_heads"),
        kv_heads=override.integer("num_key_value_heads", kv_heads),
        head_dim=override.integer("head_dim", head_dim),
        rope=_rope(fields, ropes.mapping(kind) or GEMMA4_ROPE[kind]),
        window=window,
        k_eq_v=k_eq_v,
    )


def _sliding(fields: Fields, layers: int, derived: list[str], window: int | None) -> list[bool]:
    kinds = fields.listed("layer_types", str, derived)
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", f"'full_attention' or 'sliding_attention' for each of {layers} layers")
    if "sliding_attention" in kinds and window is None:
        raise InputError(
            f"{fields.path} has sliding layers but no window in use; set use_sliding_window and sliding_window."
        )
    return [kind == "sliding_attention" for kind in kinds]


def _rope(fields: Fields, parameters: Mapping[str, Any]) -> Rope:
    inner = Fields(parameters, fields.path)
    named = ("rope_type", "type", "rope_theta")
    return Rope(
        type=inner.text("rope_type", inner.text("type", "default")),
        theta=inner.number("rope_theta", fields.number("rope_theta", 10_000.0)),
        parameters={k: v for k, v in parameters.items() if k not in named and v is not None},
    )


def expected_tensors(config: DraftConfig, reduced: int | None = None) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a draft, those in `OPTIONAL` included; `reduced` is the size of a vocabulary
    of its own.
    """
    d, vocab, rank = config.hidden_size, config.vocab_size, config.markov_rank
    own = reduced or vocab
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, d),
        "lm_head.weight": (own, d),
        "fc.weight": (d, config.feature_size),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
    }
    for layer, attention in enumerate(config.attention):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_tensors(config, attention).items()}
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (own, rank)}
    if config.markov_head_type == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, d + rank), "markov_head.gate_proj.bias": (rank,)}
    if config.markov_head_type == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * rank, 2 * rank + d),
            "markov_head.joint_proj.bias": (3 * rank,),
        }
    if config.confidence:
        width = d + (rank if config.confidence_with_markov else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def _layer_tensors(config: DraftConfig, attention: Attention) -> dict[str, tuple[int, ...]]:
    d, inner, head = config.hidden_size, config.intermediate_size, attention.head_dim
    q, kv = attention.heads * head, attention.kv_heads * head
    projections = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
    if attention.k_eq_v:
        del projections["v_proj"]
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{n}.weight": shape for n, shape in projections.items()}
    if config.attention_bias:
        shapes |= {f"self_attn.{n}.bias": shape[:1] for n, shape in projections.items()}
    shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    shapes |= {"mlp.gate_proj.weight": (inner, d), "mlp.up_proj.weight": (inner, d), "mlp.down_proj.weight": (d, inner)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.backbone == "gemma4":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes["layer_scalar"] = (1,)
    return shapes | {f"{n}.weight": (d,) for n in norms}
