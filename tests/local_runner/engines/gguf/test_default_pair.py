"""The default pair on llama.cpp, as it is (Q4_1) and in Q8_0. `DSPARK_TEST_PROMPTS` limits how many built-in prompts
are decoded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from local_runner.engine import Decoding
from local_runner.engines.gguf import LlamaEngine
from local_runner.engines.torch import TorchEngine
from local_runner.identity import judge
from local_runner.prompts import read_prompts, take
from local_runner.race import race
from local_runner.store import Resolved
from sglang_dspark.decoding.rounds import summarise
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]


class Unwatched:
    """Nobody follows the race."""

    def begin(self, *_: Any) -> None: ...

    def round(self, *_: Any) -> None: ...

    def end(self, *_: Any) -> None: ...


def in_q8_0(source: Path, out: Path) -> Path:
    """`source` with every quantised tensor in Q8_0, its metadata as it is."""
    read = gguf.GGUFReader(source)
    architecture = read.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for name, field in read.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in read.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        type_ = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.fixture(scope="module", params=["Q4_1", "Q8_0"])
def engine(
    request: pytest.FixtureRequest,
    pair: Resolved,
    open_: Callable[..., LlamaEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> LlamaEngine:
    target = pair.target_path
    if request.param == "Q8_0":
        target = in_q8_0(target, tmp_path_factory.mktemp("q8_0") / "target.gguf")
    made = open_(target, pair.draft_path)
    assert made.description["dtype"] == request.param
    return made


def test_greedy_decoding_is_identical(engine: LlamaEngine) -> None:
    """But for near-ties: a prefix that was read in one batch has not the bits of one that was read row by row."""
    prompts = take(read_prompts(), int(os.environ.get("DSPARK_TEST_PROMPTS", "1000")))
    decoding = Decoding(64, SamplingParams(), Fixed())
    runs = race(engine, prompts, decoding, repeats=1, watcher=Unwatched(), cancelled=threading.Event())
    assert len(runs) == 2 * len(prompts)
    identity = judge(engine, runs, decoding)
    assert identity.verdict in ("identical", "numerics"), identity.sentence
    mean = summarise([r for run in runs if run.heat.mode == "dspark" for r in run.rounds]).mean_accepted_length
    assert mean is not None and mean > 1.2


def test_sampling_with_greedy_drafts_is_plain_sampling(engine: LlamaEngine) -> None:
    ids = engine.encode_chat(QUESTION)
    decoding = Decoding(60, SamplingParams(temperature=0.8, top_p=0.95, seed=3), Fixed())
    plain, dspark = (
        [t for r in engine.generate(decoding.request(engine, ids, mode, "0")) for t in r.committed]
        for mode in ("plain", "dspark")
    )
    assert plain == dspark


def test_prompts_and_drafts_are_those_of_the_pytorch_engine(
    pair: Resolved, engine: LlamaEngine, load: Callable[..., TorchEngine]
) -> None:
    """The same ids, and after the same tokens nearly the same blocks: llama.cpp rounds activations to eight bits."""
    theirs = load(pair.target_path, pair.draft_path)
    ids = engine.encode_chat(QUESTION)
    assert ids == theirs.encode_chat(QUESTION)
    decoding = Decoding(64, SamplingParams(), Fixed())
    said = [t for r in engine.generate(decoding.request(engine, ids, "plain", "0")) for t in r.committed]
    first = alike = 0
    for end in range(4, 64, 4):
        both = []
        for one in (engine, theirs):
            one_more = Decoding(2, SamplingParams(), Fixed()).request(one, [*ids, *said[:end]], "dspark", "0")
            both.append(list(one.generate(one_more))[1])
        if both[0].anchor == both[1].anchor:
            first += both[0].drafted[0] == both[1].drafted[0]
            alike += sum(a == b for a, b in zip(both[0].drafted, both[1].drafted, strict=True))
    assert first >= 11 and alike >= 0.6 * 15 * 7


def test_the_conversion_is_the_pairs_own(engine: LlamaEngine, pair: Resolved) -> None:
    assert engine.block == 7 and engine.has_confidence
    assert pair.draft_path is not None
    assert str(engine.description["draft"]).startswith(Path(pair.draft_path).name)
