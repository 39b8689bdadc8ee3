"""Bytes from headers: published sizes, real files, and what each kind of layer remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from local_runner.footprint import Cache, Footprint
from local_runner.footprint.caches import caches, from_gguf
from local_runner.footprint.listing import of_draft, of_target
from local_runner.footprint.read import read_footprint
from local_runner.footprint.shapes import published, shape_files
from sglang_dspark.checkpoints.fields import Fields
from sglang_dspark.checkpoints.gguf_file import Kind, encode, quantised, write_gguf
from sglang_dspark.checkpoints.outputs import OutTensor
from sglang_dspark.checkpoints.places import Folder
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.errors import InputError

HEAD = Path(__file__).parents[2] / "configs" / "heads" / "smollm2-135m-dspark-interim"


def elements(f: Footprint) -> int:
    return sum(part.elements for part in f.parts)


def kept(raw: dict[str, Any], layers: int = 1) -> tuple[Cache, ...]:
    return caches(Fields(raw, "a test"), layers)


@pytest.mark.parametrize(
    ("name", "billions", "head_gb", "row", "draft_row"),
    [
        ("qwen3-4b", 4.02, 1.23, 147456, 20480),
        ("qwen3-8b", 8.19, 2.25, 147456, 20480),
        ("qwen3-14b", 14.77, 3.72, 163840, 20480),
        ("qwen3-30b-a3b", 30.53, 0.764, 98304, 10240),
        ("gemma-4-12b", 11.91, 2.66, 16384, 40960),
        ("deepseek-v4-flash", 284.3, 10.86, 6880, 0),
    ],
)
def test_published_shapes_have_the_published_sizes(
    name: str, billions: float, head_gb: float, row: int, draft_row: int
) -> None:
    f = published(name)
    assert f.draft is not None
    assert elements(f) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert f.draft.bytes / 1e9 == pytest.approx(head_gb, rel=5e-3)
    assert f.cache_row() == row
    assert sum(c.width * 2 for c in f.draft.caches if c.window is None) == draft_row
    assert f.notes and f.draft.shares_lm_head


def test_markov_tables_have_their_reported_sizes() -> None:
    for name, megabytes in (("qwen3-4b", 155.6), ("gemma-4-12b", 268.4)):
        draft = published(name).draft
        assert draft is not None
        assert sum(p.bytes for p in draft.parts if p.kind in ("W1", "W2")) / 1e6 == pytest.approx(megabytes, abs=0.05)


def test_copies_of_the_tables_cost_what_was_reported() -> None:
    """With its own embedding and lm_head the head of Qwen3-4B takes 2.79 GB."""
    f = published("qwen3-4b")
    assert f.draft is not None
    table = next(p for p in f.parts if p.kind == "embedding")
    assert (f.draft.bytes + 2 * table.bytes) / 1e9 == pytest.approx(2.79, abs=0.005)


def test_every_shape_has_all_its_layers() -> None:
    for name in shape_files():
        f = published(name)
        assert {p.layer for p in f.parts if p.kind == "layer"} == set(range(f.layers))
        assert {c.layer for c in f.caches} == set(range(f.layers))


def test_grouped_query_attention_and_windows() -> None:
    base = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    assert kept(base) == (Cache(0, "full", 32),)
    assert kept({**base, "num_key_value_heads": None}) == (Cache(0, "full", 64),)
    windowed = {**base, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    assert kept(windowed, 2) == (Cache(0, "sliding", 32, 16), Cache(1, "full", 32))
    assert kept({**base, "sliding_window": 16, "use_sliding_window": False}) == (Cache(0, "full", 32),)
    assert [c.kind for c in kept({**base, "sliding_window": 16}, 6)] == ["sliding"] * 5 + ["full"]


def test_gemma_4_keeps_other_heads_in_its_full_layers() -> None:
    f = published("gemma-4-12b")
    assert f.caches[0] == Cache(0, "sliding", 2 * 8 * 256, 1024)
    assert f.caches[5] == Cache(5, "full", 2 * 512)
    raw = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 8, "num_kv_shared_layers": 2}
    assert len(kept(raw, 5)) == 3, "layers that share keep nothing of their own"


def test_latent_attention_keeps_a_rank_and_a_rotary_part() -> None:
    raw = {"hidden_size": 64, "num_attention_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert kept(raw) == (Cache(0, "latent", 576),)


def test_recurrent_layers_keep_a_state_for_each_row_that_may_be_taken_back() -> None:
    raw = {
        "layer_types": ["linear_attention"], "linear_num_key_heads": 2, "linear_key_head_dim": 4,
        "linear_num_value_heads": 3, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    (cache,) = kept(raw)
    assert cache.state == 3 * 5 * 4 + 3 * (2 * 8 + 15)
    assert cache.size(1000, 8, "bfloat16") == cache.state * 4 * 9 == cache.size(10, 8, "bfloat16")
    assert kept({"layer_types": ["conv"], "conv_L_cache": 3, "hidden_size": 7})[0].state == 21
    mamba = {"layer_types": ["mamba"], "mamba_n_heads": 2, "mamba_d_head": 3, "mamba_d_state": 4, "mamba_d_conv": 4}
    assert kept(mamba)[0].state == 6 * 4 + 3 * (6 + 2 * 4)


def test_compressed_layers_keep_a_row_for_several_tokens() -> None:
    f = published("deepseek-v4-flash")
    sparse = [c for c in f.caches if c.layer == 2]
    assert sparse == [
        Cache(2, "sliding", 512, 128),
        Cache(2, "compressed", 512, every=4),
        Cache(2, "compressed", 128, every=4),
    ]
    assert Cache(0, "compressed", 512, every=4).size(9, 0, "bfloat16") == 3 * 512 * 2


def test_sizes_of_a_cache() -> None:
    cache = Cache(0, "sliding", 32, 16)
    assert cache.size(100, 8, "bfloat16") == 108 * 64, "both engines keep rows outside the window"
    assert cache.size(100, 8, "bfloat16", whole=False) == 24 * 64, "a ring needs the window and the rows to take back"
    assert cache.read(100, "bfloat16") == 16 * 64
    assert cache.size(100, 8, "int8") == 108 * 34, "int8 has a 16-bit scale for 32 elements"


def test_names_find_their_parts() -> None:
    assert of_target("model.layers.3.mlp.experts.17.up_proj.weight") == ("target experts 3", "experts", 3)
    assert of_target("blk.3.ffn_up_exps.weight")[1] == "experts"
    assert of_target("blk.3.ffn_up_shexp.weight")[1] == "layer"
    assert of_target("model.layers.3.mlp.shared_experts.up_proj.weight")[1] == "layer"
    assert of_target("model.language_model.layers.12.self_attn.q_proj.weight") == ("target layer 12", "layer", 12)
    assert of_target("model.vision_tower.encoder.layers.3.mlp.weight")[1] == "unused"
    assert of_target("output.weight")[1] == of_target("lm_head.weight")[1] == "lm_head"
    assert of_target("token_embd.weight")[1] == "embedding"
    assert of_draft("mtp.2.markov_head.markov_w2.weight")[1] == "W2"
    assert of_draft("layers.0.self_attn.q_proj.weight")[1] == of_draft("fc.weight")[1] == "backbone"


def test_fields_of_gguf_files() -> None:
    header = {
        "general.architecture": "gemma4", "gemma4.embedding_length": 64, "gemma4.attention.head_count": 4,
        "gemma4.attention.head_count_kv": [2, 1], "gemma4.attention.key_length": 16,
        "gemma4.attention.key_length_swa": 8, "gemma4.attention.sliding_window": 32,
        "gemma4.attention.sliding_window_pattern": [True, False],
    }  # fmt: skip
    assert kept(from_gguf(header, 2), 2) == (Cache(0, "sliding", 32, 32), Cache(1, "full", 32))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A sharded target with experts, and nothing else that matters."""
    target = tmp_path / "target"
    target.mkdir()
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 32, "vocab_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    shards = {
        "a.safetensors": {
            "model.embed_tokens.weight": torch.zeros(64, 32, dtype=torch.bfloat16),
            "model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(16, 32, dtype=torch.bfloat16),
        },
        "b.safetensors": {
            "model.layers.0.self_attn.q_proj.weight": torch.zeros(32, 32, dtype=torch.bfloat16),
            "model.layers.1.self_attn.q_proj.weight": torch.zeros(32, 32, dtype=torch.float8_e4m3fn),
            "model.layers.1.self_attn.q_proj.weight_scale": torch.zeros(1, dtype=torch.float32),
            "lm_head.weight": torch.zeros(64, 32, dtype=torch.float32),
        },
    }
    for name, tensors in shards.items():
        save_file(tensors, target / name)
    index = {"weight_map": {t: name for name, tensors in shards.items() for t in tensors}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target, tmp_path


def test_a_sharded_folder_is_counted_tensor_by_tensor(pair: tuple[Path, Path]) -> None:
    f = read_footprint(Folder(pair[0]))
    sizes = {p.name: (p.bytes, p.dtype) for p in f.parts}
    assert sizes == {
        "target layer 0": (2048, "BF16"),
        "target experts 0": (1024, "BF16"),
        "target layer 1": (1028, "F8_E4M3"),
        "target embedding": (4096, "BF16"),
        "target lm_head": (8192, "F32"),
    }
    assert (f.experts, f.active, f.inner, f.vocab, f.name) == (4, 2, 32, 64, "target")
    assert f.largest_file == 2048 + 1028 + 8192 and not f.tied
    assert f.transient(mapped=False) == f.largest_file and f.transient(mapped=True) == f.bytes


def test_bytes_come_from_the_files(pair: tuple[Path, Path]) -> None:
    stored = sum(file.stat().st_size for file in pair[0].glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in pair[0].glob("*.safetensors"))
    assert read_footprint(Folder(pair[0])).bytes == stored - headers


def write_q8(file: Path) -> int:
    """A GGUF target of one layer in Q8_0; returns the bytes of its tensors."""
    fields: list[tuple[str, Kind, Any]] = [
        ("general.architecture", Kind.STRING, "qwen3"),
        ("qwen3.embedding_length", Kind.UINT32, 32),
        ("qwen3.block_count", Kind.UINT32, 1),
        ("qwen3.vocab_size", Kind.UINT32, 64),
        ("qwen3.attention.head_count", Kind.UINT32, 4),
        ("qwen3.attention.head_count_kv", Kind.UINT32, 2),
        ("qwen3.attention.key_length", Kind.UINT32, 8),
    ]
    shapes = {"token_embd.weight": (64, 32), "blk.0.attn_q.weight": (32, 32)}
    tensors = [
        OutTensor(n, shape, "Q8_0", shape[0] * 34, iter([quantised(torch.ones(shape[0] * 32), "Q8_0")]))
        for n, shape in shapes.items()
    ]
    with file.open("wb") as stream:
        for _ in write_gguf(stream, [encode(*field) for field in fields], tensors):
            pass
    return sum(t.size for t in tensors)


def test_a_gguf_file_is_counted_as_it_is_quantised(tmp_path: Path) -> None:
    total = write_q8(tmp_path / "m.gguf")
    f = read_footprint(Folder(tmp_path / "m.gguf"))
    assert f.bytes == total == (64 + 32) * 34, "32 elements take 34 bytes"
    assert {p.dtype for p in f.parts} == {"Q8_0"} and f.tied
    assert f.parts[0].size("bfloat16") == 32 * 32 * 2
    assert f.caches == (Cache(0, "full", 32),) and f.largest_file == 64 * 34, "read tensor by tensor"


def test_copies_of_tables_are_told_from_tables_of_the_drafts_own(tmp_path: Path) -> None:
    """A copy is dropped when loading; a table that differs, in some row, stays and is multiplied with."""
    config = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "block_size": 5,
        "mask_token_id": 63, "target_layer_ids": [1, 3], "num_target_layers": 6, "markov_rank": 32,
        "markov_head_type": "vanilla", "enable_confidence_head": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    draft, target = tmp_path / "draft", tmp_path / "target"
    table = torch.randn(64, 32)
    for folder, tensors in (
        (draft, {"lm_head.weight": table.bfloat16(), "fc.weight": torch.zeros(32, 64)}),
        (target, {"model.embed_tokens.weight": table, "model.layers.0.mlp.up_proj.weight": torch.zeros(32, 32)}),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
        save_file(tensors, folder / "model.safetensors")
    shared = read_footprint(Folder(target), read_draft(draft)).draft
    assert shared is not None and shared.shares_lm_head and [p.kind for p in shared.parts] == ["backbone"]
    own = table.bfloat16()
    own[3] += 1
    save_file({"lm_head.weight": own, "fc.weight": torch.zeros(32, 64)}, draft / "model.safetensors")
    other = read_footprint(Folder(target), read_draft(draft)).draft
    assert other is not None and not other.shares_lm_head
    assert {p.kind: p.bytes for p in other.parts} == {"backbone": 32 * 64 * 4, "draft lm_head": 64 * 32 * 2}


def test_a_module_in_its_targets_checkpoint(tmp_path: Path) -> None:
    """DeepSeek-V4's: stages with experts and a window of the target's rows, none of which is the target's."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 32, "vocab_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 16,
        "index_head_dim": 4, "compress_ratios": [0, 4], "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "dspark_block_size": 5, "dspark_noise_token_id": 63, "dspark_markov_rank": 8,
        "dspark_target_layer_ids": [0, 1],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = [
        "embed.weight", "head.weight", "layers.0.ffn.experts.0.w1.weight", "layers.1.attn.wq_a.weight",
        "mtp.0.attn.wkv.weight", "mtp.0.ffn.experts.0.w1.weight", "mtp.1.markov_head.markov_w2.weight",
    ]  # fmt: skip
    save_file({name: torch.zeros(64, 32, dtype=torch.float8_e4m3fn) for name in names}, tmp_path / "model.safetensors")
    f = read_footprint(Folder(tmp_path), read_draft(tmp_path))
    kinds = ["experts", "layer", "embedding", "lm_head"]
    assert [p.kind for p in f.parts] == kinds and f.bytes == 4 * 2048
    assert [c.kind for c in f.caches] == ["sliding", "sliding", "compressed", "compressed"]
    assert f.draft is not None and f.draft.caches == (Cache(0, "sliding", 8, 16), Cache(1, "sliding", 8, 16))
    assert (f.draft.block, f.draft.taps, f.draft.rank, f.draft.shares_lm_head) == (5, 2, 8, True)
    assert {p.kind for p in f.draft.parts} == {"backbone", "draft experts", "W2"}


def test_parts_unpack_to_other_types(pair: tuple[Path, Path]) -> None:
    part = next(p for p in read_footprint(Folder(pair[0])).parts if p.name == "target layer 1")
    assert part.size(None) == 1028 and part.size("bfloat16") == 2 * 1025


def test_a_faulty_shape_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shape_files()["qwen3-4b"].read_text()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "dspark" / "shapes"
    folder.mkdir(parents=True)
    for name, old, new in (
        ("x", "largest_file_gb", "largest_gb"),
        ("y", "BF16 2560", "BF17 2560"),
        ("z", "[config]", "[con"),
    ):
        (folder / f"{name}.toml").write_text(text.replace(old, new, 1))
        with pytest.raises(InputError, match=rf"{name}\.toml"):
            published(name)


@pytest.mark.slow
def test_the_default_pair() -> None:
    from local_runner.doctor_command import place_of

    try:
        place = place_of("smollm2-135m", is_draft=False, pull=False)
    except InputError as error:
        pytest.skip(f"the default pair is not here: {error}")
    f = read_footprint(place, read_draft(HEAD))
    assert elements(f) == 134_515_008 and f.tied and f.layers == 30
    assert f.bytes == pytest.approx(98_362_432, rel=0.02), "the file, without its tokenizer"
    assert f.draft is not None and f.draft.shares_lm_head
    assert f.draft.bytes == pytest.approx((HEAD / "model.safetensors").stat().st_size, rel=1e-3)
