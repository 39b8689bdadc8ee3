"""What a target's and a draft's file must say before llama.cpp sees them: it answers much of what it cannot use by
ending the process. Headers are read and judged here; a draft in another format is converted once and kept.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_dspark.checkpoints import convert
from sglang_dspark.checkpoints.drafts import D2T, Draft
from sglang_dspark.checkpoints.fit import tensor_problems
from sglang_dspark.checkpoints.gguf_file import PLAIN, parse_gguf
from sglang_dspark.checkpoints.outputs import Request
from sglang_dspark.checkpoints.places import FileSource
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.checkpoints.targets import Target, read_target
from sglang_dspark.checkpoints.tensors import Readable, TensorInfo
from sglang_dspark.checkpoints.vocabulary import vocabulary_ids
from sglang_dspark.decoding.calibrate import draft_identity
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import InputError
from sglang_dspark.paths import store_root

ARCHITECTURE = "dflash"
DRAFTS = (ARCHITECTURE, "dspark", "eagle3")
TYPES = {dtype: name for name, dtype in PLAIN.items()}


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A target's .gguf file and what its header says."""

    path: Path
    target: Target
    architecture: str
    trained_length: int
    quantisation: str


@dataclass(frozen=True, slots=True)
class DraftFile:
    """A draft's .gguf file and what its header says."""

    path: Path
    config: DraftConfig
    confident: bool
    quantisation: str


def read_target_file(path: Path) -> TargetFile:
    """The target at `path`, a .gguf file or a folder that holds one. Raises InputError if it cannot be read."""
    file = gguf_in(path)
    if file is None:
        raise InputError(f"The gguf engine reads .gguf targets, which {path} is not; use --engine torch for it.")
    target = read_target(file)
    assert target.header is not None
    architecture = target.architectures[0]
    if architecture in DRAFTS:
        raise InputError(f"{file} is a draft, not a target; give it as --draft, and its target as --target.")
    length = target.header.fields.get(f"{architecture}.context_length")
    if type(length) is not int or length < 1:
        raise InputError(f"{file} does not say how long a context it was trained for; fetch it again.")
    return TargetFile(file, target, architecture, length, quantisation(target.header.tensors))


def read_draft_file(path: Path, target: TargetFile) -> DraftFile:
    """The draft at `path`, a .gguf file. Raises InputError for all that llama.cpp would not survive, or would get wrong
    without a word.
    """
    draft = read_draft(path)
    if draft.raw.get("general.architecture") != ARCHITECTURE:
        raise InputError(
            f"{path} is a {draft.format.title!r} of another architecture than '{ARCHITECTURE}', the one that llama.cpp"
            " drafts with; convert it with dspark convert --to gguf."
        )
    config = draft.config(target.target.layers)
    for problem in _problems(draft, config, target.target):
        raise InputError(problem)
    if draft.reduced:
        vocabulary_ids(draft, config.vocab_size)
    confident = config.confidence and config.markov_rank > 0
    return DraftFile(path, config, confident, quantisation(draft.stored))


def _problems(draft: Draft, config: DraftConfig, target: Target) -> list[str]:
    """A sentence for each thing that is wrong with a draft for `target`."""
    name = draft.name
    found = [
        f"The draft {name} is for another target: its {what} is {own}, that of {target.name} is {theirs}; choose the"
        " draft that was trained for this target."
        for what, own, theirs in (
            ("hidden size", config.hidden_size, target.hidden_size),
            ("vocabulary", config.vocab_size, target.vocab_size),
            ("number of target layers", config.num_target_layers, target.layers),
        )
        if own != theirs
    ]
    if draft.reading.anchor_first is False:
        found.append(
            f"{name} drafts from its mask rows only (sample_from_anchor is false), a layout that this engine does not"
            " run; run it with llama.cpp's own server."
        )
    if "tokenizer.ggml.tokens" not in draft.raw:
        found.append(
            f"{name} has no tokenizer, without which llama.cpp loads no draft; convert it again with --target"
            f" {Path(target.name).name}."
        )
    if config.target_layer_ids[-1] >= target.layers - 1:
        found.append(
            f"{name} taps the output of the last of {target.layers} layers, but llama.cpp shows inputs of layers only;"
            " use --engine torch."
        )
    turned, head = draft.raw.get(f"{ARCHITECTURE}.rope.dimension_count"), config.attention[0].head_dim
    if turned not in (None, head):
        found.append(f"{name} turns {turned} of the {head} dimensions of a head; DSpark drafts turn all.")
    found += tensor_problems(draft, config)
    for stored, tensor in draft.stored.items():
        wanted = "I64" if stored == D2T else "F32" if len(tensor.shape) < 2 else None
        if wanted not in (None, _kind(tensor)):
            found.append(f"'{stored}' in {name} is {_kind(tensor)}, but llama.cpp needs {wanted}; convert it again.")
    return found


def _kind(tensor: Readable) -> str:
    """A stored tensor's type, as GGUF calls it."""
    packing = tensor.packing if isinstance(tensor, TensorInfo) else None
    return packing.name if packing else TYPES.get(tensor.dtype, str(tensor.dtype))


def converted(path: Path, target: TargetFile) -> Path:
    """The .gguf file of the draft at `path`: itself, or what the folder's checkpoint was converted to, once.

    Conversions are named by the bytes that they come from. Raises InputError for a draft that llama.cpp cannot compute.
    """
    if (file := gguf_in(path)) is not None:
        return file
    draft = read_draft(path)
    tokenizer = target.target.tokenizer()
    digest = hashlib.sha256(repr(sorted(draft_identity(path).items())).encode())
    for field in tokenizer:
        digest.update(field)
    folder = store_root() / "converted" / f"{path.resolve().name}-{digest.hexdigest()[:16]}"
    made = folder / f"{folder.name}.gguf"
    if folder.is_dir():
        try:
            parse_gguf(FileSource(made))
            return made
        except InputError:
            shutil.rmtree(folder, ignore_errors=True)
    request = Request(
        target_name=target.path.name,
        target_architectures=target.target.architectures,
        tokenizer=tokenizer,
        tokenizer_size=target.target.vocab_size if tokenizer else None,
    )
    output = convert.plan(draft, "gguf", request, target.target.layers)
    for loss in output.losses:
        raise InputError(f"The draft {path} cannot run on llama.cpp: {loss.text}; use --engine torch.")
    try:
        convert.write(draft, "gguf", output, folder)
    except InputError:
        if not made.is_file():  # else another process was first
            raise
    return made


def gguf_in(path: Path) -> Path | None:
    """`path` if it is a .gguf file, the only one in it if it is a folder of no other format, or None."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    files = sorted(path.glob("*.gguf"))
    return files[0] if len(files) == 1 and not (path / "config.json").is_file() else None


def quantisation(tensors: Mapping[str, Readable]) -> str:
    """The type of most weights, as GGUF calls it."""
    kinds: Counter[str] = Counter()
    for tensor in tensors.values():
        kinds[_kind(tensor)] += tensor.count
    return kinds.most_common(1)[0][0] if kinds else "unknown"
