"""Conversions are exact where they can be, refuse to lose anything in silence, and leave nothing half-written."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoint_kit import QWEN3, Make, converted, rewrite, save, weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from sglang_dspark.checkpoints import convert
from sglang_dspark.checkpoints.drafts import Draft
from sglang_dspark.checkpoints.outputs import Request
from sglang_dspark.checkpoints.registry import WRITABLE, read_draft
from sglang_dspark.checkpoints.targets import read_target
from sglang_dspark.checkpoints.tensors import CHUNK, open_tensors
from sglang_dspark.errors import InputError


def values(draft: Draft) -> dict[str, torch.Tensor]:
    return {n: t.read(0, t.count).view(t.shape) for n, t in draft.tensors.items()}


def assert_same(one: Draft, other: Draft) -> None:
    assert one.config() == other.config()
    assert one.reading.anchor_first == other.reading.anchor_first and one.reduced == other.reduced
    a, b = values(one), values(other)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].shape == b[name].shape
        assert torch.equal(a[name].float(), b[name].float()), name


@pytest.mark.parametrize(("first", "second"), list(permutations(WRITABLE, 2)))
def test_round_trips_are_exact(first: str, second: str, make: Make, tmp_path: Path) -> None:
    """From any format to any other and back to where it came from."""
    source = converted(make(), first, tmp_path / "one")
    away = converted(source, second, tmp_path / "two")
    back = converted(away, first, tmp_path / "three")
    assert read_draft(away).format.name == second
    assert_same(read_draft(source), read_draft(back))


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Qwen3 drafts of many forms that every format can hold."""
    rank, kv = draw(st.sampled_from([0, 8, 32])), draw(st.sampled_from([1, 2, 4]))
    layers = draw(st.integers(1, 3))
    data = {
        **QWEN3,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "block_size": draw(st.integers(2, 9)),
        "markov_rank": rank,
        "enable_confidence_head": bool(rank) and draw(st.booleans()),
        "confidence_head_with_markov": bool(rank) and draw(st.booleans()),
        "target_layer_ids": sorted(draw(st.sets(st.integers(0, 4), min_size=1, max_size=3))),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "mask_token_id": draw(st.integers(0, 63)),
    }
    if draw(st.booleans()):
        kinds = draw(
            st.lists(st.sampled_from(["sliding_attention", "full_attention"]), min_size=layers, max_size=layers)
        )
        data |= {"use_sliding_window": True, "sliding_window": 16, "layer_types": kinds}
    if draw(st.booleans()):
        data["rope_parameters"] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    return data


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=configs(), to=st.sampled_from(["specforge", "speculators", "gguf"]))
def test_any_draft_survives(data: dict[str, Any], to: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("any")
    source = save(root / "source", data, weights(data))
    away = converted(source, to, root / "away")
    back = read_draft(converted(away, "deepspec", root / "back"))
    before = read_draft(source)
    if to == "gguf" and before.config().confidence and not before.config().confidence_with_markov:
        return  # the head comes back with Markov features of weight zero, which has its own test
    assert_same(before, back)
    shutil.rmtree(root)


@pytest.mark.parametrize("types", [{"markov": None, "backbone": None}, {"markov": "Q8_0", "backbone": "Q8_0"}])
def test_tables_of_many_chunks(types: dict[str, str | None], make: Make, tmp_path: Path) -> None:
    """The Markov tables have more elements than are read at once."""
    source = make(vocab_size=70_001)
    assert read_draft(source).tensors["markov_head.markov_w1.weight"].count > CHUNK
    folder = converted(source, "gguf", tmp_path / "g", Request(types))
    stored = {t.name: t for t in gguf.GGUFReader(folder / "g.gguf").tensors}["markov_w2.weight"]
    theirs = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).astype("float32"))
    own = load_file(source / "model.safetensors")["markov_head.markov_w2.weight"].float()
    torch.testing.assert_close(theirs.view(own.shape), own, atol=0.01 if types["markov"] else 0.0, rtol=0.0)
    back = converted(folder, "deepspec", tmp_path / "d")
    again = load_file(back / "model.safetensors")["markov_head.markov_w2.weight"]
    assert torch.equal(again.float(), theirs.view(own.shape))
    assert torch.equal(open_tensors(back).load("markov_head.markov_w2.weight"), again)


def test_bytes_are_the_same_each_time(make: Make, tmp_path: Path) -> None:
    source = make()
    for to in WRITABLE:
        first, second = (converted(source, to, tmp_path / str(n) / "out") for n in (1, 2))
        for file in first.iterdir():
            assert file.read_bytes() == (second / file.name).read_bytes(), (to, file.name)
        shutil.rmtree(tmp_path / "1")
        shutil.rmtree(tmp_path / "2")


def test_safetensors_are_aligned_and_say_where_they_come_from(make: Make, tmp_path: Path) -> None:
    source = make()
    folder = converted(source, "speculators", tmp_path / "s")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        record = json.loads(file.metadata()["sglang_dspark"])
        ordered = hashlib.sha256()
        data = (folder / "model.safetensors").read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
    ordered.update(data[start:])
    config = (source / "config.json").read_bytes()
    assert record["weights_sha256"] == ordered.hexdigest()
    assert record["source_config_sha256"] == hashlib.sha256(config).hexdigest()
    assert (record["source"], record["source_format"], record["format"]) == ("draft", "deepspec", "speculators")
    assert start % 8 == 0


def test_gguf_says_where_it_comes_from(make: Make, tmp_path: Path) -> None:
    folder = converted(make(), "gguf", tmp_path / "g")
    reader = gguf.GGUFReader(folder / "g.gguf")
    record = json.loads(reader.fields["sglang_dspark.provenance"].contents())
    assert record["lost"] == ["tokenizer"] and record["weights_sha256"] != convert.PENDING
    fields = {n: f.contents() for n, f in reader.fields.items()}
    assert fields["dflash.target_layers"] == [2, 4] and fields["dflash.sample_from_anchor"] is True
    assert fields["tokenizer.ggml.mask_token_id"] == 63 and fields["dflash.block_size"] == 5
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert kinds["markov_w1.weight"] == "BF16" and kinds["output_norm.weight"] == kinds["conf_proj.weight"] == "F32"
    assert kinds["blk.1.ffn_down.weight"] == "BF16"


NAMES = {
    "fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm", "embed_tokens": "token_embd",
    "lm_head": "output", "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj", "layers.1.self_attn.q_proj": "blk.1.attn_q",
    "layers.1.self_attn.k_proj": "blk.1.attn_k", "layers.1.self_attn.v_proj": "blk.1.attn_v",
    "layers.1.self_attn.o_proj": "blk.1.attn_output", "layers.1.self_attn.q_norm": "blk.1.attn_q_norm",
    "layers.1.self_attn.k_norm": "blk.1.attn_k_norm", "layers.1.mlp.gate_proj": "blk.1.ffn_gate",
    "layers.1.mlp.up_proj": "blk.1.ffn_up", "layers.1.mlp.down_proj": "blk.1.ffn_down",
    "layers.1.input_layernorm": "blk.1.attn_norm", "layers.1.post_attention_layernorm": "blk.1.ffn_norm",
}  # fmt: skip
"""What llama.cpp calls the tensors: a map that is swapped both ways survives every round trip."""


def test_gguf_names_are_llama_cpps(make: Make, tmp_path: Path) -> None:
    tables = {n: torch.randn(64, 32) for n in ("embed_tokens.weight", "lm_head.weight")}
    before = values(read_draft(make(edit=lambda t: t.update(tables))))
    folder = converted(tmp_path / "draft", "gguf", tmp_path / "g", Request({"markov": "F16", "backbone": "F16"}))
    after = {t.name: t for t in gguf.GGUFReader(folder / "g.gguf").tensors}
    for ours, theirs in NAMES.items():
        expected = before[f"{ours}.weight"].float()
        found = torch.from_numpy(after[f"{theirs}.weight"].data.astype("float32"))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert len(after) == len(before)


def test_speculators_fields_are_its_own(make: Make, tmp_path: Path) -> None:
    data = json.loads((converted(make(), "speculators", tmp_path / "s") / "config.json").read_text())
    layer = data.pop("transformer_layer_config")
    assert layer["num_hidden_layers"] == 2 and layer["model_type"] == "qwen3" and layer["vocab_size"] == 64
    assert data["speculators_config"]["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 5}]
    wanted = {
        "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "draft_vocab_size": 64,
        "block_size": 5, "mask_token_id": 63, "aux_hidden_state_layer_ids": [2, 4], "sample_from_anchor": True,
        "markov_rank": 32, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }  # fmt: skip
    assert {k: data[k] for k in wanted} == wanted


def test_sglang_fields_are_at_the_root(make: Make, tmp_path: Path) -> None:
    source = converted(make(), "specforge", tmp_path / "f")
    nested = json.loads((source / "config.json").read_text())
    assert "markov_rank" not in nested and nested["dflash_config"]["markov_rank"] == 32
    assert nested["dflash_config"]["projector_type"] == "dspark" and nested["architectures"] == ["DSparkDraftModel"]
    data = json.loads((converted(source, "sglang", tmp_path / "s") / "config.json").read_text())
    assert "dflash_config" not in data and data["markov_rank"] == 32 and data["sample_from_anchor"] is True
    assert data["architectures"] == ["Qwen3DSparkModel"] and data["target_layer_ids"] == [1, 3]


@pytest.mark.parametrize(
    ("types", "tables", "matrices", "worst"),
    [
        ({"markov": "Q8_0", "backbone": None}, "Q8_0", "BF16", 0.02),
        ({"markov": None, "backbone": "Q8_0"}, "BF16", "Q8_0", 0.02),
        ({"markov": "F16", "backbone": "F16"}, "F16", "F16", 1e-7),
        ({"markov": "BF16", "backbone": "BF16"}, "BF16", "BF16", 0.0),
    ],
)
def test_gguf_types_are_chosen_separately(
    types: dict[str, str | None], tables: str, matrices: str, worst: float, make: Make, tmp_path: Path
) -> None:
    source = make()
    folder = converted(source, "gguf", tmp_path / "g", Request(types))
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(folder / "g.gguf").tensors}
    assert kinds["markov_w2.weight"] == tables and kinds["fc.weight"] == kinds["blk.0.attn_q.weight"] == matrices
    before, after = values(read_draft(source)), values(read_draft(folder))
    assert max(float((before[n].float() - after[n].float()).abs().max()) for n in before) <= worst
    if worst > 1e-6:
        assert any(not torch.equal(before[n].float(), after[n].float()) for n in before)


def test_q8_0_needs_whole_packs_and_finite_numbers(make: Make, tmp_path: Path) -> None:
    types = {"markov": "Q8_0", "backbone": None}
    with pytest.raises(InputError, match="rows of 8, but q8_0 packs 32"):
        converted(make(markov_rank=8), "gguf", tmp_path / "a", Request(types))

    def break_it(tensors: dict[str, torch.Tensor]) -> None:
        tensors["markov_head.markov_w1.weight"][3, 3] = torch.inf

    with pytest.raises(InputError, match="not finite"):
        converted(make(edit=break_it), "gguf", tmp_path / "b", Request(types))
    assert not list(tmp_path.glob("*b*"))


def test_f16_refuses_what_it_cannot_hold(make: Make, tmp_path: Path) -> None:
    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["fc.weight"][0, 0] = 1e6

    with pytest.raises(InputError, match="holds numbers beyond the range of f16"):
        converted(make(edit=enlarge), "gguf", tmp_path / "g", Request({"markov": None, "backbone": "F16"}))
    assert not list(tmp_path.glob("*g*.part"))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"markov_head_type": "gated"}, "markov-head"),
        ({"markov_head_type": "rnn"}, "markov-head"),
        ({"markov_rank": 0, "confidence_head_with_markov": False}, "confidence-head"),
        ({"attention_bias": True}, "attention-bias"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                              "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}, "rope-scaling"),
    ],
)  # fmt: skip
def test_losses_are_named_and_refused(changes: dict[str, Any], name: str, make: Make, tmp_path: Path) -> None:
    source = make(**changes)
    output = convert.plan(read_draft(source), "gguf", Request())
    assert name in {loss.name for loss in output.losses}
    others = frozenset(loss.name for loss in output.losses if loss.name != name)
    with pytest.raises(InputError, match=f"--allow-loss {name} accepts that"):
        convert.check_losses(output, others)
    folder = converted(source, "gguf", tmp_path / "g", allow=frozenset({*others, name}))
    after = read_draft(folder)
    assert not after.config().attention[0].rope.parameters
    if name == "markov-head":
        assert after.config().markov_rank == 0 and not any("markov" in n for n in after.tensors)


def test_a_loss_that_is_none_is_refused(make: Make) -> None:
    output = convert.plan(read_draft(make()), "deepspec", Request())
    with pytest.raises(InputError, match="nothing of that name would be lost"):
        convert.check_losses(output, frozenset({"markov-head"}))


def test_confidence_without_markov_features_is_padded(make: Make, tmp_path: Path) -> None:
    """llama.cpp's head always sees W1[x]: weights of zero there are the same head."""
    source = make(confidence_head_with_markov=False)
    draft = read_draft(converted(source, "gguf", tmp_path / "g"))
    weight, own = (
        draft.tensors["confidence_head.proj.weight"],
        read_draft(source).tensors["confidence_head.proj.weight"],
    )
    assert weight.shape == (1, 32 + 32)
    assert torch.equal(weight.rows(0, 1)[:, :32], own.rows(0, 1).float()) and not weight.rows(0, 1)[:, 32:].any()


@pytest.mark.parametrize(
    ("changes", "to", "words"),
    [
        ({"markov_rank": 0, "enable_confidence_head": False}, "sglang", "DSPARK needs"),
        ({"target_layer_ids": [-1, 2]}, "sglang", "can tap neither the embedding nor the last layer"),
        ({"target_layer_ids": [1, 5]}, "sglang", "can tap neither"),
        ({"target_layer_ids": [1, 5]}, "gguf", "taps inputs of layers only"),
        ({"hidden_act": "gelu"}, "gguf", "'gelu' activation"),
        ({"architectures": ["Gemma4DSparkModel"], "hidden_activation": "gelu"}, "sglang", "Gemma 4 backbone"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(changes: dict[str, Any], to: str, words: str, make: Make) -> None:
    with pytest.raises(InputError, match=words):
        convert.plan(read_draft(make(**changes)), to, Request())


def test_unsound_drafts_are_not_converted(make: Make) -> None:
    source = make(edit=lambda t: t.pop("fc.weight"))
    with pytest.raises(InputError, match=r"lacks 'fc.weight'"):
        convert.plan(read_draft(source), "gguf", Request())


def test_an_anchor_row_of_its_own_is_no_deepspec_draft(make: Make, tmp_path: Path) -> None:
    folder = rewrite(converted(make(), "speculators", tmp_path / "s"), sample_from_anchor=False)
    for to in ("deepspec", "specforge"):
        with pytest.raises(InputError, match="does not draft from the anchor's row"):
            convert.plan(read_draft(folder), to, Request())
    assert read_draft(converted(folder, "gguf", tmp_path / "g")).reading.anchor_first is False


def test_an_existing_folder_is_never_touched(make: Make, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    with pytest.raises(InputError, match="is there already"):
        converted(make(), "deepspec", out)
    assert [f.name for f in out.iterdir()] == ["mine"]


def test_a_failure_leaves_nothing(make: Make, tmp_path: Path) -> None:
    """A source that ends early, after half of the result was written."""
    draft = read_draft(make())
    output = convert.plan(draft, "deepspec", Request())
    file = tmp_path / "draft" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    before = set(tmp_path.iterdir())
    with pytest.raises(InputError, match="ends at byte"):
        convert.write(draft, "deepspec", output, tmp_path / "out")
    assert set(tmp_path.iterdir()) == before


def test_what_a_killed_run_left_is_swept(make: Make, tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale, other = tmp_path / f".out.{dead.pid}.part", tmp_path / ".elsewhere.1.part"
    stale.mkdir()
    other.mkdir()
    (stale / "half").write_text("half")
    converted(make(), "deepspec", tmp_path / "out")
    assert not stale.exists() and other.exists()


def test_progress_counts_to_the_end(make: Make, tmp_path: Path) -> None:
    draft = read_draft(make())
    output = convert.plan(draft, "gguf", Request())
    seen: list[tuple[int, int]] = []
    convert.write(draft, "gguf", output, tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert seen[-1] == (output.size, output.size) and [d for d, _ in seen] == sorted(d for d, _ in seen)


def tokenizer(folder: Path, tokens: int) -> Path:
    """A tiny GGUF target with a tokenizer."""
    folder.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(folder / "t.gguf", "llama")
    writer.add_block_count(6)
    writer.add_embedding_length(32)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(tokens)])
    writer.add_chat_template("hello")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "t.gguf"


def test_the_tokenizer_comes_from_the_target(make: Make, tmp_path: Path) -> None:
    target = read_target(tokenizer(tmp_path / "t", 64))
    request = Request(tokenizer=target.tokenizer(), tokenizer_size=target.vocab_size, target_name="t")
    assert convert.plan(read_draft(make()), "gguf", request).losses == []
    folder = converted(make(), "gguf", tmp_path / "g", request)
    fields = {n: f.contents() for n, f in gguf.GGUFReader(folder / "g.gguf").fields.items()}
    assert fields["tokenizer.ggml.tokens"][:2] == ["t0", "t1"] and "tokenizer.chat_template" not in fields
    short = read_target(tokenizer(tmp_path / "t", 60))
    request = Request(tokenizer=short.tokenizer(), tokenizer_size=short.vocab_size, target_name="t")
    with pytest.raises(InputError, match="vocabulary of 64, but the tokenizer of t has 60"):
        convert.plan(read_draft(make()), "gguf", request)


def v4(folder: Path) -> Path:
    """A bundled checkpoint in three shards, of which the module is in the last and the first is missing."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "num_hidden_layers": 43, "dspark_block_size": 5,
        "dspark_markov_rank": 8, "dspark_noise_token_id": 3, "dspark_target_layer_ids": [40, 41, 42],
    }  # fmt: skip
    module = {
        "mtp.0.main_proj.weight": torch.arange(6.0).view(2, 3).to(torch.float8_e4m3fn),
        "mtp.0.main_proj.scale": torch.ones(2).to(torch.float8_e8m0fnu),
        "mtp.2.markov_head.markov_w1.weight": torch.randn(4, 8),
    }
    save(folder, config, {**module, "model.layers.9.w": torch.ones(3)})
    (folder / "model.safetensors").rename(folder / "s3.safetensors")
    names = {**dict.fromkeys([*module, "model.layers.9.w"], "s3.safetensors"), "model.embed": "s1.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def test_a_bundled_module_is_extracted_by_the_index(tmp_path: Path) -> None:
    """The shards that hold none of it are not even there."""
    source = v4(tmp_path / "v4")
    folder = converted(source, "deepseek-v4", tmp_path / "module")
    before, after = load_file(source / "s3.safetensors"), load_file(folder / "model.safetensors")
    assert set(after) == {n for n in before if n.startswith("mtp.")}
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype and torch.equal(
            tensor.view(torch.uint8), before[name].view(torch.uint8)
        )
    assert read_draft(folder).format.name == "deepseek-v4"
    for draft, to in ((source, "deepspec"), (source, "gguf")):
        with pytest.raises(InputError, match="can only be extracted"):
            convert.plan(read_draft(draft), to, Request())


def test_only_a_bundled_module_is_extracted(make: Make) -> None:
    with pytest.raises(InputError, match="nothing else can become one"):
        convert.plan(read_draft(make()), "deepseek-v4", Request())
