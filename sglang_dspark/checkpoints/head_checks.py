"""The doctor's checks of backbone, heads and tables, from headers. What `--explain` prints is a check's docstring."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_dspark.checkpoints.findings import TO_GGUF, TO_SGLANG, Effect, Finding, Subject
from sglang_dspark.checkpoints.llama_cpp import representable
from sglang_dspark.checkpoints.spelling import OPTIONAL
from sglang_dspark.checkpoints.tensors import TensorInfo
from sglang_dspark.checkpoints.words import brief


def backbone(s: Subject) -> Iterator[Finding]:
    """What not every engine computes: an activation other than SiLU, biases in attention, a scaled rope, a confidence
    head without a Markov head.

    SGLang raises for another activation. llama.cpp would leave the others out without a word: the GGUF engine refuses
    them, and the converter names each as a loss.
    """
    if s.config is None or s.config.backbone != "qwen3":
        return
    if s.config.activation != "silu":
        text = f"The backbone has the '{s.config.activation}' activation, which not every engine computes."
        why = f"it has no '{s.config.activation}' activation for drafts"
        effects = {e: Effect("fails", why) for e in ("sglang", "sglang-dspark", "llama.cpp")}
        yield Finding("backbone", "warning", text, "use the PyTorch engine", effects)
    for loss in representable(s.config)[1] if s.draft.format.name != "gguf" else ():
        if loss.name not in ("markov-head", "confidence-head" if s.config.markov_rank else ""):
            text = f"{loss.text[:1].upper()}{loss.text[1:]}."
            effects = {"llama.cpp": Effect("fails", loss.text)}
            yield Finding("backbone", "note", text, "use the PyTorch engine", effects)


def markov(s: Subject) -> Iterator[Finding]:
    """The sequential head: vanilla, gated or rnn, of a rank. Without one this is DFlash in DSpark's clothes.

    SGLang's DSPARK refuses drafts without it; llama.cpp computes the vanilla one only.
    """
    if s.config is None:
        return
    kind = s.config.markov_head_type
    if kind == "none":
        yield Finding(
            "markov",
            "note",
            "There is no Markov head: drafts are those of the backbone alone.",
            effects={
                engine: Effect("fails", "DSPARK needs a Markov head", "serve it with --speculative-algorithm DFLASH")
                for engine in ("sglang", "sglang-dspark")
            },
        )
    elif kind != "vanilla":
        yield Finding(
            "markov",
            "ok",
            f"The {kind} Markov head is complete.",
            effects={"llama.cpp": Effect("fails", f"it has no {kind} Markov head")},
        )
    else:
        yield Finding("markov", "ok", f"A vanilla Markov head of rank {s.config.markov_rank}.")


def nesting(s: Subject) -> Iterator[Finding]:
    """SpecForge nests the heads' fields in dflash_config; SGLang parses them there but builds from the root only.

    So a nested markov_rank passes SGLang's checks and then fails to build with "markov_rank=0"; a nested
    confidence_head_with_markov is not seen at all and counts as true. Where both places speak they must agree.
    """
    raw = s.draft.raw
    inner = {
        k: v
        for name in ("dflash_config", "dspark_config")
        if isinstance(raw.get(name), dict)
        for k, v in raw[name].items()
    }
    only = [
        k for k in ("markov_rank", "markov_head_type", "confidence_head_with_markov") if k in inner and k not in raw
    ]
    differ = [k for k in inner if k in raw and raw[k] != inner[k] and k not in ("layer_types", "num_hidden_layers")]
    if differ and s.draft.format.name != "minimax":
        text = f"'{differ[0]}' is {brief(raw[differ[0]])} at the root and {brief(inner[differ[0]])} nested."
        yield Finding(
            "nesting",
            "warning",
            text,
            TO_SGLANG,
            {"sglang": Effect("worse", "it builds from the one and drafts from the other")},
        )
    elif only and s.draft.format.name == "specforge":
        why = f"{only[0]} is nested, and it builds from the root only"
        yield Finding(
            "nesting",
            "warning",
            f"{', '.join(only)} are nested in dflash_config.",
            TO_SGLANG,
            {"sglang": Effect("fails", why, TO_SGLANG)},
        )


def confidence(s: Subject) -> Iterator[Finding]:
    """The confidence head judges how far a block will survive; scheduling needs it, plain drafting does not.

    SGLang looks at whether enable_confidence_head is there, never at its value, and takes confidence_head_with_markov
    as true where it is absent. Static mode, its default, builds no confidence head; the other modes refuse a draft
    without one. The one in llama.cpp always sees the Markov features.
    """
    if s.config is None:
        return
    if not s.config.confidence:
        why = "its scheduling modes insist on a confidence head; static mode runs"
        yield Finding(
            "confidence",
            "note",
            "There is no confidence head, so nothing can be scheduled by confidence.",
            effects={engine: Effect("worse", why) for engine in ("sglang", "sglang-dspark")},
        )
    elif not s.config.confidence_with_markov and s.draft.raw.get("confidence_head_with_markov") is not False:
        why = "it takes the confidence head as one with Markov features, which does not load in scheduling modes"
        yield Finding(
            "confidence",
            "warning",
            "The confidence head sees no Markov features, which the root does not say.",
            TO_SGLANG,
            {"sglang": Effect("worse", why, TO_SGLANG)},
        )
    else:
        seen = "with" if s.config.confidence_with_markov else "without"
        yield Finding("confidence", "ok", f"A confidence head {seen} Markov features.")


def vocabulary(s: Subject) -> Iterator[Finding]:
    """A draft may know fewer tokens than its target (32000 of them, say) and map them with d2t.

    SGLang drops the map and the reduced lm_head, so nothing fits. The PyTorch engine makes the vocabulary whole,
    exactly: a constant rank of the Markov head that is -∞ for tokens it lacks. llama.cpp and speculators keep the map.
    """
    size = s.draft.reduced
    if size is None:
        return
    full = s.draft.reading.fields.get("vocab_size")
    yield Finding(
        "vocabulary",
        "warning",
        f"The draft knows {size} of the target's {full} tokens.",
        TO_SGLANG,
        {
            "sglang": Effect("fails", "it drops reduced vocabularies", TO_SGLANG),
            "sglang-dspark": Effect("fails", "SGLang cannot represent a reduced vocabulary", TO_SGLANG),
        },
    )


def tables(s: Subject) -> Iterator[Finding]:
    """Copies of the target's embedding and lm_head inside the draft. SGLang always uses the target's.

    A draft whose lm_head was trained further loses that in SGLang, silently. `--deep` compares them with the target's.
    """
    own = [name for name in OPTIONAL if name in s.draft.tensors]
    if own and not s.draft.reduced:
        there = " and ".join(n.removesuffix(".weight") for n in own)
        yield Finding(
            "tables", "note", f"It carries its own {there}; SGLang uses the target's instead.", "--deep compares"
        )


def packing(s: Subject) -> Iterator[Finding]:
    """Quantised GGUF weights. Tables of the Markov head lose acceptance sooner than the backbone does."""
    names = sorted({t.packing.name for t in s.draft.stored.values() if isinstance(t, TensorInfo) and t.packing})
    if names:
        yield Finding("packing", "note", f"Weights are quantised: {', '.join(names)}.")


def tokenizer(s: Subject) -> Iterator[Finding]:
    """A GGUF file's tokenizer, the target's: llama.cpp loads no draft without one, though it never uses it.

    `dspark convert --to gguf --target TARGET.gguf` copies it. Drafts in other formats need none.
    """
    if s.draft.format.name == "gguf" and "tokenizer.ggml.tokens" not in s.draft.raw:
        text = "The file holds no tokenizer, without which llama.cpp loads none."
        effects = {"llama.cpp": Effect("fails", "it loads no file without a tokenizer", TO_GGUF)}
        yield Finding("tokenizer", "warning", text, TO_GGUF, effects)
