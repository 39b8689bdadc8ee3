"""From a checkpoint folder and a target to a draft model, or to one sentence that says why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.checkpoints.fit import check_anchor, ready
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.checkpoints.tensors import Tensors
from sglang_dspark.draft.backbone import Backbone
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.heads import Heads
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.rope import check_length
from sglang_dspark.errors import InputError


@dataclass(frozen=True)
class TargetInfo:
    """What a draft needs to know of its target. `embedding` and `lm_head` [V, d] are the raw tables (before any √d
    scale), in the precision in which the target runs; tied targets give the same tensor twice.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    embedding: Tensor
    lm_head: Tensor
    name: str
    project: Callable[[Tensor], Tensor] | None = None
    """The target's own product [n, d] -> [n, V] with `lm_head`, before any soft cap, if it has a quick one."""


@torch.inference_mode(False)
def load_draft(
    folder: Path,
    target: TargetInfo,
    *,
    dtype: torch.dtype,
    device: torch.device,
    block: int | None = None,
    context_length: int,
) -> DraftModel:
    """Load the draft at `folder` (a folder or a .gguf file, of any format) for `target`; `block` may ask
    for fewer rows than trained.

    Raises InputError for a draft of another target (before weights are read), a block longer than trained, a context
    that the draft's rope cannot serve, and for each missing, misnamed, superfluous or mis-shaped tensor, by name.
    """
    checkpoint = read_draft(folder)
    config = checkpoint.config(target.num_layers)
    check_anchor(checkpoint)
    _check_target(folder, config, target)
    rows = config.block if block is None else block
    if not 1 <= rows <= config.block:
        raise InputError(
            f"A block of {rows} was asked of {folder}, which was trained for {config.block}; ask for 1 to"
            f" {config.block}, because longer blocks make every position worse."
        )
    if context_length < 1:
        raise InputError(f"The draft's context length must be at least 1, not {context_length}.")
    check_length(config, context_length)
    config, tensors = ready(checkpoint, target.num_layers)
    notes: list[str] = []
    if context_length > config.max_position_embeddings:
        notes.append(
            f"the context length {context_length} goes beyond the {config.max_position_embeddings} positions that the"
            " draft was made for; drafts may be worse there"
        )

    def take(name: str) -> Tensor:
        # A copy: what was loaded may be a view of the file, neither aligned nor safe from changes of the file.
        return tensors.load(name).to(device=device, dtype=dtype, copy=True)

    embedding = _shared(tensors, "embed_tokens.weight", target.embedding, notes)
    own_embedding = embedding is not target.embedding
    if config.tie_word_embeddings and own_embedding and "lm_head.weight" not in tensors:
        lm_head = embedding
    else:
        lm_head = _shared(tensors, "lm_head.weight", target.lm_head, notes)
    embedding, lm_head = (t.to(device=device, dtype=dtype) for t in (embedding, lm_head))
    project = target.project if lm_head is target.lm_head else None
    backbone = Backbone(config, take, embedding, lm_head, context_length + rows, project)
    return DraftModel(config, backbone, Heads(config, take), rows, context_length, notes)


def _check_target(folder: Path, config: DraftConfig, target: TargetInfo) -> None:
    for what, own, theirs in (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("number of target layers", config.num_target_layers, target.num_layers),
    ):
        if own != theirs:
            raise InputError(
                f"The draft {folder} is for another target: its {what} is {own}, that of {target.name} is {theirs};"
                " choose the draft that was trained for this target."
            )
    # The configuration keeps the tapped layers inside its own number of layers, which is now known to be the target's.


def _shared(tensors: Tensors, name: str, theirs: Tensor, notes: list[str]) -> Tensor:
    """The target's own tensor where the checkpoint has no copy of it or an equal one, else the checkpoint's."""
    if name not in tensors:
        return theirs
    own = tensors.load(name)
    if _same_bits(own, theirs):
        return theirs
    notes.append(
        f"the checkpoint carries its own {name.removesuffix('.weight')} that differs from the target's; it is used"
    )
    return own.clone()


def _same_bits(own: Tensor, theirs: Tensor, rows: int = 4096) -> bool:
    """Whether `own`, rounded to the precision of `theirs`, is bitwise equal to it; in parts, to save memory."""
    return all(
        torch.equal(a.to(b.dtype).view(torch.uint8), b.cpu().contiguous().view(torch.uint8))
        for a, b in zip(torch.split(own, rows), torch.split(theirs, rows), strict=True)
    )
