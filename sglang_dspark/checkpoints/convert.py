"""Translating a draft checkpoint: streamed, atomic, with the same bytes each time, and refusing to lose anything in
silence.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import psutil

from sglang_dspark import __version__
from sglang_dspark.checkpoints import deepseek_v4
from sglang_dspark.checkpoints.drafts import Draft
from sglang_dspark.checkpoints.fit import tensor_problems
from sglang_dspark.checkpoints.gguf_file import Kind, encode, write_gguf
from sglang_dspark.checkpoints.outputs import CONFIG, Output, Request, as_stored
from sglang_dspark.checkpoints.registry import WRITABLE
from sglang_dspark.checkpoints.safetensors_out import document, ordered, write_safetensors
from sglang_dspark.checkpoints.tensors import SINGLE
from sglang_dspark.checkpoints.vocabulary import vocabulary_ids, whole
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import InputError

EXTRACT = deepseek_v4.FORMAT.name
CHOICES = (*WRITABLE, EXTRACT)
OWN_VOCABULARY = ("speculators", "gguf")
"""Formats that can say that a draft's vocabulary is smaller than its target's."""
PENDING = "0" * 64
"""Stands in a header for the digest of the weights, until they are written."""

Progress = Callable[[int, int], None]
"""Called with the bytes written and the bytes in all."""


@dataclass(frozen=True, slots=True)
class Written:
    """A finished conversion: the folder, its bytes of weights, their SHA-256, and what was knowingly lost."""

    folder: Path
    size: int
    weights_sha256: str
    lost: tuple[str, ...]


def plan(draft: Draft, to: str, request: Request, target_layers: int | None = None) -> Output:
    """What writing `draft` as the format `to` would write and lose.

    Raises InputError for a draft that is not sound, or that the format cannot hold at all.
    """
    if (to == EXTRACT) != (draft.format.name == EXTRACT):
        raise InputError(
            f"{draft.name} is {draft.format.title!r}, which cannot be written as {to}; a bundled module can only be"
            f" extracted, with --to {EXTRACT}, and nothing else can become one."
        )
    if to == EXTRACT:
        return _extracted(draft)
    config = draft.config(target_layers)
    for problem in tensor_problems(draft, config):
        raise InputError(problem)
    if draft.reduced:
        vocabulary_ids(draft, config.vocab_size)
        if to not in OWN_VOCABULARY:
            draft = whole(draft, config)
            config = draft.config(target_layers)
    draft = _said(draft, config)
    writer = WRITABLE[to].write
    assert writer is not None
    return writer(draft, config, request)


def _said(draft: Draft, config: DraftConfig) -> Draft:
    """The draft with what was taken from the target written down."""
    fields = dict(draft.reading.fields) | {"num_target_layers": config.num_target_layers}
    return replace(draft, reading=replace(draft.reading, fields=fields))


def _extracted(draft: Draft) -> Output:
    """V4's module as it is stored, beside the whole configuration."""
    if not draft.stored:
        raise InputError(f"{draft.name} announces a DSpark module but holds no 'mtp.' tensors; fetch it again.")
    return Output({CONFIG: document(draft.raw)}, ordered([as_stored(n, t) for n, t in draft.stored.items()]))


def check_losses(output: Output, allowed: frozenset[str]) -> None:
    """Raise InputError unless every loss was allowed by name, or for a name that loses nothing."""
    for loss in output.losses:
        if loss.name not in allowed:
            raise InputError(f"This would lose something: {loss.text} (--allow-loss {loss.name} accepts that).")
    for name in sorted(allowed - {loss.name for loss in output.losses}):
        raise InputError(f"--allow-loss {name} was given, but nothing of that name would be lost; leave it out.")


def write(
    draft: Draft, to: str, output: Output, folder: Path, progress: Progress = lambda done, total: None
) -> Written:
    """Write a planned conversion into the new folder `folder`. Nothing appears under that name before all is there.

    What a run that was killed left behind is removed by the next one. Raises InputError if the folder exists, or
    cannot be written.
    """
    if os.path.lexists(folder):
        raise InputError(f"{folder} is there already; choose another folder for --out, or remove it.")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        _check_room(folder.parent, output.size)
        part.mkdir()
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}); choose another folder.") from error
    try:
        digest = _fill(part, draft, to, output, folder.name, progress)
        part.rename(folder)
    except OSError as error:
        raise InputError(
            f"{folder} could not be written ({error.strerror}); free some room or choose another."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Written(folder, output.size, digest, tuple(loss.name for loss in output.losses))


def _sweep(folder: Path) -> None:
    for left in folder.parent.glob(f".{folder.name}.*.part"):
        pid = left.name.removesuffix(".part").rpartition(".")[2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _check_room(parent: Path, size: int) -> None:
    free = shutil.disk_usage(parent).free
    if size > free:
        raise InputError(f"{parent} has room for {free} bytes, but {size} would be written; choose another disk.")


def _fill(part: Path, draft: Draft, to: str, output: Output, name: str, progress: Progress) -> str:
    record = provenance(draft, to, output)
    for file, data in output.documents.items():
        (part / file).write_bytes(data)
    weights = part / (SINGLE if output.fields is None else f"{name}.gguf")
    digest, done = hashlib.sha256(), 0
    with weights.open("w+b") as stream:
        for data in _written(stream, record, output):
            digest.update(data)
            done += len(data)
            progress(done, output.size)
        assert done == output.size
        _patch(stream, record, digest.hexdigest())
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _written(stream: BinaryIO, record: str, output: Output) -> Iterator[bytes]:
    """Write everything, the record at the very start of the header."""
    if output.fields is None:
        return write_safetensors(stream, {"format": "pt", "sglang_dspark": record}, output.tensors)
    fields = [encode("sglang_dspark.provenance", Kind.STRING, record), *output.fields]
    return write_gguf(stream, fields, output.tensors)


def provenance(draft: Draft, to: str, output: Output) -> str:
    """Where a conversion came from, as JSON: by what it was made, the source's name, format and SHA-256 of its
    configuration, what was lost, and the SHA-256 of the written weights in their order.
    """
    return json.dumps(
        {
            "by": f"sglang-dspark {__version__}",
            "source": draft.name.rstrip("/").rpartition("/")[2] if Path(draft.name).exists() else draft.name,
            "source_format": draft.format.name,
            "source_config_sha256": hashlib.sha256(_canonical(draft)).hexdigest(),
            "format": to,
            "lost": [loss.name for loss in output.losses],
            "weights_sha256": PENDING,
        },
        sort_keys=True,
    )


def _canonical(draft: Draft) -> bytes:
    files = draft.place.files()
    if CONFIG in files:
        source = draft.place.source(CONFIG)
        return source.read(0, source.size)
    return json.dumps({k: v for k, v in draft.raw.items() if not k.startswith("tokenizer.")}, default=str).encode()


def _patch(stream: BinaryIO, record: str, digest: str) -> None:
    """Put the digest of the weights where `PENDING` stands in the record, whose last words it is."""
    stream.seek(0)
    window = stream.read(1 << 16)
    written = next(r for r in (record.encode(), json.dumps(record).encode()) if r in window)
    stream.seek(window.index(written) + written.rindex(PENDING.encode()))
    stream.write(digest.encode())
