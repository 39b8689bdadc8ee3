"""The doctor's checks that need headers only. The docstring of a check is what `--explain` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang_dspark.checkpoints.drafts import ANCHOR_OPEN, article
from sglang_dspark.checkpoints.findings import TO_DEEPSPEC, TO_GGUF, TO_SGLANG, Effect, Finding, Subject, everywhere
from sglang_dspark.checkpoints.fit import check_anchor, tensor_problems
from sglang_dspark.checkpoints.head_checks import (
    backbone,
    confidence,
    markov,
    nesting,
    packing,
    tables,
    tokenizer,
    vocabulary,
)
from sglang_dspark.checkpoints.spelling import expected_tensors
from sglang_dspark.checkpoints.words import brief
from sglang_dspark.draft.config import tap_problem
from sglang_dspark.errors import InputError

Check = Callable[[Subject], Iterator[Finding]]
OURS = ("torch", "gguf", "sglang-dspark")
"""The engines that read drafts with this package."""


def configuration(s: Subject) -> Iterator[Finding]:
    """The draft's own description must be complete and mean a model that can exist.

    Each tool chain spells the same facts differently: at the root, nested, prefixed, shifted. They are read into one
    description here; a field that is missing, of the wrong type or contradictory is named.
    """
    draft = s.draft
    if draft.format.kind != "dspark":
        algorithm = "EAGLE3" if draft.format.kind == "eagle3" else "DFLASH"
        yield Finding(
            "configuration",
            "failure",
            s.problem or "",
            f"serve it with --speculative-algorithm {algorithm}",
            everywhere("fails", "it is no DSpark draft"),
        )
    elif draft.format.foreign:
        why = f"its backbone is {draft.format.foreign}'s"
        effects = {e: Effect("fails", why) for e in ("torch", "vllm", "llama.cpp")}
        yield Finding("configuration", "note", s.problem or "", effects=effects)
    elif s.problem:
        effects = everywhere("fails", "its configuration is at fault")
        if draft.reading.unsupported:
            effects = {e: Effect("fails", s.problem) for e in OURS}
        yield Finding("configuration", "failure", s.problem, "correct the checkpoint's configuration", effects)
    elif s.config:
        c = s.config
        head = f"{c.markov_head_type} Markov head of rank {c.markov_rank}" if c.markov_rank else "no Markov head"
        yield Finding(
            "configuration",
            "ok",
            f"{_upper(article(draft.format.title))} of {c.layers} layers with a"
            f" {c.backbone} backbone, {head}, block {c.block}.",
        )


def target(s: Subject) -> Iterator[Finding]:
    """A draft belongs to one target: the hidden size, the vocabulary and the number of layers must be the target's.

    SGLang only warns when the number of layers differs, and then taps the wrong places.
    """
    if s.target is None:
        yield Finding("target", "note", "No target was given, so whether the draft fits one is not known.", "--target")
        return
    fields = s.draft.reading.fields
    for what, own, theirs in (
        ("hidden size", fields.get("hidden_size"), s.target.hidden_size),
        ("vocabulary", fields.get("vocab_size"), s.target.vocab_size),
        ("number of target layers", fields.get("num_target_layers"), s.target.layers),
    ):
        if own is not None and own != theirs:
            text = (
                f"The draft {s.draft.name} is for another target: its {what} is {own}, that of {s.target.name} is"
                f" {theirs}; choose the draft that was trained for this target."
            )
            yield Finding("target", "failure", text, "", everywhere("fails", f"its {what} is not the target's"))
            return
    yield Finding("target", "ok", f"Hidden size, vocabulary and layers are those of {s.target.name}.")


def taps(s: Subject) -> Iterator[Finding]:
    """The tapped layers, counted two ways: k for the output of layer k, or k + 1 for the input of the next.

    DeepSpec, SpecForge, SGLang and V4 count outputs (target_layer_ids, -1 the embedding); speculators and llama.cpp
    count inputs (aux_hidden_state_layer_ids, dflash.target_layers, 0 the embedding). Read one as the other and every
    feature comes from the layer beside the one it was trained on: nothing errors, acceptance falls. SGLang raises for
    -1, and accepts but never captures the last layer's output, which llama.cpp cannot tap either.
    """
    ids, layers = s.draft.reading.fields.get("target_layer_ids"), _layers(s)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        yield Finding(
            "taps",
            "failure",
            f"The tapped layers are {brief(ids)}, no list of numbers.",
            "",
            everywhere("fails", "it does not say which layers it taps"),
        )
        return
    if problem := tap_problem(ids, layers):
        inputs = "counted as inputs" in problem
        why = "its tapped layers are off by one" if inputs else "its tapped layers are not the target's"
        remedy = "subtract 1 from each in a field that counts outputs" if inputs else ""
        yield Finding("taps", "failure", f"{_upper(problem)}.", remedy, everywhere("fails", why))
    elif ids[0] == -1 or ids[-1] + 1 == layers:
        sglang = "SGLang raises for the embedding" if ids[0] == -1 else "SGLang never captures the last layer's output"
        effects = {e: Effect("fails", sglang) for e in ("sglang", "sglang-dspark")}
        if ids[-1] + 1 == layers:
            effects["llama.cpp"] = Effect("fails", "llama.cpp taps inputs of layers only")
        text = f"The tapped layers {ids}, as outputs, include one that not every engine can tap."
        yield Finding("taps", "warning", text, "use the PyTorch engine", effects)
    else:
        yield Finding("taps", "ok", f"Taps the outputs of the target's layers {', '.join(map(str, ids))}.")


def anchor(s: Subject) -> Iterator[Finding]:
    """Whether the anchor's own row drafts the first token (γ rows, γ drafts) or only the mask rows do (1 + γ rows).

    The key is sample_from_anchor. Absent, SGLang takes it as true, speculators' legacy files mean false, and the
    converter of llama.cpp writes false. Read the wrong way, every draft is one position off and acceptance falls to
    about 1 token. vLLM's adapter for speculators files has long taken every one as false, whatever it says.
    """
    draft, first = s.draft, s.draft.reading.anchor_first
    said = "sample_from_anchor" in draft.raw or any(k.endswith(".sample_from_anchor") for k in draft.raw)
    if first is None:
        yield Finding(
            "anchor",
            "failure",
            ANCHOR_OPEN.format(name=draft.name),
            "add sample_from_anchor to config.json",
            {
                **everywhere("worse", "engines read its anchor differently", "add sample_from_anchor"),
                "sglang-dspark": Effect("fails", "it does not say how its anchor is read", "add sample_from_anchor"),
            },
        )
    elif not first:
        try:
            check_anchor(draft)
        except InputError as error:
            why = "it does not run blocks of one row more than they draft"
            effects = {e: Effect("fails", why) for e in ("torch", "gguf")}
            if draft.format.name == "speculators":
                effects["sglang"] = Effect("fails", "SGLang has no class for it", TO_SGLANG)
            yield Finding("anchor", "warning", str(error), "", effects)
    elif draft.format.name == "speculators":
        why = "its adapter for speculators files takes the anchor as a row of its own: about half the acceptance"
        yield Finding(
            "anchor",
            "ok",
            "The anchor's row drafts the first token, and the file says so.",
            effects={"vllm": Effect("worse", why, TO_DEEPSPEC)},
        )
    elif draft.format.name == "gguf" and not said:
        why = "the key is absent, and parts of llama.cpp read that differently"
        yield Finding(
            "anchor",
            "warning",
            "The file does not say that the anchor's row drafts the first token; it is read as if it did.",
            TO_GGUF,
            {"llama.cpp": Effect("worse", why, TO_GGUF)},
        )
    else:
        how = "the file says so" if said else "as always in this format"
        yield Finding("anchor", "ok", f"The anchor's row drafts the first token, {how}.")


def block(s: Subject) -> Iterator[Finding]:
    """How many tokens are drafted must not be more than the block was trained for.

    The mask rows of a block see each other. One row too many changes what all of them see, so every position
    collapses, the first included (4 % acceptance has been reported), and engines only warn; llama.cpp silently skips
    the Markov head.
    """
    rows, first = s.draft.reading.fields.get("block_size"), s.draft.reading.anchor_first
    if type(rows) is not int or rows < 1:
        return
    trained = rows if first is not False else rows - 1
    proposed = _proposed(s.draft.raw)
    asked = s.block if s.block is not None else trained
    if asked > trained or asked < 1:
        text = (
            f"A block of {asked} was asked of {s.draft.name}, which was trained for {trained}; ask for 1 to"
            f" {trained}, because longer blocks make every position worse."
        )
        why = f"{asked} drafts are more than the {trained} it was trained for"
        yield Finding(
            "block",
            "failure",
            text,
            f"draft at most {trained}",
            {
                **everywhere("worse", why, f"draft at most {trained}"),
                **{e: Effect("fails", why) for e in ("torch", "sglang-dspark")},
            },
        )
    elif proposed is not None and proposed != trained:
        text = f"The file proposes {proposed} tokens a round but its block of {rows} rows drafts {trained}."
        yield Finding("block", "warning", text, f"draft {trained}", {"vllm": Effect("worse", text)})
    else:
        yield Finding("block", "ok", f"Trained to draft {trained} tokens at once.")


def nextn(s: Subject) -> Iterator[Finding]:
    """num_nextn_predict_layers counts layers of multi-token prediction (1 or 3), never the tokens of a block.

    Drafts copy the field from their target. Read as the block, it drafts 1 or 3 tokens of 5 or 7; read as the number of
    layers, it sizes the draft's cache wrongly.
    """
    value = s.draft.raw.get("num_nextn_predict_layers")
    if isinstance(value, int) and value > 0:
        yield Finding("nextn", "note", f"num_nextn_predict_layers is {value}; it is not the block and is not used.")


def mask(s: Subject) -> Iterator[Finding]:
    """The token that fills the rows after the anchor. It has to be one of the vocabulary, not of the tokenizer.

    Qwen3's 151669 is one past its tokenizer's last token, and still a row of its padded vocabulary: valid, though a
    tokenizer that is asked for it has none. Outside the vocabulary, SGLang refuses to start.
    """
    fields = s.draft.reading.fields
    value, size = fields.get("mask_token_id"), fields.get("vocab_size")
    size = s.target.vocab_size if s.target else size
    if type(value) is not int or value < 0 or (type(size) is int and value >= size):
        what = "there is none" if value is None else f"{brief(value)} is outside the vocabulary of {size}"
        yield Finding(
            "mask",
            "failure",
            f"The mask token id is needed, but {what}.",
            "",
            everywhere("fails", "it has no usable mask token"),
        )
    elif s.target and s.target.tokens is not None and value >= s.target.tokens:
        yield Finding(
            "mask",
            "note",
            f"The mask token {value} is past the tokenizer's {s.target.tokens} tokens, and"
            f" valid: it is a row of the padded vocabulary of {size}.",
        )
    else:
        yield Finding("mask", "ok", f"The mask is token {value}.")


def tensors(s: Subject) -> Iterator[Finding]:
    """Every tensor of the description must be there, under its name and in its shape, and nothing else.

    SGLang skips names that it does not know and does not notice that others are missing: those weights stay as they
    were initialised, and acceptance is about 1. A table that is stored the other way round is named as that.
    """
    if s.config is None:
        if s.draft.format.foreign and not s.draft.stored:
            text = f"{s.draft.name} announces a DSpark module but holds none of its tensors; fetch it again."
            yield Finding("tensors", "failure", text, "", everywhere("fails", "it holds no draft"))
        elif s.draft.format.foreign:
            yield Finding("tensors", "note", f"{len(s.draft.stored)} tensors, whose shapes are not checked.")
        return
    expected = expected_tensors(s.config, s.draft.reduced)
    turned = [n for n, t in s.draft.tensors.items() if n in expected and t.shape == expected[n][::-1] != expected[n]]
    for text in tensor_problems(s.draft, s.config):
        hint = f"{brief(turned[0])} looks transposed" if turned and repr(turned[0]).strip("'") in text else ""
        effects = everywhere("fails", "its tensors are not those of its configuration")
        effects["sglang"] = Effect("worse", "it loads them without a word, and drafts from untrained weights")
        yield Finding("tensors", "failure", text, hint, effects)
        return
    yield Finding("tensors", "ok", f"All {len(s.draft.tensors)} tensors are there, in their shapes.")


CHECKS: dict[str, Check] = {
    c.__name__: c
    for c in (
        configuration,
        target,
        tensors,
        taps,
        anchor,
        block,
        nextn,
        mask,
        backbone,
        markov,
        nesting,
        confidence,
        vocabulary,
        tables,
        packing,
        tokenizer,
    )
}
"""In the order in which they are shown."""


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _layers(s: Subject) -> int | None:
    if s.target:
        return s.target.layers
    layers = s.draft.reading.fields.get("num_target_layers")
    return layers if type(layers) is int else None


def _proposed(raw: Any) -> int | None:
    """How many tokens speculators' own field proposes."""
    match raw.get("speculators_config"):
        case {"proposal_methods": [{"speculative_tokens": int(count)}, *_]}:
            return count
        case _:
            return None
