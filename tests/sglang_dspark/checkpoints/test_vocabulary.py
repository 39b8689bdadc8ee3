"""Reduced vocabularies: kept where a format can, made whole exactly where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoint_kit import QWEN3, converted, rewrite, save, weights
from safetensors.torch import load_file, save_file

from sglang_dspark.checkpoints.fit import ready
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.checkpoints.tensors import Virtual
from sglang_dspark.checkpoints.vocabulary import scattered
from sglang_dspark.draft.load import TargetInfo, load_draft
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.errors import InputError

IDS = torch.tensor([0, 3, 4, 5, 9, 20, 21, 40, 62, 63])
FORMS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "without Markov features": {"confidence_head_with_markov": False},
    "no Markov head": {"markov_rank": 0, "confidence_head_with_markov": False},
}
V, D = QWEN3["vocab_size"], QWEN3["hidden_size"]


def reduce(folder: Path, full: dict[str, torch.Tensor], data: dict[str, Any]) -> Path:
    """A speculators folder that knows only the tokens `IDS` of the full draft."""
    source = converted(save(folder / "full", data, full), "speculators", folder / "reduced")
    tensors = load_file(source / "model.safetensors")
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in tensors:
            tensors[name] = tensors[name][IDS].clone()
    member = torch.zeros(V, dtype=torch.bool)
    member[IDS] = True
    tensors |= {"d2t": IDS - torch.arange(len(IDS)), "t2d": member}
    save_file(tensors, source / "model.safetensors")
    return rewrite(source, draft_vocab_size=len(IDS))


def load(folder: Path) -> DraftModel:
    generator = torch.Generator().manual_seed(9)
    embedding, head = torch.randn(V, D, generator=generator), torch.randn(V, D, generator=generator)
    target = TargetInfo(D, V, 6, embedding, head, "tiny")
    cpu = torch.device("cpu")
    return load_draft(folder, target, dtype=torch.float32, device=cpu, context_length=64)


def drafted(draft: DraftModel, only: torch.Tensor | None = None) -> Any:
    generator = torch.Generator().manual_seed(4)
    draft.observe(torch.randn(4, draft.config.feature_size, generator=generator), 0)

    def best(_: int, logits: torch.Tensor) -> int:
        return int(logits.argmax()) if only is None else int(only[logits[only].argmax()])

    return draft.draft(9, 4, best)


@pytest.mark.parametrize("form", FORMS)
def test_made_whole_it_drafts_the_same(form: str, tmp_path: Path) -> None:
    data = {**QWEN3, **FORMS[form]}
    full = weights(data) | {"lm_head.weight": torch.randn(V, D, generator=torch.Generator().manual_seed(3))}
    source = reduce(tmp_path, full, data)
    assert read_draft(source).reduced == len(IDS)
    whole = converted(source, "deepspec", tmp_path / "whole")
    assert read_draft(whole).reduced is None
    expected = drafted(load(tmp_path / "full"), IDS)
    found = drafted(load(whole))
    assert found.tokens == expected.tokens
    torch.testing.assert_close(found.logits[:, IDS], expected.logits[:, IDS], atol=1e-5, rtol=1e-5)
    absent = torch.ones(V, dtype=torch.bool)
    absent[IDS] = False
    assert bool((found.logits[:, absent] == -torch.inf).all())
    torch.testing.assert_close(found.confidence_logits, expected.confidence_logits, atol=1e-5, rtol=1e-5)


def test_rows_are_scattered_across_chunks() -> None:
    """Rows that are wider than what is read at once, and boundaries inside rows, change nothing."""
    table = Virtual(torch.float32, (10, 3), lambda first, last: torch.arange(30.0).view(10, 3)[first:last])
    made = scattered(table, IDS, V, -1.0)
    expected = torch.full((V, 3), -1.0)
    expected[IDS] = torch.arange(30.0).view(10, 3)
    for size in (1, 2, 5, 7, 64, 1000):
        assert torch.equal(torch.cat(list(made.chunks(size))).view(V, 3), expected)


def test_the_engine_gets_it_whole(tmp_path: Path) -> None:
    source = reduce(tmp_path, weights(QWEN3) | {"lm_head.weight": torch.randn(V, D)}, QWEN3)
    config, tensors = ready(read_draft(source), 6)
    assert config.markov_rank == 48 and tensors.load("lm_head.weight").shape == (V, D)
    assert torch.equal(tensors.load("lm_head.weight")[IDS], load_file(source / "model.safetensors")["lm_head.weight"])


def test_kept_where_a_format_can(tmp_path: Path) -> None:
    source = reduce(tmp_path, weights(QWEN3) | {"lm_head.weight": torch.randn(V, D)}, QWEN3)
    file = converted(source, "gguf", tmp_path / "g")
    tensor = next(t for t in gguf.GGUFReader(file / "g.gguf").tensors if t.name == "d2t")
    assert tensor.data.tolist() == IDS.tolist()
    back = load_file(converted(file, "speculators", tmp_path / "back") / "model.safetensors")
    before = load_file(source / "model.safetensors")
    assert back.keys() == before.keys()
    assert all(torch.equal(back[n].float(), before[n].float()) for n in before)


@pytest.mark.parametrize("ids", [[3, 0, *range(10, 18)], [0] * 10, list(range(60, 70)), [-1, *range(9)]])
def test_impossible_maps_are_refused(ids: list[int], tmp_path: Path) -> None:
    source = reduce(tmp_path, weights(QWEN3) | {"lm_head.weight": torch.randn(V, D)}, QWEN3)
    tensors = load_file(source / "model.safetensors")
    tensors["d2t"] = torch.tensor(ids) - torch.arange(10)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(InputError, match="no ascending list of token ids below 64"):
        converted(source, "deepspec", tmp_path / "x")


def test_a_reduced_vocabulary_without_a_map_is_refused(tmp_path: Path) -> None:
    source = reduce(tmp_path, weights(QWEN3) | {"lm_head.weight": torch.randn(V, D)}, QWEN3)
    tensors = load_file(source / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n not in ("d2t", "t2d")}, source / "model.safetensors")
    with pytest.raises(InputError, match="no d2t that says which tokens"):
        converted(source, "deepspec", tmp_path / "x")
