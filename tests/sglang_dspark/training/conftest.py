"""A tiny target, heads of every kind for it with random weights, and conversations that it wrote."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from sglang_dspark.draft.load import TargetInfo, load_draft
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.training.conversations import Conversation, write_shard
from sglang_dspark.training.features import Reading, TargetReader
from sglang_dspark.training.head import Shape, export, head_config, head_fields
from sglang_dspark.training.model import TrainableDraft

VOCAB = 60
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest) -> Any:
    return make_target(request.param)


@pytest.fixture(scope="session")
def llama() -> Any:
    return make_target("llama")


def make_target(kind: str) -> Any:
    torch.manual_seed(3)
    config = (LlamaConfig if kind == "llama" else Qwen3Config)(**TINY)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@dataclass
class Head:
    """A head as training has it, and the same weights as an engine has them."""

    model: TrainableDraft
    engine: DraftModel
    lm_head: torch.Tensor
    read: Callable[[list[int]], Reading]


@pytest.fixture
def head(llama: Any, tmp_path: Path) -> Callable[..., Head]:
    """head(**shape): random weights, none of them zero, in bfloat16's precision so that export loses nothing."""

    def make(**shape: Any) -> Head:
        fields = head_fields(llama.config, Shape(**{"block": 4, "rank": 8, **shape}), mask_token_id=0)
        config = head_config(fields)
        torch.manual_seed(5)
        embedding = llama.model.embed_tokens.weight
        model = TrainableDraft(config, embedding, 96)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_((p + torch.randn_like(p) * 0.2).bfloat16())
        export(model, fields, {}, tmp_path / "head")
        info = TargetInfo(32, VOCAB, 4, embedding, llama.lm_head.weight, "tiny")
        engine = load_draft(tmp_path / "head", info, dtype=torch.float32, device=torch.device("cpu"), context_length=90)
        reader = TargetReader(llama, config.target_layer_ids)
        return Head(model, engine, llama.lm_head.weight, reader.read)

    return make


@pytest.fixture
def data(llama: Any, tmp_path: Path) -> Path:
    """A folder with two shards of conversations that the target wrote greedily."""
    folder = tmp_path / "data"
    folder.mkdir()
    rng = random.Random(1)
    for shard in range(2):
        made = []
        for n in range(16):
            ids = torch.tensor([[rng.randrange(VOCAB) for _ in range(5)]])
            out = llama.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
            made.append(Conversation(16 * shard + n, "text", 0.0, 5, tuple(out[0].tolist())))
        write_shard(folder / f"{shard}.jsonl", made)
    return folder
