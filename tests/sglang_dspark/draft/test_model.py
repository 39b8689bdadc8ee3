"""The draft model against a slow implementation written out from the equations, row by row and head by head."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_dspark.draft.load import TargetInfo
from sglang_dspark.draft.model import DraftBlock, DraftModel

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}


def frequencies(rope: dict[str, Any], size: int) -> tuple[list[float], float]:
    """Inverse frequencies and the scale of cosine and sine, from the published formulas, in plain numbers."""
    theta, kind = rope["rope_theta"], rope["rope_type"]
    base = [theta ** (-2 * i / size) for i in range(size // 2)]
    if kind == "linear":
        return [f / rope["factor"] for f in base], 1.0
    if kind == "proportional":
        turned = int(rope["partial_rotary_factor"] * size // 2)
        return [f if i < turned else 0.0 for i, f in enumerate(base)], 1.0
    if kind == "llama3":
        low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
        scaled = []
        for f in base:
            turns = old * f / (2 * math.pi)
            smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
            scaled.append((1 - smooth) * f / rope["factor"] + smooth * f)
        return scaled, 1.0
    if kind == "yarn":

        def dimension(turns: float) -> float:
            return (
                size * math.log(rope["original_max_position_embeddings"] / (turns * 2 * math.pi)) / 2 / math.log(theta)
            )

        low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), size - 1)
        ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(size // 2)]
        scaled = [f / rope["factor"] * r + f * (1 - r) for f, r in zip(base, ramp, strict=True)]
        return scaled, 0.1 * math.log(rope["factor"]) + 1.0
    return base, 1.0


class Slow:
    """One block of a draft folder in float64, with nothing cached, fused, masked or shared."""

    def __init__(self, folder: Path, target: TargetInfo) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.w = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
        self.embedding, self.lm_head = target.embedding.double(), target.lm_head.double()
        self.gemma = "Gemma4" in self.config["architectures"][0]

    def norm(self, x: Tensor, weight: Tensor | float) -> Tensor:
        return x / (x.pow(2).mean() + self.config["rms_norm_eps"]).sqrt() * weight

    def rotate(self, x: Tensor, position: int, rope: dict[str, Any]) -> Tensor:
        out, half = x.clone(), len(x) // 2
        inverse, scale = frequencies(rope, len(x))
        for i in range(half):
            c, s = math.cos(position * inverse[i]) * scale, math.sin(position * inverse[i]) * scale
            out[i], out[half + i] = x[i] * c - x[half + i] * s, x[half + i] * c + x[i] * s
        return out

    def attend(self, layer: int, rows: list[Tensor], context: list[Tensor]) -> list[Tensor]:
        c, p = self.config, f"layers.{layer}.self_attn."
        kind = c.get("layer_types", ["full_attention"] * 2)[layer]
        full = kind == "full_attention"
        size, kv, rope, shared = c["head_dim"], c["num_key_value_heads"], c["rope_parameters"], False
        if self.gemma:
            rope, shared = rope[kind], full and c["attention_k_eq_v"]
            override = c.get("per_layer_config", {}).get(str(layer), {})
            size = override.get("head_dim", c.get("global_head_dim", size) if full else size)
            kv = override.get("num_key_value_heads", c.get("num_global_key_value_heads", kv) if shared else kv)

        def heads(name: str, x: Tensor) -> list[Tensor]:
            bias = self.w.get(f"{p}{name}_proj.bias", 0.0)
            return list((self.w[f"{p}{name}_proj.weight"] @ x + bias).split(size))

        keys, values = [], []
        for position, x in enumerate([*context, *rows]):
            raw = heads("k", x)
            keys.append([self.rotate(self.norm(h, self.w[p + "k_norm.weight"]), position, rope) for h in raw])
            plain = raw if shared else heads("v", x)
            values.append([self.norm(h, 1.0) for h in plain] if self.gemma else plain)
        results = []
        for offset, x in enumerate(rows):
            position, mixed = len(context) + offset, []
            for h, q in enumerate(heads("q", x)):
                q = self.rotate(self.norm(q, self.w[p + "q_norm.weight"]), position, rope)
                g = h // (c["num_attention_heads"] // kv)
                seen = [j for j in range(len(keys)) if full or abs(position - j) < c["sliding_window"]]
                scores = torch.stack([q @ keys[j][g] for j in seen]) * (1.0 if self.gemma else size**-0.5)
                weights = scores.softmax(0)
                mixed.append(sum(weight * values[j][g] for weight, j in zip(weights, seen, strict=True)))
            bias = self.w.get(p + "o_proj.bias", 0.0)
            results.append(self.w[p + "o_proj.weight"] @ torch.cat(mixed) + bias)
        return results

    def layer(self, index: int, rows: list[Tensor], context: list[Tensor]) -> list[Tensor]:
        def w(name: str) -> Tensor:
            return self.w[f"layers.{index}.{name}.weight"]

        attended = self.attend(index, [self.norm(x, w("input_layernorm")) for x in rows], context)
        activate = (
            torch.nn.functional.silu if not self.gemma else lambda x: torch.nn.functional.gelu(x, approximate="tanh")
        )
        results = []
        for x, a in zip(rows, attended, strict=True):
            x = x + (self.norm(a, w("post_attention_layernorm")) if self.gemma else a)
            h = self.norm(x, w("pre_feedforward_layernorm" if self.gemma else "post_attention_layernorm"))
            y = w("mlp.down_proj") @ (activate(w("mlp.gate_proj") @ h) * (w("mlp.up_proj") @ h))
            x = x + (self.norm(y, w("post_feedforward_layernorm")) if self.gemma else y)
            results.append(x * self.w[f"layers.{index}.layer_scalar"] if self.gemma else x)
        return results

    def draft(self, features: Tensor, anchor: int, block: int) -> tuple[list[int], list[float], Tensor, Tensor]:
        context = [self.norm(self.w["fc.weight"] @ f, self.w["hidden_norm.weight"]) for f in features.double()]
        ids = [anchor] + [self.config["mask_token_id"]] * (block - 1)
        rows = [self.embedding[i] * (math.sqrt(self.config["hidden_size"]) if self.gemma else 1.0) for i in ids]
        for index in range(self.config["num_hidden_layers"]):
            rows = self.layer(index, rows, context)
        hidden = [self.norm(x, self.w["norm.weight"]) for x in rows]
        tokens, confidences, logits, previous = [], [], [], anchor
        state = torch.zeros(self.config["markov_rank"], dtype=torch.float64)
        for h in hidden:
            u = self.lm_head @ h
            cap = self.config.get("final_logit_softcapping")
            u = u if cap is None else torch.tanh(u / cap) * cap
            z = self.w["markov_head.markov_w1.weight"][previous] if self.config["markov_rank"] else None
            if z is not None:
                latent = z
                kind = self.config["markov_head_type"]
                if kind == "gated":
                    gate = self.w["markov_head.gate_proj.weight"] @ torch.cat([h, z])
                    latent = torch.sigmoid(gate + self.w["markov_head.gate_proj.bias"]) * z
                if kind == "rnn":
                    joint = self.w["markov_head.joint_proj.weight"] @ torch.cat([state, z, h])
                    g, c, o = (joint + self.w["markov_head.joint_proj.bias"]).chunk(3)
                    state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
                    latent = torch.tanh(o)
                u = u + self.w["markov_head.markov_w2.weight"] @ latent
            if self.config["enable_confidence_head"]:
                x = torch.cat([h, z]) if z is not None and self.config["confidence_head_with_markov"] else h
                w, b = self.w["confidence_head.proj.weight"][0], self.w["confidence_head.proj.bias"][0]
                confidences.append(float(w @ x + b))
            previous = int(u.argmax())
            tokens.append(previous)
            logits.append(u)
        return tokens, confidences, torch.stack(logits), torch.stack(hidden)


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated": ("qwen3", {"markov_head_type": "gated"}),
    "rnn": ("qwen3", {"markov_head_type": "rnn"}),
    "dflash": ("qwen3", {"markov_rank": 0, "confidence_head_with_markov": False}),
    "confidence without Markov": ("qwen3", {"confidence_head_with_markov": False}),
    "no confidence": ("qwen3", {"enable_confidence_head": False}),
    "attention bias": ("qwen3", {"attention_bias": True}),
    "sliding": (
        "qwen3",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True},
    ),
    "linear rope": ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}),
    "llama3 rope": ("qwen3", {"rope_parameters": LLAMA3}),
    "yarn rope": ("qwen3", {"rope_parameters": YARN}),
    "gemma4, keys as values": ("gemma4", {}),
    "gemma4, own values": ("gemma4", {"attention_k_eq_v": False}),
    "gemma4, new spelling": (
        "gemma4",
        {
            "global_head_dim": None,
            "num_global_key_value_heads": None,
            "per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}},
        },
    ),
}


def clean(changes: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in changes.items() if v is not None}


@pytest.fixture(params=FORMS)
def both(request: pytest.FixtureRequest, write: Any, load: Any, target: TargetInfo) -> tuple[DraftModel, Slow]:
    form, changes = FORMS[request.param]
    folder = write(form, **changes)
    slow = Slow(folder, target)
    slow.config = clean(slow.config)
    return load(folder), slow


def features_of(draft: DraftModel, rows: int = 11) -> Tensor:
    return torch.randn(rows, draft.config.feature_size, generator=torch.Generator().manual_seed(3))


def compare(block: DraftBlock, expected: tuple[list[int], list[float], Tensor, Tensor]) -> None:
    tokens, confidences, logits, hidden = expected
    torch.testing.assert_close(block.hidden.double(), hidden, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(block.logits.double(), logits, atol=2e-5, rtol=1e-5)
    assert block.tokens == tokens
    torch.testing.assert_close(block.confidence_logits, confidences, atol=2e-5, rtol=1e-5)


def test_equals_the_equations(both: tuple[DraftModel, Slow]) -> None:
    draft, slow = both
    features = features_of(draft)
    draft.observe(features, 0)
    compare(draft.draft(7, 11), slow.draft(features, 7, 5))


def test_fewer_rows_than_trained(write: Any, load: Any, target: TargetInfo) -> None:
    folder = write()
    draft = load(folder, block=3)
    features = features_of(draft)
    draft.observe(features, 0)
    compare(draft.draft(7, 11), Slow(folder, target).draft(features, 7, 3))


def other_theta(slow: Slow) -> None:
    ropes = slow.config["rope_parameters"]
    for rope in (ropes, *(r for r in ropes.values() if isinstance(r, dict))):
        if "rope_theta" in rope:
            rope["rope_theta"] *= 1.5


def other_window(slow: Slow) -> None:
    slow.config["sliding_window"] = 5 if not slow.gemma else 7


def other_head(slow: Slow) -> None:
    slow.config["markov_head_type"] = "vanilla"


def no_scale(slow: Slow) -> None:
    slow.config["final_logit_softcapping"] = 5.0


FAULTS: list[tuple[str, Callable[[Slow], None]]] = [
    ("linear rope", other_theta),
    ("llama3 rope", other_theta),
    ("yarn rope", other_theta),
    ("gemma4, keys as values", other_theta),
    ("sliding", other_window),
    ("gemma4, own values", other_window),
    ("gated", other_head),
    ("rnn", other_head),
    ("gemma4, new spelling", no_scale),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_the_comparison_notices(name: str, fault: Any, write: Any, load: Any, target: TargetInfo) -> None:
    form, changes = FORMS[name]
    folder = write(form, **changes)
    slow = Slow(folder, target)
    slow.config = clean(slow.config)
    draft = load(folder)
    features = features_of(draft)
    draft.observe(features, 0)
    fault(slow)
    with pytest.raises(AssertionError):
        compare(draft.draft(7, 11), slow.draft(features, 7, 5))


def test_chosen_tokens_are_followed(write: Any, load: Any) -> None:
    """The caller's choices, not the argmaxes, condition the rows after them and their confidences."""
    draft = load(write())
    draft.observe(features_of(draft), 0)
    greedy = draft.draft(7, 11)
    seen = []

    def choose(k: int, logits: Tensor) -> int:
        seen.append((k, logits.clone()))
        return int(logits.argmin()) if k == 1 else int(logits.argmax())

    chosen = draft.draft(7, 11, choose)
    assert [k for k, _ in seen] == [0, 1, 2, 3, 4]
    assert all(torch.equal(logits, chosen.logits[k]) for k, logits in seen)
    assert chosen.tokens[0] == greedy.tokens[0] and chosen.tokens[1] == int(chosen.logits[1].argmin())
    w1, w2 = draft.heads.markov.w1, draft.heads.markov.w2.weight
    difference = (w1[chosen.tokens[1]] - w1[greedy.tokens[1]]) @ w2.T
    torch.testing.assert_close(chosen.logits[2] - greedy.logits[2], difference, atol=1e-5, rtol=1e-5)
    assert chosen.confidence_logits[1] == greedy.confidence_logits[1]
    assert chosen.confidence_logits[2] != greedy.confidence_logits[2]


@pytest.mark.parametrize("form", ["qwen3", "gemma4"])
def test_crop_leaves_no_trace(form: str, write: Any, load: Any) -> None:
    draft = load(write(form))
    features = features_of(draft, 20)
    draft.observe(features[:9], 0)
    before = draft.draft(7, 9)
    draft.observe(features[9:], 9)
    draft.draft(3, 20)
    draft.crop(9)
    after = draft.draft(7, 9)
    assert draft.length == 9
    assert torch.equal(before.logits, after.logits) and torch.equal(before.hidden, after.hidden)


def test_the_whole_context_can_be_used(write: Any, load: Any) -> None:
    draft = load(write(), context_length=20)
    draft.observe(features_of(draft, 20), 0)
    assert len(draft.draft(7, 20).tokens) == 5


@pytest.mark.parametrize(("rows", "width", "position"), [(3, 64, 1), (3, 63, 0), (49, 64, 0)])
def test_misplaced_features_are_refused(rows: int, width: int, position: int, write: Any, load: Any) -> None:
    draft = load(write())
    with pytest.raises(ValueError, match=f"features \\[{rows}, {width}\\] at {position} do not continue"):
        draft.observe(torch.zeros(rows, width), position)
    assert draft.length == 0


def test_no_rows_are_no_change(write: Any, load: Any) -> None:
    draft = load(write())
    draft.observe(torch.zeros(0, 64), 0)
    assert draft.length == 0


def test_misplaced_anchors_and_crops_are_refused(write: Any, load: Any) -> None:
    draft = load(write())
    with pytest.raises(ValueError, match="the anchor is at 1"):
        draft.draft(7, 1)
    with pytest.raises(ValueError, match="cannot crop"):
        draft.crop(1)
