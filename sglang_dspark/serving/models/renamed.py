"""Qwen3 drafts of formats whose tensors SGLang does not know by their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sglang.srt.models.dspark import Qwen3DSparkModel
from torch import Tensor

from sglang_dspark.checkpoints.registry import FORMATS
from sglang_dspark.serving.drafts import SOURCE_FORMAT


class DSparkSpeculator(Qwen3DSparkModel):  # type: ignore[misc]
    """SGLang's own model; only names are translated while it loads."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load under DeepSpec's names, leaving out what no draft needs."""
        rename = next(f.rename for f in FORMATS if f.name == getattr(self.config, SOURCE_FORMAT))

        def renamed() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                ours = rename(name)
                if ours is not None:
                    yield ours, tensor

        super().load_weights(renamed())


EntryClass = [DSparkSpeculator]
