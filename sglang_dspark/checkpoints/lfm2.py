"""LFM2 drafts, as SGLang reads them: Lfm2DSparkDraftModel, in the spelling of SGLang's native view.

| field | what it is |
|---|---|
| block_size, mask_token_id, target_layer_ids, markov_rank, ... | as in `sglang` |
| rope_is_neox_style | false: pairs of neighbours are rotated rather than halves of a head |

Tensors: DeepSpec's names. The interleaved rope is what sets the backbone apart from Qwen3's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dspark.checkpoints import sglang
from sglang_dspark.checkpoints.drafts import Format


def recognises(raw: Mapping[str, Any]) -> bool:
    """The class."""
    return "Lfm2DSparkDraftModel" in sglang.architectures(raw)


FORMAT = Format("lfm2", "LFM2 draft", recognises, sglang.read, sglang.rename, foreign="LFM2")
