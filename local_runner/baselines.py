"""What else a user could run on the same machine: `generate` of transformers, plain or assisted by prompt lookup."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from local_runner.engines.torch.gguf import unpack_options, unpacked


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens that were decoded after the step that also read the prompt, and the seconds that they took."""

    tokens: int
    seconds: float


class Transformers:
    """A target as transformers runs it by default: its own dynamic cache and attention, greedy, uncompiled."""

    def __init__(self, target: Path, dtype: torch.dtype) -> None:
        """Read the folder or .gguf file `target`, which an engine has read before, so that it is sound."""
        folder = unpacked(target) if target.is_file() else target
        options: dict[str, Any] = unpack_options(target) if folder is None else {}
        self._model = AutoModelForCausalLM.from_pretrained(
            folder or target.parent, dtype=dtype, attn_implementation="sdpa", local_files_only=True, **options
        ).eval()

    def generate(
        self, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Collection[int], lookup: int | None = None
    ) -> Decoded:
        """Decode after `prompt_ids`; with `lookup`, up to so many tokens a step are guessed from the text before."""
        clock = _StepClock()
        ids = torch.tensor([prompt_ids])
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(stop_ids) or None,
                pad_token_id=0,
                prompt_lookup_num_tokens=lookup,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        (first, began), (last, ended) = clock.steps[0], clock.steps[-1]
        return Decoded(last - first, ended - began)


class _StepClock(StoppingCriteria):  # type: ignore[misc]
    """Stops nothing, and writes down the length of the text and the time after each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: Any) -> torch.Tensor:
        self.steps.append((input_ids.shape[1], perf_counter()))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
