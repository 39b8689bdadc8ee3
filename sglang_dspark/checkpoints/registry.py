"""All formats, and how any checkpoint becomes a `Draft`. A new format is a new file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_dspark.checkpoints import deepseek_v4, deepspec, lfm2, llama_cpp, minimax, relatives, sglang, specforge
from sglang_dspark.checkpoints import speculators as speculators_format
from sglang_dspark.checkpoints.drafts import D2T, Draft, Format, Listed
from sglang_dspark.checkpoints.gguf_file import parse_gguf
from sglang_dspark.checkpoints.jsons import read_object
from sglang_dspark.checkpoints.outputs import CONFIG
from sglang_dspark.checkpoints.places import Folder, Place
from sglang_dspark.checkpoints.tensors import Later, Readable, Virtual, list_tensors
from sglang_dspark.checkpoints.words import brief
from sglang_dspark.errors import InputError

FORMATS: tuple[Format, ...] = (
    llama_cpp.FORMAT,
    relatives.EAGLE3,
    relatives.DFLASH_FORMAT,
    speculators_format.FORMAT,
    minimax.FORMAT,
    lfm2.FORMAT,
    sglang.FORMAT,
    specforge.FORMAT,
    deepspec.FORMAT,
    deepseek_v4.FORMAT,
)
"""In the order in which they are tried."""

WRITABLE = {f.name: f for f in FORMATS if f.write is not None}


def read_draft(place: Place | Path) -> Draft:
    """The draft at `place`: a folder, a .gguf file, or a folder that holds one. Reads the configuration; headers when
    its tensors are first looked at, and no weights.

    Raises InputError if nothing can be read, or what can is of no known format.
    """
    where = Folder(place) if isinstance(place, Path) else place
    files = where.files()
    ggufs = [name for name in files if name.endswith(".gguf")]
    if CONFIG not in files and len(ggufs) == 1:
        header = parse_gguf(where.source(ggufs[0]))
        return _draft(where, _format(where, header.fields), header.fields, header.tensors)
    if CONFIG not in files and ggufs:
        raise InputError(f"{where.name} holds {len(ggufs)} .gguf files; give the path of one of them.")
    raw = read_object(where.source(CONFIG))
    found = _format(where, raw)
    return _draft(where, found, raw, Later(lambda: list_tensors(where, found.prefix)))


def _format(place: Place, raw: Mapping[str, Any]) -> Format:
    for known in FORMATS:
        if known.recognises(raw):
            return known
    said = raw.get("architectures", raw.get("general.architecture"))
    raise InputError(
        f"{place.name} names the architecture {brief(said)}, which is no draft of a known format; give the draft's"
        " folder, .gguf file or hub id."
    )


def _draft(place: Place, known: Format, raw: Mapping[str, Any], stored: Listed) -> Draft:
    return Draft(known, place, raw, known.read(raw, stored), stored, Later(lambda: _renamed(place, known, stored)))


def _renamed(place: Place, known: Format, stored: Listed) -> dict[str, Readable]:
    """The tensors by DeepSpec's names."""
    tensors: dict[str, Readable] = {}
    for name, tensor in stored.items():
        ours = known.rename(name)
        if ours is None:
            continue
        if ours in tensors:
            raise InputError(f"{place.name} holds {brief(ours)} twice, once as {brief(name)}; keep one.")
        tensors[ours] = tensor
    if (ids := tensors.get(D2T)) is not None and len(ids.shape) == 1:
        # Not before it is needed: reading headers must not read weights.
        tensors[D2T] = Virtual(ids.dtype, ids.shape, lambda a, b: known.absolute(ids.read(0, ids.count))[None][a:b])
    return tensors
