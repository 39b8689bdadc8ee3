"""A draft checkpoint as it lies: what it says of itself in one spelling, and its tensors under one set of names.

A `Format` is one file of this package: how to recognise it, how to read its configuration into DeepSpec's spelling,
what it calls its tensors and, where it can be written, how. The registry lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from sglang_dspark.checkpoints.fields import Fields
from sglang_dspark.checkpoints.places import Place
from sglang_dspark.checkpoints.spelling import parse_config
from sglang_dspark.checkpoints.tensors import Readable
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import InputError

if TYPE_CHECKING:
    from sglang_dspark.checkpoints.outputs import Output, Request

D2T = "d2t"
"""The tensor [draft vocabulary] of target token ids that a reduced vocabulary comes with, ascending."""

Kind = Literal["dspark", "dflash", "eagle3"]
Listed = Mapping[str, Readable]


@dataclass(frozen=True, slots=True)
class Reading:
    """A configuration in DeepSpec's spelling.

    `spelled` says how the file spells a field that was translated. `anchor_first` is None where the file leaves open
    what engines read differently. `unsupported` holds a sentence for each thing that no draft of ours can do.
    """

    fields: Mapping[str, Any]
    spelled: Mapping[str, str]
    anchor_first: bool | None
    unsupported: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Format:
    """A checkpoint format. `recognises` judges a config.json or the fields of a GGUF file."""

    name: str
    title: str
    recognises: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any], Listed], Reading]
    rename: Callable[[str], str | None] = lambda name: name
    """From a stored tensor's name to DeepSpec's; None for one that belongs to nothing that a draft needs."""
    absolute: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids
    """From a stored d2t to target token ids."""
    kind: Kind = "dspark"
    prefix: str = ""
    """What the names of a module's tensors begin with in the larger checkpoint that holds it."""
    foreign: str | None = None
    """The backbone, where it is one that this package does not compute."""
    write: Callable[[Draft, DraftConfig, Request], Output] | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft checkpoint. `raw` is its configuration as stored, `stored` its tensors by their stored names."""

    format: Format
    place: Place
    raw: Mapping[str, Any]
    reading: Reading
    stored: Listed
    tensors: Listed
    """By DeepSpec's names. A name that no draft has stays as it is stored."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.place.name

    def fields(self, target_layers: int | None = None) -> Fields:
        """Its configuration for typed reading; `target_layers` counts where the format does not say it."""
        data = dict(self.reading.fields)
        if target_layers is not None and data.get("num_target_layers") is None:
            data["num_target_layers"] = target_layers
        return Fields(data, self.name, self.reading.spelled)

    def config(self, target_layers: int | None = None) -> DraftConfig:
        """The draft model that it describes. Raises InputError that names the field at fault, or says what this
        package cannot compute.
        """
        if self.format.kind != "dspark":
            raise InputError(f"{self.name} is {article(self.format.title)}, which is not DSpark; give a DSpark draft.")
        if self.format.foreign:
            title = article(self.format.title)
            raise InputError(
                f"{self.name} is {title}, whose {self.format.foreign} backbone this package does not compute; serve it"
                " with SGLang."
            )
        if self.reading.unsupported:
            raise InputError(self.reading.unsupported[0])
        if self.reading.anchor_first is None:
            raise InputError(ANCHOR_OPEN.format(name=self.name))
        return parse_config(self.fields(target_layers))

    @property
    def reduced(self) -> int | None:
        """The size of its own, reduced vocabulary, if it has one."""
        size, full = (self.reading.fields.get(k) for k in ("draft_vocab_size", "vocab_size"))
        return size if type(size) is int and size != full else None


ANCHOR_OPEN = (
    "{name} does not say whether its block drafts from the anchor's row (sample_from_anchor), and engines read that"
    " differently; add the key: true for drafts trained as DeepSpec's are, false for the older layout of one row more."
)


def article(title: str) -> str:
    """`title` with its indefinite article."""
    return f"{'an' if title[:1].lower() in 'aeio' else 'a'} {title}"
