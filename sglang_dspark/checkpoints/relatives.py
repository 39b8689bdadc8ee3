"""Drafts of other methods, recognised so that they can be named: Eagle3 and plain DFlash.

| what | how it is recognised |
|---|---|
| Eagle3 | `Eagle3` in the class, or speculators_model_type eagle3 |
| DFlash | DFlashDraftModel, DFlash2DraftModel or DFlashSpeculator, or speculators_model_type dflash |

Neither has a Markov head. A DFlash block drafts from its mask rows only: one row more than it drafts tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dspark.checkpoints import sglang
from sglang_dspark.checkpoints.drafts import Format, Listed, Reading

DFLASH = ("DFlashDraftModel", "DFlash2DraftModel", "DFlashSpeculator")


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """By class or model type."""
    return raw.get("speculators_model_type") == "eagle3" or any("Eagle3" in a for a in sglang.architectures(raw))


def is_dflash(raw: Mapping[str, Any]) -> bool:
    """By class or model type."""
    known = any(a in DFLASH for a in sglang.architectures(raw))
    return raw.get("speculators_model_type") == "dflash" or known


def read(raw: Mapping[str, Any], tensors: Listed) -> Reading:
    """What there is, for people to see."""
    return Reading({**raw, **sglang.nested(raw)}, {}, raw.get("sample_from_anchor") is True)


EAGLE3 = Format("eagle3", "Eagle3 draft", is_eagle3, read, kind="eagle3")
DFLASH_FORMAT = Format("dflash", "plain DFlash draft", is_dflash, read, kind="dflash")
