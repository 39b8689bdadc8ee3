"""What load_draft shares with the target, what it says, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_dspark.draft.load import TargetInfo, load_draft
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.errors import InputError

Tensors = dict[str, Tensor]


def drafted(draft: DraftModel) -> Tensor:
    draft.observe(torch.randn(4, draft.config.feature_size, generator=torch.Generator().manual_seed(4)), 0)
    return draft.draft(1, 4).logits


def test_absent_tables_are_the_targets(write: Any, load: Any, target: TargetInfo) -> None:
    draft = load(write())
    assert draft.backbone.embedding.data_ptr() == target.embedding.data_ptr()
    assert draft.backbone.lm_head.data_ptr() == target.lm_head.data_ptr()
    assert draft.notes == []


def test_equal_copies_are_aliased(write: Any, load: Any, target: TargetInfo) -> None:
    def copy(t: Tensors) -> None:
        t.update({"embed_tokens.weight": target.embedding.clone(), "lm_head.weight": target.lm_head.clone()})

    draft = load(write(edit=copy))
    assert draft.backbone.embedding.data_ptr() == target.embedding.data_ptr()
    assert draft.backbone.lm_head.data_ptr() == target.lm_head.data_ptr()
    assert draft.notes == []


def test_copies_are_compared_in_the_targets_precision(write: Any, load: Any, target: TargetInfo) -> None:
    narrow = dataclasses.replace(target, embedding=target.embedding.bfloat16(), lm_head=target.lm_head.bfloat16())

    def copy(t: Tensors) -> None:
        t.update({"embed_tokens.weight": target.embedding.clone(), "lm_head.weight": target.lm_head.clone()})

    assert load(write(edit=copy), narrow).notes == []


@pytest.mark.parametrize(
    "change",
    [lambda w: w[3, 4].add_(1e-3), lambda w: w[39].neg_(), lambda w: w.view(torch.int32)[0, 0].bitwise_xor_(1)],
)
def test_a_different_lm_head_is_kept_used_and_said(
    change: Callable[[Tensor], Any], write: Any, load: Any, target: TargetInfo
) -> None:
    own = target.lm_head.clone()
    change(own)
    quick = dataclasses.replace(target, project=lambda h: h @ target.lm_head.T)
    draft = load(write(edit=lambda t: t.update({"lm_head.weight": own})), quick)
    assert torch.equal(draft.backbone.lm_head, own)
    assert [n for n in draft.notes if "lm_head" in n and "differs" in n]
    assert torch.equal(drafted(draft), drafted(load(write(), dataclasses.replace(target, lm_head=own))))


def test_zeros_of_both_signs_differ(write: Any, load: Any, target: TargetInfo) -> None:
    """The comparison is of bits, so that what is kept in memory is what was shipped."""
    target.lm_head[0, 0] = 0.0
    own = target.lm_head.clone()
    own[0, 0] = -0.0
    draft = load(write(edit=lambda t: t.update({"lm_head.weight": own})))
    assert draft.backbone.lm_head.data_ptr() != target.lm_head.data_ptr()


def test_a_tied_checkpoint_projects_with_its_own_embedding(write: Any, load: Any, target: TargetInfo) -> None:
    own = target.embedding + 1

    def edit(t: Tensors) -> None:
        t["embed_tokens.weight"] = own

    draft = load(write(edit=edit, tie_word_embeddings=True))
    assert torch.equal(draft.backbone.lm_head, own) and draft.backbone.lm_head is draft.backbone.embedding
    assert torch.equal(load(write(edit=edit, tie_word_embeddings=False)).backbone.lm_head, target.lm_head)


def test_a_tied_target_is_one_tensor(write: Any, load: Any, target: TargetInfo) -> None:
    tied = dataclasses.replace(target, lm_head=target.embedding)
    draft = load(write(tie_word_embeddings=True), tied)
    assert draft.backbone.lm_head.data_ptr() == draft.backbone.embedding.data_ptr() == target.embedding.data_ptr()


def test_the_targets_own_product_is_used(write: Any, load: Any, target: TargetInfo) -> None:
    calls = []

    def project(hidden: Tensor) -> Tensor:
        calls.append(hidden.shape)
        return hidden @ target.lm_head.T

    torch.testing.assert_close(
        drafted(load(write(), dataclasses.replace(target, project=project))), drafted(load(write()))
    )
    assert calls == [(5, 32)]


def test_a_sharded_folder_is_the_same_draft(write: Any, load: Any) -> None:
    folder = write()
    whole = drafted(load(folder))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({n: t for n, t in tensors.items() if shards[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert torch.equal(drafted(load(folder)), whole)


def test_bfloat16_stays_near_float32(write: Any, load: Any, target: TargetInfo) -> None:
    narrow = load_draft(write(), target, dtype=torch.bfloat16, device=torch.device("cpu"), context_length=48)
    wide = drafted(load(write()))
    assert narrow.backbone.embedding.dtype == torch.bfloat16
    assert (drafted(narrow).float() - wide).abs().max() < 0.1 * wide.abs().max()


def test_a_context_beyond_training_is_noted(write: Any, load: Any) -> None:
    assert "64 positions" in load(write(), context_length=65).notes[0]
    assert load(write(), context_length=64).notes == []


def refusal(load: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(InputError) as error:
        load(*arguments, **options)
    text = str(error.value)
    assert "\n" not in text and text.endswith(".")
    return text


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden_size", 64, "hidden size is 32, that of tiny is 64"),
        ("vocab_size", 41, "vocabulary is 40, that of tiny is 41"),
        ("num_layers", 3, "number of target layers is 4, that of tiny is 3"),
    ],
)
def test_another_target_is_refused_before_weights(
    field: str, value: int, words: str, write: Any, load: Any, target: TargetInfo
) -> None:
    folder = write()
    (folder / "model.safetensors").write_bytes(b"not read")
    assert words in refusal(load, folder, dataclasses.replace(target, **{field: value}))


@pytest.mark.parametrize("block", [0, 6])
def test_blocks_outside_training_are_refused(block: int, write: Any, load: Any) -> None:
    assert f"A block of {block}" in refusal(load, write(), block=block)


def test_an_empty_context_is_refused(write: Any, load: Any) -> None:
    assert "at least 1, not 0" in refusal(load, write(), context_length=0)


def rename(t: Tensors, old: str, new: str) -> None:
    t[new] = t.pop(old)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("fc.weight"), r"lacks 'fc.weight'; "),
        (
            lambda t: rename(t, "layers.1.self_attn.q_proj.weight", "layers.1.attention.q_proj.weight"),
            r"lacks 'layers.1.self_attn.q_proj.weight' \('layers.1.attention.q_proj.weight' is there",
        ),
        (lambda t: [t.pop(n) for n in list(t) if "layers.0" in n], r"lacks 'layers.0[^,]*', [^,]*, [^,]* and 8 more"),
        (
            lambda t: t.update({"markov_head.gate_proj.weight": torch.zeros(6, 38)}),
            r"holds 'markov_head.gate_proj.weight'",
        ),
        (
            lambda t: t.update({"layers.2.input_layernorm.weight": torch.zeros(32)}),
            r"holds 'layers.2.input_layernorm.weight' \(near to 'layers.\d.input_layernorm.weight'\)",
        ),
        (lambda t: t.update({"norm.weight": torch.zeros(31)}), r"'norm.weight' .* has shape \[31\] .* \[32\]"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(39, 32)}), r"'lm_head.weight' .* has shape \[39, 32\]"),
        (
            lambda t: t.update({"norm.weight": torch.zeros(32, dtype=torch.int8)}),
            r"'norm.weight' .* stored as torch.int8",
        ),
    ],
)
def test_wrong_tensors_are_named(edit: Callable[[Tensors], Any], words: str, write: Any, load: Any) -> None:
    assert re.search(words, refusal(load, write(edit=edit)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 10.0}}, "'linear' rope cannot be computed"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0, "partial_rotary_factor": 0.5}},
            "rotates part",
        ),
    ],
)
def test_ropes_that_cannot_be_computed_are_refused(changes: Any, words: str, write: Any, load: Any) -> None:
    assert words in refusal(load, write(**changes))


def test_ropes_that_change_on_the_way_are_refused_beyond_their_length(write: Any, load: Any) -> None:
    folder = write(rope_parameters={"rope_type": "dynamic", "rope_theta": 10.0, "factor": 2.0})
    assert load(folder, context_length=64).length == 0
    assert "at most 64" in refusal(load, folder, context_length=65)


def test_no_folder_is_refused(tmp_path: Path, load: Any) -> None:
    assert "config.json" in refusal(load, tmp_path / "absent")
