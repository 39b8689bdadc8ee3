"""Every trap as a minimal checkpoint: the doctor names it, and says what it means for whom."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kit import GOLDEN, QWEN3, TARGET, Make, converted, rewrite, save
from safetensors.torch import load_file, save_file

from sglang_dspark.checkpoints import deep, specforge
from sglang_dspark.checkpoints.checks import CHECKS
from sglang_dspark.checkpoints.doctor import Report, examine, explain, subject
from sglang_dspark.checkpoints.findings import ENGINES
from sglang_dspark.checkpoints.fit import ready
from sglang_dspark.checkpoints.gguf_file import Kind, encode
from sglang_dspark.checkpoints.outputs import Request
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.checkpoints.targets import read_target
from sglang_dspark.draft.load import TargetInfo, load_draft
from sglang_dspark.errors import InputError

RUNNING = tuple(ENGINES)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
NESTED = {name: QWEN3[name] for name in specforge.NESTED}
V4 = {"num_hidden_layers": 6, "hidden_size": 32, "vocab_size": 64, "dspark_block_size": 5,
      "dspark_target_layer_ids": [1], "dspark_noise_token_id": 3, "dspark_markov_rank": 4}  # fmt: skip


def judged(draft: Path, target: Path | None = None, **options: Any) -> Report:
    return examine(subject(read_draft(draft), read_target(target) if target else None, **options))


def states(report: Report) -> dict[str, str]:
    return {f.check: f.state for f in report.findings}


def levels(report: Report) -> dict[str, str]:
    return {v.engine: v.level for v in report.verdicts if v.engine in RUNNING}


def text(report: Report, check: str) -> str:
    return next(f.text for f in report.findings if f.check == check)


def test_a_sound_pair(make: Make, target: Path) -> None:
    report = judged(make(), target)
    assert set(states(report).values()) == {"ok"} and report.sound
    assert levels(report) == {
        "torch": "runs", "gguf": "fails",  # the target is no .gguf file
        "sglang": "runs", "sglang-dspark": "runs", "vllm": "runs", "llama.cpp": "fails",
    }  # fmt: skip


def test_the_gguf_engine_can_do_what_llama_cpp_can(make: Make, target: Path) -> None:
    report = judged(make(markov_head_type="gated"), target)
    of = {v.engine: v for v in report.verdicts}
    assert of["gguf"].level == "fails" and of["torch"].level == "runs"
    assert [r.why for r in of["gguf"].reasons] == ["it reads .gguf targets only", "it has no gated Markov head"]
    json.dumps(report.to_dict())


Trap = Callable[[Make, Path], Path]


def changed(**changes: Any) -> Trap:
    return lambda make, _: make(**changes)


def edited(edit: Callable[[dict[str, torch.Tensor]], Any], **changes: Any) -> Trap:
    return lambda make, _: make(edit=edit, **changes)


def of_format(to: str, source: dict[str, Any] | None = None, **changes: Any) -> Trap:
    return lambda make, tmp: rewrite(converted(make(**(source or {})), to, tmp / to), **changes)


def of_gguf() -> Trap:
    return lambda make, tmp: converted(make(), "gguf", tmp / "gguf")


def turned(tensors: dict[str, torch.Tensor]) -> None:
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"].T.contiguous()


def misnamed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["markov_head.w1.weight"] = tensors.pop("markov_head.markov_w1.weight")


def reduced(make: Make, tmp: Path) -> Path:
    folder = converted(make(), "speculators", tmp / "r")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"lm_head.weight": torch.ones(8, 32), "d2t": torch.zeros(8, dtype=torch.long)}
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][:8].clone()
    save_file(tensors, folder / "model.safetensors")
    return rewrite(folder, draft_vocab_size=8)


TRAPS: list[tuple[str, Trap, str, str, str, dict[str, str]]] = [
    ("legacy anchor", of_format("speculators", sample_from_anchor=None), "anchor", "failure", "does not say", {}),
    ("anchor row", of_format("sglang", sample_from_anchor=False), "anchor", "warning", "mask rows only",
     {"torch": "fails", "gguf": "fails", "sglang": "runs"}),
    ("anchor in vLLM", of_format("speculators"), "anchor", "ok", "the file says so",
     {"vllm": "worse", "torch": "runs"}),
    ("inputs as outputs", changed(target_layer_ids=[2, 6]), "taps", "failure", "counted as inputs", {"torch": "fails"}),
    ("taps too far", changed(target_layer_ids=[1, 9]), "taps", "failure", "leave -1..5", {"sglang": "fails"}),
    ("taps in disorder", changed(target_layer_ids=[3, 1]), "taps", "failure", "do not rise", {}),
    ("no taps", changed(target_layer_ids="all"), "taps", "failure", "no list of numbers", {}),
    ("embedding tapped", changed(target_layer_ids=[-1, 3]), "taps", "warning", "not every engine",
     {"sglang": "fails", "torch": "runs"}),
    ("last layer tapped", changed(target_layer_ids=[1, 5]), "taps", "warning", "not every engine",
     {"sglang": "fails", "sglang-dspark": "fails"}),
    ("nested fields", of_format("specforge"), "nesting", "warning", "nested in dflash_config",
     {"sglang": "fails", "sglang-dspark": "runs"}),
    ("two opinions", changed(sample_from_anchor=True, dflash_config={"block_size": 4}), "nesting", "warning",
     "at the root and 4 nested", {"sglang": "worse"}),
    ("nextn", changed(num_nextn_predict_layers=3), "nextn", "note", "it is not the block", {"sglang": "runs"}),
    ("mask outside", changed(mask_token_id=64), "mask", "failure", "64 is outside the vocabulary", {"sglang": "fails"}),
    ("no mask", changed(without="mask_token_id"), "mask", "failure", "there is none", {"torch": "fails"}),
    ("missing tensor", edited(lambda t: t.pop("fc.weight")), "tensors", "failure", "lacks 'fc.weight'",
     {"torch": "fails", "sglang": "worse"}),
    ("misnamed tensor", edited(misnamed), "tensors", "failure", "is there: is it misnamed?", {"torch": "fails"}),
    ("superfluous tensor", edited(lambda t: t.update(x=torch.ones(1))), "tensors", "failure", "holds 'x'", {}),
    ("turned table", edited(turned), "tensors", "failure", "has shape [32, 64]", {"torch": "fails"}),
    ("integers", edited(lambda t: t.update({"fc.weight": torch.ones(32, 64, dtype=torch.int8)})), "tensors", "failure",
     "stored as torch.int8", {"torch": "fails"}),
    ("reduced vocabulary", reduced, "vocabulary", "warning", "8 of the target's 64",
     {"sglang": "fails", "sglang-dspark": "fails", "torch": "runs"}),
    ("own tables", edited(lambda t: t.update({"lm_head.weight": torch.ones(64, 32)})), "tables", "note",
     "its own lm_head", {"sglang": "runs"}),
    ("no Markov head", changed(markov_rank=0, enable_confidence_head=False), "markov", "note", "no Markov head",
     {"sglang": "fails", "torch": "runs"}),
    ("gated head", changed(markov_head_type="gated"), "markov", "ok", "gated Markov head", {"sglang": "runs"}),
    ("no confidence", changed(enable_confidence_head=False), "confidence", "note", "no confidence head",
     {"sglang": "worse", "torch": "runs"}),
    ("silent confidence", of_format("specforge", {"confidence_head_with_markov": False}), "confidence", "warning",
     "no Markov features", {"sglang": "fails"}),
    ("another target", changed(num_target_layers=5, target_layer_ids=[1, 2]), "target", "failure",
     "number of target layers is 5", {"torch": "fails"}),
    ("a field missing", changed(without="rms_norm_eps"), "configuration", "failure", "lacks 'rms_norm_eps'", {}),
    ("another backbone", changed(architectures=["Lfm2DSparkDraftModel"]), "configuration", "note", "LFM2",
     {"torch": "fails", "sglang": "runs"}),
    ("Gemma 4", changed(architectures=["Gemma4DSparkModel"], hidden_activation="gelu"), "configuration", "ok", "gemma4",
     {"sglang": "fails", "sglang-dspark": "runs"}),
    ("another activation", changed(hidden_act="gelu"), "backbone", "warning", "'gelu' activation",
     {"sglang": "fails", "sglang-dspark": "fails", "torch": "runs", "gguf": "fails"}),
    ("biases", changed(attention_bias=True), "backbone", "note", "no biases in attention",
     {"gguf": "fails", "sglang": "runs"}),
    ("a scaled rope", changed(rope_parameters=LLAMA3), "backbone", "note", "'llama3' rope",
     {"gguf": "fails", "sglang": "runs"}),
    ("confidence alone", changed(markov_rank=0, confidence_head_with_markov=False), "backbone", "note",
     "no confidence head without", {"gguf": "fails", "torch": "runs"}),
    ("a variation", of_format("specforge", dflash_config={**NESTED, "causal": True}), "configuration", "failure",
     "'causal' is True", {"torch": "fails", "gguf": "fails", "sglang-dspark": "fails"}),
    ("a block without end", changed(block_size=2**31 - 1), "configuration", "failure", "at most", {"torch": "fails"}),
    ("no tokenizer", of_gguf(), "tokenizer", "warning", "no tokenizer",
     {"gguf": "fails", "llama.cpp": "fails", "torch": "runs"}),
    ("an empty module", lambda make, tmp: save(tmp / "v4", V4, {"x": torch.ones(1)}), "tensors", "failure",
     "none of its tensors", {"sglang": "fails", "sglang-dspark": "fails", "torch": "fails"}),
    ("Eagle3", changed(architectures=["LlamaForCausalLMEagle3"]), "configuration", "failure", "an Eagle3 draft",
     {"torch": "fails"}),
    ("DFlash", changed(architectures=["DFlashDraftModel"]), "configuration", "failure", "a plain DFlash draft", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("trap", "check", "state", "words", "effects"), [t[1:] for t in TRAPS], ids=[t[0] for t in TRAPS]
)
def test_traps_are_named(
    trap: Trap, check: str, state: str, words: str, effects: dict[str, str], make: Make, target: Path, tmp_path: Path
) -> None:
    report = judged(trap(make, tmp_path), target)
    assert states(report)[check] == state
    assert words in text(report, check)
    assert levels(report) | effects == levels(report)
    assert report.sound == (
        not any(f.state == "failure" for f in report.findings) and "runs" in levels(report).values()
    )


def loaded(folder: Path, target: Path) -> str | None:
    """What the PyTorch engine says when it refuses the draft in `folder`."""
    info = TargetInfo(32, 64, 6, torch.ones(64, 32), torch.ones(64, 32), str(target))
    try:
        load_draft(folder, info, dtype=torch.float32, device=torch.device("cpu"), context_length=16)
    except InputError as error:
        return str(error).replace(str(folder / "config.json"), str(folder))
    return None


@pytest.mark.parametrize("trap", [t[1] for t in TRAPS], ids=[t[0] for t in TRAPS])
def test_the_engine_refuses_with_the_same_words(trap: Trap, make: Make, target: Path, tmp_path: Path) -> None:
    folder = trap(make, tmp_path)
    report = judged(folder, target)
    said = loaded(folder, target)
    if levels(report)["torch"] == "fails":
        assert said in [f.text.replace(str(folder / "config.json"), str(folder)) for f in report.findings]
    else:
        assert said is None


def test_the_engine_refuses_an_anchor_row_with_the_same_words(make: Make, target: Path, tmp_path: Path) -> None:
    folder = rewrite(converted(make(), "sglang", tmp_path / "s"), sample_from_anchor=False)
    with pytest.raises(InputError) as error:
        ready(read_draft(folder), 6)
    assert str(error.value) == text(judged(folder, target), "anchor")


@pytest.mark.parametrize("asked", [1, 5, 6])
def test_blocks_longer_than_trained_are_named(asked: int, make: Make, target: Path) -> None:
    report = judged(make(), target, block=asked)
    assert states(report)["block"] == ("failure" if asked > 5 else "ok")
    if asked > 5:
        assert levels(report)["sglang"] == "worse" and levels(report)["torch"] == "fails"
        info = TargetInfo(32, 64, 6, torch.ones(64, 32), torch.ones(64, 32), "t")
        with pytest.raises(InputError) as error:
            load_draft(make(), info, dtype=torch.float32, device=torch.device("cpu"), context_length=16, block=asked)
        assert str(error.value) == text(report, "block")


def test_a_proposal_that_is_not_the_block(make: Make, tmp_path: Path, target: Path) -> None:
    folder = converted(make(), "speculators", tmp_path / "s")
    proposed = {"proposal_methods": [{"speculative_tokens": 4}]}
    report = judged(rewrite(folder, speculators_config=proposed), target)
    assert states(report)["block"] == "warning" and "block of 5 rows drafts 5" in text(report, "block")


def test_a_gguf_that_is_silent_about_its_anchor(make: Make, tmp_path: Path, target: Path) -> None:
    tokens = encode("tokenizer.ggml.tokens", Kind.ARRAY, [str(i) for i in range(64)], Kind.STRING)
    folder = converted(make(), "gguf", tmp_path / "g", Request(tokenizer=[tokens]))
    file = folder / "g.gguf"
    assert levels(judged(folder, target))["llama.cpp"] == "runs" and levels(judged(folder))["gguf"] == "runs"
    file.write_bytes(file.read_bytes().replace(b"dflash.sample_from_anchor", b"dflash.simple_from_anchor"))
    report = judged(folder, target)
    assert states(report)["anchor"] == "warning" and levels(report)["llama.cpp"] == "worse"


def test_llama_cpp_drafts_with_dflash_files_only(make: Make, tmp_path: Path) -> None:
    file = converted(make(), "gguf", tmp_path / "g") / "g.gguf"
    file.write_bytes(file.read_bytes().replace(b"dflash", b"dspark"))
    report = judged(tmp_path / "g")
    for engine in ("gguf", "llama.cpp"):
        reasons = next(v.reasons for v in report.verdicts if v.engine == engine)
        assert reasons[0].why == "it drafts with files of the architecture 'dflash' only"
    assert levels(report)["torch"] == "runs"


def test_the_mask_may_lie_past_the_tokenizer(make: Make, target: Path) -> None:
    added: dict[str, Any] = {"added_tokens_decoder": {str(i): {} for i in range(60, 63)}}
    (target / "tokenizer_config.json").write_text(json.dumps(added))
    report = judged(make(), target)
    assert states(report)["mask"] == "note" and "past the tokenizer's 63 tokens" in text(report, "mask")
    assert report.sound


def test_a_target_with_a_nested_configuration(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Gemma4"], "text_config": TARGET}))
    assert states(judged(make(), folder))["target"] == "ok"


def test_without_a_target_that_is_said(make: Make) -> None:
    report = judged(make())
    assert states(report)["target"] == "note" and report.sound
    assert levels(report)["gguf"] == "runs"  # it converts by itself


def test_remedies_name_the_draft(make: Make, target: Path) -> None:
    folder = make()
    report = examine(subject(read_draft(folder), read_target(target)), (), "mine")
    reason = next(v for v in report.verdicts if v.engine == "llama.cpp").reasons[0]
    assert reason.remedy == "dspark convert mine --to gguf --target TARGET.gguf --out DIR"


def test_every_check_explains_itself() -> None:
    for name in (*CHECKS, *deep.CHECKS, "acceptance"):
        assert len(explain(name)) > 80, name
    with pytest.raises(InputError, match="There is no check 'nothing'; the checks are configuration"):
        explain("nothing")


def test_every_verdict_is_about_a_known_engine(make: Make) -> None:
    assert [v.engine for v in judged(make()).verdicts] == list(ENGINES)


def weighed(draft: Path, target: Path | None = None) -> dict[str, tuple[str, str]]:
    found = deep.examine_weights(subject(read_draft(draft), read_target(target) if target else None))
    return {f.check: (f.state, f.text) for f in found}


def test_sound_weights(make: Make) -> None:
    assert {state for state, _ in weighed(make()).values()} == {"ok"}


def put(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "check", "state", "name"),
    [
        (put("fc.weight", float("nan")), "finite", "failure", "fc.weight"),
        (put("fc.weight", float("inf")), "finite", "failure", "fc.weight"),
        (put("markov_head.markov_w2.weight", float("nan")), "finite", "failure", "markov_w2"),
        (put("markov_head.markov_w1.weight", float("inf")), "finite", "failure", "markov_w1"),
        (put("markov_head.markov_w2.weight", -float("inf")), "finite", "note", "bar tokens"),
        (lambda t: t["norm.weight"].fill_(1.0), "untrained", "warning", "norm.weight"),
        (lambda t: t["markov_head.markov_w2.weight"].zero_(), "untrained", "warning", "markov_w2"),
        (put("fc.weight", 1e5), "overflow", "warning", "fc.weight"),
        (put("fc.weight", -1e5), "overflow", "warning", "fc.weight"),
    ],
)
def test_faulty_weights_are_named(edit: Any, check: str, state: str, name: str, make: Make) -> None:
    found = weighed(make(edit=edit))
    assert found[check][0] == state and name in found[check][1]


def test_copies_are_compared(make: Make, tmp_path: Path) -> None:
    table = torch.randn(64, 32)
    theirs = save(tmp_path / "target", TARGET, {"model.embed_tokens.weight": table})
    own = make(edit=lambda t: t.update({"lm_head.weight": table.clone(), "embed_tokens.weight": table + 1e-3}))
    found = deep.examine_weights(subject(read_draft(own), read_target(theirs)))
    copies = [(f.state, f.text) for f in found if f.check == "copies"]
    assert copies == [
        ("warning", "The draft's embed_tokens differs from the target's."),
        ("ok", "The draft's lm_head is the target's."),
    ]


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden runs at {GOLDEN}; set DSPARK_GOLDEN")
@pytest.mark.parametrize("name", ["qwen3-vanilla", "qwen3-gated", "qwen3-rnn", "qwen3-dflash", "gemma4-vanilla"])
def test_golden_pairs_are_sound(name: str) -> None:
    report = judged(GOLDEN / name / "draft", GOLDEN / name / "target")
    assert report.sound and levels(report)["torch"] == "runs"
