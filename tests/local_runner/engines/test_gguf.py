"""GGUF targets: what the file says is what is computed, and what was unpacked is kept, renewed or done without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from local_runner.engines.torch import TorchEngine
from local_runner.engines.torch import gguf as unpacking
from sglang_dspark.errors import InputError

Load = Callable[..., TorchEngine]
WORDS = ["<unk>", "<s>", "</s>", *(chr(33 + i) for i in range(90)), "Ġ", "ab", "Ġab"]
TEXT = [(11 * i + 3) % 96 for i in range(20)]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix in llama.cpp's order: the halves that are rotated together side by side."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, folder: Path, dtype: Any = np.float32) -> None:
    """The tiny Llama of `folder` as a GGUF file, with a tokenizer of single characters and two merges."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(4)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(16)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_vocab_size(96)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * 93)
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = interleaved(values, 4 if "q_proj" in name else 2)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, values.astype(np.float32 if values.ndim == 1 else dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture
def file(tmp_path: Path, family: Callable[..., Path]) -> Path:
    write_gguf(tmp_path / "tiny.gguf", family("Llama"))
    return tmp_path / "tiny.gguf"


def logits(engine: TorchEngine) -> torch.Tensor:
    engine.target.reset()
    return engine.target.forward(TEXT)


def test_the_file_is_what_is_computed(file: Path, store: Path, family: Callable[..., Path], load: Load) -> None:
    engine, original = load(file), load(family("Llama"))
    torch.testing.assert_close(logits(engine), logits(original), atol=1e-4, rtol=1e-4)
    assert engine.description["target"] == "tiny.gguf"
    assert engine.stop_ids == {2}
    assert engine.decode([WORDS.index("Ġab"), WORDS.index("!"), 2]) == " ab!"
    assert list(engine.tokenizer("ab ab", add_special_tokens=False)["input_ids"]) == [94, 95]


def test_what_was_unpacked_is_used_again(file: Path, store: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    first = logits(load(file))
    (kept,) = (store / "unpacked").iterdir()
    assert {f.name for f in kept.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    monkeypatch.setattr(unpacking.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("read again"))
    assert unpacking.unpacked(file) == kept
    monkeypatch.undo()
    monkeypatch.setenv("DSPARK_HOME", str(store))
    assert torch.equal(logits(load(file)), first)
    assert list((store / "unpacked").iterdir()) == [kept]


def test_a_file_that_changed_is_unpacked_anew(file: Path, store: Path, family: Callable[..., Path], load: Load) -> None:
    before = logits(load(file))
    write_gguf(file, family("Llama", initializer_range=0.2))
    os.utime(file, ns=(1, 1))
    after = logits(load(file))
    assert (after - before).abs().max() > 0.1
    torch.testing.assert_close(after, logits(load(family("Llama", initializer_range=0.2))), atol=1e-4, rtol=1e-4)
    assert len(list((store / "unpacked").iterdir())) == 2


@pytest.mark.parametrize("why", ["nowhere to write", "too large to keep"])
def test_without_a_copy_the_file_is_read_itself(
    why: str, file: Path, store: Path, load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = load(file)
    if why == "nowhere to write":
        monkeypatch.setenv("DSPARK_HOME", str(file / "below-a-file"))
    else:
        monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "other"))
        monkeypatch.setattr(unpacking, "LARGEST_KEPT", file.stat().st_size - 1)
    assert unpacking.unpacked(file) is None
    engine = load(file)
    assert torch.equal(logits(engine), logits(kept))
    assert engine.stop_ids == kept.stop_ids
    assert engine.decode([94, 3, 2]) == kept.decode([94, 3, 2])
    assert not (tmp_path / "other").exists()


def test_a_copy_that_fails_half_way_leaves_nothing(
    file: Path, store: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(load(file))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("DSPARK_HOME", str(store / "other"))
    monkeypatch.setattr(unpacking, "save_file", full)
    assert torch.equal(logits(load(file)), expected)
    assert list((store / "other" / "unpacked").iterdir()) == []


def test_half_precision_is_read_too(file: Path, store: Path, family: Callable[..., Path], load: Load) -> None:
    write_gguf(file, family("Llama"), np.float16)
    exact, rounded = logits(load(family("Llama"))), logits(load(file))
    assert 0 < (exact - rounded).abs().max() < 0.05


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64, b"PK\x03\x04" * 20])
def test_what_is_no_gguf_file_is_refused(content: bytes, tmp_path: Path, store: Path, load: Load) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    assert not store.exists() or not list((store / "unpacked").iterdir())


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(kept: float, file: Path, store: Path, load: Load) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(InputError, match=str(file)):
        load(file)


def test_files_alike_in_size_and_time_are_not_taken_for_each_other(tmp_path: Path) -> None:
    files = [tmp_path / name / "m.gguf" for name in "ab"]
    for file, content in zip(files, (b"GGUF one", b"GGUF two"), strict=True):
        file.parent.mkdir()
        file.write_bytes(content)
        os.utime(file, ns=(10**18, 10**18))
    assert unpacking._place(files[0]) != unpacking._place(files[1])


def test_a_damaged_copy_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF anything")
    folder = unpacking._place(file)
    folder.mkdir(parents=True)
    save_file({"a": torch.zeros(4)}, folder / "model.safetensors")
    assert unpacking.kept_copy(file) == folder
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-4])
    assert unpacking.kept_copy(file) is None and not folder.exists()
