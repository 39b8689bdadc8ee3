"""The kernel computes a decoder as a plain one does, and a row comes out the same to the last bit at any width."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dspark.native import decoder as native_decoder
from sglang_dspark.native.decoder import Decoder, Shape, quantise, tiles

FORMS: dict[str, dict[str, Any]] = {
    "llama, groups of 2": {},
    "qwen3, groups of 3": {"heads": 6, "head_dim": 32, "qk_norm": True},
    "groups of 1": {"heads": 3, "kv_heads": 3, "head_dim": 64, "hidden": 64, "inner": 16},
    "groups of 4": {"heads": 4, "kv_heads": 1, "head_dim": 128, "hidden": 16, "qk_norm": True},
    "odd head": {"heads": 2, "kv_heads": 2, "head_dim": 48, "hidden": 80, "inner": 48},
}
LENGTHS = (1, 15, 16, 17, 33, 61)

Make = Callable[..., Any]


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest, make: Make) -> Any:
    return make(**FORMS[request.param])


def error(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square, relative to the spread of `theirs`."""
    return float((ours - theirs).pow(2).mean().sqrt() / theirs.std())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_causal_decoder(model: Any, text: Tensor, length: int, threads: int) -> None:
    taps, states = (-1, 0, 1), torch.empty(length, model.shape.hidden)
    logits, features = model.decoder(threads=threads).forward(text[:length], 0, taps, states=states)
    wanted, stream, normed = model.reference(text[:length])
    rough, rough_stream, _ = model.reference(text[:length], dtype=torch.bfloat16)
    assert error(logits, wanted) < 0.012
    assert error(logits, wanted) < error(rough.float(), wanted)
    assert error(states, normed) < 0.012
    width = model.shape.hidden
    assert torch.equal(features[:, :width], stream[0])
    for tap in (0, 1):
        ours = features[:, (tap + 1) * width : (tap + 2) * width]
        assert error(ours, stream[tap + 1]) < error(rough_stream[tap + 1].float(), stream[tap + 1])


@pytest.mark.parametrize(("length", "block"), [(n, k) for n in LENGTHS for k in (1, 7) if n > k])
def test_rows_that_see_each_other(model: Any, text: Tensor, length: int, block: int) -> None:
    """A drafted block after a context: its rows look at what follows them too."""
    context = length - block
    decoder, causal = model.decoder(causal=False), model.decoder()
    causal.forward(text[:context], 0)
    decoder._alive, decoder.model.layer = causal._alive + decoder._alive, causal.model.layer
    logits, _ = decoder.forward(text[context:length], context)
    wanted = model.reference(text[:length], context)[0]
    assert error(logits, wanted[context:]) < 0.025
    if block > 1:
        assert error(logits, model.reference(text[:length])[0][context:]) > 0.05


def in_parts(decoder: Decoder, text: Tensor, cuts: list[int], taps: tuple[int, ...] = (0, 1)) -> tuple[Tensor, Tensor]:
    logits, features = zip(*(decoder.forward(text[a:b], a, taps) for a, b in pairwise([0, *cuts])), strict=True)
    return torch.cat(logits), torch.cat(features)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_are_equal_to_the_last_bit_at_any_width(model: Any, text: Tensor, threads: int) -> None:
    single = in_parts(model.decoder(), text, list(range(1, 62)))
    decoder = model.decoder(threads=threads)
    for width in range(1, 17):
        for first in {width, 1, 30}:
            cuts = [*range(first, 61, width), 61]
            for ours, theirs in zip(in_parts(decoder, text, cuts), single, strict=True):
                assert torch.equal(ours, theirs), (width, first)
    assert torch.equal(in_parts(decoder, text, [61])[0], single[0])


def test_the_last_row_alone_is_that_row(model: Any, text: Tensor) -> None:
    decoder = model.decoder(threads=2)
    for start, end in ((0, 17), (17, 18), (18, 40)):
        all_rows, features = decoder.forward(text[start:end], start, (0,))
        last, again = decoder.forward(text[start:end], start, (0,), last_only=True)
        assert torch.equal(last, all_rows[-1:]) and torch.equal(features, again)


@pytest.mark.parametrize("kept", [1, 16, 20, 21])
def test_rows_that_were_taken_back_leave_no_trace(model: Any, text: Tensor, kept: int) -> None:
    clean = model.decoder()
    wanted = in_parts(clean, text, [kept, kept + 7])[0]
    decoder = model.decoder()
    decoder.forward(text[:kept], 0)
    decoder.forward(text.flip(0)[: 61 - kept], kept)
    decoder.forward(text[5 : 5 + 9], kept)
    rewritten, _ = decoder.forward(text[kept : kept + 7], kept)
    assert torch.equal(rewritten, wanted[kept:])
    assert rewritten.isfinite().all()


def test_what_was_never_written_is_not_looked_at(model: Any, text: Tensor) -> None:
    """Caches full of large numbers, where a decoder would begin with zeros."""
    wanted = in_parts(model.decoder(), text, [9, 24])[0]
    decoder = model.decoder()
    for layer in (decoder.model.layer[0], decoder.model.layer[1]):
        for tensor in decoder._alive:
            if tensor.data_ptr() in (layer.keys, layer.values):
                tensor.fill_(1e30)
    assert torch.equal(in_parts(decoder, text, [9, 24])[0], wanted)


def test_more_threads_than_tiles(make: Make, text: Tensor) -> None:
    model = make(heads=1, kv_heads=1, hidden=16, inner=16, vocab=16)
    small = text % 16
    wanted = model.decoder().forward(small, 0, (-1, 1))
    for ours, theirs in zip(model.decoder(threads=9).forward(small, 0, (-1, 1)), wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_is_freed_while_a_thread_may_look_at_it(
    make: Make, text: Tensor, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[bool] = []

    class Watched:
        dspark_forward = kernel.dspark_forward

        @staticmethod
        def dspark_settle() -> None:
            kernel.dspark_settle()
            settled.append(weights() is not None and structs() is not None)

    monkeypatch.setattr(native_decoder, "load_kernel", lambda progress: Watched)
    decoder = make().decoder(threads=3)
    weights, structs = weakref.ref(decoder._alive[0]), weakref.ref(decoder.model)
    for length in range(1, 50):
        decoder.forward(text[:length], 0)
    assert settled == []
    del decoder
    gc.collect()
    assert settled == [True] and weights() is None


def test_a_head_in_int8(model: Any, text: Tensor) -> None:
    logits, _ = model.decoder(small_head=True).forward(text, 0)
    exact, _ = model.decoder().forward(text, 0)
    assert 0 < error(logits, exact) < 0.012


def test_int8_holds_the_greatest_exactly_and_rounds_the_rest() -> None:
    weight = torch.tensor([[0.5, -2.0, 0.004, 1.0], [0.0, 0.0, 0.0, 0.0], [-1e-3, 0.0, 1e-3, 0.0]]).bfloat16()
    small, scale = quantise(weight)
    assert small.dtype is torch.int8 and small.tolist() == [[32, -127, 0, 64], [0, 0, 0, 0], [-127, 0, 127, 0]]
    torch.testing.assert_close(small.float() * scale[:, None], weight.float(), atol=2.0 / 254, rtol=0)


def test_tiles_are_sixteen_outputs_of_two_inputs() -> None:
    weight = torch.arange(32 * 6).view(32, 6)
    laid_out = tiles(weight)
    assert laid_out.shape == (2, 3, 16, 2)
    assert all(laid_out[o // 16, i // 2, o % 16, i % 2] == weight[o, i] for o in range(32) for i in range(6))


def test_which_sizes_fit() -> None:
    good = Shape(48, 6, 2, 32, 80, 112, 61, 1e-5)
    assert good.fits()
    for changes in (
        {"hidden": 40},
        {"head_dim": 24},
        {"inner": 81},
        {"vocab": 100},
        {"kv_heads": 4},
        {"head_dim": 528},
    ):
        assert not replace(good, **changes).fits(), changes
