"""A draft checkpoint on its way into SGLang: judged by the doctor's checks before any weight is loaded, and shown to
SGLang in the one spelling that it reads without mistakes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from sglang_dspark.checkpoints import deep, sglang
from sglang_dspark.checkpoints.doctor import examine, gemma4_problem, subject
from sglang_dspark.checkpoints.drafts import Draft
from sglang_dspark.checkpoints.findings import TO_DEEPSPEC, TO_SGLANG, Finding, Subject
from sglang_dspark.checkpoints.hub import HubRepo
from sglang_dspark.checkpoints.outputs import CONFIG, Request
from sglang_dspark.checkpoints.places import Folder, Place
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.checkpoints.safetensors_out import document
from sglang_dspark.checkpoints.targets import Target, read_target
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import InputError
from sglang_dspark.paths import store_root

ENGINE = "sglang-dspark"
"""What the doctor calls SGLang with this package."""
OWN_CLASS = "DSparkSpeculator"
GEMMA4_CLASS = "Gemma4DSparkModel"
SOURCE_FORMAT = "dspark_source_format"
"""In a written view: the format whose names its tensors have."""
NEVER_TAPPED = (
    "{name} taps {taps} of {layers} layers; SGLang can tap neither the embedding nor the last layer, so use the PyTorch"
    " engine (`dspark generate`) for this draft."
)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A draft that SGLang may load: the folder to give it, what it is, and the model class if it is one of ours."""

    folder: Path
    summary: str
    own_class: str | None


def admit(draft: Draft, target: Target | None, block: int | None) -> DraftConfig | None:
    """Judge a draft for SGLang with this package. None for formats whose backbone only SGLang knows.

    `block` is how many tokens somebody asks to draft at once, None for as many as it was trained for. Raises
    InputError, in the doctor's words, for what would fail or silently draft worse.
    """
    s = subject(draft, target, block)
    if draft.format.name == "gguf":
        command = TO_DEEPSPEC.replace("DRAFT", draft.name)
        raise InputError(f"{draft.name} is a GGUF file, which SGLang does not read; run `{command}` first.")
    findings = list(examine(s, called=draft.name).findings)
    if isinstance(draft.place, Folder):
        findings += deep.copies(s, {})
    for finding in findings:
        effect = finding.effects.get(ENGINE)
        if finding.state == "failure" or (effect is not None and effect.level == "fails"):
            raise InputError(_refusal(finding, s))
    return s.config


def _refusal(finding: Finding, s: Subject) -> str:
    """A finding that is no draft for SGLang, as a sentence: failures are for no engine, some warnings not for this."""
    name, config = s.draft.name, s.config
    match finding.check:
        case "vocabulary" if finding.state == "warning":
            command = TO_SGLANG.replace("DRAFT", name)
            return f"{name} knows only {s.draft.reduced} tokens, which SGLang cannot represent; run `{command}` first."
        case "copies" if finding.state == "warning":
            return f"{finding.text.rstrip('.')} ({name}), and SGLang always uses the target's; use the PyTorch engine."
        case "taps" if finding.state == "warning" and config is not None:
            return NEVER_TAPPED.format(name=name, taps=list(config.target_layer_ids), layers=config.num_target_layers)
        case "markov" if config is not None and not config.markov_rank:
            return f"{name} has no Markov head, which DSPARK needs; serve it with --speculative-algorithm DFLASH."
    return _sentence(finding, name)


def _sentence(finding: Finding, name: str) -> str:
    text = finding.text if name in finding.text else f"{name}: {finding.text}"
    remedy = finding.remedy if finding.remedy and ";" not in text else ""
    return f"{text.rstrip('.')}; {remedy}." if remedy else text


def native(draft: Draft, config: DraftConfig, block: int | None = None) -> dict[str, Any]:
    """The configuration as SGLang reads it: everything at the root, in its meaning, for `block` tokens at once."""
    if config.backbone == "gemma4":
        data = _gemma4(draft, config)
    else:
        data = json.loads(sglang.write(draft, config, Request()).documents[CONFIG])
        data.setdefault("model_type", "qwen3")
        if any(draft.format.rename(name) != name for name in draft.stored):
            data |= {"architectures": [OWN_CLASS], SOURCE_FORMAT: draft.format.name}
        if any(a.window is not None for a in config.attention):
            # Without it SGLang takes sliding layers as causal inside a block.
            data["is_causal"] = False
    return data | ({"block_size": block} if block is not None else {})


def _gemma4(draft: Draft, config: DraftConfig) -> dict[str, Any]:
    """What `models.gemma4` reads, as a configuration of the plainest type: SGLang treats those of Gemma 4 as targets.

    Raises InputError for layers of unequal keys and values, which SGLang's cache for drafts cannot hold.
    """
    if why := gemma4_problem(config):
        raise InputError(f"{draft.name} is no draft for SGLang: {why}; use the PyTorch engine.")
    first = config.attention[0]
    return {
        "architectures": [GEMMA4_CLASS],
        "model_type": "qwen3",
        "dtype": str(draft.tensors["fc.weight"].dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.activation,
        "rms_norm_eps": config.eps,
        "max_position_embeddings": config.max_position_embeddings,
        "num_hidden_layers": config.layers,
        "num_attention_heads": first.heads,
        "num_key_value_heads": first.kv_heads,
        "head_dim": first.head_dim,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "final_logit_softcapping": config.softcap,
        # SGLang counts drafts, where the file may count rows.
        "block_size": config.block - (draft.reading.anchor_first is False),
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
        "sample_from_anchor": draft.reading.anchor_first is not False,
        "dspark_layers": [asdict(a) for a in config.attention],
    }


def view(draft: Draft, data: dict[str, Any]) -> Path:
    """A folder that shows SGLang the draft with the configuration `data`: links to its weights, none of its code."""
    assert isinstance(draft.place, Folder)
    source = draft.place.path.resolve()
    names = [n for n in draft.place.files() if n != CONFIG and n.endswith((".safetensors", ".json"))]
    text = document(data)
    key = hashlib.sha256(b"\0".join([str(source).encode(), text, *(n.encode() for n in names)])).hexdigest()[:16]
    folder = store_root() / "serving" / f"{source.name}-{key}"
    if folder.is_dir():
        return folder
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        (part / CONFIG).write_bytes(text)
        for name in names:
            (part / name).symlink_to(source / name)
        part.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise InputError(f"{folder} cannot be written ({error.strerror}); set DSPARK_HOME elsewhere.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def prepare(draft_path: str, target_path: str, block: int | None, revision: str | None, cache: str | None) -> Admitted:
    """Judge the draft at a folder or hub id for the target at another, and say what to give SGLang for it.

    A draft on a hub is judged from its headers, then fetched into `cache`. Raises InputError if it is not one for
    SGLang, or not for this target.
    """
    draft, target, config = judge(draft_path, target_path, block, revision, cache)
    if config is None:
        return Admitted(Path(draft_path), draft.format.title, None)
    if not isinstance(draft.place, Folder):
        draft = read_draft(Folder(_snapshot(draft_path, revision, cache)))
        admit(draft, target, block)
    data = native(draft, config, block)
    own = data["architectures"][0]
    admitted = own if own in (OWN_CLASS, GEMMA4_CLASS) else None
    return Admitted(view(draft, data), summary(draft, config, data["block_size"]), admitted)


def judge(
    draft_path: str, target_path: str, block: int | None, revision: str | None = None, cache: str | None = None
) -> tuple[Draft, Target, DraftConfig | None]:
    """The draft at a folder or hub id and the target at another, read from configurations and headers and admitted.

    Raises InputError if the draft is not one for SGLang, or not for this target.
    """
    draft = read_draft(_place(draft_path, revision, cache, HF_HUB_OFFLINE))
    target = read_target(_place(target_path, None, cache, True))
    return draft, target, admit(draft, target, block)


def summary(draft: Draft, config: DraftConfig | None, block: int | None) -> str:
    """What a draft is, in a few words."""
    if config is None:
        return draft.format.title
    head = f"{config.markov_head_type} head"
    return f"{draft.format.title}, {config.layers} layers, {head}, block {block or config.block}"


def _place(path: str, revision: str | None, cache: str | None, kept: bool) -> Place:
    """A folder or file, or a repository: with `kept`, as it was fetched before, if it was."""
    if Path(path).exists():
        return Folder(Path(path))
    if kept:
        with suppress(LocalEntryNotFoundError, HFValidationError):
            return Folder(_snapshot(path, revision, cache, local_files_only=True))
    return HubRepo(path, revision or "main")


def _snapshot(repo: str, revision: str | None, cache: str | None, local_files_only: bool = False) -> Path:
    patterns = ["*.json", "*.safetensors"]
    return Path(
        snapshot_download(
            repo, revision=revision, cache_dir=cache, allow_patterns=patterns, local_files_only=local_files_only
        )
    )
