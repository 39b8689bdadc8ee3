"""STS recovers what was planted, leaves order alone, and equals the plainest implementation; its file is checked."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.decoding.calibrate import (
    GRID,
    Calibration,
    calibration_file,
    draft_identity,
    errors,
    fit,
    reliability,
    scale,
    sigmoid,
)
from sglang_dspark.errors import InputError

PLANTED = (0.4, 2.5, 1.0, 0.5, 3.0)


def blocks(n: int, temperatures: tuple[float, ...] = PLANTED, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Confidences [n, γ] whose logits are `temperatures` times too large, and the accepted length of each block [n]."""
    random = np.random.default_rng(seed)
    logits = random.normal(1.5, 1.5, (n, len(temperatures)))
    accepted = (random.random(logits.shape) < sigmoid(logits)).cumprod(1).sum(1)
    return sigmoid(logits * np.array(temperatures)), accepted


def test_planted_temperatures_are_found_and_held_out_errors_vanish() -> None:
    temperatures = fit(*blocks(20000))
    assert temperatures == pytest.approx(PLANTED, rel=0.2)
    confidence, accepted = blocks(20000, seed=1)
    before = errors(confidence, accepted)
    after = errors(scale(confidence, temperatures), accepted)
    assert max(e for e in before["survival"] if e is not None) > 0.06
    assert max(e for e in before["conditional"] if e is not None) > 0.08
    assert max(e for e in after["survival"] if e is not None) <= 0.02
    assert max(e for e in after["conditional"] if e is not None) <= 0.02


def test_calibrated_confidences_are_left_nearly_alone() -> None:
    assert fit(*blocks(20000, (1.0,) * 4)) == pytest.approx((1.0,) * 4, rel=0.2)


def plain_ece(probabilities: list[float], outcomes: list[bool], bins: int = 15) -> float:
    total = 0.0
    for b in range(bins):
        inside = [i for i, p in enumerate(probabilities) if min(int(p * bins), bins - 1) == b]
        if inside:
            mean = sum(probabilities[i] for i in inside) / len(inside)
            share = sum(outcomes[i] for i in inside) / len(inside)
            total += len(inside) / len(probabilities) * abs(mean - share)
    return total


def test_fit_equals_a_search_by_definition() -> None:
    confidence, accepted = blocks(300, (0.6, 1.7, 2.2))
    grid = [0.5, 0.8, 1.0, 1.5, 2.0]
    chosen: list[float] = []
    for k in range(3):
        found = []
        for t in grid:
            a = []
            for row in confidence:
                product = 1.0
                for c, scaled_by in zip(row, [*chosen, t], strict=False):
                    product *= 1 / (1 + math.exp(-math.log(c / (1 - c)) / scaled_by))
                a.append(product)
            found.append((plain_ece(a, [n > k for n in accepted.tolist()]), t))
        chosen.append(min(found, key=lambda pair: pair[0])[1])
    assert fit(confidence, accepted, grid) == tuple(chosen)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_ece_equals_its_definition(pairs: list[tuple[float, bool]]) -> None:
    probabilities, outcomes = [p for p, _ in pairs], [o for _, o in pairs]
    found = reliability(probabilities, outcomes)
    assert found.ece == pytest.approx(plain_ece(probabilities, outcomes), abs=1e-9)
    assert sum(found.counts) == len(pairs)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20, unique=True), st.floats(0.05, 20), st.floats(1e-6, 1 - 1e-6))
def test_scaling_keeps_order_and_bounds(values: list[float], t: float, other: float) -> None:
    ordered = sorted(values)
    scaled = scale(np.array(ordered)[:, None], [t])[:, 0]
    assert ((scaled >= 0) & (scaled <= 1)).all() and (np.diff(scaled) >= 0).all()
    assert scale([other], [1.0])[0] == pytest.approx(other)
    assert scale([0.0, 1.0], [t, t]).tolist() == [0.0, 1.0]


def test_of_equally_good_temperatures_the_mildest_is_taken() -> None:
    assert GRID[0] == pytest.approx(1.0)
    assert fit([[0.5, 0.5]] * 4, [2, 2, 0, 0])[0] == pytest.approx(1.0), "σ(0 / T) is 1/2 for every T"


def test_without_blocks_there_is_nothing_to_fit() -> None:
    with pytest.raises(InputError, match="no block"):
        fit(np.empty((0, 7)), [])
    assert reliability([], []).ece is None


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"12")
    (tmp_path / "b.safetensors").write_bytes(b"34")
    return tmp_path


def test_a_calibration_is_for_one_draft_and_one_block(draft: Path) -> None:
    identity = draft_identity(draft)
    assert identity["weights_sha256"] == hashlib.sha256(b"1234").hexdigest()
    file = calibration_file(draft)
    file.write_text(Calibration((0.5, 2.0), identity, {"temperature": 1.0}).to_json())
    read = Calibration.load(file)
    assert read == Calibration((0.5, 2.0), identity, {"temperature": 1.0})
    read.check(identity, 2)
    read.check(identity)
    with pytest.raises(InputError, match="blocks of 2 tokens, not of 3"):
        read.check(identity, 3)
    for name, text in (("b.safetensors", "35"), ("config.json", '{"a": 1}')):
        before = (draft / name).read_text()
        (draft / name).write_text(text)
        with pytest.raises(InputError, match="another draft"):
            read.check(draft_identity(draft), 2)
        (draft / name).write_text(before)
    assert read.apply([0.8, 0.8]) == pytest.approx([16 / 17, 2 / 3])
    assert read.apply([0.8]) == pytest.approx([16 / 17]) and read.apply([]) == []


def test_a_gguf_draft_has_its_calibration_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "head.gguf"
    file.write_bytes(b"1234")
    assert calibration_file(file) == tmp_path / "head.calibration.json"
    assert draft_identity(file) == {"weights_sha256": hashlib.sha256(b"1234").hexdigest()}
    with pytest.raises(InputError, match="cannot be read"):
        draft_identity(tmp_path / "none.gguf")


GOOD = {"format": "dspark-calibration", "block": 1, "temperatures": [1.5], "draft": {"weights_sha256": "ab"}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "sts"}, "no calibration"),
        ({"temperatures": []}, "'temperatures'"),
        ({"temperatures": [1, -2]}, "'temperatures'"),
        ({"temperatures": [True]}, "'temperatures'"),
        ({"temperatures": [float("inf")]}, "'temperatures'"),
        ({"temperatures": "1"}, "'temperatures'"),
        ({"draft": {}}, "'draft'"),
        ({"draft": None}, "'draft'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: dict[str, object], says: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(GOOD))
    assert Calibration.load(file).temperatures == (1.5,)
    file.write_text(json.dumps(GOOD | change))
    with pytest.raises(InputError, match=says):
        Calibration.load(file)


@pytest.mark.parametrize("text", [None, "", "[1]", "{", "[" * 100_000])
def test_a_file_that_is_not_json_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "calibration.json").write_text(text)
    with pytest.raises(InputError):
        Calibration.load(tmp_path / "calibration.json")
