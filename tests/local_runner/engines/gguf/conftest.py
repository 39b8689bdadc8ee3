"""Tiny GGUF targets, written from tiny transformers models, and drafts for them. Without llama.cpp all is skipped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from local_runner.engines.gguf import LlamaEngine, load_engine
from local_runner.engines.gguf.library import load_library
from local_runner.pairs import DEFAULT_PAIR
from local_runner.store import Resolved, resolve_pair
from sglang_dspark.checkpoints.fields import Fields
from sglang_dspark.checkpoints.spelling import expected_tensors, parse_config
from sglang_dspark.errors import InputError

VOCAB = 96
WORDS = ["<unk>", "<s>", "</s>", *(chr(33 + i) for i in range(90)), "Ġ", "ab", "Ġab"]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
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
}
AFTER = {
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
}
DRAFT: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "block_size": 5,
    "mask_token_id": 0,
    "target_layer_ids": [0, 2],
    "num_target_layers": 4,
    "markov_rank": 32,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}

HOME = os.environ.get("DSPARK_HOME")

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def library() -> Any:
    try:
        return load_library()
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def home() -> str | None:
    """`DSPARK_HOME` as these tests were started with."""
    return HOME


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A store of these tests' own; of a module's, so that tests elsewhere do not get it too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPARK_HOME", str(tmp_path_factory.mktemp("store")))
        yield


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix in llama.cpp's order: the halves that are rotated together side by side."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_target(path: Path, folder: Path, architecture: str, type_: str = "F32") -> Path:
    """The transformers model of `folder` as a GGUF file, with a tokenizer of single characters and two merges."""
    config = json.loads((folder / "config.json").read_text())
    rope = config["rope_parameters"]
    heads, kv_heads, vocab = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(vocab)
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*WORDS, *(f"<{i}>" for i in range(len(WORDS), vocab))])
    writer.add_token_types([3, 3, 3] + [1] * (vocab - 3))
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleaved(values, heads if "q_proj" in name else kv_heads)
        if architecture == "gemma3" and "norm" in name:
            values = values + 1
        names = NAMES | AFTER.get(architecture, {"post_attention_layernorm": "ffn_norm"})
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        if values.ndim == 1:
            writer.add_tensor(name, values.astype(np.float32))
        else:
            kind = gguf.GGMLQuantizationType[type_]
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory, family: Make) -> Make:
    """target(architecture, type="F32", **config): the file of a tiny target, made once."""
    made: dict[str, Path] = {}
    classes = {"llama": "Llama", "qwen3": "Qwen3", "gemma3": "Gemma3"}

    def make(architecture: str = "llama", type_: str = "F32", **config: Any) -> Path:
        key = repr((architecture, type_, sorted(config.items())))
        if key not in made:
            path = tmp_path_factory.mktemp(architecture) / f"{architecture}-{type_}.gguf"
            made[key] = write_target(path, family(classes[architecture], **config), architecture, type_)
        return made[key]

    return make


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """draft(**config): the folder of a tiny draft with random weights, in DeepSpec's format, made once."""
    made: dict[str, Path] = {}

    def make(**changes: Any) -> Path:
        key = repr(sorted(changes.items()))
        if key not in made:
            folder = made[key] = tmp_path_factory.mktemp("draft")
            config = DRAFT | changes
            numbers = torch.Generator().manual_seed(3)
            tensors = {
                name: torch.randn(shape, generator=numbers) * 0.3 + float("norm" in name)
                for name, shape in expected_tensors(parse_config(Fields(config, "a test")), None).items()
                if name not in ("embed_tokens.weight", "lm_head.weight")
            }
            (folder / "config.json").write_text(json.dumps(config))
            save_file(tensors, folder / "model.safetensors")
        return made[key]

    return make


@pytest.fixture(scope="session")
def open_(library: Any) -> Callable[..., LlamaEngine]:
    """open_(target, draft=None, reuse_prefix=False, **options): an engine on one thread."""

    def make(target: Path, draft: Path | None = None, reuse_prefix: bool = False, **options: Any) -> LlamaEngine:
        engine = load_engine(target, draft, threads=1, **options)
        engine.reuse_prefix = reuse_prefix
        return engine

    return make


@pytest.fixture(scope="session")
def write() -> Make:
    """write(path, folder, architecture, type="F32"): a transformers model as a GGUF file."""
    return write_target


@pytest.fixture(scope="module")
def pair(home: str | None) -> Iterator[Resolved]:
    """The default pair in the store that these tests were started with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DSPARK_HOME") if home is None else patch.setenv("DSPARK_HOME", home)
        try:
            found = resolve_pair(DEFAULT_PAIR)
        except InputError as error:
            pytest.skip(f"the default pair is not here: {error}")
        yield found
