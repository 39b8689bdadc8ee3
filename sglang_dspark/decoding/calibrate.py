"""Calibrating a confidence head: sequential temperature scaling (STS), and the file that engines read it from.

The confidence c_k = σ(z_k) of draft token k models the chance that it survives once tokens 1..k-1 did. STS divides each
position's logit by a temperature of its own, z_k / T_k, which leaves the order of confidences at that position alone.
Temperatures are fitted from left to right, each by a search on a grid for the least expected calibration error (ECE) of
the survival a_k = Π_{i≤k} σ(z_i / T_i), those of earlier positions held fixed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_dspark.errors import InputError

BINS = 15
GRID: tuple[float, ...] = tuple(sorted(np.geomspace(0.05, 20, 301).tolist(), key=lambda t: abs(math.log(t))))
"""The temperatures that are tried, those nearest to 1 first, so that of equally good ones the mildest is taken."""
FORMAT = "dspark-calibration"
NAME = "calibration.json"

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reliability:
    """Predictions in bins of equal width over [0, 1]: of each that is not empty, its mean prediction, the share that
    came true, and how many there are.
    """

    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def ece(self) -> float | None:
        """Expected calibration error: |predicted - observed|, averaged over the predictions; None if there are none."""
        total = sum(self.counts)
        gaps = (n * abs(p - o) for p, o, n in zip(self.predicted, self.observed, self.counts, strict=True))
        return sum(gaps) / total if total else None


def reliability(probabilities: ArrayLike, outcomes: ArrayLike, bins: int = BINS) -> Reliability:
    """The reliability of `probabilities` [n] of what happened or did not, `outcomes` [n]."""
    counts, predicted, observed = _binned(np.asarray(probabilities, float), np.asarray(outcomes, float), bins)
    full = counts > 0
    return Reliability(
        tuple((predicted[full] / counts[full]).tolist()),
        tuple((observed[full] / counts[full]).tolist()),
        tuple(counts[full].astype(int).tolist()),
    )


def fit(
    confidence: ArrayLike, accepted: ArrayLike, grid: Sequence[float] = GRID, bins: int = BINS
) -> tuple[float, ...]:
    """The temperatures T_1..T_γ, by STS, of blocks that were verified whole.

    `confidence` [n, γ] are the head's own probabilities, `accepted` [n] how many tokens of each block survived. Raises
    InputError without a block.
    """
    logits, kept = logit(confidence), np.asarray(accepted)
    if logits.ndim != 2 or not len(logits):
        raise InputError("There is no block to calibrate on; decode more prompts, or longer answers.")
    survival = np.ones(len(logits))
    temperatures: list[float] = []
    for k in range(logits.shape[1]):
        survived = (kept > k).astype(float)
        errors = [_ece(survival * sigmoid(logits[:, k] / t), survived, bins) for t in grid]
        temperatures.append(float(grid[int(np.argmin(errors))]))
        survival = survival * sigmoid(logits[:, k] / temperatures[-1])
    return tuple(temperatures)


def errors(confidence: ArrayLike, accepted: ArrayLike) -> dict[str, list[float | None]]:
    """The ECE at each position of blocks that were verified whole, as given to `fit`.

    `survival` judges a_k of every block; `conditional` judges c_k of those blocks whose tokens 1..k-1 survived.
    """
    given, kept = np.asarray(confidence, float), np.asarray(accepted)
    survival = given.cumprod(1)
    reached = [kept >= k for k in range(given.shape[1])]
    return {
        "survival": [reliability(a, kept > k).ece for k, a in enumerate(survival.T)],
        "conditional": [
            reliability(c[r], kept[r] > k).ece for k, (c, r) in enumerate(zip(given.T, reached, strict=True))
        ],
    }


def scale(confidence: ArrayLike, temperatures: ArrayLike) -> Floats:
    """σ(logit(c) / T) of confidences [..., γ]."""
    return sigmoid(logit(confidence) / np.asarray(temperatures, float))


def logit(probabilities: ArrayLike) -> Floats:
    """log(p / (1 - p)), infinite at 0 and 1."""
    p = np.asarray(probabilities, float)
    with np.errstate(divide="ignore"):
        result: Floats = np.log(p) - np.log1p(-p)
    return result


def sigmoid(logits: Floats) -> Floats:
    """1 / (1 + exp(-z)), without overflow."""
    result: Floats = 0.5 * (1 + np.tanh(0.5 * logits))
    return result


def _binned(probabilities: Floats, outcomes: Floats, bins: int) -> tuple[Floats, Floats, Floats]:
    """Of each bin: how many, the sum of their predictions, the sum of their outcomes."""
    index = np.minimum((probabilities * bins).astype(int), bins - 1)
    sums = np.stack([np.bincount(index, weights, bins) for weights in (np.ones(len(index)), probabilities, outcomes)])
    return sums[0], sums[1], sums[2]


def _ece(probabilities: Floats, outcomes: Floats, bins: int) -> float:
    _, predicted, observed = _binned(probabilities, outcomes, bins)
    return float(np.abs(predicted - observed).sum() / len(probabilities))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Temperatures T_1..T_γ of one draft, `draft` its identity (see `draft_identity`), and where they come from."""

    temperatures: tuple[float, ...]
    draft: dict[str, str]
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def block(self) -> int:
        """γ of the blocks that were calibrated."""
        return len(self.temperatures)

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a calibration file. Raises InputError that says what is wrong with it."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"The calibration {path} cannot be read ({error}); run dspark calibrate again.") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise InputError(f"{path} is no calibration that dspark calibrate wrote; remove it, or calibrate again.")
        temperatures, draft = data.pop("temperatures", None), data.pop("draft", None)
        if not (isinstance(temperatures, list) and temperatures and all(map(_is_temperature, temperatures))):
            raise InputError(f"{path} needs 'temperatures', a list of numbers above 0; run dspark calibrate again.")
        if not (isinstance(draft, dict) and draft and all(isinstance(v, str) for v in draft.values())):
            raise InputError(f"{path} does not say which 'draft' it is for; run dspark calibrate again.")
        return cls(
            tuple(map(float, temperatures)), draft, {k: v for k, v in data.items() if k not in ("format", "block")}
        )

    def to_json(self) -> str:
        """The inverse of `load`, for people too."""
        head = {"format": FORMAT, "block": self.block, "temperatures": self.temperatures, "draft": self.draft}
        return json.dumps(head | self.provenance, indent=1, ensure_ascii=False) + "\n"

    def check(self, identity: dict[str, str], block: int | None = None) -> None:
        """Raise InputError unless this is for the draft of this identity and, where given, for this `block`."""
        changed = [key for key in self.draft if identity.get(key) != self.draft[key]]
        if changed:
            raise InputError(
                f"The calibration is for another draft: its {changed[0]} is {self.draft[changed[0]][:12]}…, not"
                f" {str(identity.get(changed[0]))[:12]}…; run dspark calibrate again, or remove it."
            )
        if block not in (None, self.block):
            raise InputError(
                f"The calibration is for blocks of {self.block} tokens, not of {block}; run dspark calibrate --block"
                f" {block}, or remove it."
            )

    def apply(self, confidence: Sequence[float]) -> list[float]:
        """The calibrated probabilities of one block's confidences, at most γ of them."""
        calibrated: list[float] = scale(confidence, self.temperatures[: len(confidence)]).tolist()
        return calibrated


def draft_identity(path: Path) -> dict[str, str]:
    """SHA-256 of a draft's `config.json` and of its safetensors, joined in the order of their names, or of its .gguf.

    Raises InputError for what cannot be read.
    """
    files = {"weights_sha256": [path]}
    if path.is_dir():
        files = {"config_sha256": [path / "config.json"], "weights_sha256": sorted(path.glob("*.safetensors"))}
    try:
        return {name: _sha256(parts) for name, parts in files.items()}
    except OSError as error:
        raise InputError(f"{error.filename} of the draft cannot be read ({error.strerror}); fetch it again.") from error


def calibration_file(draft: Path) -> Path:
    """Where a draft's calibration lies: in its folder, or beside its .gguf file."""
    return draft / NAME if draft.is_dir() else draft.with_suffix(f".{NAME}")


def _sha256(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while part := stream.read(1 << 20):
                digest.update(part)
    return digest.hexdigest()


def _is_temperature(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
