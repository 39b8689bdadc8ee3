"""Targets of many families compute what transformers' own full forward computes, whatever was cached and taken back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from local_runner.engines.torch import TorchEngine, load
from local_runner.engines.torch.target import LeanTarget, NativeTarget, TorchTarget, TransformersTarget, decoder_layers
from sglang_dspark.errors import InputError
from sglang_dspark.native.build import find_compiler

LEAN = ("Llama", "Qwen3", "Llama3Rope")
GENERIC = ("Gemma3", "Gemma4", "Mistral", "Qwen2", "GPT2")
TAPS = (-1, 0, 1, 2)
LAYERS = 4
TEXT = [(7 * i * i + 3 * i + 5) % 96 for i in range(40)]
WRONG = [(5 * i + 1) % 96 for i in range(8)]
CLOSE = {"atol": 1e-4, "rtol": 1e-4}

Family = Callable[..., Path]


class Full:
    """The whole sequence in one forward without a cache: logits [n, V] and the outputs of layer k [n, d]."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).float().eval()

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        out = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        return out.logits[0], [h[0] for h in out.hidden_states]


def features(hidden: list[Tensor], taps: Sequence[int]) -> Tensor:
    return torch.cat([hidden[k + 1] for k in taps], -1)


def error(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square, relative to the spread of `theirs`."""
    return float((ours - theirs).pow(2).mean().sqrt() / theirs.std())


def check(target: TorchTarget, full: Full) -> None:
    """Prefill in chunks, verify wrong drafts, take them back, verify right ones, decode one by one."""
    target.taps = TAPS
    target.reset()
    logits, hidden = full(TEXT)
    wanted = features(hidden, TAPS)
    for start, end in ((0, 9), (9, 18), (18, 20)):
        out = target.forward(TEXT[start:end], last_only=True)
        torch.testing.assert_close(out, logits[end - 1 : end], **CLOSE)
        torch.testing.assert_close(target.features(end - start), wanted[start:end], **CLOSE)

    # Eight rows push the first rows of a window of six out of it, and are then taken back but for two.
    mixed_logits, mixed = full([*TEXT[:22], *WRONG])
    out = target.forward([*TEXT[20:22], *WRONG])
    torch.testing.assert_close(out, mixed_logits[20:], **CLOSE)
    torch.testing.assert_close(target.features(10), features(mixed, TAPS)[20:], **CLOSE)
    target.truncate(22)
    assert target.length == 22
    torch.testing.assert_close(target.forward(TEXT[22:31]), logits[22:31], **CLOSE)
    torch.testing.assert_close(target.features(4), wanted[22:26], **CLOSE)
    target.truncate(24)
    for i in range(24, 40):
        torch.testing.assert_close(target.forward([TEXT[i]]), logits[i : i + 1], **CLOSE)
    target.reset()
    torch.testing.assert_close(target.forward(TEXT[:12]), logits[:12], **CLOSE)


@pytest.mark.parametrize("name", [*LEAN, *GENERIC])
def test_a_family_computes_what_transformers_does(name: str, family: Family, load: Callable[..., TorchEngine]) -> None:
    folder = family(name)
    target = load(folder).target
    assert type(target) is (LeanTarget if name in LEAN else TransformersTarget)
    check(target, Full(folder))


@pytest.mark.parametrize("name", LEAN)
def test_the_lean_path_and_the_transformers_path_agree(name: str, family: Family) -> None:
    folder = family(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generic = TransformersTarget(model, 64)
    check(generic, Full(folder))
    generic.reset()
    ours = generic.forward(TEXT)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(LeanTarget(model, 64).forward(TEXT), ours, **CLOSE)


@pytest.mark.parametrize("name", [*LEAN, "Gemma3", "Gemma4", "Mistral", "GPT2"])
def test_the_last_layer_can_be_tapped(name: str, family: Family, load: Callable[..., TorchEngine]) -> None:
    """transformers reports it after the final norm only; its output, normed, is that."""
    folder = family(name)
    target, full = load(folder).target, Full(folder)
    target.taps = (LAYERS - 1,)
    target.forward(TEXT)
    norm = full.model.transformer.ln_f if name == "GPT2" else full.model.model.norm
    with torch.inference_mode():
        torch.testing.assert_close(norm(target.features(40)), full(TEXT)[1][LAYERS], **CLOSE)


@pytest.mark.parametrize("name", ["Gemma3", "Gemma4", "Mistral"])
def test_these_families_slide(name: str, family: Family) -> None:
    """Without the window the reference itself would say something else, so the tests above do cross it."""
    folder = family(name)
    full = Full(folder)
    wide = Full(family(name, sliding_window=64))
    assert (full(TEXT)[0] - wide(TEXT)[0]).abs().max() > 0.01


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("name", LEAN)
def test_the_compiled_target_is_nearer_to_float32_than_pytorch(
    name: str, family: Family, load: Callable[..., TorchEngine]
) -> None:
    """Of the same bfloat16 weights; the kernel keeps its sums and residuals in float32."""
    folder = family(name)
    reference = Full(folder, torch.bfloat16)
    logits, hidden = reference(TEXT)
    wanted = features(hidden, TAPS)
    errors = {}
    for compile in (True, False):
        target = load(folder, dtype="bfloat16", compile=compile).target
        assert type(target) is (NativeTarget if compile else LeanTarget)
        target.taps = TAPS
        out = target.forward(TEXT).float()
        errors[compile] = [
            error(ours.float(), theirs) for ours, theirs in ((out, logits), (target.features(40), wanted))
        ]
    assert all(native < torch for native, torch in zip(errors[True], errors[False], strict=True)), errors
    assert max(errors[True]) < 0.02


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
def test_the_compiled_target_scales_its_rope(family: Family, load: Callable[..., TorchEngine]) -> None:
    """yarn scales cosines and sines too."""
    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
    folder = family("Llama", rope_parameters=yarn)
    ours = load(folder, dtype="bfloat16", compile=True).target.forward(TEXT)
    scaled, unscaled = (Full(f, torch.bfloat16)(TEXT)[0] for f in (folder, family("Llama")))
    assert error(ours, scaled) < 0.04 < 0.2 < error(ours, unscaled)
    check(load(folder).target, Full(folder))


RECURRENT: dict[str, dict[str, Any]] = {
    "Mamba": {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "Lfm2": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention"],
    },
}


@pytest.mark.parametrize(("name", "kind"), [("Mamba", "linear_attention"), ("Lfm2", "conv")])
def test_state_that_cannot_be_taken_back_is_refused_by_name(
    name: str, kind: str, tmp_path: Path, load: Callable[..., TorchEngine]
) -> None:
    config = getattr(transformers, f"{name}Config")(**RECURRENT[name])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"kind {kind} cannot take back"):
        load(tmp_path)


def test_layers_that_cannot_be_told_are_refused(family: Family) -> None:
    model = AutoModelForCausalLM.from_pretrained(family("GPT2"))
    assert len(decoder_layers(model, LAYERS)) == LAYERS
    with pytest.raises(InputError, match="GPT2LMHeadModel could not be told"):
        decoder_layers(model, LAYERS + 1)


def test_a_target_takes_what_fits_and_no_more(family: Family, load: Callable[..., TorchEngine]) -> None:
    target = load(family("Llama"), context_length=16).target
    target.forward(TEXT[:16])
    with pytest.raises(ValueError, match="1 tokens after 16 do not fit in 16"):
        target.forward([1])
    with pytest.raises(ValueError, match="cannot truncate 16 cached tokens to 17"):
        target.truncate(17)
    with pytest.raises(ValueError, match="no taps"):
        target.features(1)


def test_stop_ids_are_those_of_the_generation_config(tmp_path: Path) -> None:
    class Tokenizer:
        eos_token_id = 7

    assert load.stop_ids(tmp_path, None) == frozenset()
    assert load.stop_ids(tmp_path, Tokenizer()) == {7}
    for said, meant in ((3, {3}), ([3, 4], {3, 4}), (0, {0})):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
        assert load.stop_ids(tmp_path, Tokenizer()) == meant
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(InputError, match=r"generation_config\.json is not a JSON object"):
        load.stop_ids(tmp_path, Tokenizer())
