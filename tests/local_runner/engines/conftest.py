"""Golden runs, tiny transformers models of many families, and a target and a drafter that are tables."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from local_runner.engines.base import Draft
from local_runner.engines.torch import TorchEngine, load_engine

GOLDEN = Path(os.environ.get("DSPARK_GOLDEN", Path(__file__).parents[4] / "shared" / "golden"))
VOCAB = 96


@pytest.fixture(scope="session")
def golden() -> Path:
    if not GOLDEN.is_dir():
        pytest.skip(f"there are no golden runs at {GOLDEN}; set DSPARK_GOLDEN to their folder")
    return GOLDEN


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Models this small only lose by more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def load() -> Callable[..., TorchEngine]:
    """load(target, draft=None, **options): an engine on one CPU thread, in float32 unless told."""

    def make(target: Path, draft: Path | None = None, **options: Any) -> TorchEngine:
        return load_engine(target, draft, device="cpu", threads=1, **{"dtype": "float32", **options})

    return make


@pytest.fixture(scope="session")
def naive() -> Any:
    """naive(logits, params, prompt, output): the reference that the tests of sampling are held to."""
    spec = importlib.util.spec_from_file_location(
        "sampling_reference", Path(__file__).parents[2] / "sglang_dspark" / "decoding" / "conftest.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._naive


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": COMMON | {"head_dim": 16, "rms_norm_eps": 1e-5},
    "Qwen3": COMMON | {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "Llama3Rope": COMMON
    | {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "Gemma3": COMMON | SLIDING | {"head_dim": 16, "query_pre_attn_scalar": 16},
    "Gemma4": COMMON
    | SLIDING
    | {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": 20.0,
    },
    "Mistral": COMMON | {"sliding_window": 6},
    "Qwen2": COMMON,
    "GPT2": {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 128,
        "initializer_range": 0.3,
    },
}
CONFIG_CLASSES = {"Gemma3": "Gemma3TextConfig", "Gemma4": "Gemma4TextConfig", "Llama3Rope": "LlamaConfig"}


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """family(name, **config): the folder of a tiny model with random weights of that family, made once."""
    made: dict[str, Path] = {}

    def make(name: str, **changes: Any) -> Path:
        key = repr((name, sorted(changes.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name)
            config = getattr(transformers, CONFIG_CLASSES.get(name, f"{name}Config"))(**FAMILIES[name] | changes)
            torch.manual_seed(len(name))
            model = AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if "norm" in parameter_name or "ln_" in parameter_name:
                        parameter.add_(
                            torch.randn_like(parameter) * 0.2
                        )  # norms of ones or zeros would hide a lost one
            model.save_pretrained(made[key])
            (made[key] / "generation_config.json").unlink(missing_ok=True)
        return made[key]

    return make


class TableTarget:
    """Logits [V] by the last two tokens: a target whose distribution can be written down."""

    def __init__(self, table: Tensor, context_length: int = 1 << 20) -> None:
        self.table, self.context_length = table, context_length
        self.vocab_size, self.device = table.shape[-1], torch.device("cpu")
        self.tokens: list[int] = [0]
        self.calls: list[int] = []
        self.last: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens) - 1

    def reset(self) -> None:
        self.truncate(0)

    def truncate(self, length: int) -> None:
        assert length <= self.length
        del self.tokens[length + 1 :]

    def forward(self, tokens: Sequence[int], last_only: bool = False) -> Tensor:
        assert self.length + len(tokens) <= self.context_length
        self.calls.append(len(tokens))
        self.last = list(tokens)
        rows = torch.tensor([*self.tokens[-1:], *tokens])
        self.tokens += tokens
        logits = self.table[rows[:-1], rows[1:]]
        return logits[-1:] if last_only else logits


@dataclass
class TableDrafter:
    """Draft logits by (k, anchor, token before), confidences by the same. Keeps the features, here tokens, that it
    observes, and insists that they are those of every committed token but the anchor.
    """

    target: TableTarget
    table: Tensor
    confidence: Tensor | None = None
    context: list[int] = field(default_factory=list)
    drafts: int = 0

    @property
    def block(self) -> int:
        return len(self.table)

    def reset(self) -> None:
        self.context.clear()

    def observe(self, count: int) -> None:
        assert 0 < count <= len(self.target.last)
        self.context += self.target.last[:count]

    def draft(self, anchor: int, position: int, choose: Callable[[int, Tensor], int] | None = None) -> Draft:
        assert self.context == self.target.tokens[1:] and position == len(self.context)
        self.drafts += 1
        before, tokens, confidence = anchor, list[int](), list[float]()
        for k, logits in enumerate(self.table[:, anchor]):
            if self.confidence is not None:
                confidence.append(float(self.confidence[k, anchor, before]))
            before = int(logits[before].argmax()) if choose is None else choose(k, logits[before])
            tokens.append(before)
        return Draft(tokens, confidence)


@pytest.fixture(scope="session")
def tables() -> Callable[..., tuple[TableTarget, TableDrafter]]:
    """tables(vocab, block, context_length): a target and a drafter that agree about half of the time."""

    def make(
        vocab: int = 6, block: int = 3, context_length: int = 1 << 20, confident: bool = True
    ) -> tuple[TableTarget, TableDrafter]:
        numbers = torch.Generator().manual_seed(11)
        table = torch.randn(vocab, vocab, vocab, generator=numbers)
        # The draft knows the last token but not the one before it, and is somewhat wrong about that.
        drafts = table.mean(0) * 1.5 + torch.randn(block, vocab, vocab, vocab, generator=numbers) * 0.5
        confidence = torch.sigmoid(torch.randn(block, vocab, vocab, generator=numbers)) if confident else None
        target = TableTarget(table * 1.2, context_length)
        return target, TableDrafter(target, drafts, confidence)

    return make
