"""What the layers of a target remember, by the fields of its configuration.

| layer | fields | kept |
|---|---|---|
| grouped-query attention | num_key_value_heads (one number, or one a layer), head_dim | 2 · heads · size a token |
| sliding window | layer_types, sliding_window | the same; looks at the last `window` tokens |
| Gemma 4's full layers | global_head_dim, num_global_key_value_heads, num_kv_shared_layers | by their own sizes |
| latent attention (MLA) | kv_lora_rank, qk_rope_head_dim | rank + rotary size a token |
| DeepSeek-V4 | compress_rates, layer_types, index_head_dim | one row for 4 or 128 tokens, and a window of whole rows |
| linear attention | linear_* | a state and the rows of a convolution |
| Mamba, short convolutions | mamba_*, conv_L_cache | the same |

GGUF fields are translated into these names first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from local_runner.footprint import Cache
from sglang_dspark.checkpoints.fields import Fields

DEFAULT_PATTERN = 6
"""Of Gemma's layers every sixth is a full one, where the configuration does not say."""
V4_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def caches(fields: Fields, layers: int) -> tuple[Cache, ...]:
    """The caches of all layers, in order. Raises InputError that names a field that is missing or malformed."""
    kinds = _layer_types(fields, layers)
    shared = fields.integer("num_kv_shared_layers", 0, least=0)
    found: list[Cache] = []
    for layer, kind in enumerate(kinds[: layers - shared]):
        found += _layer(fields, layer, kind)
    return tuple(found)


def _layer_types(fields: Fields, layers: int) -> list[str]:
    given = fields.listed("layer_types", str, [])
    if len(given) >= layers:
        return [str(kind) for kind in given[:layers]]
    if ratios := fields.listed("compress_ratios", int, []):
        names = {0: "sliding_attention", **{rate: name for name, rate in V4_RATES.items()}}
        return [names.get(ratio, "full_attention") for ratio in ratios[:layers]]
    if fields.get("sliding_window") and fields.get("use_sliding_window", True):
        pattern = fields.integer("sliding_window_pattern", DEFAULT_PATTERN)
        return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    return ["full_attention"] * layers


def _layer(fields: Fields, layer: int, kind: str) -> list[Cache]:
    if kind in V4_RATES or fields.get("model_type") == "deepseek_v4":
        return _v4(fields, layer, kind)
    if kind == "linear_attention":
        keys = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim")
        values = fields.integer("linear_num_value_heads") * fields.integer("linear_value_head_dim")
        rows = fields.integer("linear_conv_kernel_dim") - 1
        return [
            Cache(layer, "recurrent", state=values * fields.integer("linear_key_head_dim") + rows * (2 * keys + values))
        ]
    if kind in ("mamba", "mamba2"):
        inner = fields.integer("mamba_n_heads") * fields.integer("mamba_d_head")
        size = fields.integer("mamba_d_state")
        conv = (fields.integer("mamba_d_conv") - 1) * (inner + 2 * fields.integer("mamba_n_groups", 1) * size)
        return [Cache(layer, "recurrent", state=inner * size + conv)]
    if kind == "conv":
        return [Cache(layer, "recurrent", state=fields.integer("conv_L_cache") * fields.integer("hidden_size"))]
    if fields.get("kv_lora_rank"):
        return [Cache(layer, "latent", fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim"))]
    window = fields.integer("sliding_window") if kind == "sliding_attention" else None
    heads, size = _heads(fields, layer, window is not None)
    return [Cache(layer, "sliding" if window else "full", 2 * heads * size, window)]


def _heads(fields: Fields, layer: int, sliding: bool) -> tuple[int, int]:
    """How many heads keep keys and values in this layer, and their size."""
    query = fields.integer("num_attention_heads")
    listed = fields.get("num_key_value_heads", query)
    heads = listed[min(layer, len(listed) - 1)] if isinstance(listed, list) and listed else listed
    size = fields.get("head_dim") or fields.integer("hidden_size") // query
    if not sliding and fields.get("global_head_dim"):
        size = fields.integer("global_head_dim")
        heads = fields.get("num_global_key_value_heads", heads)
    known = Fields({"num_key_value_heads": heads, "head_dim": size}, fields.path)
    return known.integer("num_key_value_heads"), known.integer("head_dim")


def _v4(fields: Fields, layer: int, kind: str) -> list[Cache]:
    """Keys that are values too, of one head: the last `window` as they are, all of them compressed."""
    size = fields.integer("head_dim")
    found = [Cache(layer, "sliding", size, fields.integer("sliding_window"))]
    if kind in V4_RATES:
        rate = fields.mapping("compress_rates").get(kind, V4_RATES[kind])
        found.append(Cache(layer, "compressed", size, every=int(rate)))
        if kind == "compressed_sparse_attention":
            found.append(Cache(layer, "compressed", fields.integer("index_head_dim"), every=int(rate)))
    return found


def from_gguf(header: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The fields of a GGUF file under the names above."""
    arch = header.get("general.architecture")

    def get(name: str) -> Any:
        return header.get(f"{arch}.{name}")

    pattern = get("attention.sliding_window_pattern")
    found: dict[str, Any] = {
        "model_type": arch,
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "sliding_window": get("attention.sliding_window"),
        "max_position_embeddings": get("context_length"),
        "kv_lora_rank": get("attention.kv_lora_rank"),
        "qk_rope_head_dim": get("rope.dimension_count"),
        "num_kv_shared_layers": get("attention.shared_kv_layers"),
        "num_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
    }
    if isinstance(pattern, list):
        found["layer_types"] = ["sliding_attention" if s else "full_attention" for s in pattern]
        if size := get("attention.key_length_swa"):
            found |= {"head_dim": size, "global_head_dim": get("attention.key_length")}
    elif isinstance(pattern, int):
        found["sliding_window_pattern"] = pattern
    elif pattern is None and arch not in ("gemma2", "gemma3", "gemma4"):
        found["sliding_window"] = None
    return {name: value for name, value in found.items() if value is not None}
